"""What an environment changed in the process, which it shares with every other environment and with the trainer."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

_CLOCK = ("monotonic", "perf_counter", "sleep", "time")
_CHANCE = ("random", "randint", "choice", "seed")
MOST_THREADS = 32  # more than this many left over are a leak, and not a library's pool
_THREADS_S = 0.5  # for threads to end that are about to


class Shared:
    """What the process was like when this was made; the rest of the process is to find it like that again."""

    def __init__(self) -> None:
        self._functions = {(time, name): getattr(time, name) for name in _CLOCK}
        self._functions |= {(random, name): getattr(random, name) for name in _CHANCE}
        self._limit = sys.getrecursionlimit()
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._folder, self._variables = _folder(), dict(os.environ)
        self._threads = set(threading.enumerate())
        self._told: dict[str, None] = {}

    def put_back(self) -> None:
        """Clocks, chance and the depth of recursion are as before: a check goes wrong without them, or never ends."""
        for (module, name), function in self._functions.items():
            if getattr(module, name, None) is not function:
                setattr(module, name, function)
                self._told[f"replaces {module.__name__}.{name}"] = None
        if sys.getrecursionlimit() != self._limit:
            self._told[f"sets the recursion limit to {sys.getrecursionlimit()}"] = None
            sys.setrecursionlimit(self._limit)

    def changes(self) -> list[str]:
        """What was changed, and is as before again, except for threads that still run. Only when nothing is at work."""
        self.put_back()
        told = list(self._told)
        for name, stream in self._streams.items():
            if getattr(sys, name) is not stream:
                setattr(sys, name, stream)
                told.append(f"replaces sys.{name}")
        if _folder() != self._folder:
            told.append(f"goes into the folder {_folder() or '(one that is gone)'}")
            with suppress(OSError):
                os.chdir(self._folder)
        # Only what was there: libraries add variables of their own when they are imported.
        changed = {name for name, value in self._variables.items() if os.environ.get(name) != value}
        if changed:
            some = ", ".join(sorted(changed)[:3]) + (" and more" if len(changed) > 3 else "")
            told.append(f"changes variables of the environment ({some})")
            os.environ.update({name: self._variables[name] for name in changed})
        if (left := self._left()) > MOST_THREADS:
            told.append(f"leaves {left} threads running")
        return told

    def _left(self) -> int:
        end = time.monotonic() + _THREADS_S
        while (left := self._running()) > MOST_THREADS and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def _running(self) -> int:
        new: list[Any] = [thread for thread in threading.enumerate() if thread not in self._threads]
        return sum(not thread.name.startswith("agentrl") for thread in new)


def _folder() -> str:
    with suppress(OSError):
        return os.getcwd()
    return ""
