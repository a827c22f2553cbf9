"""Slide and merge tiles until a target tile is made."""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar, Literal

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, settle
from agentrl_envs.game_2048.board import Board, add_tile, best_move, legal, move, show

KNOBS: dict[str, Range] = {"size": (3, 5), "target": (8, 2048), "max_moves": (0, 5000)}
Direction = Literal["up", "down", "left", "right"]


class Game2048(Environment):
    """The game 2048 on a board of 3 to 5 rows, with a target tile that a short episode can reach.

    Args:
        size: Rows and columns, 3 to 5.
        target: The tile to make, a power of two from 8 to 2048.
        max_moves: Moves after which the game is over, 1 to 5000; 0: as many as tiles worth the target need.
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, size: int = 3, target: int = 32, max_moves: int = 0) -> None:
        self._defaults = _settled({}, size, target, max_moves)
        self._board: Board = ()
        self._rng = random.Random(0)
        self._target, self._moves, self._max_moves = 8, 0, 1

    def reset(
        self,
        seed: int | None = None,
        size: int | None = None,
        target: int | None = None,
        max_moves: int | None = None,
        **row: Any,
    ) -> str:
        """Two tiles on a board; they and all tiles to come depend on the seed and the moves only."""
        knobs = _settled(self._defaults, size, target, max_moves)
        self._rng = random.Random(seed)
        self._target = knobs["target"]
        self._moves, self._max_moves = 0, knobs["max_moves"] or self._target
        empty: Board = ((0,) * knobs["size"],) * knobs["size"]
        self._board = add_tile(add_tile(empty, self._rng), self._rng)
        self.done = False
        return (
            f"2048: a move slides all tiles; equal tiles that meet become one of twice the value; then a new tile of 2 "
            f"or 4 comes. Make a tile of {self._target} in at most {self._max_moves} moves. A dot is an empty cell.\n"
            f"{show(self._board)}"
        )

    def move(self, direction: Direction) -> str:
        """Slide all tiles.

        Args:
            direction: Where to.

        Returns:
            The board with the new tile.
        """
        if self.done:
            return "The game is over."
        self._moves += 1
        left = self._max_moves - self._moves
        self.done = left == 0
        slid, gained = move(self._board, direction)
        if slid == self._board:
            could = " or ".join(legal(self._board))
            return f"Nothing can slide {direction}; {could} can. {left} moves left.\n{show(self._board)}"
        self._board = add_tile(slid, self._rng)
        made = f", {gained} merged" if gained else ""
        if self._highest() >= self._target:
            self.done = True
            return f"{direction}{made}: the tile {self._highest()} is made\n{show(self._board)}"
        if not legal(self._board):
            self.done = True
            return f"{direction}{made}: no move is left, the game is over\n{show(self._board)}"
        return f"{direction}{made}, {left} moves left\n{show(self._board)}"

    def get_reward(self) -> float:
        """How far the highest tile got from 4 to the target, on a log scale: 8, 16 and 32 are equal steps."""
        steps = math.log2(max(4, self._highest()) / 4)
        return min(1.0, steps / math.log2(self._target / 4))

    def _highest(self) -> int:
        return max((tile for line in self._board for tile in line), default=0)

    def _gold(self) -> dict[str, Any] | str:
        """Two moves of look-ahead; it does not know which tiles will come."""
        return "Done." if self.done else call("move", direction=best_move(self._board))


def _settled(defaults: dict[str, Any], size: int | None, target: int | None, max_moves: int | None) -> dict[str, Any]:
    knobs = settle(KNOBS, defaults, size=size, target=target, max_moves=max_moves)
    if knobs["target"].bit_count() != 1:
        raise ValueError(f"target must be a power of two from 8 to 2048, not {knobs['target']}.")
    return knobs
