"""Limits for all processes of a sandbox together: memory, number, processor time; cgroup v1 and v2."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.sandbox.bubblewrap.lease import CLEAN_PATH
from agentrl.sandbox.types import SandboxSpec

CONTROLLERS = ("memory", "pids", "cpu")
PREFIX = "agentrl-"
OWN = 2  # processes of bwrap's own in a sandbox: outside of it, and the first one inside
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True)
class Cgroup:
    """The folders in which one sandbox's processes are counted, by controller; in v2 all are the same folder."""

    folders: dict[str, Path]
    version: int

    def entry(self) -> list[str]:
        """The words of a command line that continue it inside of this cgroup."""
        if not self.folders:
            return []
        return ["sh", "-c", JOIN, "agentrl", *(str(f / "cgroup.procs") for f in self._each()), "--"]

    def _each(self) -> list[Path]:
        return list(dict.fromkeys(self.folders.values()))

    def limit(self, spec: SandboxSpec) -> None:
        """The limits of the spec hold. Swap counts as memory where the kernel counts it at all."""
        memory, quota = spec.memory_mb << 20, int(spec.cpus * 100_000)
        v1, v2 = self.version == 1, self.version == 2
        for controller, name, value, needed in (
            ("memory", "memory.limit_in_bytes", memory, v1),
            ("memory", "memory.memsw.limit_in_bytes", memory, False),
            ("memory", "memory.max", memory, v2),
            ("memory", "memory.swap.max", 0, False),
            ("pids", "pids.max", spec.processes + OWN, True),
            ("cpu", "cpu.cfs_period_us", 100_000, v1),
            ("cpu", "cpu.cfs_quota_us", quota, v1),
            ("cpu", "cpu.max", f"{quota} 100000", v2),
        ):
            folder = self.folders.get(controller)
            if folder is not None and (needed or (folder / name).exists()):
                _write(folder / name, value)

    def oom_kills(self) -> int:
        """How many processes were killed for memory so far."""
        if "memory" not in self.folders:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.folders["memory"] / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """The folders are gone; whatever still ran in them is dead."""
        for folder in self._each():
            for _ in range(200):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:  # busy: a process in it is not yet gone
                    _kill(folder)
                    time.sleep(0.01)


def _write(path: Path, value: object) -> None:
    path.write_text(str(value))


def _kill(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), 9)


_finding = threading.Lock()  # two threads that try at once would find each other's cgroups, and believe in none


@cache
def parents() -> tuple[int, dict[str, Path]]:
    """The cgroup version, and for each controller that may be used the folder in which a new cgroup can be made."""
    with _finding:
        return _find()


def _find() -> tuple[int, dict[str, Path]]:
    own = {}
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    v1, v2 = _mounts()
    found = {name: _nested(v1[name], own.get(name, "/")) for name in CONTROLLERS if name in v1}
    if found:
        return 1, {name: path for name, path in found.items() if _works({name: path}, 1)}
    for candidate in _upwards(v2, own.get("", "/")) if v2 else ():
        have: dict[str, Path] = {name: candidate for name in CONTROLLERS}
        if _delegates(candidate) and _works(have, 2):
            return 2, have
    return 2, {}


def create(number: int, spec: SandboxSpec) -> Cgroup:
    """A limited cgroup of this lease's number, with as many controllers as this machine lets us use (maybe none)."""
    version, above = parents()
    folders = {name: path / f"{PREFIX}{number}" for name, path in above.items()}
    group = Cgroup(folders, version)
    group.remove()  # what a killed run has left
    for folder in group._each():
        folder.mkdir()
    group.limit(spec)
    return group


def leftovers(number: int) -> Cgroup:
    """The cgroup that this number would have; for the reaper, which removes it."""
    version, above = parents()
    return Cgroup({name: path / f"{PREFIX}{number}" for name, path in above.items()}, version)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _mounts() -> tuple[dict[str, Path], Path | None]:
    """Where the hierarchies are: of v1 by controller, and that of v2."""
    v1: dict[str, Path] = {}
    v2 = None
    for line in _lines("/proc/self/mounts"):
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup":
            v1.update({name: Path(place) for name in options.split(",") if name in CONTROLLERS})
        elif kind == "cgroup2":
            v2 = Path(place)
    return v1, v2


def _nested(mount: Path, own: str) -> Path:
    """Below our own cgroup, so that limits on us hold for sandboxes too; in containers that path may not be there."""
    inside = mount / own.lstrip("/")
    return inside if inside.is_dir() and ".." not in own else mount


def _upwards(mount: Path, own: str) -> list[Path]:
    start = _nested(mount, own)
    return [start, *(above for above in start.parents if above == mount or mount in above.parents)]


def _delegates(folder: Path) -> bool:
    """Whether children of this v2 cgroup have our controllers, asking for it where it is not yet so."""
    control = folder / "cgroup.subtree_control"
    missing = [name for name in CONTROLLERS if name not in " ".join(_lines(str(control))).split()]
    if missing:
        with suppress(OSError):
            control.write_text(" ".join(f"+{name}" for name in missing))
    return all(name in " ".join(_lines(str(control))).split() for name in CONTROLLERS)


def _sweep_trials(above: Path) -> None:
    """What a process has left that was killed in the middle of trying is gone."""
    for old in above.glob(f"{PREFIX}try-*"):
        if not Path(f"/proc/{old.name.rpartition('-')[2]}").exists():
            with suppress(OSError):
                old.rmdir()


def _works(folders: dict[str, Path], version: int) -> bool:
    """Whether a cgroup can be made there and a process can enter it."""
    trial = Cgroup({name: path / f"{PREFIX}try-{os.getpid()}" for name, path in folders.items()}, version)
    try:
        for folder in trial._each():
            _sweep_trials(folder.parent)
            folder.mkdir()
        command = [*trial.entry(), "true"]
        return subprocess.run(command, env={"PATH": CLEAN_PATH}, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
    finally:
        trial.remove()
