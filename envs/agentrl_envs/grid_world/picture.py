"""A maze as an image."""

from __future__ import annotations

from PIL import Image, ImageDraw

from agentrl_envs.grid_world.maze import Cell, Maze

SIDE = 28  # pixels of a cell: a whole number of patches in the common vision models (14 or 28 pixels)
COLOURS = {"wall": "#37474f", "goal": "#43a047", "locked": "#c62828", "key": "#fbc02d", "agent": "#1e88e5"}


def draw(maze: Maze, at: Cell, *, has_key: bool) -> Image.Image:
    """An RGB PIL image of [size * 28, size * 28] pixels, north above.

    Walls are dark squares, the goal is a green square (red while it is locked), the key a yellow diamond, the agent a
    blue disc.
    """
    image = Image.new("RGB", (maze.size * SIDE, maze.size * SIDE), "#cfd8dc")
    pen = ImageDraw.Draw(image)
    for row in range(maze.size):
        for column in range(maze.size):
            wall = (row, column) in maze.walls
            pen.rectangle(_box((row, column), 0), fill=COLOURS["wall"] if wall else "#fafafa", outline="#cfd8dc")
    pen.rectangle(_box(maze.goal, 4), fill=COLOURS["goal" if has_key else "locked"])
    if maze.key is not None and not has_key:
        left, top, right, bottom = _box(maze.key, 6)
        x, y = (left + right) / 2, (top + bottom) / 2
        pen.polygon([(x, top), (right, y), (x, bottom), (left, y)], fill=COLOURS["key"])
    pen.ellipse(_box(at, 8), fill=COLOURS["agent"])
    return image


def _box(cell: Cell, margin: int) -> tuple[int, int, int, int]:
    row, column = cell
    left, top = column * SIDE + margin, row * SIDE + margin
    return left, top, (column + 1) * SIDE - 1 - margin, (row + 1) * SIDE - 1 - margin
