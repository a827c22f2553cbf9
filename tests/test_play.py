"""play_episode: one call, every kind of environment and policy, also where an event loop already runs."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from typing import Any

import pytest

import agentrl
from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed, SamplerError
from agentrl.registry import register
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.play import play_episode
from agentrl.sampler import RandomPolicy, ScriptedSampler


class Door(Environment):
    run_inline = True
    opened = 0

    def __init__(self, strength: int = 1) -> None:
        self.strength = strength
        self.closed = 0

    def reset(self, seed: int, colour: str = "red") -> str:
        self.opened, self.seed = 0, seed
        return f"Open the {colour} door."

    def get_reward(self) -> float:
        return float(self.opened >= self.strength)

    def push(self) -> str:
        """Push the door."""
        self.opened += 1
        return "It opens." if self.opened >= self.strength else "It moves."

    def close(self) -> None:
        self.closed += 1


PUSH = {"tool_calls": [{"name": "push", "arguments": {}}]}


def push_then_stop(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    assert [tool["function"]["name"] for tool in tools] == ["push"]
    return "It is open." if messages[-1]["content"] == "It opens." else PUSH


async def push_async(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    await asyncio.sleep(0)
    return push_then_stop(messages, tools)


class Own:
    """A sampler of one's own."""

    async def sample(self, request: Any) -> Any:
        return await ScriptedSampler(lambda r: push_then_stop(r.messages, r.tools)).sample(request)

    def release(self, conversation_id: str) -> None: ...


# --- policies --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "policy",
    [[PUSH, "It is open."], (PUSH, "It is open."), push_then_stop, push_async, Own(), ScriptedSampler([PUSH, "open"]),
     functools.partial(push_then_stop), lambda messages, tools: push_then_stop(messages, tools)],
)  # fmt: skip
@pytest.mark.parametrize("with_ids", [False, True])
def test_every_kind_of_policy(tiny, policy, with_ids):
    if isinstance(policy, (Own, ScriptedSampler)):
        with_ids = False  # they write no ids without a tokenizer of their own
    episode = play_episode(Door, policy, tokenizer=tiny.qwen() if with_ids else None)
    assert episode.reward == 1.0 and [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert len(episode.sequences) == int(with_ids) and episode.environment == "Door"


def test_random_tool_calls_by_default_are_the_same_for_the_same_seed():
    first, again, other = (play_episode(Door, seed=seed) for seed in (1, 1, 2))
    assert first.messages == again.messages and first.tool_calls[0].name == "push"
    assert play_episode(Door, RandomPolicy(seed=1, stop_p=1.0)).tool_calls == () and other.task.seed == 2


def test_a_model_plays_with_its_tokenizer(tiny):
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny.qwen()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    before = threading.active_count()
    episode, again = (play_episode(Door, model, tokenizer=tokenizer, max_completion_length=8) for _ in range(2))
    (sequence,) = episode.sequences
    assert 0 < sum(sequence.completion_mask) <= 8 and episode.completion_ids == again.completion_ids
    assert threading.active_count() == before
    with pytest.raises(ConfigurationError, match="needs its tokenizer"):
        play_episode(Door, model)
    with pytest.raises(ConfigurationError, match="but the model sees 512"):
        play_episode(Door, model, task={"colour": "red " * 600}, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("policy", "says"), [(3, "policy is a int"), (RandomPolicy, "pass an instance"), ({"a": []}, "policy is a dict")]
)
def test_what_cannot_be_a_policy_is_named(policy, says):
    with pytest.raises(ConfigurationError, match=says):
        play_episode(Door, policy)


def test_a_sampler_without_release_is_named():
    class Half:
        async def sample(self, request: Any) -> Any: ...

    with pytest.raises(ConfigurationError, match=r"Half has no release\(conversation_id\)"):
        play_episode(Door, Half())


# --- environments ----------------------------------------------------------------------
def test_every_kind_of_environment():
    register("tests/Door-v0", Door)
    for environment in (Door, lambda: Door(), functools.partial(Door, strength=1), "tests/Door-v0", Door()):
        assert play_episode(environment, [PUSH, "open"]).reward == 1.0
    assert play_episode(functools.partial(Door, strength=2), [PUSH, "open"]).reward == 0.0


def test_a_ready_instance_can_be_looked_at_afterwards():
    door = Door()
    episode = play_episode(door, [PUSH, "open"], seed=9, task={"colour": "green", "prompt": "Hello. "})
    assert door.opened == 1 and door.seed == 9 and episode.prompt[0]["content"] == "Hello. Open the green door."
    assert play_episode(door, ["no"]).reward == 0.0


def add(left: int, right: int) -> int:
    """
    Add two numbers.

    Args:
        left: One.
        right: Another.
    """
    return left + right


def test_tools_and_rewards_without_an_environment():
    script = [{"tool_calls": [{"name": "add", "arguments": {"left": 1, "right": 2}}]}, "3"]

    def three(completions: list[Any], environments: Any = None) -> list[float]:
        assert environments is None
        return [float(completion[-1]["content"] == "3") for completion in completions]

    for functions in (three, [three]):
        episode = play_episode(None, script, task={"prompt": "1 + 2"}, tools=[add], reward_funcs=functions)
        assert episode.rewards == {"three": 1.0} and episode.messages[2]["content"] == "3"
    with pytest.raises(ConfigurationError, match="Two tools are named 'add'"):
        play_episode(None, script, task={"prompt": "1 + 2"}, tools=[add, add])
    with pytest.raises(ConfigurationError, match="there is no environment"):
        play_episode(None, script, tools=[add])


def test_reward_functions_beside_the_environment_see_it():
    def opened(environments: list[Door], **kwargs: Any) -> list[float]:
        return [10.0 * env.opened for env in environments]

    episode = play_episode(Door, [PUSH, "open"], reward_funcs=[opened])
    assert episode.rewards == {"Door": 1.0, "opened": 10.0} and episode.reward == 11.0


# --- failures --------------------------------------------------------------------------
class Broken(Door):
    where = "reset"

    def reset(self, seed: int) -> str:
        if self.where == "reset":
            raise OSError("no display")
        return "go"

    def get_reward(self) -> float:
        if self.where == "reward":
            raise OSError("no display")
        return 0.0

    def push(self) -> str:
        """Push."""
        if self.where == "tool":
            raise EnvironmentFailed("no display")
        return "fine"


@pytest.mark.parametrize("stage", ["reset", "tool", "reward"])
def test_a_broken_environment_is_an_exception_with_its_stage(stage):
    with pytest.raises(EnvironmentFailed, match=r"(?s)failed.*no display") as caught:
        play_episode(type("Broken", (Broken,), {"where": stage}), [PUSH, "open"])
    assert caught.value.stage == stage


def test_a_broken_policy_is_a_sampler_error():
    def broken(messages: Any, tools: Any) -> Any:
        raise ZeroDivisionError("policy")

    with pytest.raises(SamplerError, match="ZeroDivisionError: policy") as caught:
        play_episode(Door, broken)
    assert "no running event loop" not in str(caught.value)  # nothing of ours in the traceback's context
    with pytest.raises(SamplerError, match="asks for turn 2"):
        play_episode(Door, [PUSH])


def test_an_endless_policy_is_stopped_by_the_default_limit():
    episode = play_episode(Door, lambda messages, tools: PUSH)
    assert len(episode.tool_calls) == 32 and episode.outcome.value == "tool_limit"


# --- loops -----------------------------------------------------------------------------
def test_inside_a_running_loop_as_in_a_notebook():
    async def notebook() -> Any:
        return play_episode(Door, push_async), play_episode(Door, [PUSH, "open"])

    first, second = asyncio.run(notebook())
    assert first.reward == second.reward == 1.0


def test_inside_a_tool_of_another_episode():
    class House(Environment):
        run_inline = True

        def reset(self) -> str:
            return "go"

        def push(self) -> float | None:
            """Play an episode."""
            return play_episode(Door, [PUSH, "open"]).reward

    assert play_episode(House, [PUSH, "done"]).messages[2]["content"] == "1.0"


@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_is_left_clean(inside):
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("background")

    async def work() -> int:
        tasks.append(asyncio.ensure_future(background()))
        await asyncio.sleep(0)
        return 7

    tasks: list[Any] = []
    loop = LoopThread()

    def use() -> None:
        assert loop.run(work()) == loop.run(work()) == 7
        loop.close()
        loop.close()

    async def notebook() -> None:
        use()

    asyncio.run(notebook()) if inside else use()
    assert ended == ["background"] * 2


@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupt_cancels_what_runs(inside):
    """Ctrl-C, in plain code and in a notebook's loop: what runs is cancelled and cleans up, then it is raised."""
    code = """
import asyncio, os, signal, sys, threading
from agentrl.rollout.loop import LoopThread
async def work():
    try:
        await asyncio.sleep(30)
    finally:
        print("cleaned up", flush=True)
async def notebook():
    LoopThread().run(work())
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    if sys.argv[1] == "True":
        asyncio.new_event_loop().run_until_complete(notebook())
    else:
        LoopThread().run(work())
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", code, str(inside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.stdout == "cleaned up\ninterrupted\n", done.stderr


def test_no_torch_is_needed():
    code = """
import sys
sys.modules["torch"] = None
import agentrl
class Door:
    def reset(self): return "go"
    def get_reward(self): return 1.0
    def push(self) -> str:
        '''Push.'''
        return "open"
print(agentrl.play_episode(Door, [{"tool_calls": [{"name": "push", "arguments": {}}]}, "done"]).reward)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr
    assert agentrl.play_episode is play_episode


def test_a_ready_instance_stays_its_owners():
    """play_episode neither closes it nor throws it away: it can be looked at and played again."""

    class Counting:
        closed = 0

        def reset(self) -> str:
            return "go"

        def close(self) -> None:
            self.closed += 1

    env = Counting()
    play_episode(env, ["done"])
    play_episode(env, ["done"])
    assert env.closed == 0
