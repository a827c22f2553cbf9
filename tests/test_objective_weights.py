"""From tokens to one number: the weights, and what does not depend on how a step is cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigurationError
from agentrl.objective import token_weights

ALL = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def weights(lengths, microbatches, loss_type, *, total_rollouts=None, total_tokens=None, total_cuts=None, longest=20):
    return token_weights(
        torch.tensor(lengths, dtype=torch.long),
        torch.tensor(microbatches, dtype=torch.long),
        loss_type=loss_type,
        num_rollouts_total=len(lengths) if total_rollouts is None else total_rollouts,
        trained_tokens_total=sum(lengths) if total_tokens is None else total_tokens,
        num_microbatches_total=len(set(microbatches)) if total_cuts is None else total_cuts,
        max_completion_length=longest,
    ).tolist()


def loss_of_ones(lengths, microbatches, loss_type, **totals):
    return sum(n * w for n, w in zip(lengths, weights(lengths, microbatches, loss_type, **totals), strict=True))


def test_f001_a_masked_rollout_leaves_numerator_and_denominator():
    """F001: lengths 4 and a masked 12, all losses 1: dapo says 1.0, not 0.25."""
    for loss_type in ("dapo", "cispo", "vespo", "bnpo"):
        assert loss_of_ones([4, 0], [0, 0], loss_type) == pytest.approx(1.0)
    for loss_type in ("grpo", "sapo"):  # the masked rollout stays as a zero in the mean over rollouts
        assert loss_of_ones([4, 0], [0, 0], loss_type) == pytest.approx(0.5)
    assert loss_of_ones([4, 0], [0, 0], "luspo") == pytest.approx(2.0)
    assert loss_of_ones([4, 0], [0, 0], "dr_grpo") == pytest.approx(4 / 40)


def test_each_by_hand_on_two_micro_batches():
    lengths, cut = [1, 3, 2, 0], [0, 0, 1, 1]
    expected = {
        "grpo": [1 / 4, 1 / 12, 1 / 8, 0],
        "sapo": [1 / 4, 1 / 12, 1 / 8, 0],
        "bnpo": [1 / 8, 1 / 8, 1 / 4, 0],
        "dr_grpo": [1 / 80, 1 / 80, 1 / 80, 0],
        "dapo": [1 / 6, 1 / 6, 1 / 6, 0],
        "cispo": [1 / 6, 1 / 6, 1 / 6, 0],
        "vespo": [1 / 6, 1 / 6, 1 / 6, 0],
        "luspo": [1 / 4, 1 / 4, 1 / 4, 0],
    }
    assert set(expected) == set(ALL)
    for loss_type, values in expected.items():
        assert weights(lengths, cut, loss_type) == pytest.approx(values), loss_type


@pytest.mark.parametrize("loss_type", ALL)
def test_f005_no_trained_token_anywhere(loss_type):
    assert weights([0, 0], [0, 1], loss_type) == [0.0, 0.0]
    assert weights([], [], loss_type, total_rollouts=2, total_tokens=0, total_cuts=1) == []


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "cispo", "vespo", "luspo", "grpo", "sapo"])
def test_f003_f021_the_cut_into_equal_micro_batches_does_not_matter(loss_type):
    """F003, F021: 1,1,1,9 tokens as one batch, as two and as four; also called one micro-batch at a time."""
    lengths = [1, 1, 1, 9]
    whole = weights(lengths, [0, 0, 0, 0], loss_type)
    assert weights(lengths, [0, 0, 1, 1], loss_type) == pytest.approx(whole)
    assert weights(lengths, [0, 1, 2, 3], loss_type) == pytest.approx(whole)
    apart = []
    for part in (lengths[:2], lengths[2:]):
        apart += weights(part, [7, 7], loss_type, total_rollouts=4, total_tokens=12, total_cuts=2)
    assert apart == pytest.approx(whole)


def test_f021_bnpo_depends_on_the_cut_by_definition():
    lengths = [1, 1, 1, 9]
    assert weights(lengths, [0, 0, 0, 0], "bnpo") == pytest.approx([1 / 12] * 4)
    assert weights(lengths, [0, 0, 1, 1], "bnpo") == pytest.approx([1 / 4, 1 / 4, 1 / 20, 1 / 20])
    # One rollout per micro-batch: grpo.
    assert weights(lengths, [0, 1, 2, 3], "bnpo") == pytest.approx(weights(lengths, [0, 1, 2, 3], "grpo"))


def test_dr_grpo_needs_a_length_and_totals_must_cover_what_is_passed():
    with pytest.raises(ConfigurationError, match="max_completion_length"):
        weights([1], [0], "dr_grpo", longest=None)
    with pytest.raises(ConfigurationError, match="vespo"):
        weights([1], [0], "sum")
    for name in ("total_rollouts", "total_tokens", "total_cuts"):
        with pytest.raises(ValueError, match="whole optimizer step"):
            weights([1, 2], [0, 1], "dapo", **{name: 1})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=8), st.randoms())
def test_order_does_not_matter_and_the_sum_over_tokens_is_the_documented_share(rows, random):
    lengths, cut = [n for n, _ in rows], [m for _, m in rows]
    shuffled = rows[:]
    random.shuffle(shuffled)
    for loss_type in ALL:
        by_row = {}
        for row, weight in zip(rows, weights(lengths, cut, loss_type), strict=True):
            by_row.setdefault(row, weight)
        moved = weights([n for n, _ in shuffled], [m for _, m in shuffled], loss_type)
        assert moved == pytest.approx([by_row[row] for row in shuffled])
    trained = sum(n > 0 for n in lengths)
    assert loss_of_ones(lengths, cut, "dapo") == pytest.approx(1.0 if trained else 0.0)
    full = sum(any(n for n, m in rows if m == k) for k in set(cut))
    assert loss_of_ones(lengths, cut, "bnpo") == pytest.approx(full / len(set(cut)))
    assert loss_of_ones(lengths, cut, "luspo") == pytest.approx(sum(lengths) / len(lengths))
    means = [[float(n > 0) for n, m in rows if m == k] for k in set(cut)]
    assert loss_of_ones(lengths, cut, "grpo") == pytest.approx(math.fsum(sum(x) / len(x) for x in means) / len(means))
