"""Rewards to advantages: numbers by hand, a second implementation with `statistics`, and what must never change."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigurationError
from agentrl.objective import group_advantages

NAN = math.nan


def advantages(rewards, groups, **options):
    rows = [row if isinstance(row, list) else [row] for row in rewards]
    return group_advantages(torch.tensor(rows, dtype=torch.float64), torch.tensor(groups), **options)


def close(tensor, expected, tolerance=1e-9):
    assert tensor.tolist() == pytest.approx(expected, abs=tolerance, nan_ok=True)


def test_f011_scale_group_batch_and_none_by_hand():
    rewards, groups = [0.0, 1.0, 0.0, 10.0], [0, 0, 1, 1]
    small, large = 0.5 / (math.sqrt(0.5) + 1e-4), 5 / (math.sqrt(50) + 1e-4)
    for scale in ("group", True):
        close(advantages(rewards, groups, scale=scale).advantages_N, [-small, small, -large, large])
    # All four: mean 2.75, squares 7.5625 + 3.0625 + 7.5625 + 52.5625 = 70.75, over 3.
    std = math.sqrt(70.75 / 3) + 1e-4
    close(advantages(rewards, groups, scale="batch").advantages_N, [-0.5 / std, 0.5 / std, -5 / std, 5 / std])
    for scale in ("none", False):
        close(advantages(rewards, groups, scale=scale).advantages_N, [-0.5, 0.5, -5, 5])


def test_f013_the_better_of_two_negative_rewards_gets_the_positive_advantage():
    for scale in ("group", "batch", "none"):
        worse, better = advantages([-3.0, -1.0], [0, 0], scale=scale).advantages_N.tolist()
        assert worse < 0 < better
    with pytest.raises(ConfigurationError, match=r"'mean'.*'group', 'batch', 'none'"):
        advantages([-3.0, -1.0], [0, 0], scale="mean")


def test_f015_statistics_are_of_the_whole_group():
    result = advantages([0.0, 1.0, 1.0, 1.0], [0] * 4)
    close(result.advantages_N, [-0.75 / 0.5001] + [0.25 / 0.5001] * 3)
    close(result.group_std_N, [0.5] * 4)


def test_f017_a_rollout_that_nobody_scored_is_not_a_failed_one():
    result = advantages([[NAN, NAN], [1.0, NAN], [3.0, 2.0]], [0, 0, 0])
    close(result.rewards_N, [NAN, 1, 5])
    std = math.sqrt(8)  # of 1 and 5; a zero for the first would make it 2.6
    close(result.advantages_N, [0, -2 / (std + 1e-4), 2 / (std + 1e-4)])
    close(result.group_std_N, [std] * 3)
    assert result.scored_N.tolist() == [False, True, True]
    batch = advantages([NAN, 1.0, 5.0], [0, 0, 0], scale="batch")
    close(batch.advantages_N, [0, -2 / (std + 1e-4), 2 / (std + 1e-4)])


def test_a_batch_that_nobody_scored_and_an_empty_one():
    result = advantages([NAN, NAN], [0, 0])
    assert result.advantages_N.tolist() == [0.0, 0.0]
    assert all(math.isnan(std) for std in result.group_std_N.tolist())
    assert result.zero_std_N.tolist() == [True, True]
    empty = group_advantages(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))
    assert empty.advantages_N.shape == (0,)


OPTIONS = [
    {"scale": "group"},
    {"scale": "batch"},
    {"scale": "none"},
    {"aggregation": "normalize_then_sum"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("value", [0.35, 0.1, -7.3, 1e6 / 3, 1e-9, 0.0])
def test_f183_equal_rewards_are_exactly_zero(options, value):
    """F183: 0.35 has no exact fp32 variance; another group in the batch must not matter."""
    result = advantages([value] * 7 + [0.0, 1.0], [0] * 7 + [1] * 2, **options)
    assert result.advantages_N.tolist()[:7] == [0.0] * 7
    assert result.zero_std_N.tolist() == [True] * 7 + [False] * 2
    assert result.group_std_N.tolist()[:7] == [0.0] * 7
    in_fp32 = group_advantages(torch.full((7, 1), value), torch.zeros(7, dtype=torch.long), **options)
    assert in_fp32.advantages_N.tolist() == [0.0] * 7


def test_f183_equal_totals_with_different_rounding_are_equal():
    """0.1 + 0.2 is not 0.3 in float64, and at scale 1e12 the difference would outgrow the 1e-4."""
    for size in (1.0, 1e6, 1e13):
        result = advantages([[0.1 * size, 0.2 * size], [0.3 * size, 0.0]], [0, 0])
        assert result.advantages_N.tolist() == [0.0, 0.0]
        assert result.zero_std_N.tolist() == [True, True]


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_f183_the_size_of_an_advantage_is_bounded_by_the_group(size):
    rewards_N1 = torch.tensor([[0.35 * size]] * 7 + [[0.95 * size]], dtype=torch.float32)
    result = group_advantages(rewards_N1, torch.zeros(8, dtype=torch.long))
    # One against seven: (n-1)/sqrt(n) is the largest a standardised value can be.
    assert result.advantages_N[-1].item() == pytest.approx(7 / math.sqrt(8), rel=1e-3)
    assert result.advantages_N[0].item() == pytest.approx(-1 / math.sqrt(8), rel=1e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_f181_a_group_of_one_trains_on_nothing(options):
    result = advantages([1.0, 0.0, 4.0, NAN, 9.0], [0, 1, 1, 2, 2], **options)
    assert result.advantages_N.tolist()[0] == 0.0
    assert result.advantages_N.tolist()[3:] == [0.0, 0.0]  # one survivor of two
    assert result.zero_std_N.tolist() == [True, False, False, True, True]


def test_f109_the_unit_is_the_rollout():
    """F109: A has three sequences and B one, but the function sees one row per rollout: mean 0.5, not 0.75."""
    result = advantages([1.0, 0.0], [0, 0], scale="none")
    close(result.advantages_N, [0.5, -0.5])


def test_zero_std_is_a_property_of_the_group():
    """A member at its group's mean has advantage 0 and is no sign of an equal group."""
    result = advantages([0.0, 1.0, 2.0, NAN, 4.0, 4.0, NAN], [0, 0, 0, 0, 1, 1, 1])
    assert result.advantages_N[1].item() == 0.0
    assert result.zero_std_N.tolist() == [False] * 4 + [True] * 3


def test_f187_rewards_are_the_raw_weighted_sums():
    result = advantages([[0.0, 1.0], [10.0, 2.0]], [5, 5], weights_K=torch.tensor([1.0, 0.5]))
    close(result.rewards_N, [0.5, 11.0])


def test_gdpo_by_hand():
    """Both sources differ by sign within the group and carry weights 2 and 1; a second group is mute."""
    result = advantages(
        [[0.0, 5.0], [1.0, 3.0], [7.0, 7.0], [7.0, 7.0]],
        [0, 0, 1, 1],
        weights_K=torch.tensor([2.0, 1.0]),
        aggregation="normalize_then_sum",
    )
    first, second = 0.5 / (math.sqrt(0.5) + 1e-4), 1 / (math.sqrt(2) + 1e-4)
    low, high = -2 * first + second, 2 * first - second
    std = math.sqrt((low**2 + high**2) / 3)
    close(result.advantages_N, [low / (std + 1e-4), high / (std + 1e-4), 0, 0])


def test_gdpo_sources_that_cancel_are_no_signal():
    rewards = [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    result = advantages(rewards, [0] * 3, aggregation="normalize_then_sum")
    assert result.advantages_N.tolist() == [0.0] * 3 and result.zero_std_N.all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages([math.inf, 0.0], [0, 0]), "source 0 gave an infinite reward to rollout 0"),
        (lambda: advantages([1.0], [0], weights_K=torch.ones(2)), "2 entries for 1 reward sources"),
        (lambda: advantages([1.0], [0], aggregation="sum"), "'sum_then_normalize' or 'normalize_then_sum'"),
        (lambda: advantages([1.0], [0], aggregation="normalize_then_sum", scale="none"), "leave scale_rewards"),
        (lambda: advantages([1.0], [0, 0]), r"\[N, K\]"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- a second implementation -----------------------------------------------------------
def reference(rewards, groups, weights, scale, aggregation):
    def std(values):
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def standardise(values, division):
        """None stays None."""
        known = [v for v in values if v is not None]
        if not known:
            return values
        mean = statistics.fmean(known)
        return [None if v is None else (v - mean) / division(known) for v in values]

    def by_group(values, division):
        out = [None] * len(values)
        for group in set(groups):
            members = [i for i, g in enumerate(groups) if g == group]
            for i, value in zip(members, standardise([values[i] for i in members], division), strict=True):
                out[i] = value
        return out

    def weighted(rows):
        sums = []
        for row in rows:
            known = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
            sums.append(sum(known) if known else None)
        return sums

    if aggregation == "normalize_then_sum":
        columns = [by_group(list(column), lambda known: std(known) + 1e-4) for column in zip(*rewards, strict=True)]
        sums = weighted(list(zip(*columns, strict=True)))
        out = standardise(sums, lambda known: std(known) + 1e-4)
    else:
        totals = weighted(rewards)
        batch = std([t for t in totals if t is not None])
        division = {
            "group": lambda known: std(known) + 1e-4,
            "batch": lambda known: batch + 1e-4,
            "none": lambda known: 1.0,
        }[scale]
        out = by_group(totals, division)
    return [0.0 if value is None else value for value in out]


values = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.35, -0.5]), st.floats(-100, 100))


@st.composite
def batches(draw):
    count, sources = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    rewards = draw(st.lists(st.lists(values, min_size=sources, max_size=sources), min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([1.0, 0.5, -2.0]), min_size=sources, max_size=sources))
    return rewards, groups, weights


def run(rewards, groups, weights, scale, aggregation):
    rows = [[NAN if r is None else r for r in row] for row in rewards]
    return group_advantages(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(groups),
        weights_K=torch.tensor(weights, dtype=torch.float64),
        scale=scale,
        aggregation=aggregation,
    )


MODES = st.sampled_from(
    [("group", "sum_then_normalize"), ("batch", "sum_then_normalize"), ("none", "sum_then_normalize"),
     ("group", "normalize_then_sum")]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(batches(), MODES)
def test_equals_the_second_implementation(batch, mode):
    result = run(*batch, *mode).advantages_N.tolist()
    assert result == pytest.approx(reference(*batch, *mode), rel=1e-6, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(batches(), MODES, st.randoms())
def test_order_and_group_names_do_not_matter_and_groups_sum_to_zero(batch, mode, random):
    rewards, groups, weights = batch
    base = run(rewards, groups, weights, *mode)
    order = list(range(len(groups)))
    random.shuffle(order)
    moved = run([rewards[i] for i in order], [1000 - 7 * groups[i] for i in order], weights, *mode)
    assert moved.advantages_N.tolist() == pytest.approx(base.advantages_N[order].tolist(), rel=1e-6, abs=1e-7)
    assert moved.zero_std_N.tolist() == base.zero_std_N[order].tolist()
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        assert float(base.advantages_N[members].sum()) == pytest.approx(0, abs=1e-6)
