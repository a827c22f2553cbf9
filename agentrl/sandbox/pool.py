"""Sandboxes that are ready before they are asked for, and used again once they are as good as new."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Self

from agentrl.errors import SandboxError
from agentrl.sandbox.open import DEFAULT, open_sandbox
from agentrl.sandbox.types import Sandbox, SandboxSpec


class SandboxPool:
    """Hands out sandboxes of one spec to any number of threads; at most `size` are kept warm while nobody has them.

    `acquire` never waits: where none is warm it opens one.
    """

    def __init__(self, spec: SandboxSpec = DEFAULT, *, backend: str | None = None, size: int = 8) -> None:
        self.spec, self.backend, self.size = spec, backend, size
        self._warm: list[Sandbox] = []
        self._out: dict[int, Sandbox] = {}
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self) -> Sandbox:
        """A sandbox that lives and is as good as new, to be given to `release` or closed."""
        while True:
            with self._lock:
                if self._closed:
                    raise SandboxError("The pool of sandboxes is closed.")
                sandbox = self._warm.pop() if self._warm else None
            if sandbox is None:
                sandbox = open_sandbox(self.spec, backend=self.backend)
            elif not sandbox.alive():
                sandbox.close()
                continue
            with self._lock:
                self._out[id(sandbox)] = sandbox
            return sandbox

    def release(self, sandbox: Sandbox) -> None:
        """The sandbox is reset and kept warm, or closed where it is dead, not needed, or the pool is closed."""
        with self._lock:
            known = self._out.pop(id(sandbox), None) is not None
            wanted = known and not self._closed and len(self._warm) < self.size
        try:
            if wanted and sandbox.alive():
                sandbox.reset()
                with self._lock:
                    if not self._closed and len(self._warm) < self.size:
                        self._warm.append(sandbox)
                        return
        except SandboxError:  # it broke while it was cleaned: another will be opened when it is needed
            pass
        sandbox.close()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Sandbox]:
        """A sandbox for the length of a `with` block."""
        sandbox = self.acquire()
        try:
            yield sandbox
        finally:
            self.release(sandbox)

    def warm(self, count: int | None = None) -> None:
        """At least `count` sandboxes (default: `size`) are warm."""
        missing = min(self.size if count is None else count, self.size) - len(self._warm)
        for sandbox in [self.acquire() for _ in range(missing)] if missing > 0 else ():
            self.release(sandbox)

    def close(self) -> None:
        """Every sandbox of the pool is closed, those that are still lent too. A second call does nothing."""
        with self._lock:
            self._closed = True
            left = [*self._warm, *self._out.values()]
            self._warm, self._out = [], {}
        for sandbox in left:
            sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
