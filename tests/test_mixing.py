"""Several environments in one run: settings of each, whose turn it is, and what a broken one does to the others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_kit import Door

from agentrl import EnvironmentSpec
from agentrl.cli.main import main
from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, RunStopped
from agentrl.mixing import Mixture, check_weights, specs_of, weights_of
from agentrl.pool import make_pools
from agentrl.record import read_episodes
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_groups
from agentrl.rollout.scoring import Scorer
from agentrl.sampler import ScriptedSampler
from agentrl.tasks import TaskSource
from agentrl.train.generation import AdvantageSettings, SharedRollout, compare, play_cycle
from agentrl.train.metrics import MetricWindow, Reported, add_reward_metrics, add_rollout_metrics
from agentrl.train.run_build import load_parts
from agentrl.train.run_file import read_run_file
from agentrl.types import Deadlines, Outcome, RolloutGroup, Task, TrainingSequence

ACT = {"tool_calls": [{"name": "act", "arguments": {}}]}


class Healthy(Environment):
    """Notes when each of its episodes is over."""

    run_inline = True
    ended: list[float]

    def reset(self, seed: int) -> str:
        self._calls, self._seed = 0, seed
        return "go"

    def act(self) -> str:
        """Act."""
        self._calls += 1
        return "fine"

    def get_reward(self) -> float:
        type(self).ended.append(time.monotonic())
        return float(self._calls)


class Hanging(Environment):
    """Its tool does not return before the test is over."""

    released = threading.Event()

    def reset(self, seed: int) -> str:
        return "go"

    def act(self) -> str:
        """Act."""
        Hanging.released.wait(60)
        return "late"

    def get_reward(self) -> float:
        return 100.0  # would ruin a baseline


class Crashing(Environment):
    """Its reset fails."""

    run_inline = True

    def reset(self, seed: int) -> str:
        raise ValueError("the server is gone")

    def act(self) -> str:
        """Act."""
        return "never"

    def get_reward(self) -> float:
        return -100.0


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    Healthy.ended, Door.log = [], []
    Hanging.released.clear()
    yield
    Hanging.released.set()  # threads that were given up end


def play(environments: Any, counts: dict[str, int] | list[str], size: int = 4, script: Any = None, sampler: Any = None,
         **settings: Any) -> list[RolloutGroup]:  # fmt: skip
    """Groups of these environments, played side by side."""

    async def work() -> list[RolloutGroup]:
        pools = make_pools(environments)
        engine = RolloutEngine(
            sampler or ScriptedSampler(script or [ACT, "done"]), None, pools, settings=RolloutSettings(**settings)
        )
        names = [name for name, count in counts.items() for _ in range(count)] if isinstance(counts, dict) else counts
        plans = [GroupPlan(f"g{i}", Task(i, 0, i, environment=name), size) for i, name in enumerate(names)]
        try:
            return await run_groups(engine, Scorer([]), plans)
        finally:
            for pool in pools.values():
                await pool.close()

    return asyncio.run(work())


def outcomes(groups: list[RolloutGroup], name: str) -> Counter[Outcome]:
    return Counter(r.outcome for group in groups if group.task.environment == name for r in group.rollouts)


# --- one that hangs, one that crashes, one that is healthy -----------------------------
TROUBLED = {
    "healthy": Healthy,
    "hanging": EnvironmentSpec(Hanging, deadlines={"tool_s": 1.0}, max_failures_in_row=100),
    "crashing": EnvironmentSpec(Crashing, max_failures_in_row=100),
}


def test_a_hanging_and_a_crashing_environment_neither_hold_up_nor_poison_a_healthy_one():
    """F081: the healthy episodes are over before the hanging tool's own deadline; the failed have no reward at all."""
    started = time.monotonic()
    groups = play(TROUBLED, {"hanging": 2, "crashing": 2, "healthy": 4}, max_attempts=1)
    took = time.monotonic() - started
    assert outcomes(groups, "healthy") == {Outcome.FINISHED: 16}
    assert outcomes(groups, "hanging") == {Outcome.DEADLINE: 8}
    assert outcomes(groups, "crashing") == {Outcome.RESET_FAILED: 8}
    assert len(Healthy.ended) == 16 and max(Healthy.ended) - started < 1.0 < took < 20
    for group in groups:
        healthy = group.task.environment == "healthy"
        assert group.dropped is not healthy
        assert {r.reward for r in group.rollouts} == ({1.0} if healthy else {None})


def test_failed_rollouts_of_one_environment_are_in_nobodys_baseline():
    script = lambda request: ACT if request.seed[-1] < 1 + request.seed[-2] % 2 else "done"  # noqa: E731
    settings = AdvantageSettings(
        "batch", "sum_then_normalize", {"Healthy": 1.0, "Hanging": 1.0, "Crashing": 1.0}, False
    )
    alone = play({"healthy": Healthy}, {"healthy": 3}, script=script)
    mixed = play(TROUBLED, {"healthy": 3, "hanging": 1, "crashing": 1}, script=script, max_attempts=1)
    first, second = (
        play_cycle([_plan(g) for g in groups], lambda plans, groups=groups: groups, settings, 0, 1)
        for groups in (alone, mixed)
    )
    assert len({r.reward for g in alone for r in g.rollouts}) == 2  # there is something to compare
    assert [item.advantage for item in second.items[:12]] == [item.advantage for item in first.items]
    assert [(item.advantage, item.active) for item in second.items[12:]] == [(0.0, False)] * 8


def _plan(group: RolloutGroup) -> GroupPlan:
    return GroupPlan(group.id, group.task, len(group.rollouts))


def test_too_many_failures_of_one_environment_name_it_though_others_are_fine():
    """Healthy episodes between them do not set its count back, or a run could go on for days with one of two dead."""
    said = r"(?s)3 rollouts in a row failed \(reset_failed\) in environment 'bad' \(Crashing\).*the server is gone"
    with pytest.raises(RunStopped, match=said):
        play({"good": Healthy, "bad": Crashing}, ["bad", "good"] * 4, size=1, max_attempts=1, max_failures_in_row=3,
             max_concurrent=1)  # fmt: skip


def test_failures_of_different_environments_are_not_added_up():
    both = {"hanging": EnvironmentSpec(Hanging, deadlines={"tool_s": 0.05}), "crashing": Crashing}
    groups = play(both, {"hanging": 1, "crashing": 1}, max_attempts=1, max_failures_in_row=5)
    assert outcomes(groups, "crashing") == {Outcome.RESET_FAILED: 4}


def test_an_environment_may_have_its_own_number_of_failures():
    strict = {"good": Healthy, "bad": EnvironmentSpec(Crashing, max_failures_in_row=2)}
    with pytest.raises(RunStopped, match="2 rollouts in a row failed"):
        play(strict, {"good": 1, "bad": 1}, max_attempts=1)


def test_a_broken_sampler_is_counted_over_all_environments():
    def broken(request: Any) -> Any:
        raise OSError("no connection")

    with pytest.raises(RunStopped, match=r"(?s)6 rollouts in a row failed \(sampler_failed\).*no connection"):
        play({"a": Healthy, "b": Healthy}, {"a": 1, "b": 1}, script=broken, max_attempts=1, max_failures_in_row=6)


def test_one_environment_cannot_take_all_the_places():
    """Two places in all: a hanging environment that may have one leaves the other to the healthy one."""
    slow = {"healthy": Healthy, "hanging": EnvironmentSpec(Hanging, deadlines={"tool_s": 0.6}, max_concurrent=1)}
    started = time.monotonic()
    groups = play(slow, {"hanging": 1, "healthy": 4}, size=3, max_attempts=1, max_concurrent=2)
    assert time.monotonic() - started > 1.7  # three after each other
    assert outcomes(groups, "healthy") == {Outcome.FINISHED: 12} and max(Healthy.ended) - started < 0.6


# --- settings of one environment -------------------------------------------------------
def test_turns_and_deadlines_are_the_environments_own():
    forever = [ACT] * 20
    several = {
        "few": EnvironmentSpec(Healthy, max_turns=2),
        "none": EnvironmentSpec(Healthy, max_turns=0),
        "as run": Healthy,
    }
    groups = play(several, dict.fromkeys(several, 1), script=forever, max_tool_calling_iterations=5)
    assert [group.rollouts[0].reward for group in groups] == [2.0, 0.0, 5.0]
    assert {r.outcome for group in groups for r in group.rollouts} == {Outcome.TOOL_LIMIT}


def test_what_an_environment_does_not_say_is_as_in_the_run():
    run = RolloutSettings(max_completion_length=100, max_tool_calling_iterations=7, deadlines=Deadlines(tool_s=9.0))
    assert run.of(None) is run and run.of(EnvironmentSpec(Healthy)) == run
    own = run.of(EnvironmentSpec(Healthy, max_completion_length=40, deadlines={"reset_s": None}))
    assert (own.max_completion_length, own.max_tool_calling_iterations) == (40, 7)
    assert (own.deadlines.tool_s, own.deadlines.reset_s) == (9.0, None)
    assert run.of(EnvironmentSpec(Healthy, max_completion_length=400)).max_completion_length == 100
    assert RolloutSettings(max_completion_length=None).of(EnvironmentSpec(Healthy)).max_completion_length is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: EnvironmentSpec(None), "one environment"),
        (lambda: EnvironmentSpec({"a": Healthy}), "one environment"),
        (lambda: EnvironmentSpec(Healthy, weight=0), "above 0"),
        (lambda: EnvironmentSpec(Healthy, weight=float("nan")), "above 0"),
        (lambda: EnvironmentSpec(Healthy, weight="2"), "above 0"),  # type: ignore[arg-type]
        (lambda: EnvironmentSpec(Healthy, max_turns=-1), "max_turns must be a whole number from 0"),
        (lambda: EnvironmentSpec(Healthy, max_concurrent=0), "max_concurrent must be a whole number from 1"),
        (lambda: EnvironmentSpec(Healthy, max_turns=True), "max_turns"),
        (lambda: EnvironmentSpec(Healthy, deadlines={"tools": 1.0}), "no deadline 'tools'; there are: reset_s, tool_s"),
        (lambda: EnvironmentSpec(Healthy, deadlines={"tool_s": 0}), "above 0, or None"),
        (lambda: EnvironmentSpec(Healthy, deadlines=5.0), "a dict of seconds"),  # type: ignore[arg-type]
        (lambda: specs_of({}), "empty dict"),
        (lambda: specs_of({3: Healthy}), "the name 3"),
        (lambda: make_pools({"a": EnvironmentSpec(Healthy())}), "Pass the class Healthy itself"),
        (lambda: check_weights({"a": Healthy, "b": EnvironmentSpec(Healthy, weight=2)}, [{}]), "'b' has a weight"),
    ],
)
def test_bad_settings_are_one_clear_sentence(made: Any, says: str):
    with pytest.raises(ConfigurationError, match=says):
        made()


def test_a_run_file_says_the_same(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        'version = 1\n[model]\ntiny = true\n[environment.hunt]\nid = "agentrl/Hunt-v0"\nshare = 2\nmax_turns = 3\n'
        '[environment.hunt.deadlines]\ntool_s = 5\n[environment.courier]\nid = "agentrl/Courier-v0"\n'
    )
    parts = load_parts(read_run_file(file))
    hunt = parts.factory["hunt"]
    assert (hunt.max_turns, dict(hunt.deadlines), hunt.weight) == (3, {"tool_s": 5}, 2)
    assert parts.factory["courier"].weight == 1 and parts.train_rows is None
    with pytest.raises(ConfigurationError, match=r"\[environment.hunt\]: There is no deadline 'tols'"):
        load_parts(read_run_file(file, ["environment.hunt.deadlines.tols=1"]))
    (tmp_path / "rows.jsonl").write_text('{"environment": "hunt"}\n')
    with pytest.raises(
        ConfigurationError, match=r"'environment.hunt.share' is for several environments without \[data\]"
    ):
        load_parts(read_run_file(file, ["data.path=rows.jsonl"]))


def test_agentrl_eval_plays_as_many_tasks_of_a_mixture_as_it_is_told(tmp_path: Path, capsys: Any):
    file = tmp_path / "run.toml"
    file.write_text(
        'version = 1\n[model]\ntiny = true\n[environment.hunt]\nid = "agentrl/Hunt-v0"\nshare = 3\n'
        '[environment.recycle]\nid = "agentrl/Recycle-v0"\nmax_turns = 1\n'
    )
    assert main(["eval", str(file), "-n", "40", "--output", str(tmp_path / "e.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 40
    played = list(read_episodes(tmp_path / "e.jsonl"))
    assert Counter(episode["environment"] for episode in played) == {"Hunt": 30, "Recycle": 10}
    assert max(len(episode["tool_calls"]) for episode in played if episode["environment"] == "Recycle") == 1  # of 3


# --- whose turn it is ------------------------------------------------------------------
def test_turns_without_a_dataset_are_by_weight_and_the_same_after_a_restart():
    weights = weights_of({"a": EnvironmentSpec(Healthy, weight=3), "b": Healthy})
    source = TaskSource(None, seed=0, environments=weights, prompt_required=False)
    names = [source.task(0, i).environment for i in range(8)]
    assert names == ["a", "a", "b", "a", "a", "a", "b", "a"] and source.shares() == {"a": 0.75, "b": 0.25}
    again = TaskSource(None, seed=0, environments=weights, prompt_required=False)
    assert again.task(0, 7) == source.task(0, 7)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_every_beginning_has_each_environment_within_its_share(weights: list[float], length: int):
    mixture = Mixture({str(i): weight for i, weight in enumerate(weights)})
    counts = Counter(mixture.at(i) for i in range(length))
    for name, share in mixture.shares().items():
        assert -1 <= counts[name] - share * length <= len(weights) - 1 + 1e-6
    assert sum(mixture.shares().values()) == pytest.approx(1)


def test_with_a_dataset_the_rows_say_what_is_asked_for():
    rows = [{"environment": "a"}] * 3 + [{"environment": "b"}]
    named = {"a": None, "b": None, "c": None}
    assert TaskSource(rows, seed=0, environments=named, prompt_required=False).shares() == {
        "a": 0.75,
        "b": 0.25,
        "c": 0,
    }
    assert TaskSource(iter(rows), seed=0, environments=named, prompt_required=False).shares() == {}
    assert TaskSource(rows, seed=0, prompt_required=False).shares() == {}


# --- metrics ---------------------------------------------------------------------------
def test_the_mixture_is_counted_over_what_is_trained():
    """Four groups: two of a, one of them dropped; two of b, whose rollouts are longer."""

    def rollout(group: int, name: str, tokens: int, reward: float | None) -> SharedRollout:
        sequences = (TrainingSequence([0] + [1] * tokens, [False] + [True] * tokens, [0.0] * (tokens + 1)),)
        rewards: dict[str, float | None] = {} if reward is None else {"r": reward}
        return SharedRollout(sequences if rewards else (), rewards, reward, False, group, name)

    batch = [
        rollout(0, "a", 2, 1.0), rollout(0, "a", 4, 0.0), rollout(1, "a", 9, None), rollout(1, "a", 9, None),
        rollout(2, "b", 5, 1.0), rollout(2, "b", 5, 0.0), rollout(3, "b", 4, 1.0), rollout(3, "b", 10, None),
    ]  # fmt: skip
    window = MetricWindow()
    compared = compare(batch, AdvantageSettings("group", "sum_then_normalize", {"r": 1.0}, False))
    add_reward_metrics(window, batch, compared, Reported(frozenset(), ("a", "b"), ("r",), {"a": 0.5, "b": 0.5}))
    got = MetricWindow.values([window.state()])
    assert {name[8:]: value for name, value in got.items() if name.startswith("mixture/")} == {
        "a/asked_frac": 0.5, "b/asked_frac": 0.5, "a/realised_frac": 2 / 5, "b/realised_frac": 3 / 5,
        "a/realised_token_frac": 6 / 20, "b/realised_token_frac": 14 / 20,
    }  # fmt: skip


def test_outcomes_and_durations_by_environment():
    quick = TROUBLED | {"hanging": EnvironmentSpec(Hanging, deadlines={"tool_s": 0.1}, max_failures_in_row=100)}
    groups = play(quick, {"healthy": 1, "hanging": 1, "crashing": 1}, max_attempts=2)
    window = MetricWindow()
    add_rollout_metrics(window, groups, Reported(frozenset({"act"}), tuple(TROUBLED)))
    got = MetricWindow.values([window.state()])
    found = {name: value for name, value in got.items() if "/outcome/" in name}
    assert found == {
        "env/healthy/outcome/finished_count": 4, "env/hanging/outcome/deadline_count": 4,
        "env/crashing/outcome/reset_failed_count": 4,
    }  # fmt: skip
    assert (got["env/hanging/rollout/attempts_mean"], got["env/healthy/rollout/attempts_mean"]) == (2, 1)
    assert (got["env/hanging/rollout/groups_dropped_frac"], got["env/healthy/rollout/groups_dropped_frac"]) == (1, 0)
    assert got["env/hanging/rollout/duration_s"] > 0.1  # of the last try
    assert got["env/healthy/tools_s"] < 1 and "env/hanging/tools_s" not in got and "env/crashing/reset_s" not in got
