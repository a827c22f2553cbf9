"""Samplers, environments and tools that misbehave: typed outcomes, retries, groups, and nothing left open."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed, RunStopped, SamplerError
from agentrl.pool import EnvironmentPool
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_group, run_groups
from agentrl.rollout.scoring import Scorer, name_sources
from agentrl.sampler import ScriptedSampler
from agentrl.types import Deadlines, Outcome, RolloutGroup, SampleOutput, Task

CALL = {"tool_calls": [{"name": "act", "arguments": {}}]}


class World:
    """Counts what is built, reset, scored and closed; `trouble` goes wrong, by name and number of the event."""

    def __init__(self, **trouble: Any) -> None:
        self.trouble, self.counts = trouble, {"build": 0, "reset": 0, "act": 0, "reward": 0, "close": 0}
        self.ids: list[str] = []
        self.seeds: list[int] = []
        self.alive: set[int] = set()
        self.lock = threading.Lock()

    def happens(self, event: str) -> None:
        with self.lock:
            self.counts[event] += 1
            number = self.counts[event]
        trouble = self.trouble.get(event)
        if callable(trouble):
            trouble(number)

    def factory(self, inline: bool = True) -> Any:
        world = self

        class Thing(Environment):
            run_inline = inline

            def __init__(self) -> None:
                world.happens("build")
                world.alive.add(id(self))

            def reset(self, rollout_id: str, seed: int) -> str:
                world.ids.append(rollout_id)
                world.seeds.append(seed)
                world.happens("reset")
                return "go"

            def get_reward(self) -> float:
                world.happens("reward")
                return 1.0

            def act(self) -> str:
                """Act."""
                world.happens("act")
                return "fine"

            def close(self) -> None:
                world.happens("close")
                world.alive.remove(id(self))

        return Thing


def every(k: int, error: BaseException | None = None) -> Any:
    def trouble(number: int) -> None:
        if number % k == 0:
            raise error or ValueError("broken")

    return trouble


def always(error: BaseException | None = None) -> Any:
    return every(1, error)


def run(world: World, script: Any = None, *, groups: int = 1, size: int = 4, inline: bool = True, sampler: Any = None,
        sources: Any = (), **settings: Any) -> list[RolloutGroup]:  # fmt: skip
    """The groups, played; every environment is closed exactly once afterwards, whatever happened (F095)."""

    async def play() -> list[RolloutGroup]:
        pool = EnvironmentPool(world.factory(inline))
        engine = RolloutEngine(
            sampler or ScriptedSampler(script or [CALL, "done"]),
            None,
            {None: pool},
            settings=RolloutSettings(**settings),
        )
        plans = [GroupPlan(f"g{i}", Task(i, 0, i), size) for i in range(groups)]
        try:
            return await run_groups(engine, Scorer(name_sources(sources)), plans)
        finally:
            await pool.close()
            for _ in range(200):  # an instance whose call hangs is closed when the call returns
                if world.alive:
                    await asyncio.sleep(0.01)
            assert world.counts["close"] == pool.built and not world.alive

    return asyncio.run(play())


def outcomes(groups: list[RolloutGroup]) -> list[str]:
    return [rollout.outcome.value for group in groups for rollout in group.rollouts]


# --- retries ---------------------------------------------------------------------------
def test_f089_reset_that_fails_every_third_time_costs_no_rollout():
    """F089: 100 rollouts are played, and the number of environments built stays bounded."""
    world = World(reset=every(3))
    groups = run(world, groups=25, size=4, max_concurrent=8)
    assert outcomes(groups) == ["finished"] * 100 and world.counts["reward"] == 100
    assert {rollout.attempts for group in groups for rollout in group.rollouts} >= {1, 2}
    assert world.counts["build"] <= 8 + world.counts["reset"] // 3


def test_an_instance_that_failed_is_never_used_again():
    class Fragile(Environment):
        run_inline, used = True, 0

        def __init__(self) -> None:
            self.broken = False

        def reset(self) -> str:
            Fragile.used += 1
            self.broken = self.broken or Fragile.used == 1
            if self.broken:
                raise ValueError("broken for good")
            return "go"

    async def play() -> RolloutGroup:
        engine = RolloutEngine(ScriptedSampler(["done"]), None, {None: EnvironmentPool(Fragile)})
        return await run_group(engine, Scorer([]), GroupPlan("g", Task(0, 0, 0), 3))

    group = asyncio.run(play())
    assert outcomes([group]) == ["finished"] * 3 and [r.attempts for r in group.rollouts] == [2, 1, 1]


def test_f095_an_environment_that_fails_before_the_first_turn_is_closed_once():
    """F095: reset fails for good; every instance built for the tries is closed (`run` checks), nothing was sampled."""
    world = World(reset=always())
    (group,) = run(world, size=2)
    assert outcomes([group]) == ["reset_failed"] * 2 and group.dropped
    assert world.counts["reset"] == 6 and all(r.attempts == 3 and not r.turns for r in group.rollouts)
    assert "ValueError: broken" in str(group.rollouts[0].error) and group.rollouts[0].rewards == {}


def test_f099_every_member_has_a_rollout_id_of_its_own():
    """F099: unique over groups and members."""
    world = World()
    run(world, groups=3, size=4)
    assert len(set(world.ids)) == len(world.ids) == 12
    assert sorted(world.seeds) == [0] * 4 + [1] * 4 + [2] * 4  # a group shares its start state


def look(environments: list[Any]) -> list[float]:
    """Instances are kept until it has seen them."""
    return [float(len(environments)) for _ in environments]


@pytest.mark.parametrize("inline", [True, False])
def test_building_another_instance_may_fail_too(inline):
    def trouble(number: int) -> None:
        if number in (2, 3):
            raise OSError("no more machines")

    (group,) = run(World(build=trouble), size=2, inline=inline, sources=[look])
    assert outcomes([group]) == ["finished"] * 2 and sorted(r.attempts for r in group.rollouts) == [1, 3]

    def later(number: int) -> None:
        if number > 1:
            raise OSError("no more machines")

    (group,) = run(World(build=later), size=2, inline=inline, sources=[look])
    assert sorted(outcomes([group])) == ["finished", "reset_failed"] and group.dropped
    (lost,) = [r for r in group.rollouts if r.outcome.failed]
    assert "no more machines" in str(lost.error) and lost.environment == "Thing" and lost.messages == []


# --- model errors are text, ours are outcomes ------------------------------------------
@pytest.mark.parametrize(
    "error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), StopIteration(), RecursionError()]
)
def test_f081_a_tool_that_raises_is_text_for_the_model(error):
    """F081: on its own thread, whatever it raises; the run goes on."""
    (group,) = run(World(act=always(error)), inline=False)
    assert outcomes([group]) == ["finished"] * 4
    assert all(
        type(error).__name__ in r.tool_calls[0].content and r.tool_calls[0].error == "raised" for r in group.rollouts
    )


def test_a_dead_environment_under_a_tool_is_no_reward_of_zero():
    (group,) = run(World(act=always(EnvironmentFailed("the sandbox died"))), size=2)
    assert outcomes([group]) == ["tool_failed"] * 2
    assert all(r.reward is None and r.rewards == {} and r.sequences == () for r in group.rollouts)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)])
def test_a_failing_reward_is_no_reward_of_zero(error):
    (group,) = run(World(reward=always(error)), size=2, inline=False)
    assert outcomes([group]) == ["reward_failed"] * 2 and group.rollouts[0].reward is None


# --- groups ----------------------------------------------------------------------------
def test_one_failed_sibling_leaves_the_others_their_baseline():
    broken: list[int] = []

    def reward(completions: list[Any]) -> list[float]:
        broken.append(len(completions))
        return [2.0] * len(completions)

    world = World(reset=lambda number: (_ for _ in ()).throw(ValueError("broken")) if number == 1 else None)
    (group,) = run(world, sources=[reward], max_attempts=1)
    assert outcomes([group]) == ["reset_failed"] + ["finished"] * 3 and broken == [3] and not group.dropped
    assert [r.reward for r in group.rollouts] == [None, 3.0, 3.0, 3.0]
    assert [r.rewards for r in group.rollouts] == [{}] + [{"Thing": 1.0, "reward": 2.0}] * 3


@pytest.mark.parametrize(
    ("size", "alive", "least", "dropped"),
    [(4, 1, 2, True), (4, 2, 2, False), (1, 1, 2, False), (1, 0, 2, True), (4, 1, 1, False)],
)
def test_the_group_policy(size, alive, least, dropped):
    world = World(reset=lambda number: (_ for _ in ()).throw(ValueError("broken")) if number > alive else None)
    (group,) = run(world, size=size, max_attempts=1, min_survivors=least)
    assert outcomes([group]).count("finished") == alive and group.dropped is dropped


def test_too_many_failures_in_a_row_stop_the_run_and_say_what_failed():
    with pytest.raises(
        RunStopped, match=r"(?s)4 rollouts in a row failed \(reset_failed\) in environment Thing.*row \d.*broken"
    ):
        run(World(reset=always()), groups=8, size=2, max_failures_in_row=4)


# --- samplers --------------------------------------------------------------------------
class Bad:
    """A sampler that answers as told."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.released = answer, 0

    async def sample(self, request: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        if callable(self.answer):
            return await self.answer()
        return self.answer

    def release(self, conversation_id: str) -> None:
        self.released += 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "must return a SampleOutput"),
        (SampleOutput(None, None, "stop"), "neither ids nor a message"),
        (SampleOutput([1, 2], [-1.0], "stop"), "1 log-probs for 2 ids"),
        (SampleOutput([1], [float("nan")], "stop"), "not finite"),
        (SampleOutput([1], [float("-inf")], "stop"), "not finite"),
        (SampleOutput((1, 2), [-1.0, -1.0], "stop"), "list of int"),
        (SampleOutput([1.5], [-1.0], "stop"), "list of int"),
        (SampleOutput([1] * 600, [-1.0] * 600, "length"), "600 tokens where 512"),
        (SampleOutput([1], [-1.0], "eos"), "finish reason 'eos'"),
        (SampleOutput([1], [-1.0], "stop"), "no tokenizer"),
        (SampleOutput(None, None, "stop", 0, {"tool_calls": 7}), "cannot be read"),
        (SamplerError("server gone"), "server gone"),
        (ConnectionError("reset by peer"), "ConnectionError: reset by peer"),
        (TimeoutError("read"), "TimeoutError: read"),
        (asyncio.CancelledError(), "cancelled the turn"),
    ],
)  # fmt: skip
def test_garbage_from_a_sampler_is_a_typed_outcome(answer, says):
    world, sampler = World(), Bad(answer)
    (group,) = run(world, sampler=sampler, size=2)
    assert outcomes([group]) == ["sampler_failed"] * 2 and says in str(group.rollouts[0].error)
    assert sampler.released == 6 and group.rollouts[0].reward is None
    assert world.counts["build"] <= 3  # the environment was not at fault: it is used again


def test_messages_with_odd_calls_are_answered_with_text():
    odd: list[Any] = [None, 3, {}, {"name": ""}]
    odd += [{"function": {"name": "act", "arguments": given}} for given in ("{", [1], 0, None, " ")]
    (group,) = run(World(), [{"content": None, "tool_calls": odd}, {"content": 7}], size=1)
    kinds = [c.error for c in group.rollouts[0].tool_calls]
    assert kinds == ["malformed"] * 7 + [None, None]
    assert [c.id for c in group.rollouts[0].tool_calls] == [f"call_{i}" for i in range(9)]
    assert len(group.rollouts[0].messages[1]["tool_calls"]) == 2 and group.rollouts[0].messages[-1]["content"] == "7"


# --- deadlines -------------------------------------------------------------------------
async def hang() -> Any:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("where", "deadlines"),
    [
        ("turn", Deadlines(turn_s=0.05)), ("episode", Deadlines(episode_s=0.05)), ("reset", Deadlines(reset_s=0.05)),
        ("act", Deadlines(tool_s=0.05)), ("reward", Deadlines(reward_s=0.05)), ("build", Deadlines(reset_s=0.05)),
    ],
)  # fmt: skip
def test_every_stage_has_its_deadline(where, deadlines):
    let_go = threading.Event()
    trouble = {where: lambda number: number > (where == "build") and let_go.wait(5)}
    world = World(**({} if where in ("turn", "episode") else trouble))
    sampler = Bad(hang) if where in ("turn", "episode") else None
    threading.Timer(1.0, let_go.set).start()  # or closing what hangs would be waited for
    started = time.monotonic()
    groups = run(world, sampler=sampler, size=2, inline=False, max_attempts=1, deadlines=deadlines)
    hung = [r for r in groups[0].rollouts if r.outcome.failed]
    assert {r.outcome for r in hung} == {Outcome.DEADLINE} and len(hung) == (1 if where == "build" else 2)
    assert "longer than 0.05 s" in str(hung[0].error) or "within 0.05 s" in str(hung[0].error)
    assert time.monotonic() - started < 4


def test_f081_a_slow_tool_holds_nobody_up():
    """F081: eight sleeping tools take as long as one, and the loop's heart goes on beating."""
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    async def play() -> float:
        pool = EnvironmentPool(World(act=lambda number: time.sleep(0.3)).factory(inline=False))
        engine = RolloutEngine(ScriptedSampler([CALL, "done"]), None, {None: pool})
        pulse, started = asyncio.ensure_future(heart()), time.monotonic()
        await run_group(engine, Scorer([]), GroupPlan("g", Task(0, 0, 0), 8))
        pulse.cancel()
        took = time.monotonic() - started
        await pool.close()
        return took

    assert asyncio.run(play()) < 1.2 and beats >= 10


# --- many, and cancelled ---------------------------------------------------------------
def test_hundreds_of_episodes_at_once():
    async def sample(request: Any) -> Any:
        await asyncio.sleep(0)
        return CALL if request.seed[-1] < 2 else "done"

    world = World()
    groups = run(world, sample, groups=100, size=4, max_concurrent=64)
    assert outcomes(groups) == ["finished"] * 400 and world.counts["act"] == 800
    assert world.counts["build"] <= 64  # no reward function asks for environments: they are free after the episode
    world = World()
    assert [r.rewards["look"] for r in run(world, sample, size=8, sources=[look])[0].rollouts] == [8.0] * 8
    assert world.counts["build"] == 8


@pytest.mark.parametrize("inline", [True, False])
def test_f095_cancelled_in_the_middle_everything_is_closed_once(inline):
    """F095: the first error ends all groups; instances at work, idle and hung are each closed once (`run` checks)."""

    def act(number: int) -> None:
        time.sleep(0.01)

    async def broken_after_a_while() -> Any:
        await asyncio.sleep(0.05)
        raise ConfigurationError("stop it")

    async def sample(request: Any) -> Any:
        return await broken_after_a_while() if request.seed[-1] == 2 else CALL

    with pytest.raises(ConfigurationError, match="stop it"):
        run(World(act=act), sample, groups=6, size=4, inline=inline)


def test_a_reward_function_that_raises_ends_the_run_and_closes_everything():
    def broken(completions: list[Any]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(KeyError) as caught:
        run(World(), sources=[broken], groups=3)
    assert caught.value.__notes__ == ["Raised by the reward function 'broken'."]
