"""A folder for files that only live processes need: gone when its owner closes it or ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import weakref
from pathlib import Path

_LOCK = "lock"


class Scratch:
    """A folder of this process's own inside `parent`, which is made where it is missing.

    A lock in it says that its owner lives: it goes with the process, kill -9 included, and holds across containers
    that share the disk, where process ids mean nothing. Whoever makes the next folder beside it removes those whose
    owner is gone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = Scratch(Path(parent), "weights-")
    ...     there = folder.path.is_dir()
    ...     folder.close()
    ...     print(there, folder.path.exists())
    True False
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_left(parent, prefix)
        self.path = parent / f"{prefix}{secrets.token_hex(6)}"
        self.path.mkdir(mode=0o755)
        unborn = self.path / f"{_LOCK}.new"  # a folder counts as left behind only once its lock has its name
        lock = os.open(unborn, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # a disk without locks: nobody else removes it
            fcntl.flock(lock, fcntl.LOCK_EX)
            unborn.rename(self.path / _LOCK)
        self._gone = weakref.finalize(self, _remove, self.path, lock, os.getpid())  # also when the interpreter exits

    def close(self) -> None:
        """The folder is gone."""
        self._gone()


def remove_left(parent: Path, prefix: str) -> None:
    """Folders in `parent` whose owner has ended are gone; those of others stay, and so do those of other users."""
    for lock_file in parent.glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the owner lives
                shutil.rmtree(lock_file.parent)
            finally:
                os.close(lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork, which holds copies of everything
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
