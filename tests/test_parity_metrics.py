"""What is logged equals what `trl` logs for the same rollouts, in runs where the numbers are not trivial."""

from __future__ import annotations

from typing import Any

import parity_kit
import pytest
from parity_kit import Run, other, ours, rollouts, score, theirs

TWICE = {"num_iterations": 2, "max_steps": 4}  # the second pass has ratios other than 1
CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "dapo": (TWICE, (score,), {}),
    "masked": ({"mask_truncated_completions": True, **TWICE}, (score,), {}),
    "equal rewards": ({"loss_type": "grpo", **TWICE}, (score,), {"equal": (0,)}),
    "two sources, some None": ({"reward_weights": [1.0, 2.0], **TWICE}, (score, other),
                               {"none": ((1, "score"), (2, "other"))}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.05, **TWICE}, (score,), {}),
    "vespo": ({"loss_type": "vespo", **TWICE}, (score,), {}),
    "one ratio per rollout": ({"importance_sampling_level": "sequence", **TWICE}, (score,), {}),
    "reference and bonus": ({"beta": 0.1, "entropy_coef": 0.1, **TWICE}, (score,), {}),
    "another sampler": ({"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1.1,
                         "vllm_importance_sampling_mode": "token_truncate", "max_steps": 2}, (score,), {}),
}  # fmt: skip
MOVES = {  # names whose numbers must differ from 0 and 1 somewhere, or the case shows nothing
    "dapo": ("clip_ratio/low_mean", "clip_ratio/high_max", "clip_ratio/region_mean", "completions/clipped_ratio"),
    "masked": ("clip_ratio/high_mean", "completions/clipped_ratio"),
    "equal rewards": ("frac_reward_zero_std", "clip_ratio/region_mean"),
    "two sources, some None": ("rewards/other/std", "reward_std"),
    "cispo": ("cispo_clip_ratio",),
    "vespo": ("vespo/phi_seq_mean",),
    "one ratio per rollout": ("clip_ratio/region_mean",),
    "reference and bonus": ("kl", "policy_loss", "entropy_coef"),
    "another sampler": ("sampling/importance_sampling_ratio/mean", "sampling/sampling_logp_difference/max"),
}
APART = ("epoch", "step", "step_time")
frozen_heap = parity_kit.frozen_heap


def differing(one: Run, two: Run) -> dict[str, tuple[float, float]]:
    """Names of `two` whose numbers are others in `one`, or which it lacks."""
    found = {}
    for a, b in zip(one.log, two.log, strict=True):
        for name, value in b.items():
            if name not in APART and a.get(name, float("nan")) != pytest.approx(value, rel=2e-4, abs=2e-5):
                found[name] = (a.get(name, float("nan")), value)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_names_and_numbers_of_trl(case: str):
    changes, functions, made = CASES[case]
    samples = rollouts(**made)
    one, two = ours(samples, changes, functions), theirs(samples, changes, functions)
    for name in MOVES[case]:
        assert any(entry[name] not in (0.0, 1.0) for entry in two.log if name in entry), name
    assert differing(one, two) == {}


def test_where_trl_averages_means_of_micro_batches():
    """Micro-batches of different size, because two rollouts are masked: ours divide once, and extremes are extremes."""
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "mask_truncated_completions": True}
    one, two = (run(rollouts(), changes | TWICE) for run in (ours, theirs))
    names = {"entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/high_max"}
    apart = differing(one, two)
    assert set(apart) <= names and "entropy" in apart and "clip_ratio/high_max" in apart
    whole = ours(rollouts(), {"mask_truncated_completions": True} | TWICE)
    documented = {name for entry in two.log for name in entry}
    assert not documented & set(differing(one, whole))  # ours are those of the step in one piece
    first = (one.log[0]["entropy"], two.log[0]["entropy"])
    second = (one.log[1]["clip_ratio/high_max"], two.log[1]["clip_ratio/high_max"])
    assert first == pytest.approx((4.876, 4.880), abs=1e-3) and second == pytest.approx((2 / 3, 0.5))  # in the docs
