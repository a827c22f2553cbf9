"""Sampler correction, entropy, and the metrics that are sums and counts until the very end."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigurationError
from agentrl.objective import (
    AdaptiveEntropy,
    LossConfig,
    clip_metrics,
    clip_summary,
    entropy_bonus,
    entropy_threshold,
    keep_top_entropy,
    policy_loss,
    raw_ratio,
    sampler_correction,
    sampling_metrics,
    sampling_summary,
)


def flat(*values):
    return torch.tensor(values, dtype=torch.float64)


# --- sampler correction ----------------------------------------------------------------
OLD, SAMPLER = flat(-1.0, -1.0, -2.0, -1.0), flat(-1.5, -1.5, -1.0, -3.0)
ROLLOUT = torch.tensor([0, 0, 1, 2])


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [math.exp(0.5), math.exp(0.5), math.exp(-1), 3.0]),
        ("token_truncate", 0.5, None, [math.exp(0.5), math.exp(0.5), 0.5, math.exp(2)]),
        ("token_mask", 0.5, 3.0, [math.exp(0.5), math.exp(0.5), 0.0, 0.0]),
        ("sequence_truncate", 0.5, 2.0, [2.0, 2.0, 0.5, 2.0]),
        ("sequence_mask", None, 3.0, [math.e, math.e, math.exp(-1), 0.0]),
        ("sequence_mask", 0.5, None, [math.e, math.e, 0.0, math.exp(2)]),
    ],
)
def test_the_four_corrections_by_hand(mode, low, high, expected):
    correction = sampler_correction(OLD.requires_grad_(), SAMPLER, ROLLOUT, mode, low, high)
    assert correction.tolist() == pytest.approx(expected)
    assert not correction.requires_grad


def test_f033_equal_log_probs_are_ratio_one_whatever_the_length():
    for length in (1, 3, 500):
        log_probs = torch.full((length,), -1.3)
        for mode in ("token_mask", "sequence_mask"):
            ratio = raw_ratio(log_probs, log_probs, torch.zeros(length, dtype=torch.long), mode)
            assert ratio.tolist() == [1.0] * length


def test_the_bounds_belong_to_the_inside_and_nothing_overflows():
    exact = sampler_correction(flat(0.0), flat(0.0), torch.tensor([0]), "token_mask", 1.0, 1.0)
    assert exact.item() == 1.0
    far, index = torch.full((50,), -0.1), torch.zeros(50, dtype=torch.long)
    for mode in ("sequence_truncate", "sequence_mask"):
        for old, sampler in [(far, far - 90), (far - 90, far)]:
            assert torch.isfinite(sampler_correction(old, sampler, index, mode, None, None)).all()


@pytest.mark.parametrize(
    ("mode", "low", "high", "message"),
    [
        ("mask", None, 3.0, "token_truncate, token_mask"),
        ("token_mask", 4.0, 3.0, r"clip_min 4\.0 is above clip_max 3\.0"),
        ("token_mask", -1.0, None, "clip_min must be at least 0"),
        ("token_mask", None, math.nan, "clip_max must be at least 0"),
    ],
)
def test_bad_bounds_are_named(mode, low, high, message):
    with pytest.raises(ConfigurationError, match=message):
        sampler_correction(OLD, SAMPLER, ROLLOUT, mode, low, high)


def test_f037_a_missing_sampler_log_prob_is_an_error():
    with pytest.raises(ValueError, match="sampler_log_probs_T is missing"):
        sampler_correction(flat(-1.0), flat(math.nan), torch.tensor([0]), "token_mask", None, 3.0)


# --- entropy ---------------------------------------------------------------------------
def test_entropy_quantile_by_hand():
    entropies = flat(4.0, 0.0, 1.0, 3.0, 2.0)
    assert entropy_threshold(entropies, 1.0) == 0.0
    assert entropy_threshold(entropies, 0.0) == 4.0
    assert entropy_threshold(entropies, 0.2) == pytest.approx(3.2)
    kept = [keep_top_entropy(entropies, entropy_threshold(entropies, rho)).tolist() for rho in (1.0, 0.5, 0.0)]
    assert kept == [[True] * 5, [True, False, False, True, True], [True, False, False, False, False]]
    assert keep_top_entropy(flat(), entropy_threshold(flat(), 0.5)).tolist() == []
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        entropy_threshold(entropies, 1.5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20), st.floats(0, 1))
def test_entropy_quantile_equals_torch_and_always_keeps_the_largest(entropies, rho):
    entropies_T = torch.tensor(entropies)
    threshold = entropy_threshold(entropies_T, rho)
    assert threshold == pytest.approx(torch.quantile(entropies_T.double(), 1 - rho).item(), rel=1e-9, abs=1e-9)
    kept = keep_top_entropy(entropies_T, threshold)
    assert kept[entropies_T.argmax()] and (rho < 1 or kept.all())


def test_the_bonus_is_the_mean_over_the_step_however_it_is_cut():
    entropies = flat(1.0, 2.0, 3.0, 6.0).requires_grad_()
    keep = torch.tensor([True, False, True, True])
    whole = entropy_bonus(entropies, keep, 0.3, 3)
    assert whole.item() == pytest.approx(-0.3 * 10 / 3)
    parts = entropy_bonus(entropies[:1], keep[:1], 0.3, 3) + entropy_bonus(entropies[1:], keep[1:], 0.3, 3)
    assert parts.item() == pytest.approx(whole.item())
    parts.backward()
    assert entropies.grad.tolist() == pytest.approx([-0.1, 0, -0.1, -0.1])
    assert entropy_bonus(flat(), None, 0.3, 0).item() == 0.0


def test_adaptive_entropy_step_by_step():
    state = AdaptiveEntropy(coef=0.015, target=1.0, delta=0.01, minimum=0.0, maximum=0.03)
    assert state.active == 0.0  # nothing measured yet
    seen = []
    for entropy in (1.0, 0.2, 0.2, 3.0, 3.0, 3.0, 3.0, math.nan, 0.9):
        state = state.updated(entropy)
        seen.append((round(state.coef, 9), round(state.active, 9)))
    up = [(0.025, 0.025), (0.03, 0.03), (0.03, 0.03)]
    down = [(0.02, 0.0), (0.01, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert seen == [*up, *down, (0.01, 0.01)]
    measured_once = AdaptiveEntropy(coef=0.5, target=1.0, delta=0.1, minimum=0.0, maximum=1.0).updated(0.5)
    assert measured_once.updated(math.nan) == measured_once  # a step without kept tokens measures nothing
    with pytest.raises(ConfigurationError, match="entropy_coef_min"):
        AdaptiveEntropy(coef=0.0, target=1.0, delta=0.1, minimum=2.0, maximum=1.0)
    with pytest.raises(ConfigurationError, match="entropy_coef_delta"):
        AdaptiveEntropy(coef=0.0, target=1.0, delta=-0.1, minimum=0.0, maximum=1.0)


# --- metrics ---------------------------------------------------------------------------
def measured(ratios, advantages, rollout, **fields):
    rollout_T = torch.tensor(rollout)
    terms = policy_loss(
        flat(*ratios).log(), flat(*[0.0] * len(ratios)), flat(*advantages), rollout_T, LossConfig(**fields)
    )
    return terms, clip_metrics(terms, rollout_T)


def test_f103_extremes_are_over_completions_not_over_calls():
    """F103: a row with clip fractions 0 and 1 has low_min 0 and high_max 1, its mean is over tokens."""
    _, part = measured([2.0, 1.0, 1.0, 1.0], [1, 1, 1, 1], [0, 1, 1, 1])
    summary = clip_summary([part])
    assert summary == {
        "clip_ratio/region_mean": 0.25,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_mean": 0.25,
        "clip_ratio/high_max": 1.0,
    }


def test_means_are_of_sums_whatever_the_cut():
    ratios, advantages, rollout = [0.5, 0.5, 1.0, 2.0, 1.0, 1.0, 0.5], [-1, -1, -1, 1, 1, 1, -1], [0, 0, 0, 1, 1, 1, 2]
    whole = clip_summary([measured(ratios, advantages, rollout)[1]])
    assert whole["clip_ratio/low_mean"] == pytest.approx(3 / 7)
    assert whole["clip_ratio/low_min"] == 0.0
    assert whole["clip_ratio/region_mean"] == pytest.approx(4 / 7)
    parts = [
        measured(ratios[:3], advantages[:3], [0] * 3)[1],
        measured(ratios[3:], advantages[3:], [0, 0, 0, 1])[1],
    ]
    assert clip_summary(parts) == pytest.approx(whole)


def test_a_rollout_spread_over_calls_is_added_before_it_is_divided():
    """Its share is 2 of 4 tokens; as two rollouts it would show 1.0 and 0.0."""
    parts = []
    for ratios in ([2.0, 2.0], [1.0, 1.0]):
        rollout_T = torch.tensor([1, 1])
        terms = policy_loss(flat(*ratios).log(), flat(0, 0), flat(1, 1), rollout_T, LossConfig())
        parts.append(clip_metrics(terms, rollout_T, num_rollouts=3))
    added = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert clip_summary([added])["clip_ratio/high_max"] == 0.5


def test_at_sequence_level_the_unit_is_the_rollout():
    terms, part = measured([4.0, 1.0, 1.0, 1.0], [1, 1, 1, 1], [0, 1, 1, 1], importance_sampling_level="sequence")
    assert clip_summary([part], level=terms.level)["clip_ratio/high_mean"] == 0.5


def test_cispo_and_vespo_have_their_own_names():
    terms, part = measured([8.0, 1.0, 8.0, 1.0], [1, 1, -1, -1], [0, 0, 1, 1], loss_type="cispo")
    assert clip_summary([part], clip_metric=terms.clip_metric) == {"cispo_clip_ratio": 0.25}
    terms, part = measured([1.0, 1.0, 1.0], [1, 1, -1], [0, 0, 2], loss_type="vespo")
    assert clip_summary([part], clip_metric=terms.clip_metric) == {"vespo/phi_seq_mean": pytest.approx(1.0)}
    terms, part = measured([1.0], [1], [0], loss_type="sapo")
    assert clip_summary([part], clip_metric=terms.clip_metric) == {}


def test_nothing_measured_gives_no_metric_instead_of_nan():
    none = torch.zeros(0, dtype=torch.long)
    terms = policy_loss(flat(), flat(), flat(), none, LossConfig())
    assert clip_summary([clip_metrics(terms, none, num_rollouts=2)]) == {}
    assert clip_summary([]) == {} and sampling_summary([]) == {}


def test_sampling_metrics_over_tokens_and_over_rollouts():
    token = sampler_correction(OLD.detach(), SAMPLER, ROLLOUT, "token_truncate", None, 3.0)
    by_token = sampling_summary([sampling_metrics(OLD, SAMPLER, token, ROLLOUT, "token_truncate")])
    assert by_token["sampling/sampling_logp_difference/mean"] == pytest.approx((0.5 + 0.5 + 1 + 2) / 4)
    assert by_token["sampling/sampling_logp_difference/max"] == 2.0
    ratios = [math.exp(0.5), math.exp(0.5), math.exp(-1), 3.0]
    assert by_token["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(ratios) / 4)
    sequence = sampler_correction(OLD.detach(), SAMPLER, ROLLOUT, "sequence_mask", None, 3.0)
    parts = [
        sampling_metrics(OLD[:2], SAMPLER[:2], sequence[:2], ROLLOUT[:2], "sequence_mask"),
        sampling_metrics(OLD[2:], SAMPLER[2:], sequence[2:], ROLLOUT[2:], "sequence_mask"),
        sampling_metrics(OLD[:0], SAMPLER[:0], sequence[:0], ROLLOUT[:0], "sequence_mask"),
    ]
    by_rollout = sampling_summary(parts)
    assert by_rollout["sampling/importance_sampling_ratio/mean"] == pytest.approx((math.e + math.exp(-1) + 0) / 3)
    assert by_rollout["sampling/importance_sampling_ratio/min"] == 0.0
    assert by_rollout["sampling/importance_sampling_ratio/max"] == pytest.approx(math.e)
    assert by_rollout["sampling/sampling_logp_difference/mean"] == pytest.approx(1.0)
