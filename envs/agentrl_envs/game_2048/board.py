"""The rules of 2048, and a search that plays it."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

Row = tuple[int, ...]
Board = tuple[Row, ...]  # tiles as they are shown; 0: empty
DIRECTIONS = ("up", "down", "left", "right")
FOUR_SHARE = 0.1  # of new tiles that are a 4 and not a 2


@lru_cache(maxsize=1 << 16)
def slide(row: Row) -> tuple[Row, int]:
    """(the row pushed to its beginning, the sum of the tiles made): each tile merges at most once, nearest pairs first.

    >>> slide((2, 2, 2, 2)), slide((4, 2, 2, 0)), slide((0, 2, 0, 2)), slide((2, 2, 2, 0))
    (((4, 4, 0, 0), 8), ((4, 4, 0, 0), 4), ((4, 0, 0, 0), 4), ((4, 2, 0, 0), 4))
    """
    merged: list[int] = []
    gained, free = 0, False  # free: the last tile was not made by a merge
    for tile in row:
        if not tile:
            continue
        if free and merged[-1] == tile:
            merged[-1] = 2 * tile
            gained += 2 * tile
            free = False
        else:
            merged.append(tile)
            free = True
    return tuple(merged) + (0,) * (len(row) - len(merged)), gained


def move(board: Board, direction: str) -> tuple[Board, int]:
    """(the board after all tiles slid, the sum of the tiles made); the same board where nothing can slide."""
    across = direction in ("up", "down")
    backwards = direction in ("down", "right")
    lines = tuple(zip(*board, strict=True)) if across else board
    slid, gained = [], 0
    for line in lines:
        moved, made = slide(line[::-1] if backwards else line)
        slid.append(moved[::-1] if backwards else moved)
        gained += made
    return (tuple(zip(*slid, strict=True)) if across else tuple(slid)), gained


def legal(board: Board) -> list[str]:
    """The directions that change the board."""
    return [direction for direction in DIRECTIONS if move(board, direction)[0] != board]


def with_tile(board: Board, row: int, column: int, tile: int) -> Board:
    line = board[row]
    return (*board[:row], (*line[:column], tile, *line[column + 1 :]), *board[row + 1 :])


def empty_cells(board: Board) -> list[tuple[int, int]]:
    return [(r, c) for r, line in enumerate(board) for c, tile in enumerate(line) if not tile]


def add_tile(board: Board, rng: random.Random) -> Board:
    """The board with a 2, or one time in ten a 4, in a random empty cell."""
    row, column = rng.choice(empty_cells(board))
    return with_tile(board, row, column, 4 if rng.random() < FOUR_SHARE else 2)


def show(board: Board) -> str:
    """Lines of numbers in columns; a dot is an empty cell.

    >>> print(show(((2, 0), (16, 4))))
     2  .
    16  4
    """
    width = max(len(str(tile)) for line in board for tile in line)
    return "\n".join(" ".join(str(tile or ".").rjust(width) for tile in line) for line in board)


def best_move(board: Board, depth: int = 2) -> str:
    """The direction with the best expected outlook `depth` moves ahead."""
    return max(legal(board), key=lambda direction: _after(*move(board, direction), depth))


def _after(board: Board, gained: int, depth: int) -> float:
    """What a board is worth before its new tile comes: the mean over where a 2 may come."""
    cells = empty_cells(board)
    if depth <= 1:
        return gained + _outlook(board)
    total = 0.0
    for row, column in cells:
        grown = with_tile(board, row, column, 2)
        options = [_after(*move(grown, direction), depth - 1) for direction in legal(grown)]
        total += max(options, default=-1000.0)
    return gained + total / len(cells)


@lru_cache(maxsize=1 << 16)
def _outlook(board: Board) -> float:
    """Room, neighbours that are equal or nearly so, and large tiles at the edge are good."""
    score = 4.0 * len(empty_cells(board))
    for lines in (board, tuple(zip(*board, strict=True))):
        for line in lines:
            tiles = [tile.bit_length() for tile in line]
            for one, two in itertools.pairwise(tiles):
                if one and two:
                    score += 3.0 if one == two else -abs(one - two)
    corner = max(board[0][0], board[0][-1], board[-1][0], board[-1][-1])
    return score + (4.0 if corner == max(max(line) for line in board) else 0.0)
