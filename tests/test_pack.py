"""Which rollouts share a row, and which rank trains them: nobody is lost, and the work is alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train.pack import attention_pairs, plan_rows, share_out
from agentrl.train.rows import TrainItem, make_row
from agentrl.train.tree import tree_of
from agentrl.types import TrainingSequence

CPU = torch.device("cpu")


def rollout(index: int, *sequences: list[int], group: int = 0) -> TrainItem:
    made = tuple(TrainingSequence(ids, [t > 0 for t in range(len(ids))], [-1.0] * len(ids)) for ids in sequences)
    return TrainItem(index, made, 1.0, True, group=group)


def tokens(items: list[TrainItem], least: int | None) -> int:
    return len(tree_of([s.input_ids for item in items for s in item.sequences], least).ids_T)


def cost(items: list[TrainItem], least: int | None) -> int:
    tree = tree_of([s.input_ids for item in items for s in item.sequences], least)
    return attention_pairs(tree.lengths, tree.parents)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainItem]:
    """Groups of forked or plain rollouts that begin alike, some empty, some all of a piece."""
    items: list[TrainItem] = []
    ids = st.lists(st.integers(3, 5), max_size=8)
    for group in range(draw(st.integers(0, 4))):
        prompt = draw(st.lists(st.integers(3, 9), max_size=12))
        for _ in range(draw(st.integers(1, 4))):
            parts = draw(st.lists(ids, max_size=3))
            items.append(rollout(len(items), *([*prompt, *part] for part in parts), group=group))
    return items


leasts = st.sampled_from([None, 1, 2, 7, 30])


# --- rows --------------------------------------------------------------------------------
@given(batches(), st.integers(1, 70), leasts)
@settings(max_examples=200, deadline=None)
def test_each_rollout_is_in_one_row_within_the_budget(items: list[TrainItem], budget: int, least: int | None):
    plan = plan_rows(items, budget, least)
    assert sorted(i for row in plan for i in row) == list(range(len(items)))
    assert all(plan) and all(row == sorted(row) for row in plan)
    for row in plan:
        assert len(row) == 1 or tokens([items[i] for i in row], least) <= budget
    assert plan == plan_rows(items, budget, least)


def test_the_budget_holds_where_what_two_share_alone_is_not_worth_a_segment_beside_a_third():
    """Of 11 shared tokens a third has 9: with a threshold of 6 they share 9 among three, and the last 2 no more."""
    stem = list(range(10, 21))
    items = [rollout(0, [*stem, 3]), rollout(1, [*stem, 4]), rollout(2, [*stem[:9], 5])]
    assert [tokens(items[:n], 6) for n in (1, 2, 3)] == [12, 13, 16]
    for budget in range(12, 20):
        for row in plan_rows(items, budget, 6):
            assert len(row) == 1 or tokens([items[i] for i in row], 6) <= budget


def test_groups_stay_together_where_they_fit():
    """Three groups of four, prompt of 20 and completions of 5: 40 tokens each, shared."""
    items = [
        rollout(4 * g + m, [*range(100 * g, 100 * g + 20), *[3 + m] * 5], group=g) for m in range(4) for g in range(3)
    ]
    groups = [[i for i, item in enumerate(items) if item.group == g] for g in range(3)]
    assert sorted(plan_rows(items, 40, 1)) == sorted(groups)
    assert sorted(plan_rows(items, 79, 1)) == sorted(groups)
    two = plan_rows(items, 80, 1)
    assert sorted(map(len, two)) == [4, 8] and all(set(g) <= set(two[0]) or set(g) <= set(two[1]) for g in groups)
    assert plan_rows(items, 120, 1) == plan_rows(items, 10**6, 1)
    assert len(plan_rows(items, 120, 1)) == 1
    # cut where one row does not hold a group: two halves of 30 for each
    assert all(len(row) == 2 and len({items[i].group for i in row}) == 1 for row in plan_rows(items, 30, 1))


def test_unshared_prompts_count_for_each():
    items = [rollout(m, [*range(20), *[3 + m] * 5]) for m in range(4)]
    assert len(plan_rows(items, 40, None)) == 4
    assert len(plan_rows(items, 50, None)) == 2
    assert len(plan_rows(items, 40, 1)) == 1
    assert len(plan_rows(items, 40, 61)) == 4  # sharing would save 60


def test_rows_are_alike_in_what_they_cost():
    """20 tokens have 210 pairs, 10 have 55, 5 have 15: the long one gets a row for itself, though more would fit."""
    items = [rollout(i, [5 + i] * n, group=i) for i, n in enumerate((5, 10, 5, 20, 5, 10, 5))]
    for least in (None, 1):
        plan = sorted(plan_rows(items, 40, least), key=len)
        assert plan == [[3], [0, 1, 2, 4, 5, 6]]


def test_one_rollout_beyond_the_budget_has_a_row_of_its_own():
    items = [rollout(0, [5] * 3), rollout(1, [6] * 30), rollout(2, [7] * 3)]
    assert sorted(plan_rows(items, 10, 1)) == [[0, 2], [1]]


def test_bad_input():
    assert plan_rows([], 10, 1) == [] == plan_rows([], 10, None)
    assert plan_rows([rollout(0)], 10, 1) == [[0]]  # no sequence at all
    assert plan_rows([rollout(0, [])], 1, 1) == [[0]]
    assert plan_rows([rollout(0, []), rollout(1, [3, 4])], 1, 1) in ([[0], [1]], [[0, 1]], [[1], [0]])
    same = [rollout(i, [3, 4, 5]) for i in range(5)]
    assert plan_rows(same, 3, 1) == [[0, 1, 2, 3, 4]]
    assert sorted(map(len, plan_rows(same, 3, None))) == [1] * 5
    nested = [rollout(i, list(range(3, 4 + i))) for i in range(6)]
    assert plan_rows(nested, 6, 1) == [[0, 1, 2, 3, 4, 5]]


def test_forks_of_one_rollout_share_as_well():
    """Turns that each repeat the conversation: 4 sequences of 10, 20, 30, 40 tokens are 40."""
    forked = [rollout(g, *(list(range(100 * g, 100 * g + 10 * n)) for n in (1, 2, 3, 4)), group=g) for g in range(2)]
    assert plan_rows(forked, 80, 1) == [[0, 1]]
    assert plan_rows(forked, 40, 1) == [[0], [1]]
    assert len(make_row(forked, CPU, 1).input_ids_T) == 80 and len(make_row(forked, CPU).input_ids_T) == 200


# --- against the best ----------------------------------------------------------------------
def partitions(n: int) -> Iterator[list[list[int]]]:
    """All ways to cut 0..n-1 into parts."""
    if n == 0:
        yield []
        return
    for rest in partitions(n - 1):
        for at in range(len(rest)):
            yield [*rest[:at], [*rest[at], n - 1], *rest[at + 1 :]]
        yield [*rest, [n - 1]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(20, 45))
@settings(max_examples=60, deadline=None)
def test_hardly_more_rows_than_the_fewest_and_nearly_even_ones(sizes: list[int], budget: int):
    """First fit on decreasing size: at most 11/9 of the fewest and 6/9 more (Dosa 2007)."""
    items = [rollout(i, [5] * n) for i, n in enumerate(sizes)]
    plan = plan_rows(items, budget)
    held = [p for p in partitions(len(sizes)) if all(sum(sizes[i] for i in part) <= budget for part in p)]
    fewest = min(map(len, held))
    assert len(plan) <= (11 * fewest + 6) / 9
    worst = max(cost([items[i] for i in row], None) for row in plan)
    best = min(max(cost([items[i] for i in row], None) for row in p) for p in held if len(p) == len(plan))
    assert worst <= 2 * best


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_ranks_have_at_most_a_third_more_than_the_best_cut(sizes: list[int], ranks: int):
    """Longest first to whom has least: at most 4/3 - 1/3m of the best (Graham 1969)."""
    items = [rollout(i, [5 + i] * n, group=i) for i, n in enumerate(sizes)]
    pairs = [n * (n + 1) // 2 for n in sizes]
    parts = share_out(items, ranks, None)
    best = min(
        max(sum(pairs[i] for i, r in enumerate(who) if r == rank) for rank in range(ranks))
        for who in itertools.product(range(ranks), repeat=len(sizes))
    )
    assert max(sum(pairs[i] for i in part) for part in parts) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


# --- ranks -----------------------------------------------------------------------------------
@given(batches(), st.integers(1, 6), leasts)
@settings(max_examples=150, deadline=None)
def test_F157_each_rollout_is_trained_by_one_rank_and_no_rank_is_idle(items: list[TrainItem], ranks: int, least):
    parts = share_out(items, ranks, least)
    assert len(parts) == ranks
    assert sorted(i for part in parts for i in part) == list(range(len(items)))
    assert sum(bool(part) for part in parts) == min(ranks, len(items))
    assert parts == share_out(items, ranks, least)


def test_F157_one_group_for_four_ranks():
    items = [rollout(i, [*range(50), 60 + i]) for i in range(4)]
    assert sorted(share_out(items, 4, 1)) == [[0], [1], [2], [3]]
    assert sorted(map(len, share_out(items, 6, 1))) == [0, 0, 1, 1, 1, 1]
    assert share_out([], 3, 1) == [[], [], []]


def test_whole_groups_go_round_where_there_are_enough():
    items = [rollout(i, [*range(100 * (i // 4), 100 * (i // 4) + 30), 5, i], group=i // 4) for i in range(16)]
    parts = share_out(items, 2, 1)
    assert sorted(map(len, parts)) == [8, 8]
    assert all(len({items[i].group for i in part}) == 2 for part in parts)
    # a group that is far longer than the others is cut
    long = [rollout(i, [*range(1000), i], group=0) for i in range(4)]
    short = [rollout(4 + i, [1, 2, i], group=1) for i in range(4)]
    assert all(part for part in share_out([*long, *short], 2, None))


def test_a_rank_gets_what_costs_not_what_counts():
    """One of 40 tokens has 820 pairs; 8 of 10 have 440."""
    items = [rollout(0, [5] * 40), *(rollout(1 + i, [6] * 10) for i in range(8))]
    assert share_out(items, 2, None) == [[0], list(range(1, 9))]


# --- what the rows say ---------------------------------------------------------------------
@given(batches(), leasts)
@settings(max_examples=80, deadline=None)
def test_a_row_holds_each_sequence_with_its_own_predecessors(items: list[TrainItem], least: int | None):
    row = make_row(items, CPU, least)
    sequences = [s for item in items for s in item.sequences if len(s.input_ids)]
    assert row.sequence_lengths == tuple(len(s.input_ids) for s in sequences)
    assert row.input_ids_T[row.places_M].tolist() == [i for s in sequences for i in s.input_ids]
    assert row.position_ids_T[row.places_M].tolist() == [t for s in sequences for t in range(len(s.input_ids))]
    assert row.targets_N.tolist() == [i for s in sequences for i in s.input_ids[1:]]
    assert row.input_ids_T[row.scored_by_N].tolist() == [i for s in sequences for i in s.input_ids[:-1]]
    owners = [p for p, item in enumerate(items) for s in item.sequences for _ in s.input_ids[1:]]
    assert row.rollout_N.tolist() == owners
    assert row.shared == (len(row.input_ids_T) < sum(row.sequence_lengths))


def test_a_first_token_that_is_trained_and_a_mask_that_does_not_fit_are_refused():
    for mask, says in (([True, True], "first token"), ([False], "has a mask of 1")):
        bad = TrainItem(0, (TrainingSequence([3, 4], mask, [math.nan] * 2),), 1.0, True)
        with pytest.raises(ValueError, match=says):
            make_row([bad], CPU, 1)
