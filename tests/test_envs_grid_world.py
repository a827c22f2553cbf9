"""`GridWorld`: mazes that can be solved, what is told about them, rewards, and the policy that shows the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from agentrl_envs.grid_world import GridWorld
from agentrl_envs.grid_world.maze import STEPS, Maze, distances, make_maze, moved, shortest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Environment, play_episode
from agentrl.check import check_environment


def gold(env: GridWorld) -> Iterator[Any]:
    """What the tool answers to the policy that knows the way."""
    while not env.done:
        message = env._gold()
        assert isinstance(message, dict)
        (call,) = message["tool_calls"]
        assert call["name"] == "move"
        yield env.move(**call["arguments"])


def placed(rows: list[str], max_steps: int = 8, **given: Any) -> GridWorld:
    """An environment in a maze that is drawn: @ start, G goal, K key, # wall."""
    at = {sign: (r, c) for r, row in enumerate(rows) for c, sign in enumerate(row) if sign in "@GK"}
    walls = frozenset((r, c) for r, row in enumerate(rows) for c, sign in enumerate(row) if sign == "#")
    env = GridWorld(size=len(rows), max_steps=max_steps, **given)
    env.reset(seed=0)
    env._maze = maze = Maze(len(rows), walls, at["@"], at["G"], at.get("K"))
    env._at, env._has_key, env._length = maze.start, maze.key is None, shortest(maze) or 0
    env._to_goal, env._to_key = distances(maze, maze.goal), {} if maze.key is None else distances(maze, maze.key)
    return env


# --- mazes -----------------------------------------------------------------------------
@given(st.integers(0, 10**6), st.integers(2, 7), st.floats(0, 0.5), st.booleans())
def test_every_maze_can_be_solved_by_a_search_of_its_own(seed: int, size: int, walls: float, key: bool):
    """A second search, over (cell, whether the key is there), finds the same shortest way within the limit."""
    try:
        maze = make_maze(random.Random(seed), size, walls, key=key, longest=8)
    except ValueError:
        assert size < 3 or walls > 0.3  # hardly a free cell is left
        return
    layer, seen, steps = {(maze.start, not key)}, set(), 0
    while (maze.goal, True) not in layer:
        seen |= layer
        following = {(moved(cell, way), has) for cell, has in layer for way in STEPS}
        layer = {(cell, has or cell == maze.key) for cell, has in following if maze.free(cell)} - seen
        steps += 1
        assert layer and steps <= 8
    assert steps == shortest(maze) and steps >= 2


def test_walls_are_the_share_that_was_asked_for_and_seeds_determine_and_vary():
    mazes = [make_maze(random.Random(seed), 5, 0.2, key=False, longest=8) for seed in range(40)]
    assert {len(maze.walls) for maze in mazes} == {5} and len(set(mazes)) == 40
    assert mazes[7] == make_maze(random.Random(7), 5, 0.2, key=False, longest=8)


def test_a_maze_that_cannot_be_drawn_is_an_error_that_says_what_to_change():
    with pytest.raises(ValueError, match="use fewer walls or a larger max_steps"):
        GridWorld(size=2, walls=0.5).reset(seed=0)  # two cells are left: they are neighbours, or apart


# --- episodes --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "knobs", [{}, {"key": True, "size": 5, "max_steps": 14}, {"view": "map", "walls": 0.3}, {"observation": "picture"}]
)
def test_the_gold_policy_gets_the_top_reward_and_no_moves_none(knobs: dict[str, Any]):
    env = GridWorld(**knobs)
    for seed in range(50):
        env.reset(seed=seed)
        assert env.get_reward() == 0.0  # nothing done, nothing earned
        steps = sum(1 for _ in gold(env))
        assert env.get_reward() == env.reward_range[1] and steps == env._length
        assert env._gold() == "done"


def test_random_moves_are_in_between():
    env, rng, rewards = GridWorld(), random.Random(0), []
    for seed in range(500):
        env.reset(seed=seed)
        while not env.done:
            env.move(rng.choice(list(STEPS)))  # type: ignore[arg-type]
        rewards.append(env.get_reward())
    assert 0.15 < sum(rewards) / 500 < 0.35 and min(rewards) == 0.0


def test_what_is_told_by_compass_is_where_the_goal_lies_and_what_is_blocked():
    env = placed(["...", "#@.", "..G"])
    assert env._compass() == "walls: west. goal: south east"
    assert env.move("west") == "a wall is west. walls: west. goal: south east"
    assert env.move("north") == "went north. walls: north. goal: south east"
    assert env.move("north") == "a wall is north. walls: north. goal: south east"  # the edge is one
    assert [env.move("east"), env.move("south")] == [
        "went east. walls: north east. goal: south",
        "went south. walls: east. goal: south",
    ]
    assert env.move("south") == "went south, at the goal" and env.done and env.get_reward() == 1.0


def test_the_episode_ends_after_max_steps_and_the_way_that_is_done_counts_half():
    env = placed(["@..", "...", "..G"], max_steps=3)
    assert [env.move("east"), env.move("south"), env.done] == [
        "went east. walls: north. goal: south east", "went south. walls: none. goal: south east", False,
    ]  # fmt: skip
    assert env.move("west") == "went west, too late" and env.done
    assert env.get_reward() == 0.5 * (1 - 3 / 4)
    away = placed(["..@", "...", "..G"], max_steps=2)
    away.move("west")
    away.move("west")
    assert away.get_reward() == 0.0  # farther than at the start, and no less than nothing


def test_a_locked_goal_needs_the_key_first():
    env = placed(["@G.", "K..", "..."], key=True)
    assert env._length == 3 and env._compass() == "walls: north west. key: south"
    assert env.move("east") == "went east. walls: north. key: south west" and not env.done  # on the goal, locked
    env.move("west")
    assert env.move("south") == "went south, got the key. walls: west. goal: north east"
    assert env.get_reward() == 0.5 * (1 - 2 / 3)
    env.move("north")
    assert env.move("east").endswith("at the goal") and env.get_reward() == 1.0


def test_the_map_shows_every_cell():
    env = placed(["@.#", "K..", ".G."], key=True, view="map")
    env._view = "map"
    assert env.move("south").splitlines() == [
        "went south, got the key. map (@ you, G goal, K key, # wall):", "..#", "@..", ".G.",
    ]  # fmt: skip


def test_the_picture_shows_every_cell_and_the_text_does_not_tell():
    env = placed(["@.#", "K..", ".G."], key=True, observation="picture")
    image, text = env.move("east")
    assert text == {"type": "text", "text": "went east"}
    picture = image["image"]
    assert (picture.size, picture.mode) == ((84, 84), "RGB")
    colours = {(c, r): picture.getpixel((28 * c + 14, 28 * r + 14)) for r in range(3) for c in range(3)}
    free, wall, agent, key, locked = (250, 250, 250), (55, 71, 79), (30, 136, 229), (251, 192, 45), (198, 40, 40)
    assert colours == {
        (0, 0): free, (1, 0): agent, (2, 0): wall,
        (0, 1): key, (1, 1): free, (2, 1): free,
        (0, 2): free, (1, 2): locked, (2, 2): free,
    }  # fmt: skip


def test_columns_go_over_the_constructor_and_are_gone_at_the_next_reset():
    env = GridWorld(size=3, walls=0.0)
    env.reset(seed=1, size=6, walls=0.25, max_steps=20, key=True, view="map", other="ignored")
    assert (env._maze.size, len(env._maze.walls), env._left, env._view) == (6, 9, 20, "map") and env._maze.key
    first = env.reset(seed=1)
    assert (env._maze.size, len(env._maze.walls), env._left, env._maze.key) == (3, 0, 8, None)
    assert first == GridWorld(size=3, walls=0.0).reset(seed=1)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"size": 1}, "size must be between 2 and 12, not 1"),
        ({"size": 13}, "size must be between 2 and 12"),
        ({"walls": 0.51}, r"walls must be between 0.0 and 0.5, not 0.51"),
        ({"max_steps": 1}, "max_steps must be at least 2"),
        ({"view": "sky"}, "view must be one of compass, map"),
    ],
)
def test_bad_difficulty_is_named_at_construction_and_in_a_row(knobs: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        GridWorld(**knobs)
    with pytest.raises(ValueError, match=says):
        GridWorld().reset(seed=0, **knobs)


def test_an_unknown_observation_is_refused():
    with pytest.raises(ValueError, match="observation must be one of text, picture"):
        GridWorld(observation="smell")  # type: ignore[arg-type]


def test_a_direction_that_there_is_not_is_told_to_the_model():
    turns = [{"tool_calls": [{"name": "move", "arguments": {"direction": "up"}}]}, "I give up."]
    episode = play_episode(GridWorld, turns)
    content = str(episode.messages[2]["content"])
    assert all(direction in content for direction in STEPS) and episode.reward == 0.0


@pytest.mark.parametrize("knobs", [{}, {"observation": "picture", "key": True, "max_steps": 12}])
def test_it_passes_the_check_of_every_environment(knobs: dict[str, Any]):
    assert [str(f) for f in check_environment(lambda: GridWorld(**knobs)) if f.level != "note"] == []
    assert issubclass(GridWorld, Environment)
    assert GridWorld().run_inline and not GridWorld(observation="picture").run_inline
