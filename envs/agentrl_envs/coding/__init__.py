"""Write a function that passes tests which nobody shows: run code, try the examples, submit."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl.sandbox import FunctionVerdict, SandboxSpec, run_function_tests
from agentrl.sandbox.episode import CleanSandboxes, EpisodeSandbox
from agentrl.sandbox.shown import cut, shown
from agentrl_envs._common import Range, call, settle
from agentrl_envs.coding.tasks import KINDS, NAME, Task, make_task

KNOBS: dict[str, Range] = {
    "kind": ("any", *KINDS),
    "depth": (1, 6),
    "examples": (1, 8),
    "hidden": (10, 60),
    "max_calls": (2, 100),
}
# the same hash of texts in every run: an episode that is repeated gives the same answers
SPEC = SandboxSpec(memory_mb=256, disk_mb=16, files=512, env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"})
RUN_S, TEST_S = 5.0, 10.0  # deadlines of one run, and of all cases together
MOST_CODE, MOST_SHOWN = 20_000, 2000  # characters


class Coding(Environment):
    """A function of `depth` steps and a last one is described; hidden cases judge what is submitted.

    Args:
        kind: Of the argument: numbers, text, words, number, or any of them by the seed.
        depth: Steps before the last, 1 to 6.
        examples: Calls that the description shows, 1 to 8.
        hidden: Cases that judge, 10 to 60.
        max_calls: Tool calls after which the episode is over, 2 to 100.
        backend: Of the sandboxes; None: see `agentrl.sandbox.open_sandbox`.
    """

    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(
        self,
        kind: str = "any",
        depth: int = 2,
        examples: int = 3,
        hidden: int = 20,
        max_calls: int = 10,
        backend: str | None = None,
    ) -> None:
        self._defaults = settle(
            KNOBS, {}, kind=kind, depth=depth, examples=examples, hidden=hidden, max_calls=max_calls
        )
        self._box = EpisodeSandbox(SPEC, backend=backend)
        self._judges = CleanSandboxes(SPEC, backend=backend)
        self._task = Task("", (), (), "")
        self._calls = self._max_calls = 0
        self._reward = 0.0

    def reset(
        self,
        seed: int | None = None,
        kind: str | None = None,
        depth: int | None = None,
        examples: int | None = None,
        hidden: int | None = None,
        max_calls: int | None = None,
        **row: Any,
    ) -> str:
        """A task that depends on the seed and the difficulty only."""
        knobs = settle(
            KNOBS, self._defaults, kind=kind, depth=depth, examples=examples, hidden=hidden, max_calls=max_calls
        )
        self._max_calls = knobs.pop("max_calls")
        self._task = make_task(seed, **knobs)
        self._calls, self._reward, self.done = 0, 0.0, False
        self._box.start()
        return (
            f"{self._task.text}\nrun_code runs a program, run_tests tries the function on these examples, submit is "
            f"judged by {len(self._task.hidden)} hidden cases and ends the episode. Calls: {self._max_calls}."
        )

    def run_code(self, code: str) -> str:
        """Run a Python program, to try something out. Files that it writes stay.

        Args:
            code: The whole program; it shows only what it prints.

        Returns:
            What it printed, and how it ended.
        """
        if refused := self._refused(code):
            return refused
        return shown(self._box.exec(["python3", "-"], stdin=code, timeout_s=RUN_S), MOST_SHOWN)

    def run_tests(self, code: str) -> str:
        """Call the function solve with the examples of the task.

        Args:
            code: Python source that defines solve.

        Returns:
            How many examples are right, and what is wrong with the first that is not.
        """
        if refused := self._refused(code):
            return refused
        verdict = self._verdict(code, self._task.examples)
        lines = [f"{verdict.passed} of {verdict.total} examples are right.", verdict.first_failure]
        if verdict.printed:
            lines.append(f"It printed: {cut(verdict.printed.rstrip(), MOST_SHOWN)}")
        return "\n".join(line for line in lines if line)

    def submit(self, code: str) -> str:
        """Submit the function solve. This ends the episode.

        Args:
            code: Python source that defines solve.

        Returns:
            How many of the hidden cases are right.
        """
        if refused := self._refused(code):
            return refused
        verdict = self._verdict(code, self._task.hidden)
        self._reward, self.done = verdict.score, True
        return f"{verdict.passed} of {verdict.total} hidden cases are right."

    def get_reward(self) -> float:
        """The share of the hidden cases that the submitted function passed; 0 without one."""
        return self._reward

    def close(self) -> None:
        """The sandboxes are gone."""
        self._box.close()
        self._judges.close()

    def _verdict(self, code: str, cases: tuple[Any, ...]) -> FunctionVerdict:
        """In a sandbox of its own: nothing that was run before is in it, nor the expected values."""
        examples = cases is self._task.examples
        return run_function_tests(self._judges.pool, code, NAME, cases, TEST_S, reveal=examples)

    def _refused(self, code: str) -> str:
        """Why nothing is done with this code; empty where something is, and one call is counted."""
        if self.done:
            return "The episode is over."
        if len(code) > MOST_CODE:
            return f"The code has {len(code)} characters; at most {MOST_CODE} are read. Nothing was done."
        self._calls += 1
        self.done = self._calls >= self._max_calls
        return ""

    def _gold(self) -> dict[str, Any] | str:
        """The function is tried on the examples, and submitted."""
        if self.done:
            return "Done."
        return call("submit" if self._calls else "run_tests", code=self._task.solution)
