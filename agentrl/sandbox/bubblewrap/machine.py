"""What this machine has for bubblewrap, and what runs that are gone have left on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.bubblewrap import cgroup, lease, watchdog

TOOLS = {
    "bwrap": "bubblewrap",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
}
OLDEST_BWRAP, NESTED = (0, 5), (0, 8)  # the first with --clearenv, and the first with --disable-userns


def missing() -> str | None:
    """What this machine lacks for bubblewrap, in one sentence; None where nothing is known to be missing."""
    if sys.platform != "linux":
        return (
            f"The bubblewrap sandbox is made of Linux namespaces, which {sys.platform} does not have. "
            "Use Docker: a local engine, or a remote one named by DOCKER_HOST."
        )
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=lease.CLEAN_PATH) is None:
            return (
                f"{tool} is not installed. Install it (Debian, Ubuntu: apt-get install {package}), or use Docker: "
                "a local engine, or a remote one named by DOCKER_HOST."
            )
    if bwrap_version() < OLDEST_BWRAP:
        return f"bwrap is older than {'.'.join(map(str, OLDEST_BWRAP))}; install a newer bubblewrap, or use Docker."
    if _kernel() < (5, 3):
        return "The bubblewrap sandbox needs Linux 5.3 or newer, which can name a process for sure; use Docker."
    if "memory" not in cgroup.parents()[1] and not watchdog.works():
        return "No memory cgroup may be made here and the kernel does not tell a process's children; use Docker."
    if os.getuid() != 0 and "pids" not in cgroup.parents()[1] and _kernel() < (5, 14):
        return "Without root, bounding the number of processes needs Linux 5.14 or a pids cgroup; use Docker."
    return None


@cache
def bwrap_version() -> tuple[int, ...]:
    """The version of the installed bwrap, such as (0, 8, 0)."""
    run = subprocess.run(["bwrap", "--version"], env={"PATH": lease.CLEAN_PATH}, capture_output=True, check=False)
    return tuple(int(part) for part in re.findall(r"\d+", run.stdout.decode(errors="replace")))


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def check_machine() -> None:
    """This machine has what bubblewrap needs; SandboxUnavailable says in one sentence what is missing."""
    if why := missing():
        raise SandboxUnavailable(why)
    reap_once()


@cache
def reap_once() -> None:
    """What dead runs have left is gone, once in a process."""
    reap()


def reap() -> list[str]:
    """Processes and cgroups of runs that are gone are removed; a sentence for each sandbox that had left some."""
    removed = []
    for number in lease.known():
        if held := lease.take(number):
            killed, group = lease.kill_all(held), cgroup.leftovers(number)
            folders = [folder for folder in group.folders.values() if folder.exists()]
            group.remove()
            if killed or folders:
                who = f"bubblewrap sandbox {number} ({held.told()})"
                removed.append(f"{who}: {killed} processes, {len(folders)} cgroups")
            held.release()
    return removed
