"""Nothing of a run stays behind: at its end, on SIGTERM, and what a run that was killed has left."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_open: dict[int, Closable] = {}
_lock = threading.RLock()  # re-entrant: the handler of a signal closes while its own thread may be in here
_owner: int | None = None  # a forked child must not close what is its parent's


def track(sandbox: Closable) -> None:
    """The sandbox is closed when this process ends, by itself or by SIGTERM, unless `untrack` comes first."""
    global _owner
    with _lock:
        if _owner != os.getpid():
            _open.clear()
            _owner = os.getpid()
            atexit.register(close_all)
            _on_sigterm()
        _open[id(sandbox)] = sandbox


def untrack(sandbox: Closable) -> None:
    """The sandbox is closed, and nothing is to be done about it at the end."""
    with _lock:
        _open.pop(id(sandbox), None)


def close_all() -> None:
    """Every sandbox that this process has open is closed."""
    if _owner != os.getpid():
        return
    with _lock:
        left = list(_open.values())
    for sandbox in left:
        with suppress(Exception):
            sandbox.close()


def _on_sigterm() -> None:
    # Python ends at SIGTERM without its exit functions. A handler that somebody has set is left alone: it decides.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    close_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def run_id() -> str:
    """A text that names this process among all that were ever on the machine: its pid and when it started.

    >>> run_id() == run_id()
    True
    """
    return f"{os.getpid()}-{start_ticks(os.getpid())}"


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where there is no such process (or no /proc)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def reap() -> list[str]:
    """What runs that are gone have left on this machine is removed; a sentence for each thing. Safe while others run.

    Opening a sandbox does this once in a process, for its backend.
    """
    from agentrl.sandbox import bubblewrap
    from agentrl.sandbox.open import docker_missing

    removed = [] if bubblewrap.missing() else bubblewrap.reap()
    if docker_missing() is None:
        from agentrl.sandbox import docker_engine

        removed += [f"Docker container {name}" for name in docker_engine.reap()]
    return removed
