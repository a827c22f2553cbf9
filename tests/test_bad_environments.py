"""What an environment may do wrong, played to the end: a typed outcome or text, nothing lost, nothing left open.

tests/test_engine_failures.py has retries, groups and deadlines of each stage; here is what comes back from them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from agentrl.environment import Environment, Instance
from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_groups
from agentrl.rollout.scoring import Scorer
from agentrl.sampler import ScriptedSampler
from agentrl.types import Deadlines, Rollout, Task
from tests.tiny_processors import qwen3_vl

CALL = {"tool_calls": [{"name": "act", "arguments": {}}]}


def world(**parts: Callable[[], Any]) -> type[Environment]:
    """An environment whose `reset`, `act`, `get_reward` or `__init__` does as told; counts what is open."""

    class World(Environment):
        open: set[int] = set()  # noqa: RUF012

        def __init__(self) -> None:
            parts.get("init", lambda: None)()
            self.open.add(id(self))

        def reset(self) -> Any:
            return parts.get("reset", lambda: "go")()

        def act(self) -> Any:
            """Act."""
            return parts.get("act", lambda: "fine")()

        def get_reward(self) -> Any:
            return parts.get("reward", lambda: 1.0)()

        def close(self) -> None:
            self.open.discard(id(self))

    return World


def played(
    env: type[Environment],
    renderer: Any = None,
    *,
    tokenizer: Any = None,
    script: Any = (CALL, "done"),
    **settings: Any,
) -> list[Rollout]:
    """Two rollouts of a call and an answer; everything is closed, and no thread of theirs is left."""

    rollouts: list[Rollout] = []

    async def play() -> None:
        pool = EnvironmentPool(env)
        sampler = ScriptedSampler(list(script), tokenizer=tokenizer)
        options = {"max_attempts": 1, "deadlines": Deadlines(reset_s=0.3, tool_s=0.3, reward_s=0.3), **settings}
        engine = RolloutEngine(sampler, renderer, {None: pool}, settings=RolloutSettings(**options))
        try:
            (group,) = await run_groups(engine, Scorer([]), [GroupPlan("g", Task(0, 0, 0), 2)])
        finally:
            await pool.close()
        rollouts.extend(group.rollouts)  # asyncio.run would write out what is returned, for a signal handler

    before = threading.active_count()
    asyncio.run(play())
    until = time.monotonic() + 5.0
    while (env.open or threading.active_count() > before) and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert not env.open and threading.active_count() <= before  # type: ignore[attr-defined]
    assert len(rollouts) == 2
    return rollouts


def broken() -> Any:
    raise OSError("no display")


def exits() -> Any:
    raise SystemExit(3)


# --- crashes and hangs -----------------------------------------------------------------
@pytest.mark.parametrize("crash", [broken, exits])
@pytest.mark.parametrize(
    ("part", "outcome"), [("reset", "reset_failed"), ("act", "finished"), ("reward", "reward_failed")]
)
def test_a_crash_is_an_outcome_or_text(part, outcome, crash):
    for rollout in played(world(**{part: crash})):
        assert rollout.outcome.value == outcome
        if part == "act":
            assert rollout.tool_calls[0].error == "raised" and rollout.reward == 1.0
            assert rollout.tool_calls[0].content.startswith("act failed: ")
        else:
            assert rollout.reward is None and crash.__name__ in str(rollout.error)  # the traceback names the line


def test_an_environment_that_cannot_be_built_is_one_sentence_before_anything_runs():
    with pytest.raises(ConfigurationError) as caught:
        played(world(init=broken))
    assert str(caught.value).endswith("World failed: OSError: no display.") and "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["reset", "act", "reward"])
def test_what_hangs_is_given_up_and_closed_when_it_returns(part):
    env = world(**{part: lambda: time.sleep(1.0)})
    started = time.monotonic()
    rollouts = played(env)
    assert {rollout.outcome.value for rollout in rollouts} == {"deadline"} and time.monotonic() - started < 4.0
    assert all(rollout.reward is None and rollout.sequences == () for rollout in rollouts)


# --- what comes back -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        (bytearray(b"go"), "bytearray(b'go')"),
        (None, "None"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({"x": float("nan"), "y": {1, 2}}, '{"x": NaN, "y": [1, 2]}'),
        ("\ud800<|im_end|>\x00", "?<|im_end|>\x00"),
        ([], "[]"),
        ("", ""),
    ],
)
def test_every_value_that_a_tool_returns_is_text_that_can_be_tokenised(tiny, value, text):
    tokenizer = tiny.make()
    for rollout in played(world(act=lambda: value), Renderer(tokenizer), tokenizer=tokenizer):
        assert rollout.outcome.value == "finished" and rollout.tool_calls[0].content.startswith(text)
        assert rollout.sequences and sum(rollout.sequences[0].completion_mask) > 0


class Mute:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(("make", "says"), [(Mute, "no text"), (lambda: 10**5000, "Exceeds the limit (4300 digits)")])
def test_a_value_that_cannot_be_written_is_the_environments_failure(make, says):
    for rollout in played(world(act=make)):
        assert rollout.outcome.value == "tool_failed" and says in str(rollout.error) and rollout.reward is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", b"1", [1.0], 1j, 10**400])
def test_a_reward_that_is_no_finite_number_is_no_reward(value):
    for rollout in played(world(reward=lambda: value)):
        assert rollout.outcome.value == "reward_failed" and rollout.reward is None
        assert "It must return a finite number" in str(rollout.error)


@pytest.mark.parametrize("levels", [100, 300, 500, 900, 2000])
@pytest.mark.parametrize("way", ["ids", "message"])
def test_arguments_nested_without_end_are_the_models_own_doing(tiny, levels, way):
    """They would have failed the rollout, which a model then could do at will, and stopped the run in the end."""
    tokenizer = tiny.make()
    call = f'{{"name": "act", "arguments": {{"x": {"[" * levels}{"]" * levels}}}}}'
    turn = f"<tool_call>\n{call}\n</tool_call>" if way == "ids" else None
    if turn is None:
        turn = {"tool_calls": [{"name": "act", "arguments": f'{{"x": {"[" * levels}{"]" * levels}}}'}]}
    renderer = Renderer(tokenizer) if way == "ids" else None
    for rollout in played(
        world(),
        renderer,
        tokenizer=tokenizer if renderer else None,
        script=[turn, "done"],
        max_completion_length=50_000,
    ):
        assert rollout.outcome.value == "finished" and rollout.reward == 1.0, rollout.error
        (record,) = rollout.tool_calls
        assert record.error == "malformed", record
        assert "recursion" in record.content or "nested too deeply" in record.content, record
        json.dumps(rollout.messages)


@pytest.mark.parametrize(("part", "outcome"), [("reset", "reset_failed"), ("act", "tool_failed")])
def test_an_image_of_zero_size_is_the_environments_failure(part, outcome):
    processor = qwen3_vl()
    env = world(**{part: lambda: Image.new("RGB", (4, 0))})
    for rollout in played(env, Renderer(processor), tokenizer=processor.tokenizer):
        assert rollout.outcome.value == outcome and "4 x 0 pixels" in str(rollout.error)


def test_a_result_of_100_mb_is_taken_back_without_being_tokenised(tiny):
    tokenizer = tiny.make()
    started = time.monotonic()
    for rollout in played(
        world(act=lambda: "x y " * 25_000_000), Renderer(tokenizer), tokenizer=tokenizer,
        max_completion_length=512, deadlines=Deadlines(),
    ):  # fmt: skip
        assert rollout.outcome.value == "truncated" and rollout.reward == 1.0
        assert len(rollout.sequences[0].input_ids) < 1000
    assert time.monotonic() - started < 5.0


PRINTS = """
import resource, sys
from agentrl import Environment, play_episode

class Loud(Environment):
    def reset(self):
        return "go"

    def shout(self) -> str:
        '''Shout.'''
        for _ in range(1024):
            print("x" * (1 << 20))
        return "hoarse"

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
episode = play_episode(Loud, [{"tool_calls": [{"name": "shout", "arguments": {}}]}, "done"])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(episode.tool_calls[0].content, (after - before) // 1024, file=sys.stderr)
"""


def test_a_tool_that_prints_1_gb_prints_it_and_nothing_of_it_is_kept():
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    content, megabytes = done.stderr.split()
    assert content == "hoarse" and int(megabytes) < 64


@pytest.mark.parametrize("blocks", [False, True])
def test_a_text_that_no_context_holds_is_cut_and_the_model_is_told(blocks: bool):
    text = "ab" * 5_000_000
    env = world(act=lambda: [{"type": "text", "text": text}] if blocks else text)()

    async def acted():
        instance = Instance(env)
        await instance.reset({})
        return (await instance.call(instance.tools["act"], {}, 30.0)).content

    content = asyncio.run(acted())
    shown = content[0]["text"] if blocks else content
    assert shown.startswith("abab") and shown.endswith("... (cut: 10,000,000 characters in all)")
    assert len(shown) < 1_000_100
