"""Every metric by hand, on rollouts of which some are cut off, failed or unscored, and parts of different size."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from test_fork_metrics import group, rollout, turn

from agentrl.train.generation import AdvantageSettings, SharedRollout, compare, play_cycle
from agentrl.train.metrics import MetricWindow, Reported, add_reward_metrics, add_rollout_metrics, add_speed
from agentrl.train.rows import TrainItem
from agentrl.train.schedule import Schedule
from agentrl.train.speed import add_staleness
from agentrl.types import Outcome, RolloutGroup, Task, ToolCallRecord


def values(*windows: MetricWindow) -> dict[str, float]:
    return MetricWindow.values([window.state() for window in windows])


# --- windows ---------------------------------------------------------------------------
def test_F103_windows_of_ranks_join_as_sums_counts_and_extremes():
    """Ranks with 1 and 3 measurements: the mean of their means would be 3.5, and the mean of their minima 1.5."""
    one, two = MetricWindow(), MetricWindow()
    for window, numbers in ((one, [6.0]), (two, [1.0, 0.0, 2.0])):
        window.add_all("mean", numbers)
        window.low("low", min(numbers))
        window.high("high", max(numbers))
        window.count("count", len(numbers))
        window.under("env/").under("door/").add_all("mean", numbers)
    assert values(one, two) == {"mean": 9 / 4, "env/door/mean": 9 / 4, "low": 0.0, "high": 6.0, "count": 4}
    one.clear()
    assert values(one) == {}


# --- what was played -------------------------------------------------------------------
def played(outputs: list[list[int]], calls: list[ToolCallRecord] = [], **changes: Any) -> Any:  # noqa: B006
    """A rollout whose turns sampled `outputs`."""
    turns, held = [], [1, 2]
    for ids in outputs:
        turns.append(turn(list(held), ids))
        held += [*ids, 9]  # 9: what a tool said
    seconds = {"reset": 0.5, "reward": 0.25, "total": 2.0}
    return rollout(turns, **({"environment": "Door", "tool_calls": tuple(calls), "seconds": seconds} | changes))


def record(at: int, name: str, error: Any = None, seconds: float = 0.0) -> ToolCallRecord:
    return ToolCallRecord(at, "id", name, {}, "text", error, seconds)


def task(environment: str) -> Task:
    return Task(0, 0, 0, environment=environment)


def two_ranks() -> tuple[MetricWindow, MetricWindow]:
    """Four rollouts of which one failed, and one alone on the other rank."""
    first = [
        played([[5, 6, 7], [8, 9]], [record(0, "push", seconds=0.1), record(0, "push", "raised", 0.3)]),
        played([[5, 6, 7], [8, 9]], [record(0, "push", seconds=0.2)], member=1),
        played([[5, 6, 7, 8]], truncated=True, outcome=Outcome.TRUNCATED, member=2),
        played([[5]] * 9, [record(0, "push", "raised", 9.0)], outcome=Outcome.TOOL_FAILED, attempts=3, member=3),
    ]
    second = [
        played(
            [[4] * 8, [3, 2]],
            [record(0, "fly", "unknown_tool"), record(0, "push", "malformed"), record(0, "switch", "bad_arguments"),
             record(1, "switch", seconds=0.6), record(1, "switch", "episode_over")],
            outcome=Outcome.TOOL_LIMIT, seconds={"reset": 2.0, "total": 6.0}, environment="Lamp",
        )
    ]  # fmt: skip
    reported = Reported(frozenset({"push", "switch"}), ("door", "lamp", "never"))
    windows = MetricWindow(), MetricWindow()
    for window, members, name in zip(windows, (first, second), ("door", "lamp"), strict=True):
        members = [dataclasses.replace(one, task=task(name)) for one in members]
        add_rollout_metrics(window, [RolloutGroup("g", task(name), tuple(members))], reported)
    return windows


def test_completions_count_sampled_tokens_of_rollouts_that_did_not_fail():
    got = values(*two_ranks())
    want = {
        "mean_length": (5 + 5 + 4 + 10) / 4, "min_length": 4, "max_length": 10,
        "mean_terminated_length": (5 + 5 + 10) / 3, "min_terminated_length": 5, "max_terminated_length": 10,
        "clipped_ratio": 1 / 4, "duplicate_frac": 1 / 4,
    }  # fmt: skip
    assert {name: got[f"completions/{name}"] for name in want} == pytest.approx(want)


def test_tool_metrics_by_hand():
    got = values(*two_ranks())
    want = {
        "call_frequency": 8 / 4, "failure_frequency": 4 / 8,  # raised, unknown, malformed, bad arguments
        "unknown_name_count": 1, "loop_exhausted_frac": 1 / 4, "parallel_calls_mean": (2 + 1 + 3 + 2) / 4,
        "latency_s": (0.1 + 0.3 + 0.2 + 0.6) / 4,  # of calls that ran
        "push/latency_s": 0.6 / 3, "push/call_count": 4, "push/failure_count": 2,
        "switch/latency_s": 0.6, "switch/call_count": 3, "switch/failure_count": 1,
    }  # fmt: skip
    assert {name[6:]: v for name, v in got.items() if name.startswith("tools/")} == pytest.approx(want)


def test_without_calls_the_failure_frequency_is_zero_and_without_tools_there_is_none():
    """The asynchronous trainer's is NaN."""
    quiet = group(played([[5]]))
    window = MetricWindow()
    add_rollout_metrics(window, [quiet], Reported(frozenset({"push"})))
    got = values(window)
    assert (got["tools/failure_frequency"], got["tools/call_frequency"], got["tools/push/call_count"]) == (0, 0, 0)
    assert "tools/push/latency_s" not in got and "tools/latency_s" not in got
    window.clear()
    add_rollout_metrics(window, [quiet], Reported())
    assert not [name for name in values(window) if name.startswith("tools/")]


def test_rollout_and_environment_metrics_by_hand():
    got = values(*two_ranks())
    want = {
        "rollout/turns_mean": (2 + 2 + 1 + 2) / 4, "rollout/turns_max": 2, "rollout/failed_frac": 1 / 5,
        "rollout/attempts_mean": 7 / 5, "rollout/duration_s": (4 * 2 + 6) / 5, "rollout/groups_dropped_frac": 0.0,
        "env/reset_s": (3 * 0.5 + 2.0) / 4, "env/reward_s": 0.25,  # the lamp has no reward of its own
    }  # fmt: skip
    assert {name: got[name] for name in want} == pytest.approx(want)
    window = MetricWindow()
    add_rollout_metrics(window, [group(rollout([turn([1], [2])]))], Reported())
    assert not [name for name in values(window) if name.startswith("env/")]  # no environment


def test_mixed_environments_have_metrics_of_their_own():
    got = values(*two_ranks())
    want = {
        "door/completions/mean_length": 14 / 3, "door/completions/clipped_ratio": 1 / 3, "door/rollout_frac": 4 / 5,
        "door/rollout/failed_frac": 1 / 4, "door/rollout/turns_mean": 5 / 3, "door/tools/call_frequency": 1.0,
        "door/tools/failure_frequency": 1 / 3, "lamp/completions/mean_length": 10, "lamp/rollout_frac": 1 / 5,
        "lamp/rollout/turns_max": 2, "lamp/tools/failure_frequency": 3 / 5, "lamp/tools/loop_exhausted_frac": 1.0,
        "never/rollout_frac": 0.0,
    }  # fmt: skip
    assert {name: got[f"env/{name}"] for name in want} == pytest.approx(want)


def test_speed_is_tokens_and_seconds_divided_once_over_all_ranks():
    """24 + 9 tokens in (2 + 4) / 2 seconds; rollouts of 2, 2, 2, 2 and 6 seconds at the same time."""
    first, second = MetricWindow(), MetricWindow()
    members = [played([[5] * 5]), played([[5] * 5]), played([[5] * 4]), played([[5] * 9])]
    add_speed(first, [group(*members)], 2.0, 2)
    add_speed(second, [group(played([[5] * 10], seconds={"total": 6.0}))], 4.0, 2)
    assert values(first, second) == {
        "rollout/generated_tokens_per_s": pytest.approx(33 / 3), "rollout/concurrency": pytest.approx(14 / 3)
    }  # fmt: skip


# --- rewards ---------------------------------------------------------------------------
def shared(group: int, environment: str | None = None, **rewards: float | None) -> SharedRollout:
    known = [value for value in rewards.values() if value is not None]
    return SharedRollout((), dict(rewards), sum(known) if known else None, False, group, environment)


def rewarded(*batches: list[SharedRollout], sources: tuple[str, ...], environments: tuple[str, ...] = ()) -> Any:
    window = MetricWindow()
    settings = AdvantageSettings("group", "sum_then_normalize", dict.fromkeys(sources, 1.0), False)
    for batch in batches:
        add_reward_metrics(window, batch, compare(batch, settings), Reported(frozenset(), environments, sources))
    return values(window)


def test_F187_rewards_are_raw_and_their_spread_is_of_the_batch_or_of_the_groups():
    """Group 0: 0 and 10; group 1: 0.35 three times; group 2: nobody scored; one member of group 1 unscored, too."""
    batch = [
        shared(0, a=0.0, b=None), shared(0, a=4.0, b=6.0),
        shared(1, a=0.35, b=None), shared(1, a=0.35, b=0.0), shared(1, a=0.35, b=0.0), shared(1, a=None, b=None),
        shared(2, a=None, b=None),
    ]  # fmt: skip
    got = rewarded(batch, sources=("a", "b"))
    everyone = [0.0, 10.0, 0.35, 0.35, 0.35]
    want = {
        "reward": 11.05 / 5, "reward_std": statistics.stdev(everyone), "frac_reward_zero_std": 3 / 5,
        "reward_group_std": 2 * statistics.stdev([0, 10]) / 5, "rewards/unscored_frac": 2 / 7,
        "rewards/a/mean": 5.05 / 5, "rewards/a/std": statistics.stdev([0, 4, 0.35, 0.35, 0.35]),
        "rewards/a/group_std": 2 * statistics.stdev([0, 4]) / 5,
        "rewards/b/mean": 6 / 3, "rewards/b/std": statistics.stdev([6, 0, 0]), "rewards/b/group_std": 0.0,
    }  # fmt: skip
    assert got == pytest.approx(want)
    ten = rewarded([shared(0, a=0.0), shared(0, a=10.0)], sources=("a",))
    assert ten["reward"] == 5.0 and ten["reward_std"] == pytest.approx(math.sqrt(50))


def test_batches_of_different_size_weigh_by_their_rollouts():
    one = [shared(0, a=1.0), shared(0, a=3.0)]
    two = [shared(0, a=5.0), shared(0, a=5.0), shared(1, a=5.0), shared(1, a=9.0)]
    got = rewarded(one, two, sources=("a",))
    assert got["reward"] == pytest.approx(28 / 6) and got["frac_reward_zero_std"] == pytest.approx(2 / 6)
    spread = (2 * math.sqrt(2) + 4 * statistics.stdev([5, 5, 5, 9])) / 6
    assert got["reward_std"] == got["rewards/a/std"] == pytest.approx(spread)
    assert got["reward_group_std"] == pytest.approx((2 * math.sqrt(2) + 2 * math.sqrt(8)) / 6)


def test_nobody_scored_and_equal_sums_of_different_rounding():
    got = rewarded([shared(0, a=None), shared(0, a=None)], sources=("a",))
    assert got == {"rewards/unscored_frac": 1.0}
    equal = rewarded([shared(0, a=0.1, b=0.2), shared(0, a=0.3, b=0.0)], sources=("a", "b"))
    assert equal["frac_reward_zero_std"] == 1.0 and equal["reward_group_std"] == 0.0


def test_rewards_by_environment():
    batch = [shared(0, "door", a=0.0), shared(0, "door", a=2.0), shared(1, "lamp", a=7.0), shared(1, "lamp", a=None)]
    got = rewarded(batch, sources=("a",), environments=("door", "lamp", "never"))
    assert (got["env/door/reward"], got["env/lamp/reward"], got["reward"]) == (1.0, 7.0, 3.0)
    assert got["env/door/reward_std"] == pytest.approx(math.sqrt(2)) and got["env/lamp/reward_std"] == 0.0
    assert (got["env/door/frac_reward_zero_std"], got["env/lamp/frac_reward_zero_std"]) == (0.0, 1.0)
    assert (got["env/door/rewards/unscored_frac"], got["env/lamp/rewards/unscored_frac"]) == (0.0, 0.5)
    assert not [name for name in got if name.startswith("env/never")]


def test_F109_a_rollout_in_three_sequences_counts_once():
    """A forked twice and has reward 1, B has 0: the baseline is 0.5, not 0.75, for each sequence of A."""
    forked = rollout([turn([1], [2]), turn([3], [4]), turn([5], [6])], 1.0)
    both = group(forked, rollout([turn([1], [2])], 0.0, 1))
    assert [len(one.sequences) for one in both.rollouts] == [3, 1]
    settings = AdvantageSettings("none", "sum_then_normalize", {"score": 1.0}, False)
    cycle = play_cycle([both], lambda plans: plans, settings, 0, 1)  # type: ignore[arg-type,return-value]
    assert [item.advantage for item in cycle.items] == [0.5, -0.5] and len(cycle.items[0].sequences) == 3
    assert cycle.advantages.rewards_N.tolist() == [1.0, 0.0]


# --- the step --------------------------------------------------------------------------
def trained(samples: kit.Fixed, folder: Path, **args: Any) -> Any:
    made = kit.trainer(kit.policy(), samples, kit.config(folder, **args))
    made.train()
    made.close()
    return made


def uneven() -> kit.Fixed:
    """A short group and a long one, so that micro-batches of one group each differ; the last rollout is cut off."""
    end = kit.stop()
    short = [([20 + n, end], float(n)) for n in range(4)]
    long = [([30 + n] * (6 + n) + [end if n < 3 else 7], float(n)) for n in range(4)]
    return kit.Fixed({"a": short, "bbb": long})


CUT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def test_entropy_and_kl_weigh_by_tokens_over_micro_batches_of_different_size(tmp_path: Path):
    samples = uneven()
    model, (terms, gaps) = kit.policy(), ([], [])
    for prompt, members in samples.table.items():
        start = samples.prompt_ids(prompt)
        for n, (ids, _) in enumerate(members):
            if prompt == "bbb" and n == 3:
                continue  # masked
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1]
            terms.append(torch.distributions.Categorical(logits=logits).entropy())
    made = trained(samples, tmp_path, beta=0.1, mask_truncated_completions=True, num_iterations=2, max_steps=2, **CUT)
    assert kit.logs_with(made, "entropy")[0] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    mean_of_means = (torch.cat(terms[:4]).mean() + torch.cat(terms[4:]).mean()).item() / 2
    assert abs(mean_of_means - torch.cat(terms).mean().item()) > 1e-3  # the test could see it
    after = kit.policy()
    kit.trainer(after, samples, kit.config(tmp_path, beta=0.1, mask_truncated_completions=True, **CUT)).train()
    for prompt, members in samples.table.items():
        for n, (ids, _) in enumerate(members):
            if not (prompt == "bbb" and n == 3):
                with torch.no_grad():
                    now, was = (kit.log_probs(m, samples.prompt_ids(prompt), ids) for m in (after, model))
                k3 = (was - now).exp() - (was - now) - 1
                gaps.append(k3 * (now - was).exp())  # use_bias_correction_kl; the old policy is the reference here
    assert kit.logs_with(made, "kl") == pytest.approx([0.0, torch.cat(gaps).mean().item()], abs=1e-6)


def test_batch_and_sample_metrics_by_hand(tmp_path: Path):
    """Prompts of 1 and 3 tokens, completions of 2 (four times) and 7, 8, 9, 10; the last one is masked."""
    made = trained(uneven(), tmp_path, mask_truncated_completions=True, **CUT)
    last = made.state.log_history[0]
    forwarded, counted = 4 * 3 + 10 + 11 + 12, 4 * 2 + 7 + 8 + 9
    want = {
        "sample/forwarded_tokens_mean": forwarded / 7, "sample/forwarded_tokens_max": 12,
        "sample/trained_tokens_mean": counted / 7, "sample/staleness_mean": 0, "sample/staleness_max": 0,
        "batch/forwarded_tokens_per_step": forwarded, "batch/trained_tokens_per_step": counted,
        "batch/samples_per_step": 7, "batch/groups_per_step": 2, "batch/microbatches_per_step": 2,
        "batch/masked_token_frac": 1 - counted / forwarded,
        "batch/samples_per_row": 7, "batch/row_tokens_mean": forwarded, "batch/row_tokens_max": forwarded,
        "completions/mean_length": (8 + 34) / 8, "completions/clipped_ratio": 1 / 8,
    }  # fmt: skip
    assert {name: last[name] for name in want} == pytest.approx(want)


def test_rows_without_gradient_are_in_the_batch_metrics_and_steps_are_averaged(tmp_path: Path):
    """One group with equal rewards, then two: 8 rollouts each, all of them run, in one window of two steps."""
    table = dict(kit.fixed(groups=4).table)
    for prompt in list(table)[1:]:
        table[prompt] = [(ids, 1.0) for ids, _ in table[prompt]]
    made = trained(kit.Fixed(table), tmp_path, max_steps=2, logging_steps=2)
    last = made.state.log_history[0]
    lengths = [len(ids) for members in table.values() for ids, _ in members]
    assert last["batch/trained_tokens_per_step"] == sum(lengths) / 2
    assert last["batch/samples_per_step"] == 8 and last["agentrl/no_signal_steps"] == 0.5
    assert last["frac_reward_zero_std"] == 0.75


def test_staleness_counts_the_updates_since_a_sample_was_played(tmp_path: Path):
    """A phase of 2 micro-batches trained twice, one per step: 0, 1, 2, 3 updates; then a phase of its own."""
    args = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 5}
    made = trained(kit.fixed(groups=4), tmp_path, **args)
    assert kit.logs_with(made, "sample/staleness_max") == [0, 1, 2, 3, 0]
    assert kit.logs_with(made, "batch/groups_per_step") == [1] * 5
    whole = trained(kit.fixed(groups=4), tmp_path, **(args | {"logging_steps": 5}))
    assert kit.logs_with(whole, "sample/staleness_mean") == [pytest.approx(6 / 5)]
    assert kit.logs_with(whole, "sample/staleness_max") == [3]


def test_staleness_is_of_sequences_that_are_trained():
    """One forked rollout in two sequences, 3 updates old; one of this step; a masked one, 9 updates old."""
    sequences = rollout([turn([1], [2]), turn([3], [4])]).sequences
    items = [TrainItem(0, sequences, 1.0, True), TrainItem(1, sequences[:1], 1.0, True),
             TrainItem(2, sequences, 1.0, False)]  # fmt: skip
    window = MetricWindow()
    add_staleness(window, items, [3, 0, 9])
    assert values(window) == {"sample/staleness_mean": 2.0, "sample/staleness_max": 3}


def test_groups_of_a_step_are_counted_where_a_group_lies_in_two_micro_batches():
    """Cycles of 3 groups of 4 in 4 micro-batches of 3: group 0 fills the first and a third of the second."""
    plan = Schedule(accumulation=1, slices=4, iterations=1, prompts=3, rows=None, group=4)
    assert [plan.groups(n) for n in range(5)] == [1, 2, 2, 1, 1]
    assert Schedule(3, 4, 1, 3, None, 4).groups(1) == 3 and Schedule(8, 4, 1, 3, None, 4).groups(0) == 6
    assert Schedule(8, 4, 2, 3, None, 4).groups(0) == 3  # the second iteration adds no group


def test_clip_extremes_come_from_rollouts_of_all_micro_batches(tmp_path: Path):
    """F103: cutting the step into micro-batches moves no clip metric."""
    names = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
    logs = []
    for cut in ({}, CUT, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}):
        made = trained(uneven(), tmp_path, num_iterations=2, max_steps=2, learning_rate=0.3, **cut)
        logs.append([kit.logs_with(made, f"clip_ratio/{name}")[1] for name in names])
    assert logs[1] == pytest.approx(logs[0], abs=1e-6) and logs[2] == pytest.approx(logs[0], abs=1e-6)
    assert logs[0][3] > logs[0][2] > 0


def test_times_add_up(tmp_path: Path):
    made = trained(kit.fixed(groups=4), tmp_path, max_steps=2)
    for entry in made.state.log_history[:2]:
        perf = {name[5:]: value for name, value in entry.items() if name.startswith("perf/")}
        assert 0 < perf["fwd_s"] < perf["fwd_bwd_s"] < perf["step_s"] and 0 < perf["optimizer_s"] < perf["step_s"]
        assert perf["rollout_wait_s"] > 0 and perf["rollout_wait_s"] + perf["fwd_bwd_s"] <= entry["step_time"]
        assert entry["step_time"] < perf["step_s"]
        forwarded, counted = entry["batch/forwarded_tokens_per_step"], entry["batch/trained_tokens_per_step"]
        assert perf["fwd_bwd_forwarded_tokens_per_s"] == pytest.approx(forwarded / perf["fwd_bwd_s"])
        assert perf["wall_clock_forwarded_tokens_per_s"] == pytest.approx(forwarded / perf["step_s"])
        assert perf["wall_clock_trained_tokens_per_s"] == pytest.approx(counted / perf["step_s"])
        said = entry["rollout/generated_tokens_per_s"] * perf["rollout_wait_s"]
        assert said == pytest.approx(entry["completions/mean_length"] * 8)


def test_what_a_run_did_not_log_is_not_counted_in_the_next(tmp_path: Path):
    """Three steps, a line every two: the third is in no line, and not in the first one of a second call."""
    table = dict(kit.fixed(groups=6).table)
    for prompt in list(table)[4:]:
        table[prompt] = [(ids, 100.0) for ids, _ in table[prompt]]
    made = kit.trainer(kit.policy(), kit.Fixed(table), kit.config(tmp_path, max_steps=3, logging_steps=2))
    for _ in range(2):
        made.train()
        assert kit.logs_with(made, "reward") == [1.5]
