"""Families of Gymnasium environments, each with the raw environment stepped beside it: MiniGrid, BabyAI, Atari, own."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import random
import re
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.check import check_environment
from agentrl.environment import Instance
from agentrl.errors import ConfigurationError, EnvironmentFailed, MissingDependency, ToolArgumentError
from agentrl.gym import GymnasiumEnvironment
from agentrl.gym.masks import Valid
from agentrl.gym.observations import check_readable, content_of, parts_of
from agentrl.rollout.play import play_episode

ROOT = pathlib.Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("bench_gym", ROOT / "tests/benchmarks/bench_gym.py")
assert _SPEC is not None and _SPEC.loader is not None
bench = sys.modules["bench_gym"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)
OWN = bench.own_ids()
GRIDS = [id for id in bench.all_ids() if id.startswith(("MiniGrid-", "BabyAI-"))]
GAMES = [id for id in bench.all_ids() if id.startswith("ALE/")]


def raw(id, **kwargs):
    """Gymnasium's own environment, after ours was built, which imports its package."""
    return gymnasium.make(id, disable_env_checker=True, **kwargs)


def text_of(content):
    return content if isinstance(content, str) else "\n".join(b["text"] for b in content if b["type"] == "text")


def images_of(content):
    return [] if isinstance(content, str) else [b["image"] for b in content if b["type"] == "image"]


# --- ids -------------------------------------------------------------------------------
def test_there_are_enough_families():
    assert len({id.split("-")[1] for id in GRIDS}) >= 20 and len(GAMES) >= 10 and len(OWN) >= 12


def test_ids_work_by_name_and_nothing_is_printed():
    """In a process of its own: nothing is imported yet. No banner, no warning, no line of a rejected level."""
    code = (
        "import agentrl\n"
        "ids = ['MiniGrid-DoorKey-5x5-v0', 'BabyAI-PickupLoc-v0', 'ALE/Pong-v5', 'CartPole-v0', 'CartPole-v1']\n"
        "for id in ids:\n"
        "    env = agentrl.make(id)\n"
        "    for seed in range(2 if id.startswith('ALE') else 10):\n"
        "        env.reset(seed=seed)\n"
        "        env.act(type(env).act.tool_schema['parameters']['properties']['action']['enum'][0])\n"
    )
    ran = subprocess.run([sys.executable, "-W", "always::UserWarning", "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("id", "module", "package", "extra"),
    [
        ("MiniGrid-DoorKey-5x5-v0", "minigrid", "minigrid", "minigrid"),
        ("BabyAI-OpenDoor-v0", "minigrid", "minigrid", "minigrid"),
        ("ALE/Breakout-v5", "ale_py", "ale-py", "atari"),
    ],
)
def test_a_missing_package_names_its_extra(id, module, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(gymnasium.registry, id, raising=False)
    with pytest.raises(MissingDependency) as caught:
        agentrl.make(id)
    assert str(caught.value) == f"'{id}' needs the package '{package}'. Install it with: pip install -e '.[{extra}]'"


def test_a_misspelled_id_of_a_package_is_corrected():
    with pytest.raises(ConfigurationError, match="Did you mean 'MiniGrid-DoorKey-5x5-v0'"):
        agentrl.make("MiniGrid-DorKey-5x5-v0")
    with pytest.raises(ConfigurationError, match="Did you mean 'ALE/Breakout-v5'"):
        agentrl.make("ALE/Brakeout-v5")


def test_a_package_that_is_broken_is_not_called_missing(tmp_path):
    """A module that the package needs is not there: that is what the error names."""
    (tmp_path / "minigrid.py").write_text("import no_such_module_at_all")
    code = "import agentrl\nagentrl.make('MiniGrid-DoorKey-5x5-v0')"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert "no_such_module_at_all" in ran.stderr and "pip install" not in ran.stderr


# --- with the raw environment beside it ------------------------------------------------
def meaning(env, word):
    """The number that Gymnasium gives to an action's name: the environment's own names, a second way."""
    inner = env.unwrapped
    if hasattr(inner, "get_action_meanings"):
        return inner.get_action_meanings().index(word.upper())
    return int(inner.actions[word])


def side_by_side(id, steps, check, **kwargs):
    env = GymnasiumEnvironment(id, **kwargs)
    beside = raw(id)
    words, rng = env._action.schema["enum"], random.Random(id)
    content, (observation, _) = env.reset(seed=11), beside.reset(seed=11)
    check(content, observation, beside.unwrapped)
    total = 0.0
    for _ in range(steps):
        word = rng.choice(words)
        content = env.act(word)
        observation, reward, terminated, truncated, _ = beside.step(meaning(beside, word))
        total += float(reward)
        check(content, observation, beside.unwrapped)
        assert env.get_reward() == pytest.approx(total) and env.done == (terminated or truncated)
        if env.done:
            assert text_of(content).endswith(f"Total reward: {total:g}.")
            break
    env.close()
    beside.close()
    return env


def things_seen(inner, image):
    """What is in sight, from the world's own objects and MiniGrid's own view coordinates."""
    size, said = image.shape[0], set()
    for x in range(inner.width):
        for y in range(inner.height):
            thing, (vx, vy) = inner.grid.get(x, y), inner.get_view_coords(x, y)
            inside = 0 <= vx < size and 0 <= vy < size
            if thing is None or not inside or (x, y) == tuple(inner.agent_pos) or image[vx, vy, 0] == 0:
                continue
            if thing.type in ("wall", "lava", "floor"):
                continue
            state = ("locked " if thing.is_locked else "open " if thing.is_open else "closed ") if (
                thing.type == "door") else ""  # fmt: skip
            ahead, right = size - 1 - vy, vx - size // 2
            where = [f"{ahead} ahead"] if ahead else []
            where += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
            said.add((f"{state}{thing.color} {thing.type}", " and ".join(where)))
    return said


def check_grid(content, observation, inner):
    text = text_of(content)
    facing = ["east", "south", "west", "north"][observation["direction"]]
    held = "nothing" if inner.carrying is None else f"{inner.carrying.color} {inner.carrying.type}"
    assert re.search(rf"You face {facing} and carry (an? )?{held}\. Ahead", text)
    said = re.search(r"You see: (.*)\.\n", text)[1]
    listed = set() if said == "nothing but the map" else {
        (re.sub("^an? ", "", one.split(", ")[0]), one.split(", ")[1]) for one in said.split("; ")
    }  # fmt: skip
    assert listed == things_seen(inner, observation["image"])
    check_map(text.partition("ahead is up:\n")[2].partition("\nThe episode")[0].split("\n"), observation["image"])


def check_map(rows, image):
    """The rows are a part of the view, in its place, and all around it is wall or not seen."""
    from minigrid.core.constants import IDX_TO_OBJECT

    signs = {"unseen": "?", "empty": ".", "floor": ".", "wall": "#", "key": "K", "ball": "B", "box": "X", "goal": "G",
             "lava": "~"}  # fmt: skip
    size = image.shape[0]
    full = [["ODL"[image[x, y, 2]] if IDX_TO_OBJECT[image[x, y, 0]] == "door" else signs[IDX_TO_OBJECT[image[x, y, 0]]]
             for x in range(size)] for y in range(size)]  # fmt: skip
    full[-1][size // 2] = "@"
    top, left = size - len(rows), size // 2 - rows[-1].index("@")
    for y in range(size):
        for x in range(size):
            if top <= y and left <= x < left + len(rows[0]):
                assert rows[y - top][x - left] == full[y][x]
            else:
                assert full[y][x] in "#?"
    assert len({len(row) for row in rows}) == 1 and (len(rows) < 2 or set(rows[1]) - set("#?"))  # no margin of walls


@pytest.mark.parametrize("id", GRIDS)
def test_minigrid_says_what_the_raw_environment_shows(id):
    side_by_side(id, 40, check_grid)


@pytest.mark.parametrize("id", GAMES)
def test_atari_shows_the_raw_environments_pixels(id):
    def check(content, observation, inner):
        (image,) = images_of(content)
        assert image.size == (160, 210) and np.array_equal(np.asarray(image), observation)
        lives = inner.ale.lives()
        assert (f"Lives: {lives}." in text_of(content)) == (lives > 0)

    side_by_side(id, 12, check)


@pytest.mark.parametrize("id", OWN)
def test_own_environments_step_as_the_raw_ones_do(id):
    env, beside, rng = GymnasiumEnvironment(id), raw(id), random.Random(3)
    env.reset(seed=2)
    beside.reset(seed=2)
    for _ in range(20):
        written = rng.choice(env._action.schema["enum"]) if "enum" in env._action.schema else rng.uniform(-1, 1)
        env.act(written)
        observation, reward, terminated, truncated, _ = beside.step(env._action.decode(written))
        assert env._rewards[-1] == float(reward) and env.done == (terminated or truncated)
        assert np.array_equal(_last_observation(env), _state(beside, observation))
        if env.done:
            break


def _last_observation(env):
    inner = env._env.unwrapped
    return np.asarray(inner.s if hasattr(inner, "s") else getattr(inner, "state", 0), dtype=float)


def _state(beside, observation):
    inner = beside.unwrapped
    return np.asarray(observation if hasattr(inner, "s") else getattr(inner, "state", 0), dtype=float)


@pytest.mark.parametrize("id", ["MiniGrid-FourRooms-v0", "BabyAI-GoToLocal-v0", "ALE/Pong-v5", "Taxi-v4"])
def test_seeds_determine(id):
    def played(seed):
        env, rng = GymnasiumEnvironment(id), random.Random(1)
        first = [env.reset(seed=seed)]
        seen = [*first, *(env.act(rng.choice(env._action.schema["enum"])) for _ in range(25))]
        env.close()
        return [(text_of(content), [image.tobytes() for image in images_of(content)]) for content in seen]

    assert played(4) == played(4) != played(5)


# --- MiniGrid --------------------------------------------------------------------------
def test_a_grid_is_solved_from_its_text():
    """By hand: 5x5, the goal is two cells ahead and two to the right."""
    env = GymnasiumEnvironment("MiniGrid-Empty-5x5-v0")
    start = env.reset(seed=0)
    assert start.split("\n", 3)[2:] == [
        "Call act with an action, one of: left, right, forward, pickup, drop, toggle, done.",
        "Mission: get to the green goal square. You have 100 steps; fewer are better.\n"
        "You face east and carry nothing. Ahead of you: nothing.\n"
        "You see: a green goal, 2 ahead and 2 right.\n"
        "What you see, ahead is up:\n#####\n#..G#\n#...#\n#@..#",
    ]
    for action in ("forward", "forward", "right", "forward"):
        env.act(action)
    assert "Ahead of you: a green goal." in env._view.state(env._env.unwrapped, env._env.unwrapped.gen_obs())
    assert env.act("forward").endswith("The episode is over: it ended after 5 steps. Total reward: 0.955.")
    assert env.get_reward() == pytest.approx(1 - 0.9 * 5 / 100)


def test_a_door_is_opened_with_its_key():
    env = GymnasiumEnvironment("MiniGrid-DoorKey-5x5-v0")
    assert "a locked yellow door, 1 ahead and 1 left" in env.reset(seed=3)
    env.act("right")
    assert "carry a yellow key" in env.act("pickup")
    texts = [env.act(action) for action in ("left", "left", "forward", "right")]
    assert "Ahead of you: a locked yellow door" in texts[-1]
    assert "Ahead of you: an open yellow door" in env.act("toggle")


def test_the_whole_grid_can_be_text_too():
    from minigrid.wrappers import FullyObsWrapper, ViewSizeWrapper

    env = GymnasiumEnvironment("MiniGrid-Empty-5x5-v0", wrappers=[FullyObsWrapper])
    assert env.reset(seed=0).endswith("The grid, north is up:\n#####\n#@..#\n#...#\n#..G#\n#####")
    assert "a green goal, 2 behind and 2 left" in [env.act("right"), env.act("right")][1]
    near = GymnasiumEnvironment(
        "MiniGrid-Empty-5x5-v0", wrappers=[functools.partial(ViewSizeWrapper, agent_view_size=3)]
    )
    assert near.reset(seed=0).endswith("What you see, ahead is up:\n#..\n#..\n#@.")


def test_minigrids_wrappers_of_pictures_and_vectors():
    from minigrid.wrappers import FlatObsWrapper, RGBImgPartialObsWrapper

    env = GymnasiumEnvironment("MiniGrid-DoorKey-5x5-v0", wrappers=[RGBImgPartialObsWrapper], image_size=224)
    content = env.reset(seed=3)
    assert [image.size for image in images_of(content)] == [(224, 224)]
    text = text_of(content)
    assert "mission: use the key" in text and "You face east and carry nothing." in text and "Signs" not in text
    with pytest.raises(ConfigurationError, match=r"2835 numbers|no text form"):
        GymnasiumEnvironment("MiniGrid-DoorKey-5x5-v0", wrappers=[FlatObsWrapper])


@pytest.mark.parametrize(("mode", "has_map"), [("image", False), ("both", True)])
def test_minigrid_as_a_picture_says_what_the_picture_does_not_show(mode, has_map):
    env = GymnasiumEnvironment("MiniGrid-DoorKey-5x5-v0", observation=mode)
    beside = raw("MiniGrid-DoorKey-5x5-v0", render_mode="rgb_array")
    beside.reset(seed=3)
    content = env.reset(seed=3)
    for action in (None, "right", "pickup"):
        if action is not None:
            content = env.act(action)
            beside.step(meaning(beside, action))
        (image,) = images_of(content)
        assert image.size == (160, 160) and np.array_equal(np.asarray(image), beside.render())
        assert ("ahead is up" in text_of(content)) == has_map
    assert "You face south and carry a yellow key." in text_of(content)
    assert "Mission: use the key" in text_of(env.reset(seed=3))
    assert "Mission" not in text_of(env.act("left"))


# --- pictures --------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "expected"), [(84, (64, 84)), (420, (320, 420)), (210, (160, 210)), (1, (1, 1))])
def test_pictures_have_the_size_that_is_asked_for(size, expected):
    env = GymnasiumEnvironment("ALE/Pong-v5", image_size=size)
    (image,) = images_of(env.reset(seed=0))
    assert image.size == expected and image.mode == "RGB"
    if size == 420:  # each pixel became four
        beside = raw("ALE/Pong-v5").reset(seed=0)[0]
        assert np.array_equal(np.asarray(image), beside.repeat(2, axis=0).repeat(2, axis=1))


def test_grey_pictures_and_the_consoles_memory():
    (image,) = images_of(GymnasiumEnvironment("ALE/Pong-v5", obs_type="grayscale").reset(seed=0))
    assert image.mode == "L" and image.size == (160, 210)
    text = GymnasiumEnvironment("ALE/Pong-v5", obs_type="ram").reset(seed=0)
    numbers = raw("ALE/Pong-v5", obs_type="ram").reset(seed=0)[0]
    assert text.endswith(f"[{', '.join(map(str, numbers))}]") and len(numbers) == 128


# --- step limits and repeats -----------------------------------------------------------
@pytest.mark.parametrize(("id", "limit", "action"), [
    ("MiniGrid-Empty-5x5-v0", 4, "left"), ("ALE/Pong-v5", 4, "noop"), ("MiniGrid-Empty-5x5-v0", None, "left"),
])  # fmt: skip
def test_step_limits_of_the_package_and_of_the_user(id, limit, action):
    env = GymnasiumEnvironment(id, max_episode_steps=limit)
    env.reset(seed=0)
    steps = 0
    while not env.done:
        text, steps = text_of(env.act(action)), steps + 1
    assert steps == (limit or 100) and f"it was cut off after {steps} steps" in text


def test_an_action_is_repeated():
    """The rewards and the last observation are those of the raw steps, frame by frame."""
    both = {"action_repeat": 2, "max_times": 5}
    cases = (({"action_repeat": 4}, None, 4), ({"max_times": 5}, 3, 3), (both, 5, 10), ({"max_times": 5}, None, 1))
    for kwargs, times, steps in cases:
        env, beside = GymnasiumEnvironment("ALE/Breakout-v5", **kwargs), raw("ALE/Breakout-v5")
        env.reset(seed=1)
        beside.reset(seed=1)
        for word in ("fire", "left", "left"):
            (image,) = images_of(env.act(word) if times is None else env.act(word, times))
            for _ in range(steps):
                observation = beside.step(meaning(beside, word))[0]
            assert np.array_equal(np.asarray(image), observation)
        assert len(env._rewards) == 3 * steps


def test_a_repeat_stops_with_the_episode_and_says_what_it_can_do():
    env = GymnasiumEnvironment("MountainCar-v0", action_repeat=150, max_times=2)
    text = env.reset(seed=0)
    assert "none, right. Each call takes it 150 times in a row. With times, up to 2, it is repeated as often." in text
    text = env.act("none", 2)
    assert text.endswith("The episode is over: it was cut off after 200 steps. Total reward: -200.")


def test_wrong_times_are_answered_in_text():
    factory = functools.partial(GymnasiumEnvironment, "MountainCar-v0", max_times=3)
    wrong = [{"tool_calls": [{"name": "act", "arguments": {"action": "none", "times": n}}]} for n in (0, 4, "x", 2)]
    episode = play_episode(factory, [*wrong, "stop"])
    assert [call.error for call in episode.tool_calls] == ["bad_arguments"] * 3 + [None]
    assert all("times" in call.content for call in episode.tool_calls[:3]) and episode.reward == -2
    without = play_episode("MountainCar-v0", [wrong[3], "stop"])
    assert without.tool_calls[0].error == "bad_arguments" and without.reward == 0
    with pytest.raises(ToolArgumentError, match="from 1 to 3, not True"):
        env = factory()
        env.reset(seed=0)
        env.act("none", True)


# --- masks -----------------------------------------------------------------------------
def taxi_words(beside, info):
    names = ["south", "north", "east", "west", "pickup", "dropoff"]
    return [name for name, allowed in zip(names, info["action_mask"], strict=True) if allowed]


def test_a_mask_is_said_and_holds():
    env, beside = GymnasiumEnvironment("Taxi-v4", action_mask=True), raw("Taxi-v4")
    content = env.reset(seed=3)
    _, info = beside.reset(seed=3)
    refused, rng = 0, random.Random(0)
    for _ in range(60):
        allowed = taxi_words(beside, info)
        assert content.endswith(f"Possible actions: {', '.join(allowed)}.")
        word = rng.choice(env._action.schema["enum"])
        if word in allowed:
            content = env.act(word)
            _, _, _, _, info = beside.step(env._action.schema["enum"].index(word))
        else:
            refused += 1
            with pytest.raises(ToolArgumentError) as caught:
                env.act(word)
            assert str(caught.value) == (
                f"No step was taken: '{word}' is not possible now. Possible actions: {', '.join(allowed)}."
            )
        assert env._env.unwrapped.s == beside.unwrapped.s
    assert refused > 5 and len(env._rewards) == 60 - refused


def test_without_the_option_every_action_is_a_step():
    env = GymnasiumEnvironment("Taxi-v4")
    assert "Possible" not in env.reset(seed=3)
    env.act("dropoff")  # nobody is in the taxi
    assert env.get_reward() == -10


class Board(gymnasium.Env):
    """Cells that can be taken once; another move is an error of the caller."""

    def __init__(self, how="method", start=0, broken=None):
        self.how, self.broken, self.action_space = how, broken, spaces.Discrete(4, start=start)
        self.observation_space = spaces.Dict({"count": spaces.Discrete(5), "action_mask": spaces.MultiBinary(4)})
        if how != "observation":
            self.observation_space = spaces.Discrete(5)
        if how == "method":
            self.action_masks = lambda: self.mask()

    def mask(self):
        return np.array([cell not in self.taken for cell in range(4)]) if self.broken is None else np.array(self.broken)

    def look(self):
        count = len(self.taken)
        observation = {"count": count, "action_mask": self.mask().astype(np.int8)}
        return observation if self.how == "observation" else count, {"action_mask": self.mask()} if (
            self.how == "info") else {}  # fmt: skip

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken = set()
        return self.look()

    def step(self, action):
        cell = int(action) - int(self.action_space.start)
        assert cell not in self.taken
        self.taken.add(cell)
        observation, info = self.look()
        return observation, 1.0, len(self.taken) == 4, False, info


@pytest.mark.parametrize("how", ["info", "observation", "method"])
def test_masks_come_from_info_from_the_observation_and_from_a_method(how):
    env = GymnasiumEnvironment(Board, how=how, start=5, action_names=["a", "b", "c", "d"], action_mask=True)
    assert env.reset().endswith("Possible actions: a, b, c, d.")
    assert env.act("b").endswith("Possible actions: a, c, d.")
    with pytest.raises(ToolArgumentError, match=r"'b' is not possible now\. Possible actions: a, c, d\."):
        env.act("b")
    for word in "ac":
        env.act(word)
    last = env.act("d")
    assert "Possible" not in last and env.get_reward() == 4
    assert env.reset().endswith("Possible actions: a, b, c, d.")  # nothing is left of the last episode


def test_a_refused_action_is_a_tool_error_and_the_episode_goes_on():
    factory = functools.partial(GymnasiumEnvironment, Board, action_mask=True)
    turns = [{"tool_calls": [{"name": "act", "arguments": {"action": f"action_{n}"}}]} for n in (0, 0, 1, 2, 3)]
    episode = play_episode(factory, turns)
    assert [call.error for call in episode.tool_calls] == [None, "bad_arguments", None, None, None]
    assert episode.reward == 4
    with pytest.raises(EnvironmentFailed):  # without the mask such a choice breaks the environment
        play_episode(functools.partial(GymnasiumEnvironment, Board), turns)


def test_a_repeat_stops_where_the_mask_forbids_the_action():
    env = GymnasiumEnvironment(Board, action_mask=True, action_repeat=3)
    env.reset()
    text = env.act("action_2")
    assert text.endswith("Only 1 of 3 steps were taken: the action is not possible any more.")
    assert len(env._rewards) == 1


@pytest.mark.parametrize(
    ("broken", "says"), [([1, 1, 1], "has 3 entries for 4 actions"), ([0, 0, 0, 0], "allows no action")]
)
def test_a_mask_that_cannot_be_is_the_environments_fault(broken, says):
    with pytest.raises(EnvironmentFailed, match=says):
        play_episode(functools.partial(GymnasiumEnvironment, Board, broken=broken, action_mask=True), ["x"])


def test_masks_that_cannot_hold_are_said_early():
    with pytest.raises(ConfigurationError, match="needs a Discrete action space"):
        GymnasiumEnvironment("Pendulum-v1", action_mask=True)
    with pytest.raises(ConfigurationError, match="CartPole gives no mask"):
        GymnasiumEnvironment("CartPole-v1", action_mask=True).reset(seed=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=70).filter(any), st.integers(-3, 3))
def test_what_is_said_to_be_possible_is_what_is_accepted(mask, start):
    space = spaces.Discrete(len(mask), start=start)
    valid = Valid.of(np.array(mask, np.int8), space, None)
    for index, allowed in enumerate(mask):
        assert valid.allows(space.dtype.type(start + index)) == allowed
    listed = [str(start + index) for index, allowed in enumerate(mask) if allowed]
    assert valid.said.split(", ")[:64] == listed[:64] and valid.said.endswith(f"{len(listed)} in all)") == (
        len(listed) > 64
    )


# --- spaces ----------------------------------------------------------------------------
def test_a_graph_is_read_by_nodes_and_edges():
    space = spaces.Graph(spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(3))
    value = spaces.GraphInstance(np.array([[0, 0.5], [1, 0]], np.float32), np.array([2]), np.array([[0, 1]]))
    check_readable(space, True)
    text = content_of(list(parts_of(space, value)))
    assert text == "graph of 2 nodes and 1 edges\nnode 0: [0, 0.5]\nnode 1: [1, 0]\nedge 0 -> 1: 2"
    space = spaces.Graph(spaces.Discrete(4), None)
    value = spaces.GraphInstance(np.array([3, 1]), None, np.array([[1, 0]]))
    assert content_of(list(parts_of(space, value))) == "graph of 2 nodes and 1 edges\nnode 0: 3\nnode 1: 1\nedge 1 -> 0"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([None, spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,))]))
def test_every_graph_is_read(seed, edges):
    space = spaces.Graph(spaces.Discrete(4), edges, seed=seed)
    assert content_of(list(parts_of(space, space.sample(num_nodes=1 + seed % 5)))).startswith("graph of ")


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), np.array([[1, 2], [3, 4]]), "[1, 2]\n[3, 4]"),
        (spaces.Sequence(spaces.Box(0, 9, (2,)), stack=True), np.array([[1, 2], [3, 4.5]]), "[1, 2]\n[3, 4.5]"),
        (
            spaces.Sequence(spaces.Box(0, 9, (2,))),
            (np.array([1, 2]), np.array([3, 4])),
            "2 items\n0: [1, 2]\n1: [3, 4]",
        ),
    ],
)
def test_further_spaces_are_read(space, value, text):
    check_readable(space, True)
    assert content_of(list(parts_of(space, value))) == text


# --- settings and the check ------------------------------------------------------------
@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"image_size": 0}, "image_size must be the pixels .* not 0"),
        ({"image_size": 5000}, "from 1 to 4096, not 5000"),
        ({"image_size": True}, "not True"),
        ({"action_repeat": 0}, "action_repeat must be a whole number of at least 1, not 0"),
        ({"action_repeat": 1.5}, "not 1.5"),
        ({"max_times": 0}, "max_times must be"),
        ({"observation": "text"}, r"\(100800 numbers\).*observation='auto'"),
        ({"observation": "image", "obs_type": "ram", "render_mode": None}, "needs an environment that renders"),
    ],
)
def test_settings_that_cannot_work_are_said_at_construction(kwargs, says):
    with pytest.raises(ConfigurationError, match=says):
        GymnasiumEnvironment("ALE/Pong-v5", **kwargs)


@pytest.mark.parametrize("id", ["MiniGrid-DoorKey-5x5-v0", "ALE/Breakout-v5", "BabyAI-GoToRedBall-v0"])
def test_F079_a_wrong_action_names_the_right_ones(id):
    wrong = [{"tool_calls": [{"name": "act", "arguments": {"action": one}}]} for one in ("jump", 3, None, ["left"])]
    episode = play_episode(id, [*wrong, "stop"])
    assert [call.error for call in episode.tool_calls] == ["bad_arguments"] * 4
    names = GymnasiumEnvironment(id)._action.schema["enum"]
    assert all(all(name in call.content for name in names) for call in episode.tool_calls)


def test_games_are_played_on_a_thread_and_their_tool_has_the_games_actions():
    env = GymnasiumEnvironment("ALE/Breakout-v5")
    instance = Instance(env)
    assert not instance.inline and env._action.schema["enum"] == ["noop", "fire", "right", "left"]
    assert "A step lasts 4 frames. With probability 0.25" in text_of(env.reset(seed=0))
    still = GymnasiumEnvironment("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    assert "A step lasts 1 frame.\n" in text_of(still.reset(seed=0))


@pytest.mark.parametrize(
    "factory",
    [
        "MiniGrid-DoorKey-5x5-v0",
        functools.partial(
            GymnasiumEnvironment, "MiniGrid-Empty-5x5-v0", observation="both", image_size=96, max_times=4
        ),
        functools.partial(GymnasiumEnvironment, "Taxi-v4", action_mask=True),
        functools.partial(GymnasiumEnvironment, Board, action_mask=True),
    ],
)
def test_representative_environments_pass_their_check(factory):
    assert [str(finding) for finding in check_environment(factory) if finding.level == "error"] == []


@pytest.mark.slow
def test_atari_passes_its_check():
    assert [str(finding) for finding in check_environment("ALE/Breakout-v5") if finding.level != "note"] == []


def test_gymnasiums_checker_is_off_unless_it_is_asked_for():
    class Outside(Board):
        def look(self):
            return 99, {}

    gymnasium.register("tests/Outside-v0", Outside)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = GymnasiumEnvironment("tests/Outside-v0")
            env.reset(seed=0)
            env.act("action_0")
        with pytest.warns(UserWarning, match="not within the observation space"):
            GymnasiumEnvironment("tests/Outside-v0", disable_env_checker=False).reset(seed=0)
    finally:
        gymnasium.registry.pop("tests/Outside-v0")


# --- the docs --------------------------------------------------------------------------
def test_the_docs_table_is_that_of_the_benchmark():
    table = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "docs/gymnasium.md").read_text(), re.M)
    ids = [id for id, _, _ in table]
    assert ids == bench.all_ids()
    for id, actions, form in table:
        if id in ("Taxi-v4", "MountainCarContinuous-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0", "ALE/Pong-v5"):
            row = bench.measure(id, episodes=1, steps=3)
            assert (row.actions, row.observation) == (actions, form) and str(row).startswith(f"| `{id}` | ")
