"""Our environments behind Gymnasium's interface."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import sqlite3
import time
import warnings

import agentrl_envs
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, CustomSpaceError, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import create_shared_memory

from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.gym import AgentEnv, CallText, FreeText
from agentrl.gym.turn import read_turn
from agentrl.registry import register
from agentrl.rollout.play import play_episode

agentrl_envs.register_all()
OWN = ("gymnasium.envs.toy_text", "gymnasium.envs.classic_control")
SHIPPED = sorted(id for id in gymnasium.registry if id.startswith("agentrl/"))
GYM_IDS = [id for id, spec in gymnasium.registry.items() if str(spec.entry_point).startswith(OWN)]


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


class Count(Environment):
    """Counts up to a target; a row may set it."""

    run_inline = True
    closed = 0

    def __init__(self, max_turns=9):
        self.max_turns = max_turns

    def reset(self, seed=None, target=2, **row):
        self.count, self.target, self.done = 0, target, False
        return f"Count to {target} from seed {seed}."

    def add(self, amount: int = 1) -> str:
        """Add to the count.

        Args:
            amount: How much.
        """
        self.count += amount
        self.done = self.count >= self.target
        return str(self.count)

    def fail(self) -> str:
        """Break the environment."""
        raise EnvironmentFailed("the sandbox died")

    def get_reward(self):
        return self.count / self.target

    def close(self):
        type(self).closed += 1


class Unseeded:
    """Its start is not in anybody's hand."""

    async def reset(self):
        await asyncio.sleep(0)
        return f"at {time.perf_counter_ns()}"

    async def look(self) -> str:
        """Look around."""
        await asyncio.sleep(0)
        return "nothing"


# --- Gymnasium's own check -------------------------------------------------------------
@pytest.mark.parametrize("id", SHIPPED)
def test_every_shipped_environment_passes_gymnasiums_check(id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(id)
        check_env(env)
        env.close()


@pytest.mark.parametrize("id", GYM_IDS)
def test_every_gymnasium_environment_can_be_wrapped_there_and_back(id):
    env = AgentEnv(id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not having a spec")
        check_env(env)
    # the same actions give the same return as without us
    plain = gymnasium.make(id)
    env.action_space.seed(3)
    env.reset(seed=7)
    plain.reset(seed=7)
    names = env._instance.env._action
    total, ended, reward = 0.0, False, 0.0
    for _ in range(25):
        action = env.action_space.sample()
        _, reward, terminated, truncated, info = env.step(action)
        _, theirs, *ends, _ = plain.step(names.decode(json.loads(action)["arguments"]["action"]))
        total += float(theirs)
        assert terminated == any(ends) and not truncated and info["tool_errors"] == 0
        ended = terminated
        if ended:
            break
        assert reward == 0.0
    if not ended:
        _, reward, terminated, _, info = env.step("That is enough.")
        assert terminated and info["outcome"] == "finished"
    assert reward == pytest.approx(total, rel=1e-6)
    env.close()


def test_an_environment_without_a_seed_is_nondeterministic_and_passes_all_the_same():
    register("tests/Unseeded-v0", Unseeded)
    register("tests/UnseededByName-v0", "tests_unseeded:Unseeded")
    try:
        assert gymnasium.spec("tests/Unseeded-v0").nondeterministic
        assert not gymnasium.spec("agentrl/Hunt-v0").nondeterministic
        env = gymnasium.make("tests/Unseeded-v0")
        assert env.spec.nondeterministic
        check_env(env)
        assert env.reset(seed=1)[0] != env.reset(seed=1)[0]
        assert env.step(call("look"))[0] == "nothing"
        env.close()
        import sys
        import types

        module = types.ModuleType("tests_unseeded")
        module.Unseeded = Unseeded
        sys.modules["tests_unseeded"] = module
        env = gymnasium.make("tests/UnseededByName-v0")  # known only once it is built
        assert env.spec.nondeterministic
        env.close()
    finally:
        gymnasium.registry.pop("tests/Unseeded-v0")
        gymnasium.registry.pop("tests/UnseededByName-v0")


# --- a turn ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"name": "a", "arguments": {"x": 1}}', [("a", {"x": 1}, False)]),
        ('  \n{"name": "a"}\n', [("a", {}, False)]),
        ('{"name": "a", "arguments": null}', [("a", {}, False)]),
        ('{"name": "a", "arguments": ""}', [("a", {}, False)]),
        ('[{"name": "a"}, {"name": "b"}]', [("a", {}, False), ("b", {}, False)]),
        ('[{"name": "a"}, 3]', [("a", {}, False), ("", {}, True)]),
        ('{"name": "bash", "arguments": {"cmd": "echo \'}{\' > x"}}', [("bash", {"cmd": "echo '}{' > x"}, False)]),
        ('{"name": "a", "arguments": [1]}', [("a", {}, True)]),
        ('{"name": "a", "arguments": 3}', [("a", {}, True)]),
        ('{"name": 3}', [("", {}, True)]),
        ('{"answer": 42}', [("", {}, True)]),
        ('{"name": "a"', [("", {}, True)]),
        ('{"name": "a", "arguments": {"x": NaN}}', [("", {}, True)]),
        ("[]", [("", {}, True)]),
        ('{"a": ' * 100_000, [("", {}, True)]),
        ("42", []),
        ("", []),
        ("[1, 2] is the answer", []),
        ("Let me call {a}.", []),
        ("é漢😀", []),
    ],
    ids=range(20),
)
def test_F071_F073_F075_a_turn_is_calls_or_an_answer(text, read):
    found = read_turn(text, start=4)
    assert [(c.name, c.arguments, c.error is not None) for c in found] == read
    assert [c.id for c in found] == [f"call_{4 + i}" for i in range(len(read))]


SCRIPTS = [
    [[("search", {"place": "cave"})], "It is found."],
    [[("search", {"place": "cave"}), ("search", {"place": "mill"})], [("serch", {})], "I give up."],
    [[("search", {"place": "moon"})], [("search", {})], [("search", {"place": "lake", "depth": 3})]],
    [[("search", {"place": place}) for place in ("cave", "forest", "lake", "mill", "tower", "shrine")]],
    ["I know nothing."],
]


@pytest.mark.parametrize("turns", SCRIPTS, ids=range(len(SCRIPTS)))
@pytest.mark.parametrize("seed", [0, 3])
def test_the_rollout_engine_and_the_adapter_play_the_same_episode(turns, seed):
    """Tool results, reward and outcome are equal: one meaning of an environment, not two."""
    env = AgentEnv("agentrl/Hunt-v0")
    first, _ = env.reset(seed=seed)
    results, reward, over, info = [], 0.0, False, {}
    for turn in [*turns, "Stop."]:
        if over:
            break
        text = turn if isinstance(turn, str) else json.dumps([{"name": n, "arguments": a} for n, a in turn])
        shown, reward, over, _, info = env.step(text)
        results += [shown] if not isinstance(turn, str) else []
    env.close()
    script = [t if isinstance(t, str) else {"tool_calls": [{"name": n, "arguments": a} for n, a in t]} for t in turns]
    episode = play_episode("agentrl/Hunt-v0", [*script, "Stop."], seed=seed)
    assert first == episode.messages[0]["content"]
    by_turn = {}
    for one in episode.tool_calls:
        by_turn.setdefault(one.turn, []).append(one.content)
    assert results == ["\n".join(texts) for texts in by_turn.values()]
    assert (reward, info["outcome"]) == (episode.reward, episode.outcome.value)
    assert info["tool_calls"] == len(episode.tool_calls)
    assert info["tool_errors"] == sum(one.error is not None for one in episode.tool_calls)


def test_an_episode_by_hand():
    env = AgentEnv(Count, max_turns=3, render_mode="ansi")
    first, info = env.reset(seed=5)
    assert first == "Count to 2 from seed 5."
    assert [tool["function"]["name"] for tool in info["tools"]] == ["add", "fail"]
    assert env.step(call("add")) == ("1", 0.0, False, False, {"turns": 1, "tool_calls": 1, "tool_errors": 0})
    shown, reward, *ends, info = env.step(f"[{call('add')}, {call('add')}]")
    assert (shown, reward, ends) == ("2\nThe episode is over; this call was not run.", 1.0, [True, False])
    assert info == {"turns": 2, "tool_calls": 3, "tool_errors": 1, "outcome": "env_done"}
    assert env.render() == (
        f"user: Count to 2 from seed 5.\n\nassistant: {call('add')}\n\ntool: 1\n\n"
        f"assistant: [{call('add')}, {call('add')}]\n\ntool: 2\nThe episode is over; this call was not run."
    )
    env.reset(options={"target": 100, "prompt": "Please. "})
    for turn in range(3):
        _, reward, terminated, truncated, info = env.step(call("add"))
        assert (terminated, truncated) == (False, turn == 2)
    assert (reward, info["outcome"]) == (0.03, "tool_limit")
    env.close()


def test_reset_gives_the_seed_on_and_draws_others_from_its_stream():
    env = AgentEnv(Count)
    starts = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0], env.reset(seed=5)[0], env.reset()[0]]
    assert starts[0] == starts[3] == "Count to 2 from seed 5."
    assert starts[1] == starts[4] and len(set(starts)) == 3
    env.close()


def test_rows_are_drawn_and_options_are_a_row():
    rows = [{"target": target, "prompt": f"{target}! "} for target in range(1, 9)]
    env = AgentEnv(Count, rows=rows)
    starts = [env.reset(seed=seed)[0] for seed in range(12)]
    assert starts == [env.reset(seed=seed)[0] for seed in range(12)]
    assert len({start.partition("!")[0] for start in starts}) > 3
    assert all(start.split("!")[0] in start.split("!")[1] for start in starts)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count. "}]
    assert env.reset(seed=1, options={"target": 7, "prompt": messages})[0] == (
        "Be brief.\n\nCount. Count to 7 from seed 1."
    )
    env.close()

    class Silent:
        def reset(self): ...

    with pytest.raises(ConfigurationError, match=r"Silent.reset\(\) returned None"):
        AgentEnv(Silent).reset()
    with pytest.raises(ConfigurationError, match="'size'"):
        AgentEnv(Silent).reset(options={"size": 3})
    env = AgentEnv(Silent, rows=[{"prompt": "Say hi."}])
    assert env.reset()[0] == "Say hi."
    assert env.step("hi")[1:4] == (0.0, True, False)


def test_F099_every_episode_has_an_id_of_its_own():
    seen = []

    class Logs:
        def reset(self, rollout_id):
            seen.append(rollout_id)
            return "go"

    env = AgentEnv(Logs)
    env.reset(seed=0)
    env.reset(seed=0)
    assert len(set(seen)) == 2


# --- misuse and failure ----------------------------------------------------------------
def test_steps_outside_an_episode_are_refused():
    env = AgentEnv(Count)
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset()
    env.step("x")
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset()
    with pytest.raises(TypeError, match="not int"):
        env.step(3)
    env.close()
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_F017_F095_a_broken_environment_raises_is_closed_once_and_replaced():
    Count.closed = 0
    env = AgentEnv(Count)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailed, match="the sandbox died"):
        env.step(call("fail"))
    assert Count.closed == 1
    with pytest.raises(ResetNeeded):
        env.step(call("add"))
    assert env.reset(seed=1)[0] == "Count to 2 from seed 1."
    assert env.step(call("add"))[0] == "1"
    env.close()
    assert Count.closed == 2


def test_a_hanging_tool_ends_at_its_deadline():
    class Slow:
        def reset(self, seed=None):
            return "go"

        def nap(self) -> str:
            """Sleep."""
            time.sleep(0.6)
            return "awake"

    env = AgentEnv(Slow, timeout_s=0.1)
    env.reset()
    started = time.perf_counter()
    with pytest.raises(EnvironmentFailed, match=r"0\.1 s"):
        env.step(call("nap"))
    assert time.perf_counter() - started < 0.5
    assert env.reset()[0] == "go"
    env.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AgentEnv("agentrl/Hnt-v0"), "Did you mean 'agentrl/Hunt-v0'"),
        (lambda: AgentEnv(Count, render_mode="human"), "'ansi'"),
        (lambda: AgentEnv(Count, max_turns=0), "at least 1"),
        (lambda: AgentEnv(Count, rows=[]), "rows is empty"),
        (lambda: AgentEnv(Count()), "instance of Count"),
        (lambda: AgentEnv(dict), "no method reset"),
    ],
)
def test_what_cannot_work_is_said_at_construction(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_it_works_where_an_event_loop_runs_already():
    async def notebook():
        env = AgentEnv(Unseeded)
        env.reset()
        shown = env.step(call("look"))[0]
        env.close()
        return shown

    assert asyncio.run(notebook()) == "nothing"


def test_sync_calls_stay_on_one_thread():
    class Database:
        def __init__(self):
            self.base = sqlite3.connect(":memory:")  # refuses other threads

        def reset(self, seed=None):
            self.base.execute("create table if not exists t (x)")
            return "go"

        def add(self) -> str:
            """Add a row."""
            self.base.execute("insert into t values (1)")
            return str(self.base.execute("select count(*) from t").fetchone()[0])

        def close(self):
            self.base.close()

    env = AgentEnv(Database)
    env.reset()
    assert [env.step(call("add"))[0] for _ in range(2)] == ["1", "2"]
    env.close()


def test_images_travel_in_info():
    class Camera:
        def reset(self, seed=None):
            return [{"type": "text", "text": "look"}, {"type": "image", "image": "pixels"}]

    observation, info = AgentEnv(Camera).reset()
    assert (observation, info["images"]) == ("look\n[image]", ["pixels"])


# --- make ------------------------------------------------------------------------------
def test_make_tells_options_of_the_environment_from_those_of_the_adapter():
    register("tests/Count-v0", Count)
    try:
        env = gymnasium.make("agentrl/Hunt-v0", hops=1, max_turns=2, render_mode="ansi")
        assert isinstance(env, AgentEnv) and env._max_turns == 2 and env._instance.env._hops == 1
        env.close()
        env = gymnasium.make("tests/Count-v0", max_turns=4, max_length=100)  # Count has a max_turns of its own
        assert env.unwrapped._instance.env.max_turns == 4 and env.unwrapped._max_turns is None
        env.close()
        with pytest.raises(ConfigurationError, match="hop"):
            gymnasium.make("agentrl/Hunt-v0", hop=1)
    finally:
        gymnasium.registry.pop("tests/Count-v0")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_return_the_texts_of_single_ones(mode):
    kwargs = {"shared_memory": False} if mode == "async" else {}
    many = gymnasium.make_vec("agentrl/Hunt-v0", num_envs=2, vectorization_mode=mode, vector_kwargs=kwargs)
    single = [AgentEnv("agentrl/Hunt-v0") for _ in range(2)]
    expected = [env.reset(seed=seed)[0] for env, seed in zip(single, (3, 4), strict=True)]
    observations, infos = many.reset(seed=[3, 4])
    assert tuple(observations) == tuple(expected)
    assert infos["tools"][1][0]["function"]["name"] == "search"
    places = [text.rpartition(" ")[2] for text in expected]
    for turn in range(4):
        actions = tuple(call("search", place=place) for place in places)
        observations, rewards, terminated, truncated, infos = many.step(actions)
        steps = [env.step(action) for env, action in zip(single, actions, strict=True)]
        assert tuple(observations) == tuple(step[0] for step in steps)
        assert rewards.tolist() == [step[1] for step in steps] and terminated.tolist() == [step[2] for step in steps]
        assert not truncated.any() and infos["turns"].tolist() == [turn + 1] * 2
        places = [step[0].rpartition(" ")[2] if ": " in step[0] else "lake" for step in steps]
        if terminated.all():
            break
    assert rewards.tolist() == [1.0, 1.0] and infos["outcome"].tolist() == ["env_done"] * 2
    observations, *_ = many.step(actions)  # autoreset: a new prompt, and never a stale tail of an older text
    assert all(text.startswith("find the treasure, first clue: ") for text in observations)
    for env in (many, *single):
        env.close()


def test_shared_memory_fails_loudly_instead_of_returning_stale_text():
    with pytest.raises(ValueError, match="shared_memory=False") as caught:
        gymnasium.make_vec("agentrl/Hunt-v0", num_envs=2, vectorization_mode="async")
    assert isinstance(caught.value.__cause__, CustomSpaceError)
    for space in (FreeText(9), CallText(9, [])):
        with pytest.raises(CustomSpaceError, match="padded with older ones"):
            create_shared_memory(space, 2)


def test_statistics_and_time_limits_of_gymnasium_work():
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("agentrl/Hunt-v0"))
    place = env.reset(seed=3)[0].rpartition(" ")[2]
    for _ in range(3):
        shown, _, terminated, _, info = env.step(call("search", place=place))
        place = shown.rpartition(" ")[2]
    assert terminated and info["episode"]["r"] == 1.0 and info["episode"]["l"] == 3
    env.close()
    env = gymnasium.make("agentrl/Hunt-v0", max_episode_steps=2)
    env.reset(seed=3)
    assert env.step(call("search", place="cave"))[2:4] == (False, False)
    assert env.step(call("search", place="cave"))[1:4] == (0.0, False, True)
    env.close()


# --- spaces and copies -----------------------------------------------------------------
def test_text_spaces_hold_any_text_quickly():
    space = FreeText(1 << 20)
    text = "é漢😀\x00" * (1 << 18)
    started = time.perf_counter()
    assert text in space and text + "x" not in space and 3 not in space
    assert time.perf_counter() - started < 0.05
    space.seed(0)
    assert all(sample in space for sample in (space.sample() for _ in range(20)))
    assert space == FreeText(1 << 20) and space != FreeText(3) and copy.deepcopy(space) == space


def test_a_sampled_action_is_a_call_that_is_run():
    env = AgentEnv("agentrl/Courier-v0")
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(20)]
    env.action_space.seed(0)
    assert actions == [env.action_space.sample() for _ in range(20)]
    assert {json.loads(action)["name"] for action in actions} == {"lookup", "deliver"}
    env.reset(seed=0)
    assert env.step(actions[0])[4]["tool_errors"] == 0
    env.close()


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("id", ["agentrl/Hunt-v0", "FrozenLake-v1"])
def test_a_copy_goes_on_where_the_original_stands(id, through):
    env = AgentEnv(id)
    env.action_space.seed(1)
    other = through(env)
    assert other.reset(seed=9) == env.reset(seed=9)
    actions = [env.action_space.sample() for _ in range(2)]
    env.step(actions[0])
    other = through(env)
    assert env.step(actions[1]) == other.step(actions[1])
    assert env.reset() == other.reset()  # the random stream went along
    env.close()
    assert other.reset(seed=9)[0]
    other.close()


def test_what_cannot_be_pickled_says_so():
    env = AgentEnv(lambda: Count())
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(env)


def test_text_lines_of_numpy_strings_are_actions():
    env = AgentEnv(Count)
    env.reset()
    assert env.step(np.str_(call("add")))[0] == "1"
    env.close()
