"""Connect four on boards of several sizes: bit boards, wins, and a search of limited depth.

A column takes `rows + 1` bits, the lowest cell first; the top bit of each stays empty, so that lines do not run over.
A position is (own, other): the discs of whoever is to move, and those of the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

WIN = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a board."""

    rows: int
    columns: int

    def drop(self, taken: int, column: int) -> int:
        """The bit of the disc that falls into a column; 0 where the column is full.

        >>> Shape(4, 5).drop(0b11, 0), Shape(4, 5).drop(0b1111, 0), Shape(4, 5).drop(0, 1)
        (4, 0, 32)
        """
        height = self.rows + 1
        lane = ((1 << self.rows) - 1) << (column * height)
        free = lane & ~taken
        return free & -free

    def moves(self, taken: int) -> list[int]:
        """Columns that are not full, the middle first."""
        return [column for column in _from_middle(self.columns) if self.drop(taken, column)]

    def wins(self, discs: int) -> bool:
        """True where four discs stand in a line.

        >>> Shape(4, 5).wins(0b1111), Shape(4, 5).wins(0b0111)
        (True, False)
        """
        for step in (1, self.rows + 1, self.rows, self.rows + 2):
            pairs = discs & (discs >> step)
            if pairs & (pairs >> 2 * step):
                return True
        return False


@lru_cache
def _from_middle(columns: int) -> tuple[int, ...]:
    middle = (columns - 1) / 2
    return tuple(sorted(range(columns), key=lambda column: (abs(column - middle), column)))


def search(shape: Shape, own: int, other: int, depth: int, least: int = -2 * WIN, most: int = 2 * WIN) -> int:
    """What the mover gets within `depth` moves: positive a win (more: sooner), negative a loss, 0 neither."""
    if depth == 0:
        return 0
    moves = shape.moves(own | other)
    if not moves:
        return 0
    best = -2 * WIN
    for column in moves:
        after = own | shape.drop(own | other, column)
        worth = WIN + depth if shape.wins(after) else -search(shape, other, after, depth - 1, -most, -least)
        best = max(best, worth)
        least = max(least, worth)
        if least >= most:
            break
    return best


def best_columns(shape: Shape, own: int, other: int, depth: int) -> list[int]:
    """The columns that are best within `depth` moves; all that can be played where depth is 0."""
    moves = shape.moves(own | other)
    if depth == 0 or len(moves) == 1:
        return moves
    worth = {}
    for column in moves:
        after = own | shape.drop(own | other, column)
        worth[column] = WIN + depth if shape.wins(after) else -search(shape, other, after, depth - 1)
    best = max(worth.values())
    return [column for column in moves if worth[column] == best]


def reply(shape: Shape, own: int, other: int, depth: int, mistakes: float, key: str) -> int:
    """The column of a scripted player: the same each time for the same position and key."""
    rng = random.Random(f"{key}/{own}/{other}")
    erring = rng.random() < mistakes
    return rng.choice(shape.moves(own | other) if erring else best_columns(shape, own, other, depth))


def show(shape: Shape, own: int, other: int) -> str:
    """A line of column numbers, then the rows from the top; a dot is an empty cell.

    >>> print(show(Shape(2, 4), 0b1, 0b1000))
    1 2 3 4
    . . . .
    X O . .
    """
    lines = [" ".join(str(column + 1) for column in range(shape.columns))]
    for row in reversed(range(shape.rows)):
        bits = [1 << (column * (shape.rows + 1) + row) for column in range(shape.columns)]
        lines.append(" ".join("X" if own & bit else "O" if other & bit else "." for bit in bits))
    return "\n".join(lines)
