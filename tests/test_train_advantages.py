"""Rewards to advantages in a run: numbers by hand, with several sources, weights and missing rewards."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit

from agentrl.record import read_episodes

LOW, HIGH = [0.0, 1.0, 1.0, 2.0], [0.0, 0.0, None, 4.0]  # of group 0; group 1 has 0.35 all over, and one unscored


def advantages_of(folder: Path, **args: Any) -> tuple[list[list[float | None]], dict[str, float]]:
    """[group][member] advantages on record, and the log, of two groups scored by two functions with weights 1 and 2."""

    def low(completion_ids: list[list[int]], prompts: list[str]) -> list[float | None]:
        return LOW if prompts[0] == "a" else [0.35, 0.35, 0.35, None]  # type: ignore[return-value]

    def high(completions: list[str], prompts: list[str]) -> list[float | None]:
        return HIGH if prompts[0] == "a" else [None] * 4  # type: ignore[return-value]

    answers = [([20 + n, kit.stop()], None) for n in range(4)]
    samples = kit.Fixed({"a": answers, "bbb": answers})
    options = {"reward_weights": [1.0, 2.0], "record_episodes": True, **args}
    made = kit.trainer(kit.policy(), samples, kit.config(folder, **options), reward_funcs=[low, high])
    made.train()
    made.close()
    records = sorted(read_episodes(folder / "episodes.jsonl"), key=lambda one: (one["group_id"], one["member"]))
    found = [one["advantage"] for one in records]
    return [found[:4], found[4:]], made.state.log_history[0]


@pytest.mark.parametrize("scale", ["group", "batch", "none", True, False])
def test_F011_F183_scale_rewards_in_a_run_with_weights_and_missing_rewards(tmp_path: Path, scale: Any):
    """Sums 0, 1, 1, 10 in group 0 (a source that returned None adds nothing); 0.35 three times in group 1."""
    sums = [0.0, 1.0, 1.0, 10.0]
    divisor = {
        "group": statistics.stdev(sums) + 1e-4, "batch": statistics.stdev([*sums, 0.35, 0.35, 0.35]) + 1e-4, "none": 1.0
    }[{True: "group", False: "none"}.get(scale, scale)]  # fmt: skip
    found, log = advantages_of(tmp_path, scale_rewards=scale)
    assert found[0] == pytest.approx([(value - 3.0) / divisor for value in sums], rel=1e-6)
    assert found[1] == [0.0] * 4  # exactly; the last one was scored by nobody
    assert log["reward"] == pytest.approx((12 + 3 * 0.35) / 7) and log["rewards/unscored_frac"] == 1 / 8
    assert log["frac_reward_zero_std"] == pytest.approx(3 / 7)
    assert log["reward_group_std"] == pytest.approx(4 * statistics.stdev(sums) / 7)
    assert log["rewards/high/mean"] == pytest.approx(4 / 3)


def test_normalize_then_sum_in_a_run(tmp_path: Path):
    """Each source standardised in its group, summed with the weights, and the sums standardised over the batch."""
    low = [(value - 1.0) / (statistics.stdev(LOW) + 1e-4) for value in LOW]  # type: ignore[arg-type]
    seen = [0.0, 0.0, 4.0]
    mean, spread = 4 / 3, statistics.stdev(seen) + 1e-4
    high = [0.0 if value is None else (value - mean) / spread for value in HIGH]
    sums = [a + 2 * b for a, b in zip(low, high, strict=True)]
    batch = [*sums, 0.0, 0.0, 0.0]  # group 1's three scored members; the unscored one is in no mean
    want = [(value - statistics.fmean(batch)) / (statistics.stdev(batch) + 1e-4) for value in sums]
    found, _ = advantages_of(tmp_path, multi_objective_aggregation="normalize_then_sum")
    assert found[0] == pytest.approx(want, rel=1e-6) and found[1] == [0.0] * 4


def test_F181_a_single_survivor_trains_on_nothing(tmp_path: Path):
    """Three of four members were scored by nobody: no baseline, so the one with reward 1 moves nothing either."""
    table = {"a": [([20 + n, kit.stop()], 1.0 if n == 2 else None) for n in range(4)]}
    model = kit.policy()
    before = kit.weights(model)
    args = kit.config(tmp_path, per_device_train_batch_size=4)
    made = kit.trainer(model, kit.Fixed(table), args)
    made.train()
    log = made.state.log_history[0]
    assert torch.equal(kit.weights(model), before) and log["agentrl/no_signal_steps"] == 1.0
    assert (log["reward"], log["frac_reward_zero_std"], log["rewards/unscored_frac"]) == (1.0, 1.0, 0.75)
