"""MiniGrid's symbolic observation in words and as a map. Works on the arrays; the package itself is not imported.

An observation holds an array [x, y, (kind, colour, state)]. In the agent's view the agent stands in the middle of the
last row and looks up; in the whole grid (`FullyObsWrapper`) it is a cell of its own, north up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_KINDS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
_DOORS = ("open", "closed", "locked")
_FACING = ("east", "south", "west", "north")
_STEP = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of each direction, as (x, y)
_SIGNS = "?.#.DKBXG~@"  # of each kind
_DOOR_SIGNS = "ODL"
_UNSEEN, _EMPTY, _WALL, _FLOOR, _DOOR, _LAVA, _AGENT = 0, 1, 2, 3, 4, 9, 10

_DOES = {
    "forward": "forward goes to the cell ahead",
    "left": "left and right turn you on the spot",
    "pickup": "pickup takes the key, ball or box ahead, if you carry nothing",
    "drop": "drop puts what you carry on the cell ahead",
    "toggle": "toggle opens or closes the door ahead or opens the box ahead; a locked door needs the key of its colour "
    "in your hands",
    "done": "done says that the mission is accomplished, where it does not end by itself",
}


LEGEND = (
    "Signs of the map: @ you, # wall, . free, K key, B ball, X box, G goal, ~ lava, O open door, D closed door, "
    "L locked door, ? not seen."
)


def about(env: Any) -> str:
    """What the actions do."""
    names = [action.name for action in env.actions if action < env.action_space.n]
    does = "; ".join(text for name, text in _DOES.items() if name in names)
    return f"You move on a grid: {does}. Lava kills."


def mission(env: Any) -> str:
    """What is to be done, and in how many steps."""
    limit = f" You have {env.max_steps} steps; fewer are better." if env.max_steps else ""
    return f"Mission: {str(env.mission).rstrip('.')}.{limit}"


def situation(env: Any) -> str:
    """Where the agent looks and what it carries."""
    held = env.carrying
    carried = "nothing" if held is None else _with_article(f"{held.color} {held.type}")
    return f"You face {_FACING[int(env.agent_dir)]} and carry {carried}."


def seen(env: Any, observation: Any) -> str:
    """The situation, what is ahead, the things in sight by where they are, and a map.

    >>> class Env:
    ...     carrying, agent_dir = None, 0
    >>> image = np.ones((3, 3, 3), np.uint8)
    >>> image[:, 0] = (2, 5, 0)  # walls
    >>> image[2, 1] = (4, 4, 2)
    >>> print(seen(Env(), {"image": image}))
    You face east and carry nothing. Ahead of you: nothing.
    You see: a locked yellow door, 1 ahead and 1 right.
    What you see, ahead is up:
    ###
    ..L
    .@.
    """
    cells = np.asarray(observation["image"])
    whole = np.argwhere(cells[:, :, 0] == _AGENT)
    if len(whole):
        x, y = (int(part) for part in whole[0])
        step = _STEP[int(env.agent_dir)]
    else:
        x, y, step = cells.shape[0] // 2, cells.shape[1] - 1, (0, -1)
    things = "; ".join(_things(cells, (x, y), step)) or "nothing but the map"
    front = (x + step[0], y + step[1])
    inside = all(0 <= part < size for part, size in zip(front, cells.shape, strict=False))
    ahead = _name(cells[front]) if inside else "the edge"
    return (
        f"{situation(env)} Ahead of you: {ahead}.\nYou see: {things}.\n"
        f"{'The grid, north is up' if len(whole) else 'What you see, ahead is up'}:\n{_map(cells, (x, y))}"
    )


def _things(cells: np.ndarray, agent: tuple[int, int], step: tuple[int, int]) -> Iterator[str]:
    """Doors, keys, balls, boxes and goals, the nearest first; walls and lava are on the map."""
    plain = (_UNSEEN, _EMPTY, _WALL, _FLOOR, _LAVA, _AGENT)
    found = []
    for x, y in np.argwhere(~np.isin(cells[:, :, 0], plain)):
        right, down = int(x) - agent[0], int(y) - agent[1]
        ahead, side = right * step[0] + down * step[1], down * step[0] - right * step[1]
        if (ahead, side) != (0, 0):  # in the agent's own cell is what it carries
            found.append((abs(ahead) + abs(side), ahead, side, _name(cells[x, y])))
    for _, ahead, side, name in sorted(found):
        where = [f"{abs(ahead)} {'ahead' if ahead > 0 else 'behind'}"] if ahead else []
        where += [f"{abs(side)} {'right' if side > 0 else 'left'}"] if side else []
        yield f"{name}, {' and '.join(where)}"


def _name(cell: Any) -> str:
    kind, colour, state = (int(part) for part in cell)
    if kind in (_EMPTY, _FLOOR):
        return "nothing"
    if kind == _UNSEEN:
        return "something that you cannot see"
    if kind == _WALL:
        return "a wall"
    if kind == _LAVA:
        return "lava"
    named = f"{_COLOURS[colour]} {_KINDS[kind]}"
    return _with_article(f"{_DOORS[state]} {named}" if kind == _DOOR else named)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _map(cells: np.ndarray, agent: tuple[int, int]) -> str:
    """Rows of signs. Of margins of walls and of what is not seen, one row or column is left."""
    signs = [[_sign(cells[x, y]) for x in range(cells.shape[0])] for y in range(cells.shape[1])]
    signs[agent[1]][agent[0]] = "@"
    lines = _without_margins(_without_margins(signs))
    return "\n".join("".join(line) for line in lines)


def _without_margins(rows: list[list[str]]) -> list[list[str]]:
    """The rows between the margins, as columns."""
    inside = [number for number, row in enumerate(rows) if not set(row) <= {"#", "?"}]
    kept = rows[max(0, inside[0] - 1) : inside[-1] + 2]
    return [list(column) for column in zip(*kept, strict=True)]


def _sign(cell: Any) -> str:
    kind, _, state = (int(part) for part in cell)
    return _DOOR_SIGNS[state] if kind == _DOOR else _SIGNS[kind]
