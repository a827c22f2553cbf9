"""Word problems whose numbers are too large for the head: compute with a tool, then submit the answer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl_envs._arithmetic import ExpressionError, evaluate, show_number
from agentrl_envs._common import Range, call, settle
from agentrl_envs.calculator.problems import Problem, make_problem

KNOBS: dict[str, Range] = {"depth": (1, 12), "largest": (10, 10_000), "distractors": (0, 4), "max_calls": (2, 100)}
USED, SUBMITTED, STEPS = 0.05, 0.05, 0.3


class Calculator(Environment):
    """A story of `depth` steps; each changes a stock of things, and the question is how many there are in the end.

    Args:
        depth: Steps of the story, 1 to 12.
        largest: Size of the numbers in it, 10 to 10000.
        distractors: Sentences with numbers that do not matter, 0 to 4.
        max_calls: Tool calls after which the episode is over, 2 to 100.
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, depth: int = 3, largest: int = 100, distractors: int = 0, max_calls: int = 20) -> None:
        self._defaults = settle(KNOBS, {}, depth=depth, largest=largest, distractors=distractors, max_calls=max_calls)
        self._problem = Problem("", (), ())
        self._calls = self._max_calls = self._solved_steps = 0
        self._used = self._submitted = self._right = False

    def reset(
        self,
        seed: int | None = None,
        depth: int | None = None,
        largest: int | None = None,
        distractors: int | None = None,
        max_calls: int | None = None,
        **row: Any,
    ) -> str:
        """A story that depends on the seed and the difficulty only."""
        knobs = settle(
            KNOBS, self._defaults, depth=depth, largest=largest, distractors=distractors, max_calls=max_calls
        )
        self._max_calls = knobs.pop("max_calls")
        self._problem = make_problem(seed, **knobs)
        self._calls = self._solved_steps = 0
        self._used = self._submitted = self._right = self.done = False
        return (
            f"{self._problem.text}\nCompute with calculate, then submit the answer, a whole number. "
            "There is one submission."
        )

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, for example "12 * (7 + 5)".

        Returns:
            The result, or what is wrong with the expression.
        """
        if self.done:
            return "The episode is over."
        self._count()
        try:
            evaluation = evaluate(expression)
        except ExpressionError as error:
            return f"error: {error}"
        self._used = True
        self._credit(evaluation.results)
        return show_number(evaluation.value)

    def submit(self, answer: int) -> str:
        """Submit the answer. This ends the episode.

        Args:
            answer: The answer, a whole number.

        Returns:
            Whether it is right.
        """
        if self.done:
            return "The episode is over."
        self._count()
        self._submitted = self.done = True
        self._right = answer == self._problem.milestones[-1]
        return "right" if self._right else "wrong"

    def get_reward(self) -> float:
        """1 for the right answer; else at most 0.4 for using the tools and for the first steps of the way."""
        if self._right:
            return 1.0
        steps = self._solved_steps / max(1, len(self._problem.milestones))
        return USED * self._used + SUBMITTED * self._submitted + STEPS * steps

    def _credit(self, results: tuple[Fraction, ...]) -> None:
        """A step counts once all before it do, and only as the result of an operation: numbers can be copied."""
        for value in results:
            left = self._problem.milestones[self._solved_steps :]
            self._solved_steps += bool(left) and value == left[0]

    def _count(self) -> None:
        self._calls += 1
        self.done = self._calls >= self._max_calls

    def _gold(self) -> dict[str, Any] | str:
        """One call for each step of the story, then the answer."""
        if self.done:
            return "Done."
        if self._solved_steps < len(self._problem.milestones) and self._calls < self._max_calls - 1:
            return call("calculate", expression=self._problem.expressions[self._solved_steps])
        return call("submit", answer=self._problem.milestones[-1])
