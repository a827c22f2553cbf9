"""Tic-tac-toe, solved."""

from __future__ import annotations

from functools import cache

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9


def winner(board: str) -> str | None:
    """X or O where one has three in a line."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


def free(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == "."]


def put(board: str, cell: int, mark: str) -> str:
    return f"{board[:cell]}{mark}{board[cell + 1 :]}"


@cache
def value(board: str, mover: str) -> int:
    """What X gets when both play perfectly from here: a win is positive, a loss negative, a draw 0; soon is more.

    >>> value(EMPTY, "X"), value("XX.OO....", "X"), value("XX.OO....", "O"), value("X...O...X", "O")
    (0, 5, -5, 0)
    """
    if won := winner(board):
        return (1 + board.count(".")) * (1 if won == "X" else -1)
    if "." not in board:
        return 0
    if mover == "X":
        return max(value(put(board, cell, "X"), "O") for cell in free(board))
    return min(value(put(board, cell, "O"), "X") for cell in free(board))


def best_cells(board: str, mover: str) -> list[int]:
    """The free cells that keep what the position is worth to the mover: a lost one is lost as late as can be."""
    other = "O" if mover == "X" else "X"
    worth = value(board, mover)
    return [cell for cell in free(board) if value(put(board, cell, mover), other) == worth]


def show(board: str) -> str:
    """Three lines; a free cell is shown by its number, 1 to 9.

    >>> print(show("X...O...."))
    X 2 3
    4 O 6
    7 8 9
    """
    cells = [str(i + 1) if mark == "." else mark for i, mark in enumerate(board)]
    return "\n".join(" ".join(cells[i : i + 3]) for i in (0, 3, 6))
