"""Sudoku grids of 4, 6 or 9: full ones, and puzzles with exactly one solution."""

from __future__ import annotations

import random
from functools import lru_cache

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # size: rows and columns of a box
MOST_EMPTY = {4: 10, 6: 22, 9: 50}  # what digging in random order reaches within a few attempts
ATTEMPTS = 50

Grid = tuple[int, ...]  # size * size digits, row by row; 0: empty


@lru_cache
def peers(size: int) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each cell the other cells of its row, its column and its box."""
    height, width = BOXES[size]

    def groups(cell: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        row, column = divmod(cell, size)
        top, left = row - row % height, column - column % width
        cells = {
            "row": [row * size + c for c in range(size)],
            "column": [r * size + column for r in range(size)],
            "box": [r * size + c for r in range(top, top + height) for c in range(left, left + width)],
        }
        return tuple((name, tuple(c for c in found if c != cell)) for name, found in cells.items())

    return tuple(groups(cell) for cell in range(size * size))


@lru_cache
def _neighbours(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple({c for _, cells in groups for c in cells}) for groups in peers(size))


def full_grid(size: int, rng: random.Random) -> Grid:
    """A solved grid: a pattern whose digits, bands, rows, stacks and columns are shuffled."""
    height, width = BOXES[size]

    def shuffled(blocks: int, length: int) -> list[int]:
        return [
            block * length + line
            for block in rng.sample(range(blocks), blocks)
            for line in rng.sample(range(length), length)
        ]

    digits = rng.sample(range(1, size + 1), size)
    rows, columns = shuffled(size // height, height), shuffled(size // width, width)
    return tuple(digits[(width * (r % height) + r // height + c) % size] for r in rows for c in columns)


def solve(grid: Grid, size: int, most: int = 1) -> list[Grid]:
    """Up to `most` solutions; the cell with the fewest choices is tried first."""
    cells, found = list(grid), []
    near = _neighbours(size)
    every = (1 << (size + 1)) - 2

    def choices(cell: int) -> int:
        taken = 0
        for other in near[cell]:
            taken |= 1 << cells[other]
        return every & ~taken

    def fill() -> None:
        best, options = -1, 0
        for cell, digit in enumerate(cells):
            if digit == 0:
                mask = choices(cell)
                if best < 0 or mask.bit_count() < options.bit_count():
                    best, options = cell, mask
                    if mask.bit_count() < 2:
                        break
        if best < 0:
            found.append(tuple(cells))
            return
        while options and len(found) < most:
            low = options & -options
            options ^= low
            cells[best] = low.bit_length() - 1
            fill()
        cells[best] = 0

    fill()
    return found


def make_puzzle(size: int, empties: int, rng: random.Random) -> tuple[Grid, Grid]:
    """(puzzle, solution): the puzzle has this many empty cells and one solution.

    Raises:
        ValueError: So many empty cells were not reached; not known to happen up to `MOST_EMPTY`.
    """
    for _ in range(ATTEMPTS):
        solution = full_grid(size, rng)
        puzzle = list(solution)
        left = empties
        for cell in rng.sample(range(size * size), size * size):
            if not left:
                break
            puzzle[cell] = 0
            if _another(puzzle, size, cell, solution[cell]):
                puzzle[cell] = solution[cell]
            else:
                left -= 1
        if not left:
            return tuple(puzzle), solution
    raise ValueError(f"empties={empties} is too many for size {size}.")


def _another(puzzle: list[int], size: int, cell: int, digit: int) -> bool:
    """True where a solution has another digit in this cell. The puzzle had one solution before the cell was emptied."""
    taken = {puzzle[other] for other in _neighbours(size)[cell]}
    for other in range(1, size + 1):
        if other != digit and other not in taken:
            trial = (*puzzle[:cell], other, *puzzle[cell + 1 :])
            if solve(trial, size):
                return True
    return False


def show(grid: Grid, size: int) -> str:
    """One line for each row, with its number; a dot is an empty cell.

    >>> print(show((1, 2, 3, 4, 3, 0, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1), 4))
          c1 c2 c3 c4
    r1:    1  2  3  4
    r2:    3  .  1  2
    r3:    2  1  4  3
    r4:    4  3  2  1
    """
    lines = ["      " + " ".join(f"c{c + 1}" for c in range(size))]
    for row in range(size):
        digits = grid[row * size : (row + 1) * size]
        lines.append(f"r{row + 1}:   " + " ".join(f" {digit or '.'}" for digit in digits))
    return "\n".join(lines)
