"""Connect four against an opponent that looks some moves ahead and errs as often as it is told to."""

from __future__ import annotations

import functools
import random
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, settle
from agentrl_envs.connect4 import gold
from agentrl_envs.connect4.board import Shape, reply, show

KNOBS: dict[str, Range] = {
    "rows": (4, 8),
    "columns": (4, 8),
    "depth": (0, 3),
    "mistakes": (0.0, 1.0),
    "begins": ("seed", "you", "opponent"),
}
DRAW, RESISTED = 0.5, 0.2
REFUSED_CALLS = 5  # moves to full columns, after which the game is lost


class Connect4(Environment):
    """The model is X. Discs fall to the lowest free cell of a column; four in a line win.

    The opponent's reply depends on the seed and the position only: every rollout of a group meets the same opponent.

    Args:
        rows: Of the board, 4 to 8.
        columns: Of the board, 4 to 8.
        depth: Moves that the opponent looks ahead, 0 (random) to 3. With 2 it takes wins and blocks threats.
        mistakes: Share of its moves that are random all the same, 0 to 1.
        begins: "seed" (drawn), "you" or "opponent".
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(
        self, rows: int = 6, columns: int = 7, depth: int = 2, mistakes: float = 0.25, begins: str = "seed"
    ) -> None:
        self._defaults = settle(KNOBS, {}, rows=rows, columns=columns, depth=depth, mistakes=mistakes, begins=begins)
        self._shape = Shape(6, 7)
        self._own = self._other = self._refused = 0
        self._strength: tuple[int, float, str] = (0, 0.0, "")
        self._plan: list[int] = []

    def reset(
        self,
        seed: int | None = None,
        rows: int | None = None,
        columns: int | None = None,
        depth: int | None = None,
        mistakes: float | None = None,
        begins: str | None = None,
        **row: Any,
    ) -> str:
        """An empty board, or one with the opponent's first disc; it and its replies depend on the seed only."""
        knobs = settle(KNOBS, self._defaults, rows=rows, columns=columns, depth=depth, mistakes=mistakes, begins=begins)
        rng = random.Random(seed)
        self._shape = Shape(knobs["rows"], knobs["columns"])
        self._strength = (knobs["depth"], knobs["mistakes"], f"{rng.getrandbits(64):x}")
        opponent_first = knobs["begins"] == "opponent" or (knobs["begins"] == "seed" and rng.random() < 0.5)
        self._own = self._other = self._refused = 0
        self._plan = []
        self.done = False
        if opponent_first:
            self._other = self._shape.drop(0, self._reply(0, 0))
        began = "The opponent began." if opponent_first else "You begin."
        return (
            f"Connect four: you are X, the opponent is O, discs fall to the lowest free cell of a column (1 to "
            f"{self._shape.columns}). Four in a line, also diagonally, win. {began}\n{self._show()}"
        )

    def drop(self, column: Annotated[int, Field(ge=1, le=8)]) -> str:
        """Drop a disc into a column.

        Args:
            column: The number of the column, from the left.

        Returns:
            The opponent's reply and the board.
        """
        if self.done:
            return "The game is over."
        taken = self._own | self._other
        disc = self._shape.drop(taken, column - 1) if column <= self._shape.columns else 0
        if not disc:
            return self._refuse(column)
        self._plan = self._plan[1:] if self._plan[:1] == [column - 1] else []
        self._own |= disc
        if (result := self._over()) is not None:
            return f"{result}\n{self._show()}"
        answer = self._reply(self._other, self._own)
        self._other |= self._shape.drop(self._own | self._other, answer)
        result = self._over()
        return f"The opponent plays {answer + 1}.{'' if result is None else f' {result}'}\n{self._show()}"

    def get_reward(self) -> float:
        """1 for a win, 0.5 for a draw; for a loss or an unfinished game up to 0.2 by the discs played."""
        if self._shape.wins(self._own):
            return 1.0
        if not self._shape.wins(self._other) and not self._shape.moves(self._own | self._other):
            return DRAW
        return RESISTED * 2 * self._own.bit_count() / (self._shape.rows * self._shape.columns)

    def _refuse(self, column: int) -> str:
        self._refused += 1
        self.done = self._refused >= REFUSED_CALLS
        free = ", ".join(str(c + 1) for c in sorted(self._shape.moves(self._own | self._other)))
        why = "is full" if column <= self._shape.columns else "is not on this board"
        return f"Column {column} {why}. Free columns: {free}." + (
            " That was the last warning: you lose." if self.done else ""
        )

    def _over(self) -> str | None:
        """How the game ended, for the model; None while it goes on."""
        if self._shape.wins(self._own):
            result = "You win."
        elif self._shape.wins(self._other):
            result = "You lose."
        elif not self._shape.moves(self._own | self._other):
            result = "The game is a draw."
        else:
            return None
        self.done = True
        return result

    def _reply(self, theirs: int, ours: int) -> int:
        depth, mistakes, key = self._strength
        return reply(self._shape, theirs, ours, depth, mistakes, key)

    def _show(self) -> str:
        return show(self._shape, self._own, self._other)

    def _gold(self) -> dict[str, Any] | str:
        """A line that beats this very opponent, found by trying its replies; without one, a search."""
        if self.done:
            return "Done."
        if not self._plan:
            self._plan = gold.plan(self._shape, self._own, self._other, functools.partial(self._reply))
        column = self._plan[0] if self._plan else gold.careful(self._shape, self._own, self._other)
        return call("drop", column=column + 1)
