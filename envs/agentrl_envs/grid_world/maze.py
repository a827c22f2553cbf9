"""Random mazes that can always be solved, and their distances by breadth-first search."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass

Cell = tuple[int, int]
"""(row, column), row 0 in the north."""

STEPS: dict[str, Cell] = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
TRIES = 1000


@dataclass(frozen=True, slots=True)
class Maze:
    """A square of cells, some of them walls; `start`, `goal` and `key` are three free cells that reach each other."""

    size: int
    walls: frozenset[Cell]
    start: Cell
    goal: Cell
    key: Cell | None  # has to be fetched first; None: the goal is open

    def free(self, cell: Cell) -> bool:
        """True where one can stand."""
        return all(0 <= x < self.size for x in cell) and cell not in self.walls


def moved(cell: Cell, direction: str) -> Cell:
    """The neighbour in this direction, wall or not.

    >>> moved((2, 2), "north")
    (1, 2)
    """
    down, right = STEPS[direction]
    return cell[0] + down, cell[1] + right


def distances(maze: Maze, to: Cell) -> dict[Cell, int]:
    """Steps of the shortest way to a cell, from each cell that reaches it.

    >>> distances(Maze(2, frozenset({(0, 1)}), (0, 0), (1, 1), None), (1, 1))
    {(1, 1): 0, (1, 0): 1, (0, 0): 2}
    """
    found = {to: 0}
    waiting = deque([to])
    while waiting:
        cell = waiting.popleft()
        for direction in STEPS:
            near = moved(cell, direction)
            if near not in found and maze.free(near):
                found[near] = found[cell] + 1
                waiting.append(near)
    return found


def make_maze(rng: random.Random, size: int, walls: float, *, key: bool, longest: int) -> Maze:
    """A maze whose goal is at least 2 and at most `longest` steps away, by the key where there is one.

    Raises:
        ValueError: No such maze turns up in a thousand draws.
    """
    cells = [(row, column) for row in range(size) for column in range(size)]
    count = round(walls * len(cells))
    for _ in range(TRIES):
        start, *rest = rng.sample(cells, len(cells))
        empty = Maze(size, frozenset(rest[:count]), start, start, None)
        reached = distances(empty, start)
        goals = [cell for cell in rest[count:] if 2 <= reached.get(cell, 0) <= longest]
        if not goals:
            continue
        goal, place = goals[0], None
        if key:
            back = distances(empty, goal)
            on_the_way = (cell for cell in rest[count:] if cell in reached and cell != goal)
            place = next((cell for cell in on_the_way if reached[cell] + back[cell] <= longest), None)
        if place is not None or not key:
            return Maze(size, empty.walls, start, goal, place)
    raise ValueError(
        f"No solvable maze of size {size} with walls={walls} and at most {longest} steps was found; "
        "use fewer walls or a larger max_steps."
    )


def shortest(maze: Maze) -> int | None:
    """Steps of the shortest way from the start to the goal, by the key where there is one; None: there is no way."""
    stops = [maze.start, *([] if maze.key is None else [maze.key]), maze.goal]
    legs = [distances(maze, there).get(here) for here, there in itertools.pairwise(stops)]
    return None if None in legs else sum(leg for leg in legs if leg is not None)
