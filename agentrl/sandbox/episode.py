"""The sandbox of an environment's instance: opened when it is first needed, clean for each episode, closed once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox.open import DEFAULT, open_sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.types import ExecResult, Sandbox, SandboxSpec


class EpisodeSandbox:
    """Hold one in an environment: `start` in `reset`, `close` in `close`.

    A copy (by pickle) has no sandbox until its `start`. An environment that is never asked to do anything in an
    episode pays nothing for a clean sandbox: files are put in place with the first command.
    """

    def __init__(self, spec: SandboxSpec = DEFAULT, *, backend: str | None = None) -> None:
        self.spec, self.backend = spec, backend
        self._sandbox: Sandbox | None = None
        self._files: Mapping[str, bytes | str] | None = None  # to be put in place; None: that is done
        self._started = self._used = False

    def start(self, files: Mapping[str, bytes | str] | None = None) -> None:
        """An open sandbox in which, for whoever looks, are these files and nothing else.

        Raises:
            SandboxUnavailable: Nothing on this machine can run code safely.
        """
        if self._sandbox is None:
            self._sandbox, self._used = open_sandbox(self.spec, backend=self.backend), False
        self._files, self._started = dict(files or {}), True

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | str | None = None,
        timeout_s: float = 10.0,
        max_output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`; in /work."""
        return self._ready().exec(argv, stdin=stdin, timeout_s=timeout_s, max_output_bytes=max_output_bytes, env=env)

    def upload(self, files: Mapping[str, bytes | str]) -> None:
        """See `Sandbox.upload`."""
        self._ready().upload(files)

    def download(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.download`."""
        return self._ready().download(path, max_bytes)

    def list_files(self) -> list[str]:
        """See `Sandbox.list_files`."""
        return self._ready().list_files()

    def close(self) -> None:
        """The sandbox is gone. A second call does nothing, and `start` opens another."""
        sandbox, self._sandbox, self._started = self._sandbox, None, False
        if sandbox is not None:
            sandbox.close()

    def _ready(self) -> Sandbox:
        if not self._started or self._sandbox is None:
            raise SandboxError("This environment has no sandbox: call reset first, in a copy as well.")
        if self._files is not None:
            self._sandbox = self._cleaned(self._sandbox)
            self._sandbox.upload(self._files)
            self._files = None
        self._used = True
        return self._sandbox

    def _cleaned(self, sandbox: Sandbox) -> Sandbox:
        """One in which nothing is left of the last episode; a new one where the last episode's is broken."""
        if not self._used:
            return sandbox
        try:
            if sandbox.alive():
                sandbox.reset()
                return sandbox
        except SandboxError:
            pass
        sandbox.close()
        return open_sandbox(self.spec, backend=self.backend)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sandbox": None, "_started": False}


@dataclass
class _Held:
    pool: SandboxPool
    users: set[int]


_shared: dict[tuple[int, str, str | None], _Held] = {}
_lock = threading.Lock()


class CleanSandboxes:
    """Clean sandboxes for a moment, such as for grading: one pool for all that have the same spec in this process.

    The pool is closed with the last of them. Copies by pickle are users of their own.
    """

    def __init__(self, spec: SandboxSpec = DEFAULT, *, backend: str | None = None, size: int = 4) -> None:
        self.spec, self.backend, self.size = spec, backend, size

    @property
    def _key(self) -> tuple[int, str, str | None]:
        return os.getpid(), repr(self.spec), self.backend  # a forked child must not use its parent's

    @property
    def pool(self) -> SandboxPool:
        """The pool, which others use as well: never close it, but this."""
        with _lock:
            held = _shared.get(self._key)
            if held is None:
                held = _shared[self._key] = _Held(SandboxPool(self.spec, backend=self.backend, size=self.size), set())
            held.users.add(id(self))
            return held.pool

    @contextlib.contextmanager
    def lend(self) -> Iterator[Sandbox]:
        """A clean sandbox for the length of a `with` block."""
        with self.pool.lend() as sandbox:
            yield sandbox

    def close(self) -> None:
        """This one needs the pool no more; the last one closes it. A second call does nothing."""
        with _lock:
            held = _shared.get(self._key)
            if held is None:
                return
            held.users.discard(id(self))
            if held.users:
                return
            del _shared[self._key]
        held.pool.close()
