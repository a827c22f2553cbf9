"""Gymnasium environments played as ours."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import agentrl
from agentrl.check import check_environment
from agentrl.environment import Instance
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.gym import GymnasiumEnvironment
from agentrl.pool import EnvironmentPool
from agentrl.rollout.play import play_episode
from agentrl.types import Outcome

OWN = ("gymnasium.envs.toy_text", "gymnasium.envs.classic_control")
IDS = [id for id, spec in gymnasium.registry.items() if str(spec.entry_point).startswith(OWN)]


class Recorder(gymnasium.Env):
    """Counts to `length`; remembers how it was treated."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    closed: list[int] = []  # noqa: RUF012 - one list for all instances

    def __init__(self, length=3, observation_space=None, action_space=None, render_mode=None, fail=""):
        self.observation_space = observation_space or spaces.Discrete(100)
        self.action_space = action_space or spaces.Discrete(2)
        self.render_mode = render_mode
        self.length, self.fail, self.count, self.threads, self.resets, self.taken = length, fail, 0, [], [], []

    def observe(self):
        return self.count if isinstance(self.observation_space, spaces.Discrete) else self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append((seed, options))
        if self.fail == "reset":
            raise OSError("the simulator is gone")
        self.count, self.taken = 0, []
        return self.observe(), {}

    def step(self, action):
        self.threads.append(threading.current_thread())
        if self.fail == "step":
            raise OSError("the simulator is gone")
        self.taken.append(action)
        self.count += 1
        reward = float("nan") if self.fail == "reward" else 0.5 * self.count
        return self.observe(), reward, self.count >= self.length, False, {}

    def render(self):
        return np.full((5, 7, 3), self.count, np.uint8)

    def close(self):
        self.closed.append(id(self))


def calls(*actions, tool="act"):
    return [{"tool_calls": [{"name": tool, "arguments": {"action": action}}]} for action in actions]


# --- Gymnasium's own -------------------------------------------------------------------
def test_the_list_of_ids_is_that_of_gymnasium():
    assert {"FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1", "CartPole-v1", "Pendulum-v1"} <= set(IDS)
    assert len(IDS) >= 12


@pytest.mark.parametrize("id", IDS)
def test_every_own_environment_gives_the_return_that_gymnasium_gives(id):
    policy = agentrl.RandomPolicy(1, stop_p=0.0)
    episode = play_episode(id, policy, seed=5, max_tool_calling_iterations=30)
    assert [call.error for call in episode.tool_calls] == [None] * len(episode.tool_calls) and episode.tool_calls
    env = gymnasium.make(id)
    env.reset(seed=5)
    total, ended = 0.0, False
    names = GymnasiumEnvironment(id)._action
    for call in episode.tool_calls:
        assert not ended
        _, reward, terminated, truncated, _ = env.step(names.decode(call.arguments["action"]))
        total, ended = total + reward, terminated or truncated
    assert episode.reward == pytest.approx(float(total), rel=1e-6)
    assert ended == (episode.outcome is Outcome.ENV_DONE)


@pytest.mark.parametrize("id", IDS)
def test_every_own_environment_passes_its_check(id):
    assert [str(finding) for finding in check_environment(id) if finding.level != "note"] == []


@pytest.mark.parametrize(
    ("id", "names"),
    [
        ("FrozenLake-v1", {"left": 0, "down": 1, "right": 2, "up": 3}),
        ("CliffWalking-v1", {"up": 0, "right": 1, "down": 2, "left": 3}),
        ("Taxi-v4", {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5}),
        ("Blackjack-v1", {"stick": 0, "hit": 1}),
        ("CartPole-v1", {"left": 0, "right": 1}),
        ("MountainCar-v0", {"left": 0, "none": 1, "right": 2}),
        ("Acrobot-v1", {"negative": 0, "none": 1, "positive": 2}),
    ],
)
def test_actions_have_the_names_of_gymnasiums_documentation(id, names):
    action = GymnasiumEnvironment(id)._action
    assert {name: int(action.decode(name)) for name in action.schema["enum"]} == names


def test_names_mean_what_they_say():
    lake = GymnasiumEnvironment("FrozenLake-v1", is_slippery=False)
    lake.reset(seed=0)
    assert lake.act("right").endswith("row 0, column 1 (observation 1).")
    text = lake.act("down")  # into a hole
    assert "F[H]FH" in text and lake.done
    car = GymnasiumEnvironment("CartPole-v1")
    car.reset(seed=0)
    for _ in range(5):
        text = car.act("right")
    assert float(text.split(",")[1].rpartition(" ")[2]) > 0.5  # cart velocity


def test_the_first_message_by_hand():
    assert play_episode("Blackjack-v1", ["I stop."], seed=0).messages[0]["content"] == (
        "Blackjack: Get closer to 21 than the dealer without going over. Face cards count 10, an ace 1 or 11.\n"
        "Call act with an action, one of: stick, hit.\n"
        "Your sum is 11, the dealer shows 10, you have no usable ace."
    )
    taxi = GymnasiumEnvironment("Taxi-v4").reset(seed=0)
    row, column, passenger, destination = gymnasium.make("Taxi-v4").unwrapped.decode(
        gymnasium.make("Taxi-v4").reset(seed=0)[0]
    )
    assert f"row {row}, column {column}, the passenger at {'RGYB'[passenger]}" in taxi
    assert f"destination is {'RGYB'[destination]}" in taxi
    assert "slippery" in GymnasiumEnvironment("FrozenLake-v1").reset(seed=0)
    assert "slippery" not in GymnasiumEnvironment("FrozenLake-v1", is_slippery=False).reset(seed=0)


# --- the tool --------------------------------------------------------------------------
def test_F079_a_wrong_action_is_answered_with_the_right_ones_and_the_episode_goes_on():
    misnamed = {"tool_calls": [{"name": "act", "arguments": {"move": "up"}}]}
    turns = [*calls("north"), *calls(2), misnamed, *calls("up"), "x"]
    episode = play_episode("FrozenLake-v1", turns)
    assert [call.error for call in episode.tool_calls] == ["bad_arguments"] * 3 + [None]
    assert "'left', 'down', 'right' or 'up', not 'north'" in episode.tool_calls[0].content
    episode = play_episode("Pendulum-v1", [*calls(3.0), *calls([0.5]), *calls(0.5), "x"])
    assert episode.tool_calls[0].content == "No step was taken: 'action' should be a number from -2 to 2, not 3.0."
    assert [call.error for call in episode.tool_calls][1:] == ["bad_arguments", None]


def test_tool_and_actions_take_the_names_that_the_author_gives():
    env = functools.partial(Recorder, 2)
    factory = functools.partial(
        GymnasiumEnvironment, env, action_names=["wait", "go"], action_tool="move", describe="Count to 2."
    )
    episode = play_episode(factory, calls("go", "wait", tool="move"))
    assert (episode.reward, episode.outcome) == (1.5, Outcome.ENV_DONE)
    assert episode.messages[0]["content"].startswith(
        "Recorder: Count to 2.\nCall move with an action, one of: wait, go."
    )
    assert episode.environment == "Recorder"


def test_actions_without_known_names_are_numbered_or_named_by_the_environment():
    import enum

    class Doors(enum.IntEnum):
        open = 1
        shut = 0

    class Named(Recorder):
        actions = Doors

    class Atari(Recorder):
        def get_action_meanings(self):
            return ["NOOP", "FIRE"]

    for made, names in ((Recorder, ["action_0", "action_1"]), (Named, ["shut", "open"]), (Atari, ["noop", "fire"])):
        assert GymnasiumEnvironment(made)._action.schema["enum"] == names
    many = GymnasiumEnvironment(Recorder, action_space=spaces.Discrete(1000))
    assert many._action.schema["maximum"] == 999 and "enum" not in many._action.schema


def test_a_wrapper_that_changes_what_numbers_mean_loses_the_known_names():
    class Turned(gymnasium.ActionWrapper):
        def action(self, action):
            return (action + 1) % 4

    class Elsewhere(gymnasium.ObservationWrapper):
        def observation(self, observation):
            return 15 - observation

    env = GymnasiumEnvironment("FrozenLake-v1", wrappers=[Turned, Elsewhere], is_slippery=False)
    assert env._action.schema["enum"] == ["action_0", "action_1", "action_2", "action_3"]
    assert env.reset(seed=0).endswith("\n15")
    assert env.act("action_0").endswith("\n11")  # down
    limited = GymnasiumEnvironment("FrozenLake-v1", max_episode_steps=3)
    assert limited._action.schema["enum"] == ["left", "down", "right", "up"]


# --- the end of an episode -------------------------------------------------------------
def test_done_says_that_and_why_and_nothing_is_played_after_it():
    turns = [{"tool_calls": [{"name": "act", "arguments": {"action": "action_1"}}] * 5}]
    episode = play_episode(functools.partial(GymnasiumEnvironment, Recorder), turns)
    assert episode.tool_calls[2].content == "3\nThe episode is over: it ended after 3 steps. Total reward: 3."
    assert [call.error for call in episode.tool_calls] == [None] * 3 + ["episode_over"] * 2
    env = GymnasiumEnvironment(Recorder, length=1)
    env.reset()
    last = env.act("action_0")
    assert env.act("action_0") == last.partition("\n")[2] and len(env._env.taken) == 1
    assert env.get_reward() == env.get_reward() == 0.5


def test_max_episode_steps_cuts_off_by_id_by_factory_and_by_object():
    limited = gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 2)
    for env in (
        GymnasiumEnvironment("CartPole-v1", max_episode_steps=2),
        GymnasiumEnvironment(lambda: gymnasium.make("CartPole-v1"), max_episode_steps=2),
        GymnasiumEnvironment(limited),
    ):
        env.reset(seed=0)
        env.act("left")
        assert not env.done
        assert env.act("right").endswith("The episode is over: it was cut off after 2 steps. Total reward: 2.")
        assert env.done
        env.reset(seed=0)
        assert not env.done
    with pytest.raises(ConfigurationError, match="max_episode_steps"):
        GymnasiumEnvironment("CartPole-v1", max_episode_steps=0)


def test_the_registered_step_limit_holds():
    env = GymnasiumEnvironment("MountainCar-v0")
    env.reset(seed=0)
    texts = [env.act("none") for _ in range(200)]
    assert env.done and "cut off after 200 steps. Total reward: -200." in texts[-1] and "over" not in texts[-2]


def test_reward_is_the_return_the_last_reward_or_a_function():
    for reward, expected in (("return", 3.0), ("last", 1.5), (lambda rewards: max(rewards) - len(rewards), -1.5)):
        env = GymnasiumEnvironment(Recorder, reward=reward)
        env.reset()
        for _ in range(3):
            env.act("action_0")
        assert env.get_reward() == expected
        env.reset()
        if reward != "last" and not callable(reward):
            assert env.get_reward() == 0.0
    with pytest.raises(ConfigurationError, match="reward must be"):
        GymnasiumEnvironment(Recorder, reward="sum")


def test_wrappers_are_honoured_in_order():
    twice = functools.partial(gymnasium.wrappers.TransformReward, func=lambda r: 2 * r)
    plus = functools.partial(gymnasium.wrappers.TransformReward, func=lambda r: r + 1)
    env = GymnasiumEnvironment(Recorder, length=1, wrappers=[twice, plus])
    env.reset()
    env.act("action_0")
    assert env.get_reward() == 2.0


# --- reset -----------------------------------------------------------------------------
def test_F085_the_seed_and_the_rows_columns_reach_reset():
    env = Recorder()
    played = GymnasiumEnvironment(env)
    episode = play_episode(played, ["x"], seed=11, task={"prompt": "Hi! ", "size": 4, "none": None})
    assert env.resets == [(11, {"size": 4})]
    assert episode.messages[0]["content"] == (
        "Hi! Recorder: Counts to length; remembers how it was treated.\n"
        "Call act with an action, one of: action_0, action_1.\n0"
    )
    played.close()  # a ready instance is its owner's to close
    play_episode(GymnasiumEnvironment(env), ["x"], task={"options": {"low": -1}, "seed": 3})
    assert env.resets[1:] == [(3, {"low": -1})]


def test_columns_for_an_environment_without_options_are_refused():
    class Plain(Recorder):
        def reset(self, *, seed=None):
            return Recorder.reset(self, seed=seed)

    env = GymnasiumEnvironment(Plain)
    env.reset(seed=1)
    with pytest.raises(ConfigurationError, match="'size'"):
        env.reset(seed=1, size=4)


def test_a_pooled_instance_starts_like_a_new_one():
    """F089: instances are built once and reset many times; nothing leaks from one episode into the next."""
    built = []

    def factory():
        built.append(GymnasiumEnvironment("FrozenLake-v1"))
        return built[-1]

    async def episode(pool, seed):
        instance = await pool.acquire()
        texts = [await instance.reset({"seed": seed})]
        while not instance.done and len(texts) < 20:
            texts.append((await instance.call(instance.tools["act"], {"action": "down"})).content)
        reward = await instance.reward()
        pool.release(instance, healthy=True)
        return texts, reward

    async def run():
        pool = EnvironmentPool(factory)
        played = [await episode(pool, seed) for seed in (1, 2, 1)]
        await pool.close()
        fresh = EnvironmentPool(factory)
        again = await episode(fresh, 1)
        await fresh.close()
        return played, again

    played, again = asyncio.run(run())
    assert played[0] == played[2] == again and played[1] != played[0]
    assert len(built) == 2


# --- observations ----------------------------------------------------------------------
def test_pictures_are_images_unless_text_is_asked_for():
    space = spaces.Box(0, 255, (4, 6, 3), np.uint8)
    content = GymnasiumEnvironment(Recorder, observation_space=space).reset()
    assert [block["type"] for block in content] == ["text", "image"] and content[1]["image"].size == (6, 4)
    assert isinstance(GymnasiumEnvironment(Recorder, observation_space=space, observation="text").reset(), str)
    episode = play_episode(
        functools.partial(GymnasiumEnvironment, Recorder, observation_space=space), calls(*["action_0"] * 3)
    )
    last = episode.tool_calls[-1].content
    assert [block["type"] for block in last] == ["image", "text"] and "The episode is over" in last[1]["text"]


def test_what_is_rendered_can_be_the_observation():
    env = GymnasiumEnvironment(Recorder, observation="image", render_mode="rgb_array")
    env.reset()
    (block,) = env.act("action_0")
    assert block["type"] == "image" and block["image"].getpixel((0, 0)) == (1, 1, 1)
    with pytest.raises(ConfigurationError, match="rgb_array"):
        GymnasiumEnvironment(Recorder, observation="image")


def test_an_environment_from_an_id_is_built_so_that_it_renders():
    gymnasium.register("tests/Recorder-v0", Recorder)
    try:
        env = GymnasiumEnvironment("tests/Recorder-v0", observation="image")
        assert env._env.render_mode == "rgb_array" and not env.run_inline
        with pytest.raises(ConfigurationError, match=r"Building 'tests/Recorder-v0' failed: .*colour"):
            GymnasiumEnvironment("tests/Recorder-v0", colour="red")
    finally:
        gymnasium.registry.pop("tests/Recorder-v0")


def test_rendering_as_text_can_be_left_out():
    text = GymnasiumEnvironment("FrozenLake-v1", render_mode=None).reset(seed=0)
    assert "FFF" not in text and text.endswith("You are at row 0, column 0 (observation 0).")


def test_labels_name_numbers():
    env = GymnasiumEnvironment("CartPole-v1", observation_names=["x", "v", "angle", "w"])
    assert "x 0.0137, v -0.023" in env.reset(seed=0)
    with pytest.raises(ConfigurationError, match="4 names"):
        GymnasiumEnvironment("CartPole-v1", observation_names=["x"])


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_a_space_without_a_text_form_is_named_and_what_was_built_is_closed(which):
    before = len(Recorder.closed)
    with pytest.raises(ConfigurationError, match=r"OneOf.*no text form"):
        GymnasiumEnvironment(Recorder, **{which: spaces.OneOf([spaces.Discrete(2), spaces.Text(3)])})
    assert len(Recorder.closed) == before + 1


# --- threads and failures --------------------------------------------------------------
def test_cheap_environments_run_inline_and_others_on_one_thread():
    assert GymnasiumEnvironment("CartPole-v1").run_inline and GymnasiumEnvironment("Taxi-v4").run_inline
    assert not GymnasiumEnvironment(Recorder).run_inline
    assert not GymnasiumEnvironment("CartPole-v1", run_inline=False).run_inline
    here = threading.current_thread()
    for inline in (False, True):
        env = Recorder()

        async def run(env=env, inline=inline):
            instance = Instance(GymnasiumEnvironment(env, run_inline=inline))
            await instance.reset({})
            for _ in range(2):
                await instance.call(instance.tools["act"], {"action": "action_0"})
            await instance.close()

        asyncio.run(run())
        assert len(set(env.threads)) == 1 and (env.threads[0] is here) == inline


@pytest.mark.parametrize(
    ("fail", "stage"), [("reset", "reset_failed"), ("step", "tool_failed"), ("reward", "reward_failed")]
)
def test_F017_what_gymnasium_breaks_is_a_failed_episode_and_never_a_reward(fail, stage):
    before = len(Recorder.closed)
    with pytest.raises(EnvironmentFailed, match=stage) as caught:
        play_episode(functools.partial(GymnasiumEnvironment, Recorder, fail=fail), calls(*["action_0"] * 3))
    assert "simulator is gone" in str(caught.value) or fail == "reward"
    assert len(Recorder.closed) > before


def test_F095_each_environment_is_closed_exactly_once():
    Recorder.closed.clear()
    for turns in (["x"], calls(*["action_0"] * 3)):
        play_episode(functools.partial(GymnasiumEnvironment, Recorder), turns)
    assert len(Recorder.closed) == 2
    env = GymnasiumEnvironment(Recorder())
    env.close()
    env.close()
    assert len(Recorder.closed) == 3
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        env.reset()


def test_one_gymnasium_object_cannot_serve_two_rollouts():
    inner = Recorder()
    wrapped = GymnasiumEnvironment(inner)
    with pytest.raises(ConfigurationError, match="in use"):
        GymnasiumEnvironment(gymnasium.wrappers.TimeLimit(inner, 3))
    assert id(inner) not in Recorder.closed  # the first one still uses it
    wrapped.close()
    GymnasiumEnvironment(inner)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GymnasiumEnvironment("CartPol-v1"), "Did you mean 'CartPole-v1'"),
        (lambda: GymnasiumEnvironment("CartPole-v1", gravty=3), "Building 'CartPole-v1' failed: .*gravty"),
        (lambda: GymnasiumEnvironment(dict), "not a gymnasium.Env"),
        (lambda: GymnasiumEnvironment(3), "not 3"),
        (lambda: GymnasiumEnvironment(Recorder(), size=3), "'size' cannot be given"),
        (lambda: GymnasiumEnvironment(Recorder, observation="pixels"), "'auto', 'text', 'image' or 'both'"),
        (lambda: GymnasiumEnvironment(Recorder, action_tool="reset"), "not taken yet"),
        (lambda: GymnasiumEnvironment(Recorder, action_tool="two words"), "not taken yet"),
        (lambda: GymnasiumEnvironment(Recorder, action_names="ab"), "list of names"),
        (lambda: GymnasiumEnvironment(Recorder, action_names=["a"]), "2 different names"),
        (lambda: GymnasiumEnvironment(Recorder, wrappers=[lambda env: None]), "not a gymnasium.Env"),
        (lambda: GymnasiumEnvironment(Recorder, wrappers=[lambda env: 1 / 0]), "ZeroDivisionError"),
    ],
)
def test_what_cannot_work_is_said_at_construction(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


# --- copies ----------------------------------------------------------------------------
@pytest.mark.parametrize("through", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_where_the_original_stands(through):
    env = GymnasiumEnvironment("FrozenLake-v1")
    untouched = through(env)
    env.reset(seed=4)
    env.act("down")
    other = through(env)
    assert type(other) is type(env)
    assert [env.act("right") for _ in range(3)] == [other.act("right") for _ in range(3)]
    assert env.get_reward() == other.get_reward()
    assert untouched.reset(seed=4) == env.reset(seed=4)
    env.close()
    assert "FrozenLake" in other.reset(seed=0)  # it has an environment of its own


def test_a_factory_can_be_pickled():
    factory = pickle.loads(pickle.dumps(functools.partial(GymnasiumEnvironment, "Taxi-v4", describe="Drive.")))
    assert factory().reset(seed=0).startswith("Taxi: Drive.")


def test_a_class_derived_from_it_keeps_its_own_tools():
    class WithHint(GymnasiumEnvironment):
        def hint(self) -> str:
            """Ask for a hint."""
            return "Go right."

    env = WithHint("FrozenLake-v1")
    assert sorted(Instance(env).tools) == ["act", "hint"] and env.hint() == "Go right."
