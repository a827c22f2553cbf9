"""Tic-tac-toe against an opponent that errs as often as it is told to."""

from __future__ import annotations

import random
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, settle
from agentrl_envs.tictactoe.board import EMPTY, best_cells, free, put, show, value, winner

KNOBS: dict[str, Range] = {"mistakes": (0.0, 1.0), "begins": ("seed", "you", "opponent")}
DRAW, RESISTED = 0.5, 0.2
REFUSED_CALLS = 5  # moves to cells that are taken, after which the game is lost
OPPONENTS = 8  # drawn until one can be beaten


class TicTacToe(Environment):
    """The model is X. The opponent plays perfectly, except for the share of its moves that are random.

    Which positions it errs in depends on the seed, so every rollout of a group meets the same opponent, and a line of
    play that beats it does so again.

    Args:
        mistakes: Share of random moves, 0 to 1. At 0 nobody can win, and a draw has the full reward.
        begins: "seed" (drawn), "you" or "opponent".
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, mistakes: float = 0.3, begins: str = "seed") -> None:
        self._defaults = settle(KNOBS, {}, mistakes=mistakes, begins=begins)
        value(EMPTY, "X")  # the table of all positions is made once in a process, and not in the first episode
        self._board = EMPTY
        self._key = ""
        self._mistakes, self._draw = 0.0, DRAW
        self._refused = 0
        self._lines: dict[str, tuple[int, int]] = {}  # what `_best` found against this opponent

    def reset(
        self, seed: int | None = None, mistakes: float | None = None, begins: str | None = None, **row: Any
    ) -> str:
        """An empty board, or one with the opponent's first move; it and its replies depend on the seed only."""
        knobs = settle(KNOBS, self._defaults, mistakes=mistakes, begins=begins)
        rng = random.Random(seed)
        self._mistakes = knobs["mistakes"]
        opponent_first = knobs["begins"] == "opponent" or (knobs["begins"] == "seed" and rng.random() < 0.5)
        outcome = 0
        for _ in range(OPPONENTS if self._mistakes else 1):
            self._key, self._lines = f"{rng.getrandbits(64):x}", {}
            self._board = put(EMPTY, self._reply(EMPTY), "O") if opponent_first else EMPTY
            outcome = self._best(self._board)[0] if self._mistakes else 0
            if outcome > 0:
                break
        self._draw = DRAW if outcome > 0 else 1.0
        self._refused = 0
        self.done = False
        began = "The opponent began." if opponent_first else "You begin."
        goal = "Win" if outcome > 0 else "This opponent cannot be beaten: a draw counts as a win. Win or draw"
        return (
            f"Tic-tac-toe: you are X, the opponent is O, free cells show their number. {began} {goal}.\n{self._show()}"
        )

    def play(self, cell: Annotated[int, Field(ge=1, le=9)]) -> str:
        """Put an X into a free cell.

        Args:
            cell: The number of the cell.

        Returns:
            The opponent's reply and the board.
        """
        if self.done:
            return "The game is over."
        if self._board[cell - 1] != ".":
            self._refused += 1
            self.done = self._refused >= REFUSED_CALLS
            numbers = ", ".join(str(i + 1) for i in free(self._board))
            lost = " That was the last warning: you lose." if self.done else ""
            return f"Cell {cell} is taken. Free cells: {numbers}.{lost}"
        self._board = put(self._board, cell - 1, "X")
        if self._over():
            return f"{self._result()}\n{self._show()}"
        reply = self._reply(self._board)
        self._board = put(self._board, reply, "O")
        if self._over():
            return f"The opponent takes {reply + 1}. {self._result()}\n{self._show()}"
        return f"The opponent takes {reply + 1}.\n{self._show()}"

    def get_reward(self) -> float:
        """1 for a win, 0.5 for a draw (1 where the opponent cannot be beaten); else up to 0.2 by the marks put."""
        won = winner(self._board)
        if won == "X":
            return 1.0
        if won is None and "." not in self._board:
            return self._draw
        return RESISTED * 2 * self._board.count("X") / len(self._board)

    def _over(self) -> bool:
        self.done = winner(self._board) is not None or "." not in self._board
        return self.done

    def _result(self) -> str:
        return {"X": "You win.", "O": "You lose."}.get(winner(self._board) or "", "The game is a draw.")

    def _show(self) -> str:
        return show(self._board)

    def _reply(self, board: str) -> int:
        """The opponent's cell: the same each time in the same position of the same seed."""
        rng = random.Random(f"{self._key}{board}")
        erring = rng.random() < self._mistakes
        return rng.choice(free(board) if erring else best_cells(board, "O"))

    def _best(self, board: str) -> tuple[int, int]:
        """(1 a win, 0 a draw, -1 a loss; the cell that leads there) for X against this very opponent."""
        if board in self._lines:
            return self._lines[board]
        found, good = (-2, -1), best_cells(board, "X")
        for cell in sorted(free(board), key=lambda cell: cell not in good):
            after = put(board, cell, "X")
            outcome = self._value(after)
            if outcome > found[0]:
                found = (outcome, cell)
            if outcome == 1:
                break
        self._lines[board] = found
        return found

    def _value(self, board: str) -> int:
        """What X can get once it has moved and the opponent is to reply."""
        if winner(board) == "X":
            return 1
        if "." not in board:
            return 0
        replied = put(board, self._reply(board), "O")
        if winner(replied) == "O":
            return -1
        return 0 if "." not in replied else self._best(replied)[0]

    def _gold(self) -> dict[str, Any] | str:
        """The best line against this opponent: it knows where the opponent errs, and never loses."""
        return "Done." if self.done else call("play", cell=self._best(self._board)[1] + 1)
