"""Files and a terminal: find, count, rename, edit, fix; what is left in the files is judged elsewhere."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl.sandbox import SandboxSpec
from agentrl.sandbox.episode import CleanSandboxes, EpisodeSandbox
from agentrl.sandbox.shown import shown
from agentrl_envs._common import Range, call, settle
from agentrl_envs.shell.goals import Answer
from agentrl_envs.shell.tasks import TASKS, Task, make_task

KNOBS: dict[str, Range] = {"task": ("any", *TASKS), "files": (6, 60), "depth": (1, 4), "max_calls": (2, 100)}
SPEC = SandboxSpec(memory_mb=256, disk_mb=16, files=2048, env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"})
COMMAND_S = 10.0
MOST_COMMAND, MOST_SHOWN = 8000, 3000  # characters


class Shell(Environment):
    """A tree of files, and something to do in it with the shell.

    Args:
        task: count, edit, find, fix, rename, sum, or any of them by the seed.
        files: In the tree, 6 to 60.
        depth: Of its folders, 1 to 4.
        max_calls: Tool calls after which the episode is over, 2 to 100.
        backend: Of the sandboxes; None: see `agentrl.sandbox.open_sandbox`.
    """

    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(
        self, task: str = "any", files: int = 12, depth: int = 2, max_calls: int = 12, backend: str | None = None
    ) -> None:
        self._defaults = settle(KNOBS, {}, task=task, files=files, depth=depth, max_calls=max_calls)
        self._box = EpisodeSandbox(SPEC, backend=backend)
        self._judges = CleanSandboxes(SPEC, backend=backend)
        self._task = Task("", {}, Answer(""), "")
        self._calls = self._max_calls = 0
        self._reward = 0.0

    def reset(
        self,
        seed: int | None = None,
        task: str | None = None,
        files: int | None = None,
        depth: int | None = None,
        max_calls: int | None = None,
        **row: Any,
    ) -> str:
        """Files and a task that depend on the seed and the difficulty only."""
        knobs = settle(KNOBS, self._defaults, task=task, files=files, depth=depth, max_calls=max_calls)
        self._max_calls = knobs.pop("max_calls")
        self._task = make_task(seed, **knobs)
        self._calls, self._reward, self.done = 0, 0.0, False
        self._box.start(self._task.files)
        return f"You are in the folder /work. {self._task.text} Then submit. Calls: {self._max_calls}."

    def bash(self, command: str) -> str:
        """Run a command in bash, in the folder /work. Files stay from one command to the next.

        Args:
            command: One or more lines for bash, for example "find . -type f | head".

        Returns:
            What it printed, and how it ended.
        """
        if self.done:
            return "The episode is over."
        if len(command) > MOST_COMMAND or "\0" in command:
            return f"Nothing was run: a command has at most {MOST_COMMAND} characters, and no NUL character."
        self._count()
        words = ["bash", "-c", command.encode("utf-8", "replace").decode()]
        return shown(self._box.exec(words, timeout_s=COMMAND_S), MOST_SHOWN)

    def submit(self) -> str:
        """Say that everything is done. This ends the episode.

        Returns:
            How much of it is right.
        """
        if self.done:
            return "The episode is over."
        self._count()
        self.done = True
        self._reward = self._task.goal.score(self._box, self._judges)
        return "right" if self._reward == 1.0 else "not right" if self._reward == 0.0 else "partly right"

    def get_reward(self) -> float:
        """How much of the task was done when it was submitted; 0 before."""
        return self._reward

    def close(self) -> None:
        """The sandboxes are gone."""
        self._box.close()
        self._judges.close()

    def _count(self) -> None:
        self._calls += 1
        self.done = self._calls >= self._max_calls

    def _gold(self) -> dict[str, Any] | str:
        """One command does it, and is submitted."""
        if self.done:
            return "Done."
        return call("submit") if self._calls else call("bash", command=self._task.command)
