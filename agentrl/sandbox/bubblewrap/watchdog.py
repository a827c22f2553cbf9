"""The memory of a process and all below it, for machines where no cgroup may be made."""

from __future__ import annotations

import os
from contextlib import suppress

from agentrl.sandbox.types import Reason

PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096


def works() -> bool:
    """Whether this kernel tells the children of a process."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class Watchdog:
    """Called often; answers "oom" once the processes below `pid` together hold more than `limit` bytes."""

    def __init__(self, pid: int, limit: int) -> None:
        self.pid, self.limit = pid, limit

    def __call__(self) -> Reason | None:
        pids = tree(self.pid)
        # What is resident counts a page that forks share once for each; only when that is too much is it worth a look.
        if sum(_resident(pid) for pid in pids) <= self.limit:
            return None
        return "oom" if sum(_share(pid) for pid in pids) > self.limit else None


def tree(pid: int) -> list[int]:
    """The process and all below it; those that lost their parent hang below the namespace's first process."""
    found = [pid]
    for parent in found:  # grows while it is gone through
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError), open(f"/proc/{parent}/task/{task}/children", "rb") as children:
                    found += map(int, children.read().split())
    return found


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as statm:
        return int(statm.read().split()[1]) * PAGE
    return 0


def _share(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
        for line in rollup:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return 0
