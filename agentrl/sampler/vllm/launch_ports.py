"""Ports of this machine: one that is free, and who holds one that is not."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from agentrl.errors import ConfigurationError

ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # how a server that listens everywhere is reached


def reachable(host: str) -> str:
    """The address at which this machine reaches a server that was bound to `host`."""
    return ANY.get(host, host)


def url(host: str, port: int) -> str:
    """The base URL of a server bound to `host`, as seen from this machine.

    >>> url("0.0.0.0", 8000), url("::1", 8000)
    ('http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    host = reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str) -> int:
    """A port that nothing listens on now; somebody else may take it before it is used."""
    with _bound(host, 0) as held:
        return held.getsockname()[1]


def check_free(host: str, port: int) -> None:
    """Nothing listens on this port. ConfigurationError says who does, where that can be known."""
    try:
        with _bound(host, port) as held:
            held.listen(1)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise taken(port) from None


def taken(port: int) -> ConfigurationError:
    """The error for a port that somebody else listens on."""
    found = holder(port)
    who = f" by process {found[0]} ({found[1]})" if found else ""
    return ConfigurationError(f"Port {port} is taken{who}: stop that process, or name another port or none.")


def holder(port: int) -> tuple[int, str] | None:
    """Process id and command of who listens on a TCP port; None where /proc does not show it.

    >>> holder(1) is None
    True
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table) as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listens
                    inodes.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc") if inodes else []):
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                        return int(pid), _command(pid)
    return None


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    return words if len(words) <= 120 else f"{words[:117]}..."


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound as vLLM's own will be. ConfigurationError where this machine has no such address."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or the last server's connections still count
        held.bind((host, port))
    except (OSError, OverflowError) as error:
        held.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        raise ConfigurationError(f"A server cannot listen on {host or '0.0.0.0'}, port {port}: {error}.") from error
    return held
