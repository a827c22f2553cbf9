"""A program that runs one command and lets nothing of it outlive the process that asked for it.

It is started by path, as `python -P launch_keeper.py PARENT GRACE_S COMMAND...`, and imports only the standard library:
it is ready in milliseconds. When the parent is gone (killed with SIGKILL too), on SIGTERM, or when the command has
ended, every process that the command has started is stopped, also those in sessions of their own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LINUX = sys.platform.startswith("linux")
POLL_S = 0.2
LEFT_S = 1.0  # what children may take by themselves after the command has ended: they remove shared memory

_libc = ctypes.CDLL(None) if LINUX else None
_told_to_stop = False


def keep(parent: int, grace_s: float, command: list[str]) -> int:
    """The command has ended and nothing of it is left; returns its exit code (128 + N where signal N ended it)."""
    if _libc is not None:  # orphans of the command become children of this process, so that they can be found
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    child = subprocess.Popen(command, preexec_fn=_die_with_keeper)
    # The parent's number is compared, not asked for by a signal of the kernel: that one is sent when the *thread* ends
    # that started this process.
    while child.poll() is None and not _told_to_stop and os.getppid() == parent:
        time.sleep(POLL_S)
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    _stop_rest()
    code = child.wait()
    return 128 - code if code < 0 else code


def _stop(number: int, frame: FrameType | None) -> None:
    global _told_to_stop
    _told_to_stop = True


def _die_with_keeper() -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stop_rest() -> None:
    """No process that descends from this one is left; those that do not end by themselves are killed."""
    if not LINUX:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the second one ends this process as well
            os.killpg(os.getpgrp(), number)
            time.sleep(LEFT_S)
        return
    kill_at = time.monotonic() + LEFT_S
    while time.monotonic() < kill_at + 5 and (left := descendants(os.getpid())):
        if time.monotonic() >= kill_at:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def descendants(ancestor: int) -> list[int]:
    """The living processes that come from this one, by /proc."""
    children: dict[int, list[int]] = {}
    dead = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            state, parent = stat.read().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state in b"ZX":
                dead.add(int(name))
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found += [pid for pid in below if pid not in dead]
    return found


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
