"""Walk through a maze to a goal, told by compass, by a map, or by a picture."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from agentrl.environment import Environment
from agentrl_envs.grid_world.maze import STEPS, Cell, Maze, distances, make_maze, moved, shortest

Direction = Literal["north", "south", "west", "east"]
View = Literal["compass", "map"]
Observation = Literal["text", "picture"]


class GridWorld(Environment):
    """Where the goal lies and where walls are is told after each step, so that the policy must read it.

    Args:
        size: Cells of one side, 2 to 12.
        walls: Share of the cells that are walls, 0.0 to 0.5; the goal can always be reached.
        max_steps: Moves after which the episode is over, at least 2, those against a wall included.
        key: The goal is locked until a key has been fetched from another cell.
        view: "compass": in which directions the goal lies and which neighbours are walls; "map": all cells.
        observation: "text", or "picture": an image of all cells instead of the view.
    """

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        size: int = 4,
        walls: float = 0.15,
        max_steps: int = 8,
        key: bool = False,
        view: View = "compass",
        observation: Observation = "text",
    ) -> None:
        if observation not in get_args(Observation):
            raise ValueError(f"observation must be one of {', '.join(get_args(Observation))}, not {observation!r}.")
        self.run_inline = observation == "text"  # drawing takes longer than the event loop should be held up
        self._observation = observation
        self._defaults = {"size": size, "walls": walls, "max_steps": max_steps, "key": key, "view": view}
        _check(**self._defaults)
        self._maze: Maze
        self._at: Cell

    def reset(
        self,
        seed: int | None = None,
        size: int | None = None,
        walls: float | None = None,
        max_steps: int | None = None,
        key: bool | None = None,
        view: str | None = None,
        **row: Any,
    ) -> Any:
        """The task and the first view of a maze that depends on the seed only."""
        asked = {"size": size, "walls": walls, "max_steps": max_steps, "key": key, "view": view}
        now = self._defaults | {name: value for name, value in asked.items() if value is not None}
        _check(**now)
        self._view, self._left = now["view"], now["max_steps"]
        self._maze = make_maze(random.Random(seed), now["size"], now["walls"], key=now["key"], longest=self._left)
        self._at, self._has_key = self._maze.start, self._maze.key is None
        self._to_goal = distances(self._maze, self._maze.goal)
        self._to_key = {} if self._maze.key is None else distances(self._maze, self._maze.key)
        self._length = shortest(self._maze) or 0
        self.done = False
        return self._shown("fetch the key, then reach the goal" if self._maze.key else "reach the goal")

    def move(self, direction: Direction) -> Any:
        """Move to a neighbour cell.

        Args:
            direction: Where to go.

        Returns:
            What happened and the next view.
        """
        there = moved(self._at, direction)
        self._left -= 1
        if not self._maze.free(there):
            said = f"a wall is {direction}"
        else:
            self._at, said = there, f"went {direction}"
            if there == self._maze.key and not self._has_key:
                self._has_key, said = True, said + ", got the key"
        arrived = self._remaining() == 0
        self.done = arrived or self._left <= 0
        return said + (", at the goal" if arrived else ", too late") if self.done else self._shown(said)

    def get_reward(self) -> float:
        """1.0 at the goal; else up to 0.5, for the share of the way that is done."""
        left = self._remaining()
        return 1.0 if left == 0 else 0.5 * max(0.0, 1 - left / self._length)

    def _remaining(self) -> int:
        """Steps of the shortest way from here, by the key where it is not fetched."""
        if self._has_key:
            return self._to_goal[self._at]
        assert self._maze.key is not None
        return self._to_key[self._at] + self._to_goal[self._maze.key]

    def _gold(self) -> dict[str, Any] | str:
        """The next message of a policy that walks the shortest way."""
        if self.done:
            return "done"
        to = self._to_goal if self._has_key else self._to_key
        best = min(STEPS, key=lambda direction: to.get(moved(self._at, direction), len(to)))
        return {"tool_calls": [{"name": "move", "arguments": {"direction": best}}]}

    # --- what is seen ---
    def _shown(self, said: str) -> Any:
        if self._observation == "picture":
            from agentrl_envs.grid_world.picture import draw

            image = draw(self._maze, self._at, has_key=self._has_key)
            return [{"type": "image", "image": image}, {"type": "text", "text": said}]
        return f"{said}. {self._map() if self._view == 'map' else self._compass()}"

    def _compass(self) -> str:
        """The directions that the target lies in, and the neighbours where one cannot go."""
        name, (row, column) = ("goal", self._maze.goal) if self._has_key else ("key", self._maze.key or self._at)
        down, right = row - self._at[0], column - self._at[1]
        lies = {"north": down < 0, "south": down > 0, "west": right < 0, "east": right > 0}
        blocked = [direction for direction in STEPS if not self._maze.free(moved(self._at, direction))]
        return f"walls: {' '.join(blocked) or 'none'}. {name}: {' '.join(d for d in STEPS if lies[d])}"

    def _map(self) -> str:
        """All cells, north above: @ you, G goal, K key, # wall."""
        shown = {self._maze.goal: "G", **dict.fromkeys(self._maze.walls, "#")}
        if self._maze.key is not None and not self._has_key:
            shown[self._maze.key] = "K"
        shown[self._at] = "@"
        cells = range(self._maze.size)
        return "map (@ you, G goal, K key, # wall):\n" + "\n".join(
            "".join(shown.get((row, column), ".") for column in cells) for row in cells
        )


def _check(size: int, walls: float, max_steps: int, key: bool, view: str) -> None:
    if not 2 <= size <= 12:
        raise ValueError(f"size must be between 2 and 12, not {size}.")
    if not 0 <= walls <= 0.5:
        raise ValueError(f"walls must be between 0.0 and 0.5, not {walls}.")
    if max_steps < 2:
        raise ValueError(f"max_steps must be at least 2, not {max_steps}.")
    if view not in get_args(View):
        raise ValueError(f"view must be one of {', '.join(get_args(View))}, not {view!r}.")
