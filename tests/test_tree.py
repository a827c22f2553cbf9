"""The prefix tree of a row's sequences, where its segments lie, and which of them are computed together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train import layout as layout_module
from agentrl.train.layout import Bucket, Layout, together
from agentrl.train.pack import attention_pairs
from agentrl.train.tree import Tree, tree_of

CPU = torch.device("cpu")
Ids = list[list[int]]
few_ids = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9)


def shape(sequences: Sequence[Sequence[int]], least: int | None = 1) -> tuple[Ids, list[int], Ids]:
    """Segments' ids, their parents, and the places of each sequence."""
    tree = tree_of(sequences, least)
    ends = list(itertools.accumulate(tree.lengths, initial=0))
    parts = [tree.ids_T[a:b].tolist() for a, b in itertools.pairwise(ends)]
    return parts, list(tree.parents), [place.tolist() for place in tree.places]


# --- by hand -----------------------------------------------------------------------------
def test_two_completions_of_one_prompt_in_any_order():
    assert shape([[1, 2, 4, 5], [1, 2, 3]]) == ([[1, 2], [3], [4, 5]], [-1, 0, 0], [[0, 1, 3, 4], [0, 1, 2]])
    assert shape([[1, 2, 3], [1, 2, 4, 5]]) == ([[1, 2], [3], [4, 5]], [-1, 0, 0], [[0, 1, 2], [0, 1, 3, 4]])


def test_positions_count_along_the_path():
    assert tree_of([[7, 8, 9], [7, 8, 5, 6], [7, 3]], 1).positions_T.tolist() == [0, 1, 1, 2, 3, 2]


def test_a_fork_in_a_fork_and_a_stranger():
    parts, parents, places = shape([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [9, 9]])
    assert parts == [[1, 2], [3], [4], [5], [6], [9, 9]]
    assert parents == [-1, 0, 1, 1, 0, -1]
    assert places == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [6, 7]]


def test_identical_sequences_are_one_segment():
    assert shape([[4, 5], [4, 5], [4, 5]]) == ([[4, 5]], [-1], [[0, 1]] * 3)


def test_one_sequence_is_a_prefix_of_another():
    assert shape([[1, 2, 3], [1, 2]]) == ([[1, 2], [3]], [-1, 0], [[0, 1, 2], [0, 1]])
    assert shape([[1], [1, 2], [1, 2, 3]]) == ([[1], [2], [3]], [-1, 0, 1], [[0], [0, 1], [0, 1, 2]])


def test_empty_sequences_lie_nowhere():
    assert shape([]) == ([], [], [])
    assert shape([[], []]) == ([], [], [[], []])
    assert shape([[], [3], []]) == ([[3]], [-1], [[], [0], []])
    assert shape([[], [3], []], None) == ([[3]], [-1], [[], [0], []])


def test_without_sharing_each_sequence_is_a_segment_in_the_order_given():
    assert shape([[2, 1], [2, 1], [1]], None) == ([[2, 1], [2, 1], [1]], [-1] * 3, [[0, 1], [2, 3], [4]])


def test_the_threshold_counts_the_tokens_that_are_saved():
    pair, three = [[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert shape(pair, 2)[0] == [[1, 2], [3], [4]]
    assert shape(pair, 3)[0] == [[1, 2, 3], [1, 2, 4]]  # saves 2
    assert shape(three, 4)[0] == [[1, 2], [3], [4], [5]]
    assert shape(three, 5)[0] == three  # saves 4


def test_a_beginning_that_is_too_short_for_all_may_be_long_enough_for_some():
    parts, parents, places = shape([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 9]], 3)
    assert parts == [[1, 2, 3, 4], [5], [6], [1, 9]]  # [1] alone would save 2
    assert parents == [-1, 0, 0, -1]
    assert places[2] == [6, 7]


def test_a_thousand_nested_prefixes_need_no_recursion():
    """A conversation that forks at every turn: 1500 sequences, each one token longer than the one before."""
    sequences = [list(range(n)) for n in range(1, 1501)]
    tree = tree_of(sequences[::-1], 1)
    assert tree.ids_T.tolist() == list(range(1500)) == tree.positions_T.tolist()
    assert tree.parents == tuple(range(-1, 1499))
    assert all(place.tolist() == sequences[1499 - i] for i, place in enumerate(tree.places))
    layout = Layout.of(tree.lengths, tree.parents, CPU)
    assert layout.depths == tuple(range(1500))
    assert attention_pairs(tree.lengths, tree.parents) == 1500 * 1501 // 2


# --- against a set of prefixes -------------------------------------------------------------
def check(tree: Tree, sequences: Ids) -> None:
    """What is true whatever is shared."""
    assert len(tree.places) == len(sequences) and len(tree.ids_T) == sum(tree.lengths) == len(tree.positions_T)
    assert all(n > 0 for n in tree.lengths)
    starts = list(itertools.accumulate(tree.lengths, initial=0))
    owner = [s for s, n in enumerate(tree.lengths) for _ in range(n)]
    for place, ids in zip(tree.places, sequences, strict=True):
        assert tree.ids_T[place].tolist() == ids
        assert tree.positions_T[place].tolist() == list(range(len(ids)))
        assert (place[1:] > place[:-1]).all()  # what continues a segment stands behind it
        path, seen = [], (owner[place[-1]] if len(place) else -1)
        while seen >= 0:
            path.append(seen)
            seen = tree.parents[seen]
        whole = [t for s in reversed(path) for t in range(starts[s], starts[s + 1])]
        assert whole == place.tolist()  # the sequence is the whole path to its last segment
    below = [[s, *(c for c in range(len(tree.lengths)) if s in ancestors(tree, c))] for s in range(len(tree.lengths))]
    assert all(family == list(range(family[0], family[0] + len(family))) for family in below)  # depth first


def ancestors(tree: Tree, s: int) -> set[int]:
    found = set()
    while (s := tree.parents[s]) >= 0:
        found.add(s)
    return found


@given(few_ids)
@settings(max_examples=150, deadline=None)
def test_every_prefix_stands_once(sequences: Ids):
    tree = tree_of(sequences, 1)
    check(tree, sequences)
    assert len(tree.ids_T) == len({tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))})


@given(few_ids, st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_a_segment_is_shared_only_where_it_saves_enough(sequences: Ids, least: int):
    tree = tree_of(sequences, least)
    check(tree, sequences)
    for s in set(tree.parents) - {-1}:
        start = sum(tree.lengths[:s])
        users = sum(start in place for place in tree.places)
        assert (users - 1) * tree.lengths[s] >= least
    each_once = sum(map(len, sequences)) - sum(
        (sum(start in p for p in tree.places) - 1) * n
        for start, n in zip(itertools.accumulate(tree.lengths, initial=0), tree.lengths, strict=False)
    )
    assert len(tree.ids_T) == each_once


@given(few_ids)
@settings(max_examples=50, deadline=None)
def test_without_sharing_nothing_is_lost_either(sequences: Ids):
    tree = tree_of(sequences, None)
    check(tree, sequences)
    assert len(tree.ids_T) == sum(map(len, sequences)) and set(tree.parents) <= {-1}


# --- layout ----------------------------------------------------------------------------------
def seen_by_path(layout: Layout, window: int | None = None) -> set[tuple[int, int]]:
    """(query, key) pairs of a root path, by following the parents token by token."""
    before = []
    for start, length, parent in zip(layout.starts, layout.lengths, layout.parents, strict=True):
        above = -1 if parent < 0 else layout.starts[parent] + layout.lengths[parent] - 1
        before += [above, *range(start, start + length - 1)]
    pairs = set()
    for query in range(len(before)):
        key, far = query, 0
        while key >= 0 and (window is None or far < window):
            pairs.add((query, key))
            key, far = before[key], far + 1
    return pairs


def seen_by_buckets(layout: Layout, window: int | None = None) -> list[tuple[int, int]]:
    """What the buckets say, with a causal band in those of a segment with itself."""
    pairs = []
    for bucket in layout.own:
        real = real_places(bucket)
        for s, queries in enumerate(bucket.queries_SQ.tolist()):
            for i, query in enumerate(queries):
                near = range(0 if window is None else max(0, i - window + 1), i + 1)
                pairs += [(query, queries[j]) for j in near if (s, i) in real]
    for bucket in layout.above(window):
        real = real_places(bucket)
        S, Q, K = *bucket.queries_SQ.shape, bucket.keys_SK.shape[1]
        bias = torch.zeros(S, Q, K) if bucket.bias_SQK is None else bucket.bias_SQK.expand(S, Q, K)
        for s, i in real:
            sees = (bias[s, i] == 0).nonzero()[:, 0]
            pairs += [(int(bucket.queries_SQ[s, i]), int(key)) for key in bucket.keys_SK[s][sees]]
    return pairs


def real_places(bucket: Bucket) -> set[tuple[int, int]]:
    at = torch.arange(bucket.queries_SQ.numel()) if bucket.real_R is None else bucket.real_R
    return {divmod(int(i), bucket.queries_SQ.shape[1]) for i in at}


@st.composite
def trees(draw: st.DrawFn, longest: int = 7, most: int = 8) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and parents of segments in depth-first order."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    parents, path = [-1], [0]
    for s in range(1, len(lengths)):
        keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(s)
    return tuple(lengths), tuple(parents)


@given(
    trees(), st.sampled_from([None, 1, 2, 3, 5, 9, 40]), st.sampled_from([0, 16, 1 << 14]), st.sampled_from([2, 128])
)
@settings(max_examples=150, deadline=None)
def test_each_token_meets_its_root_path_once_in_some_bucket(tree: tuple, window: int | None, small: int, piece: int):
    """With few or many buckets, and long segments cut into pieces or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "SMALL", small)
        patch.setattr(layout_module, "PIECE", piece)
        whole = Layout.of(*tree, CPU)
        want = seen_by_path(whole, window)
        for layout in (whole, whole.in_pieces()):
            pairs = seen_by_buckets(layout, window)
            assert len(pairs) == len(set(pairs))
            assert set(pairs) == want
        if window is None:
            assert (
                attention_pairs(*tree)
                == len(want)
                == attention_pairs(whole.in_pieces().lengths, whole.in_pieces().parents)
            )


@given(trees(longest=9), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_pieces_are_about_as_long_as_asked_and_continue_each_other(tree: tuple, piece: int, most: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "PIECE", piece)
        patch.setattr(layout_module, "MOST_PIECES", most)
        whole = Layout.of(*tree, CPU)
        pieces = whole.in_pieces()
    assert sum(pieces.lengths) == sum(whole.lengths) and set(whole.starts) <= set(pieces.starts)
    longest = max(1.0, 1.5 * piece, max(whole.lengths) / most + 1)
    assert all(0 < n <= longest for n in pieces.lengths)
    assert len(pieces.lengths) <= most * len(whole.lengths)
    assert pieces.depths == tuple(int(d) for d in whole.positions()[list(pieces.starts)])


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=20), st.sampled_from([0, 100, 1 << 14]))
@settings(max_examples=100, deadline=None)
def test_sets_that_are_padded_together_waste_little(sizes: list[tuple[int, int]], small: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "SMALL", small)
        groups = together(sizes)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        real = sum(sizes[i][0] * sizes[i][1] for i in group)
        padded = max(sizes[i][0] for i in group) * max(sizes[i][1] for i in group) * len(group)
        assert padded <= max(1.15 * real, real + small)


def test_children_of_one_segment_are_one_set_of_queries():
    """64 completions of one prompt read the prompt's keys in one call, unpadded and without a mask."""
    layout = Layout.of((50, *range(1, 65)), (-1, *[0] * 64), CPU)
    (bucket,) = layout.above(None)
    assert bucket.keys_SK.tolist() == [list(range(50))]
    assert bucket.queries_SQ.shape == (1, sum(range(1, 65)))
    assert bucket.bias_SQK is None and bucket.real_R is None and bucket.span == (50, 50 + sum(range(1, 65)))


def test_a_window_leaves_out_what_nobody_sees():
    """Window 4 over a prompt of 10 and two completions of 6: three keys, and three queries of each."""
    (bucket,) = Layout.of((10, 6, 6), (-1, 0, 0), CPU).above(4)
    assert bucket.keys_SK.tolist() == [[7, 8, 9]]
    assert bucket.queries_SQ.tolist() == [[10, 11, 12, 16, 17, 18]]
    assert bucket.bias_SQK is not None
    assert (bucket.bias_SQK[0] == 0).tolist() == [[True] * 3, [False, True, True], [False, False, True]] * 2
    assert Layout.of((10, 6), (-1, 0), CPU).above(1) == ()


def test_attention_pairs_by_hand():
    assert attention_pairs((), ()) == 0
    assert attention_pairs((3,), (-1,)) == 6
    assert attention_pairs((3, 2), (-1, -1)) == 9
    assert attention_pairs((3, 2), (-1, 0)) == 15
    assert attention_pairs((3, 2, 1), (-1, 0, 1)) == 21
