"""A server of ours that runs: whether it is ready, why it ended, and how it is stopped."""

from __future__ import annotations

import atexit
import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.sampler.vllm import launch_log, launch_ports

KEEPER = Path(__file__).with_name("launch_keeper.py")
GRACE_S = 5.0  # between SIGTERM and SIGKILL; vLLM on a CPU takes about two


class Server:
    """A running server. `stop()` ends it and all its processes; so does the end of this process, by a signal too."""

    def __init__(
        self, keeper: subprocess.Popen[bytes], host: str, port: int, log: Path, start: int, title: str
    ) -> None:
        self.base_url = launch_ports.url(host, port)
        self.port = port
        self.log = log
        self.title = title
        self._address = launch_ports.reachable(host)
        self._keeper, self._start = keeper, start
        self._lock = threading.Lock()
        self._stopped = False
        atexit.register(self.stop)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The server's exit code (128 + N where signal N ended it); None while it runs."""
        return self._keeper.poll()

    def wait(self) -> int:
        """The server has ended by itself; returns its exit code."""
        return self._keeper.wait()

    def failure(self) -> str | None:
        """One sentence on why the server ended, with its log's last meaningful line; None while it runs."""
        code = self.poll()
        if code is None or self._stopped:
            return None
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        if code == 128 + signal.SIGKILL:
            how += " (mostly because memory ran out)"
        why = launch_log.cause(self.output())
        return f"{self.title} {how}{f': {why}' if why else ''} (log: {self.log})"

    def output(self) -> str:
        """The end of what this server has written to its log."""
        return launch_log.tail(self.log, self._start)

    def healthy(self) -> bool:
        """Whether the server answers that it is ready."""
        # http.client knows no proxies, which the environment may name for localhost too
        connection = http.client.HTTPConnection(self._address, self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stranger(self) -> bool:
        """Whether a process that is not this server's is known to listen on its port."""
        found = launch_ports.holder(self.port)
        try:
            return found is not None and os.getsid(found[0]) != self._keeper.pid
        except ProcessLookupError:
            return False

    def stop(self) -> None:
        """No process of the server is left: SIGTERM, then SIGKILL after some seconds. Again is no error."""
        with self._lock:
            self._stopped = True
            atexit.unregister(self.stop)
            if self.poll() is not None:  # so it is in a fork of this process, which must not stop its parent's server
                return
            self._keeper.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(GRACE_S + 10)
                return
            os.killpg(self._keeper.pid, signal.SIGKILL)
            self._keeper.wait()


def spawn(command: Sequence[str], host: str, port: int, log: Path, env: Mapping[str, str], title: str) -> Server:
    """The keeper runs, in a session of its own: a Ctrl-C of the terminal reaches this process alone."""
    with log.open("ab") as output:
        start = output.tell()
        keeper = subprocess.Popen(
            [sys.executable, "-P", str(KEEPER), str(os.getpid()), str(GRACE_S), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True,
        )  # fmt: skip
    return Server(keeper, host, port, log, start, title)
