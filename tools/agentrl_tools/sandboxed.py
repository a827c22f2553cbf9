"""Python and a shell for `tools=[...]`: each call in a clean sandbox of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from agentrl.sandbox import SandboxPool, SandboxSpec
from agentrl.sandbox.open import DEFAULT
from agentrl.sandbox.shown import MOST, shown
from agentrl_tools.limits import too_much, words_of


class SandboxTools:
    """A context manager; its `tools` keep nothing from one call to the next, so that any number of rollouts share it.

    Standalone tools are not told whose call they get. What must stay (files of an episode) needs an environment: see
    `Workspace`.

    Args:
        spec: Of the sandboxes.
        files: That lie in /work at each call.
        backend: See `agentrl.sandbox.open_sandbox`.
        timeout_s: Of a call.
        most_shown: Characters of the output that the model reads.
        size: Sandboxes that are kept warm.
    """

    def __init__(
        self,
        spec: SandboxSpec = DEFAULT,
        *,
        files: Mapping[str, bytes | str] | None = None,
        backend: str | None = None,
        timeout_s: float = 10.0,
        most_shown: int = MOST,
        size: int = 8,
    ) -> None:
        self.files, self.timeout_s, self.most_shown = dict(files or {}), timeout_s, most_shown
        self._pool = SandboxPool(spec, backend=backend, size=size)

    def tools(self) -> list[Callable[..., str]]:
        """`python` and `bash`."""
        return [self.python, self.bash]

    def python(self, code: str) -> str:
        """Run a Python program. Nothing stays from one call to the next: each is a program of its own.

        Args:
            code: The whole program; it shows only what it prints.

        Returns:
            What it printed, and how it ended.
        """
        return too_much(code) or self._run(["python3", "-"], code)

    def bash(self, command: str) -> str:
        """Run a command in bash. Nothing stays from one call to the next, no file either.

        Args:
            command: One or more lines for bash.

        Returns:
            What it printed, and how it ended.
        """
        return too_much(command) or self._run(words_of(command))

    def close(self) -> None:
        """The sandboxes are gone. A second call does nothing."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, argv: list[str], stdin: str | None = None) -> str:
        with self._pool.lend() as sandbox:
            if self.files:
                sandbox.upload(self.files)
            return shown(sandbox.exec(argv, stdin=stdin, timeout_s=self.timeout_s), self.most_shown)
