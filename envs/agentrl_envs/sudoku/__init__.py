"""Fill a grid so that no digit repeats in a row, a column or a box."""

from __future__ import annotations

import random
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, settle
from agentrl_envs.sudoku.grids import BOXES, MOST_EMPTY, Grid, make_puzzle, peers, show

DEFAULT_EMPTIES = {4: 6, 6: 12, 9: 30}
HANDED_IN, CELLS = 0.05, 0.45  # for submitting a grid that is not solved; the most for the cells of it
Position = Annotated[int, Field(ge=1, le=9)]


class Sudoku(Environment):
    """A puzzle with exactly one solution. Moves that break a rule are refused and explained; others may still be wrong.

    Args:
        size: Rows and columns: 4, 6 or 9.
        empties: Empty cells, 1 to 10, 22 or 50 by the size; 0: 6, 12 or 30.
        max_moves: Tool calls after which the episode is over, 1 to 500; 0: three for each empty cell.
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, size: int = 4, empties: int = 0, max_moves: int = 0) -> None:
        self._defaults: dict[str, Any] = {}
        self._defaults = self._settle(size, empties, max_moves)
        self._size = 4
        self._puzzle: Grid = ()
        self._solution: Grid = ()
        self._cells: list[int] = []
        self._moves = self._max_moves = 0
        self._submitted = False

    def reset(
        self,
        seed: int | None = None,
        size: int | None = None,
        empties: int | None = None,
        max_moves: int | None = None,
        **row: Any,
    ) -> str:
        """A puzzle that depends on the seed, the size and the empty cells only."""
        knobs = self._settle(size, empties, max_moves)
        self._size = knobs["size"]
        wanted = knobs["empties"] or DEFAULT_EMPTIES[self._size]
        self._puzzle, self._solution = make_puzzle(self._size, wanted, random.Random(seed))
        self._cells = list(self._puzzle)
        self._moves, self._max_moves = 0, knobs["max_moves"] or 3 * wanted
        self._submitted = self.done = False
        height, width = BOXES[self._size]
        return (
            f"Sudoku: fill the dots with digits 1 to {self._size} so that no digit repeats in a row, a column or a box "
            f"of {height} rows by {width} columns. Moves: {self._max_moves}.\n{show(self._puzzle, self._size)}"
        )

    def place(self, row: Position, column: Position, digit: Position) -> str:
        """Write a digit into a cell.

        Args:
            row: The row, from the top.
            column: The column, from the left.
            digit: The digit.

        Returns:
            The grid, or why the move is against the rules.
        """
        if (refused := self._refuse(row, column, digit)) is not None:
            return refused
        self._cells[(row - 1) * self._size + column - 1] = digit
        if tuple(self._cells) == self._solution:
            self.done = True
            return f"solved\n{self._show()}"
        full = "" if 0 in self._cells else " The grid is full, and digits in it are wrong."
        return f"placed {digit} in r{row}c{column}.{full}{self._left()}\n{self._show()}"

    def erase(self, row: Position, column: Position) -> str:
        """Empty a cell that was filled by place.

        Args:
            row: The row, from the top.
            column: The column, from the left.

        Returns:
            The grid, or why the move is against the rules.
        """
        if (refused := self._refuse(row, column, None)) is not None:
            return refused
        self._cells[(row - 1) * self._size + column - 1] = 0
        return f"erased r{row}c{column}.{self._left()}\n{self._show()}"

    def submit(self) -> str:
        """Hand in the grid as it is. A grid that is solved is handed in by itself.

        Returns:
            How many cells are right.
        """
        if self.done:
            return "The episode is over."
        self._submitted = self.done = True
        right, wanted = self._right()
        return f"{right} of {wanted} cells are right"

    def get_reward(self) -> float:
        """1 for the solution; else 0.05 for handing in, and up to 0.45 for the cells: right ones less wrong ones."""
        right, wanted = self._right()
        if not wanted:
            return 0.0
        filled = sum(digit != 0 for digit, given in zip(self._cells, self._puzzle, strict=True) if not given)
        cells = CELLS * max(0, 2 * right - filled) / wanted
        return 1.0 if right == wanted else HANDED_IN * self._submitted + cells

    def _settle(self, size: int | None, empties: int | None, max_moves: int | None) -> dict[str, Any]:
        wanted = self._defaults.get("size") if size is None else size
        if wanted not in BOXES or isinstance(wanted, bool):
            raise ValueError(f"size must be 4, 6 or 9, not {wanted!r:.60}.")
        if empties is None and wanted != self._defaults.get("size", wanted):
            empties = 0  # the constructor's number was for another size
        ranges: dict[str, Range] = {"empties": (0, MOST_EMPTY[int(wanted)]), "max_moves": (0, 500)}
        return {"size": int(wanted), **settle(ranges, self._defaults, empties=empties, max_moves=max_moves)}

    def _refuse(self, row: int, column: int, digit: int | None) -> str | None:
        """Counts the move. The text for the model where it is against the rules; None where it can be made."""
        if self.done:
            return "The episode is over."
        self._moves += 1
        self.done = self._moves >= self._max_moves
        size = self._size
        if not all(1 <= number <= size for number in (row, column, 1 if digit is None else digit)):
            return f"Rows, columns and digits are 1 to {size} here.{self._left()}"
        cell = (row - 1) * size + column - 1
        if self._puzzle[cell]:
            return f"r{row}c{column} is {self._puzzle[cell]} in the puzzle and cannot be changed.{self._left()}"
        if digit is None:
            return None if self._cells[cell] else f"r{row}c{column} is empty already.{self._left()}"
        for name, others in peers(size)[cell]:
            for other in others:
                if self._cells[other] == digit:
                    there = f"r{other // size + 1}c{other % size + 1}"
                    return f"{digit} cannot be in r{row}c{column}: its {name} has {digit} in {there}.{self._left()}"
        return None

    def _left(self) -> str:
        left = self._max_moves - self._moves
        return f" {left} moves left." if left else " No moves left."

    def _show(self) -> str:
        return show(tuple(self._cells), self._size)

    def _right(self) -> tuple[int, int]:
        """(cells filled rightly, cells to fill)."""
        wanted = [cell for cell, given in enumerate(self._puzzle) if not given]
        return sum(self._cells[cell] == self._solution[cell] for cell in wanted), len(wanted)

    def _gold(self) -> dict[str, Any] | str:
        """A wrong digit is erased, then the empty cells are filled from the solution."""
        if self.done:
            return "Done."
        for cell, (digit, right) in enumerate(zip(self._cells, self._solution, strict=True)):
            row, column = divmod(cell, self._size)
            if digit not in (0, right):
                return call("erase", row=row + 1, column=column + 1)
        cell = self._cells.index(0)
        row, column = divmod(cell, self._size)
        return call("place", row=row + 1, column=column + 1, digit=self._solution[cell])
