"""Reward functions: how they are named, called and believed."""

from __future__ import annotations

import asyncio
import functools
import signal
import sqlite3
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest

from agentrl.environment import Environment
from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.group import GroupPlan, run_group, run_groups, with_advantages
from agentrl.rollout.scoring import Scorer, check_rewards, name_sources
from agentrl.sampler import ScriptedSampler
from agentrl.types import Rollout, RolloutGroup, Task


class Counter(Environment):
    run_inline = True

    def reset(self, start: int = 0) -> str:
        self.count = start
        return "count"

    def get_reward(self) -> float:
        return float(self.count)

    def increment(self) -> str:
        """Count one further."""
        self.count += 1
        return str(self.count)


def play(functions: Any, row: Any = None, *, size: int = 2, env: Any = Counter, weights: Any = None,
         scorer: Scorer | None = None, state: Any = None) -> RolloutGroup:  # fmt: skip
    """A group whose member 0 counts once and whose other members do not."""

    def script(request: Any) -> Any:
        first = request.conversation_id.startswith("g.0/") and request.seed[-1] == 0
        return {"tool_calls": [{"name": "increment", "arguments": {}}]} if first and request.tools else "done"

    async def run() -> RolloutGroup:
        pool = EnvironmentPool(env)
        engine = RolloutEngine(ScriptedSampler(script), None, {None: pool})
        made = scorer or Scorer(name_sources(functions, weights, taken=[pool.name]))
        try:
            return await run_group(engine, made, GroupPlan("g", Task(0, 0, 0, row or {}), size), trainer_state=state)
        finally:
            await pool.close()

    return asyncio.run(run())


def rewards(group: RolloutGroup, name: str) -> list[float | None]:
    return [rollout.rewards[name] for rollout in group.rollouts]


# --- what is passed --------------------------------------------------------------------
def test_f087_environments_and_every_documented_argument():
    """F087: environments are there with their state, as are the columns, the ids, the state and both loggers."""
    seen: dict[str, Any] = {}

    def everything(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        kwargs["log_extra"]("final", [env.count for env in kwargs["environments"]])
        kwargs["log_metric"]("twice", 2)
        kwargs["log_metric"]("twice", np.float32(3))
        return [0.5] * len(kwargs["completions"])

    group = play([everything], {"start": 3, "prompt": [{"role": "user", "content": "go "}]}, state="state")
    assert seen["start"] == [3, 3] and seen["trainer_state"] == "state" and "prompt" not in seen
    assert [env.count for env in seen["environments"]] == [4, 3]
    assert seen["prompts"] == [[{"role": "user", "content": "go count"}]] * 2
    assert [[m["role"] for m in c] for c in seen["completions"]] == [["assistant", "tool", "assistant"], ["assistant"]]
    assert seen["completion_ids"] == [[], []]
    assert [r.extra for r in group.rollouts] == [{"final": 4}, {"final": 3}] and group.metrics["twice"] == [2.0, 3.0]
    assert [r.rewards for r in group.rollouts] == [
        {"Counter": 4.0, "everything": 0.5}, {"Counter": 3.0, "everything": 0.5}
    ]  # fmt: skip
    assert [r.reward for r in group.rollouts] == [4.5, 3.5]


def test_plain_prompts_give_plain_completions_and_no_environments():
    def texts(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        assert "environments" not in kwargs
        return [float(p == "hello" and c == "done") for p, c in zip(prompts, completions, strict=True)]

    assert rewards(play([texts], {"prompt": "hello"}, env=None), "texts") == [1.0, 1.0]


def test_a_missing_argument_names_function_and_argument():
    def needs(completions: list[Any], answer: list[str]) -> list[float]:
        return [0.0] * len(answer)

    with pytest.raises(ConfigurationError, match=r"'needs' needs 'answer', and no column.*completions"):
        play([needs])
    assert rewards(play([lambda completions, extra=None: [1, 2]]), "lambda") == [1.0, 2.0]


# --- kinds of functions ----------------------------------------------------------------
async def slow(completions: list[Any], wait: float = 0.1) -> list[float]:
    await asyncio.sleep(wait)
    return [1.0] * len(completions)


class Judge:
    def __call__(self, completions: list[Any]) -> list[float]:
        return [2.0] * len(completions)

    def method(self, completions: list[Any]) -> list[float]:
        return [3.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions: list[Any]) -> list[float]:
        return [4.0] * len(completions)


def fixed(completions: list[Any], value: float) -> list[float]:
    return [value] * len(completions)


def test_every_kind_of_function_and_its_name():
    functions = [
        slow, Judge(), Judge().method, AsyncJudge(), functools.partial(fixed, value=5), lambda completions: [6, 6],
        functools.partial(slow, wait=0.0), lambda completions: slow(completions, 0.0), Judge(),
    ]  # fmt: skip
    group = play(functions, env=None, row={"prompt": "x"})
    assert group.rollouts[0].rewards == {
        "slow": 1.0, "Judge": 2.0, "method": 3.0, "AsyncJudge": 4.0, "fixed": 5.0, "lambda": 6.0, "slow_2": 1.0,
        "lambda_2": 1.0, "Judge_2": 2.0,
    }  # fmt: skip
    assert group.rollouts[0].reward == 25.0


def test_async_functions_wait_together():
    started = time.monotonic()
    play([slow, slow, slow], env=None, row={"prompt": "x"})
    assert time.monotonic() - started < 0.25


def test_weights_and_names():
    group = play([slow, Judge()], weights=[10, 0.5])
    assert [r.reward for r in group.rollouts] == [1.0 + 10.0 + 1.0, 0.0 + 10.0 + 1.0]  # the environment's has weight 1
    assert [s.name for s in name_sources([Judge(), Judge()], taken=["Judge"])] == ["Judge_2", "Judge_3"]
    with pytest.raises(ConfigurationError, match="1 values for 2 reward functions"):
        name_sources([slow, slow], [1.0])
    with pytest.raises(ConfigurationError, match="Reward function 1 is a int"):
        name_sources([slow, 3])  # type: ignore[list-item]


def test_none_rewards_leave_a_function_out_of_the_sum():
    group = play([lambda completions: [None, 1.0], lambda completions: [None, None]], env=None, row={"prompt": "x"})
    assert [r.reward for r in group.rollouts] == [None, 1.0]
    assert rewards(group, "lambda") == [None, 1.0] and rewards(group, "lambda_2") == [None, None]


# --- what is believed ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([1.0], "1 values for 3 completions"), ([1.0] * 4, "4 values for 3"), (1.0, "a float"),
        (np.float64(1), "a float"),
        (None, "a NoneType"), ((x for x in (1, 2, 3)), "a generator"), ("abc", "a str"), ({1: 1, 2: 2, 3: 3}, "a dict"),
        ({1, 2, 3}, "a set"), (np.ones((3, 1)), r"returned \[1.0\]"), ([1, "2", 3], "returned '2'"),
        ([1, float("inf"), 3], "must be finite"), ([1, 1j, 3], "returned 1j"), (np.array(1.0), "a float"),
    ],
)  # fmt: skip
def test_f101_a_wrong_answer_names_function_and_counts(answer, says):
    """F101: nothing is broadcast, nothing is guessed."""
    with pytest.raises(ConfigurationError, match=f"Reward function 'judge' returned.*{says}|'judge'.*{says}"):
        check_rewards(answer, 3, "judge")


@pytest.mark.parametrize(
    "answer",
    [(1, 0, None), [True, False, float("nan")], np.array([1.0, 0.0, np.nan]), np.array([1, 0, None], dtype=object)],
)
def test_f101_numbers_of_every_kind_pass(answer):
    """F101: tuples, bools, numpy and NaN (not scored)."""
    assert check_rewards(answer, 3, "judge") == [1.0, 0.0, None]
    assert check_rewards(np.array([True, False]), 2, "judge") == [1.0, 0.0]


def test_f101_tensors_pass():
    torch = pytest.importorskip("torch")
    assert check_rewards(torch.tensor([1.0, 0.5]), 2, "judge") == [1.0, 0.5]
    assert check_rewards([torch.tensor(1.0), torch.tensor(2)], 2, "judge") == [1.0, 2.0]
    with pytest.raises(ConfigurationError, match="'judge'"):
        check_rewards([torch.ones(2), torch.ones(2)], 2, "judge")


@pytest.mark.parametrize(
    ("values", "says"), [([1], "1 values for 2"), ("ab", "a string"), ([1, 2, 3], "3 values for 2")]
)
def test_log_extra_wants_one_value_for_each_completion(values, says):
    def logs(completions: list[Any], log_extra: Any) -> list[float]:
        log_extra("column", values)
        return [0.0] * len(completions)

    with pytest.raises(ConfigurationError, match=rf"log_extra\('column'\) got {says}"):
        play([logs])


# --- where sync functions run ----------------------------------------------------------
@pytest.mark.filterwarnings("ignore:coroutine 'slow' was never awaited")  # by the asyncio.run that was refused
def test_sync_functions_run_where_they_can():
    """Quick ones and those that need the main thread stay; slow ones and those with a loop of their own move."""
    where: dict[str, list[bool]] = {"quick": [], "slow": [], "loop": [], "signal": [], "sqlite": []}
    database = sqlite3.connect(":memory:")

    def here(name: str, count: int) -> list[float]:
        where[name].append(threading.current_thread() is threading.main_thread())
        return [1.0] * count

    def quick(completions: list[Any]) -> list[float]:
        return here("quick", len(completions))

    def takes_time(completions: list[Any]) -> list[float]:
        time.sleep(0.01)
        return here("slow", len(completions))

    def own_loop(completions: list[Any]) -> list[float]:
        return asyncio.run(slow(completions, 0.0)) and here("loop", len(completions))

    def alarm(completions: list[Any]) -> list[float]:
        time.sleep(0.01)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return here("signal", len(completions))

    def query(completions: list[Any]) -> list[float]:
        time.sleep(0.01)
        database.execute("select 1")
        return here("sqlite", len(completions))

    scorer = Scorer(name_sources([quick, takes_time, own_loop, alarm, query]))
    for _ in range(3):
        group = play([], {"prompt": "x"}, env=None, scorer=scorer)
        assert [r.reward for r in group.rollouts] == [5.0, 5.0]
    assert where == {
        "quick": [True] * 3, "slow": [True, False, False], "loop": [False] * 3,
        "signal": [True] * 3, "sqlite": [True] * 3,
    }  # fmt: skip


def test_when_one_function_fails_the_others_are_not_left_behind():
    cancelled: list[bool] = []

    async def waits(completions: list[Any]) -> list[float]:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return []

    def breaks(completions: list[Any]) -> list[float]:
        raise ZeroDivisionError("by zero")

    async def breaks_later(completions: list[Any]) -> list[float]:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError("later")

    for function in (breaks_later, breaks):
        with pytest.raises(ZeroDivisionError) as caught:
            play([waits, function], env=None, row={"prompt": "x"})
        assert function.__name__ in caught.value.__notes__[0]
    assert cancelled == [True]  # the sync one fails before the other has begun to wait


# --- one reward per rollout ------------------------------------------------------------
def test_f109_a_reward_belongs_to_the_rollout_not_to_its_sequences():
    """F109: rewards 1 (in several turns) and 0 (in one) have the mean 0.5; an advantage is one number per rollout."""
    group = play([])
    assert [len(r.turns) for r in group.rollouts] == [2, 1] and [r.reward for r in group.rollouts] == [1.0, 0.0]
    values = [r.reward or 0.0 for r in group.rollouts]
    mean = sum(values) / len(values)
    done = with_advantages(group, [value - mean for value in values])
    assert [r.advantage for r in done.rollouts] == [0.5, -0.5]
    with pytest.raises(ValueError, match="zip"):
        with_advantages(group, [0.1] * 3)
    assert all(isinstance(r, Rollout) for r in done.rollouts)


def test_start_states_that_differ_within_a_group_are_counted_and_warned_about_once():
    class Dice(Environment):
        run_inline, throws = True, 0

        def reset(self) -> str:
            Dice.throws += 1
            return f"you threw {Dice.throws}"

    async def run(env: type) -> list[RolloutGroup]:
        engine = RolloutEngine(ScriptedSampler(["done"]), None, {None: EnvironmentPool(env)})
        return await run_groups(engine, Scorer([]), [GroupPlan(f"g{i}", Task(i, 0, i), 2) for i in range(3)])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counted = [g.metrics["rollout/start_state_mismatch"] for env in (Dice, Counter) for g in asyncio.run(run(env))]
    assert counted == [[1.0]] * 3 + [[0.0]] * 3
    assert ["began differently in Dice" in str(w.message) for w in caught] == [True]
