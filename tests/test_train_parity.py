"""Three optimizer steps beside the PyPI package `trl` (extra ``dev``): the same rollouts, the same change of weights.

Every case is one option in a run where it matters: without it, the weights change by something else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_kit import Rollouts, Run, apart, frozen_heap, other, ours, rollouts, score, theirs  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
IN_TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
CORRECTED = {"vllm_importance_sampling_correction": True}
OTHER_METRICS = {  # those that mean something else in trl: test_parity_differences.py
    "accumulation": ("entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/phi_seq_mean"),
    "generations": ("completions/m", "epoch"),
    "masked": ("vespo/phi_seq_mean",),
    "batch scale": ("frac_reward_zero_std",),
}


def base(loss_type: str) -> dict[str, Any]:
    """Three passes over one generation batch: the ratios are 1 in the first and outside the bounds in the others."""
    more: dict[str, Any] = {"luspo": {"learning_rate": 0.02}, "cispo": {"epsilon_high": 5.0}}.get(loss_type, {})
    return {"loss_type": loss_type, "num_iterations": 3, **more}


# option: (what is set, what it is compared with, losses)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "passes": ({}, {"num_iterations": 1}, LOSSES),
    "epsilon": ({"epsilon": 0.05}, {}, CLIPPED),
    "epsilon_high": ({"epsilon_high": 0.5}, {}, CLIPPED),
    "delta": ({"delta": 1.05, "epsilon": 0.02}, {"epsilon": 0.02}, CLIPPED),
    "sequence": ({"importance_sampling_level": "sequence"}, {}, (*CLIPPED, "cispo", "sapo")),
    "masked": ({"mask_truncated_completions": True}, {}, LOSSES),
    "beta": ({"beta": 0.5}, {}, LOSSES),
    "plain kl": ({"beta": 0.5, "use_bias_correction_kl": False}, {"beta": 0.5}, LOSSES),
    "sequence kl": ({"beta": 0.5, "importance_sampling_level": "sequence"}, {"beta": 0.5}, ("dapo", "sapo", "vespo")),
    "masked kl": ({"beta": 0.5, "mask_truncated_completions": True, **IN_TWO}, {"beta": 0.5, **IN_TWO}, LOSSES),
    "temperature": ({"temperature": 0.6}, {}, LOSSES),
    "off-policy": ({"off_policy_mask_threshold": 0.06}, {}, LOSSES),
    "quantile": ({"top_entropy_quantile": 0.3}, {}, LOSSES),
    "quantile in two": ({"top_entropy_quantile": 0.3, **IN_TWO}, IN_TWO, ("dapo", "grpo", "bnpo")),
    "bonus": ({"entropy_coef": 0.3}, {}, LOSSES),
    "bonus of the top": ({"entropy_coef": 0.3, "top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.3}, ("dapo",)),
    "adaptive": (
        {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.9, "entropy_target": 9.0},
        {"entropy_coef": 0.05}, ("dapo", "grpo"),
    ),
    "token_truncate": (
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1, **CORRECTED}, {},
        LOSSES,
    ),
    "token_mask": (
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.3,
         "vllm_importance_sampling_clip_min": 0.8, **CORRECTED}, {}, ("dapo", "cispo", "grpo", "vespo"),
    ),
    "sequence_truncate": (
        {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.1,
         "vllm_importance_sampling_clip_min": 0.9, **CORRECTED}, {}, LOSSES,
    ),
    "sequence_mask": (CORRECTED | {"vllm_importance_sampling_clip_max": 1.2, "beta": 0.5}, {"beta": 0.5}, LOSSES),
    "sapo_temperature": ({"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}, {}, ("sapo",)),
    "vespo numbers": (
        {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 2.5}, {}, ("vespo",),
    ),
    "moving reference": (
        {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7,
         "num_iterations": 1}, {"beta": 0.5, "num_iterations": 1}, ("dapo",),
    ),
    "max_grad_norm": ({"max_grad_norm": 0.5}, {}, ("dapo",)),
}  # fmt: skip


def assert_same(got: Run, want: Run, changes: dict[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """The weights changed alike, and what both log agrees."""
    assert want.moved.norm() > 1e-2
    assert apart(got, want) < 1e-4
    skip = ("step_time", *skip)
    if changes.get("gradient_accumulation_steps", 1) > 1:
        skip += OTHER_METRICS["accumulation"]
    if changes.get("mask_truncated_completions"):
        skip += OTHER_METRICS["masked"]
    for mine, their in zip(got.log, want.log, strict=True):
        assert not set(their) - set(mine)
        names = [name for name in their if not name.startswith(skip)]
        assert {n: mine[n] for n in names} == pytest.approx({n: their[n] for n in names}, abs=5e-5, rel=2e-4)


@pytest.mark.parametrize(
    ("loss_type", "option"), [(loss, name) for name, (_, _, losses) in OPTIONS.items() for loss in losses]
)
def test_three_steps_are_trls(loss_type: str, option: str):
    on, off, _ = OPTIONS[option]
    changes = base(loss_type) | on
    want = theirs(rollouts(), changes)
    assert_same(ours(rollouts(), changes), want, changes)
    assert apart(ours(rollouts(), base(loss_type) | off), want) > 1e-3


def test_every_loss_is_another_one():
    """In two micro-batches with unequal numbers of tokens; each of them is trl's, too."""
    runs = {}
    for loss_type in LOSSES:
        changes = base(loss_type) | {"learning_rate": 0.02} | IN_TWO
        runs[loss_type] = ours(rollouts(), changes)
        assert_same(runs[loss_type], theirs(rollouts(), changes), changes)
    for one in LOSSES:
        for two in LOSSES:
            assert one == two or apart(runs[one], runs[two]) > 1e-3, (one, two)


# --- rewards ---------------------------------------------------------------------------
TWO = (score, other)
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
BATCH, NONE = {"scale_rewards": "batch"}, {"scale_rewards": "none"}
WEIGHTS = {"reward_weights": [0.3, 2.0]}
SOME: dict[str, Any] = {"none": ((1, "other"), (6, "score"))}
EQUAL: dict[str, Any] = {"equal": (1,)}
# option: (what is set, what it is compared with, arguments of `rollouts`)
REWARDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "group": ({}, NONE, {}),
    "batch": (BATCH, {}, {}),
    "none": (NONE, {}, {}),
    "False": ({"scale_rewards": False}, {}, {}),
    "weights": (WEIGHTS, {}, {}),
    "weights, batch": (WEIGHTS | BATCH, WEIGHTS, {}),
    "normalize_then_sum": (GDPO, {}, {}),
    "normalize_then_sum, weights": (GDPO | WEIGHTS, GDPO, {}),
    "some None": ({}, NONE, SOME),
    "some None, batch, weights": (WEIGHTS | BATCH, WEIGHTS, SOME),
    "some None, normalize_then_sum": (GDPO, {}, SOME),
    "equal group": ({}, NONE, EQUAL),
    "equal group, batch": (BATCH, {}, EQUAL),
    "equal group, normalize_then_sum": (GDPO, {}, EQUAL),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_become_trls_advantages(name: str):
    on, off, data = REWARDS[name]
    samples = rollouts(**data)
    changes = base("dapo") | on
    want = theirs(samples, changes, TWO)
    skip = OTHER_METRICS["batch scale"] if on.keys() & {"scale_rewards", "multi_objective_aggregation"} else ()
    assert_same(ours(samples, changes, TWO), want, changes, skip=skip)
    assert apart(ours(samples, base("dapo") | off, TWO), want) > 1e-3


# --- cuts ------------------------------------------------------------------------------
def cut(size: int, accumulation: int, generation: int, **more: Any) -> dict[str, Any]:
    """`generation`: micro-batches per generation batch."""
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation,
            "steps_per_generation": generation, **more}  # fmt: skip


CUTS = {
    "four micro-batches": cut(2, 4, 4, num_iterations=2),
    "two passes in a step": cut(4, 2, 1, num_iterations=2),
    "two generations in a step": cut(4, 2, 1, scale_rewards="batch"),
    "one generation for two steps": cut(4, 1, 2, num_iterations=2),
    "one generation for two accumulated steps": cut(2, 2, 4),
    "one generation for one and a half steps": cut(4, 2, 3),
    "two steps for one and a half generations": cut(4, 3, 2),
    "the same, masked": cut(4, 3, 2, mask_truncated_completions=True),
    "three of four": cut(2, 3, 4, num_iterations=2, beta=0.3),
    "large": cut(8, 1, 2, num_iterations=2, scale_rewards="batch"),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "sapo", "luspo"])
def test_steps_are_cut_like_trls(name: str, loss_type: str):
    """Which rollouts make a step, which old log-probs they have, and what a micro-batch counts."""
    samples: Rollouts = rollouts(10)
    rate = {"learning_rate": 0.02} if loss_type == "luspo" else {}
    changes = CUTS[name] | {"loss_type": loss_type, **rate}
    want = theirs(samples, changes)
    assert_same(ours(samples, changes), want, changes, skip=OTHER_METRICS["generations"])
    whole = cut(8, 1, 1, loss_type=loss_type, scale_rewards=changes.get("scale_rewards", "group"), **rate)
    assert apart(ours(samples, whole), want) > 1e-3


def test_a_generation_batch_size_is_that_many_rollouts():
    for size, steps in ((8, 4), (4, 2)):  # of rollouts, of micro-batches
        cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "loss_type": "grpo"}
        samples, changes = rollouts(10), cut | {"generation_batch_size": size}
        got = ours(samples, changes)
        assert_same(got, theirs(samples, changes), changes, skip=OTHER_METRICS["generations"])
        assert torch.equal(ours(samples, cut | {"steps_per_generation": steps}).moved, got.moved)
