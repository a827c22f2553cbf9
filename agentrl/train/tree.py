"""A prefix tree of token sequences: what several of them begin with is one segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tree:
    """T tokens in S segments, depth first: a segment stands before what continues it, and its own part comes first."""

    ids_T: Ints
    positions_T: Ints  # a token's place in every sequence that it belongs to
    lengths: tuple[int, ...]  # [S]
    parents: tuple[int, ...]  # [S] the segment that a segment continues; -1: none
    places: tuple[Ints, ...]  # for each sequence, in the order given: where its tokens lie in [0, T)


def tree_of(sequences: Sequence[Sequence[int]], least: int | None) -> Tree:
    """The tree of some sequences.

    Args:
        sequences: Token ids. Any may be equal, begin another one, or be empty.
        least: A common beginning becomes a segment where that saves at least so many tokens; None: never.

    >>> t = tree_of([[1, 2, 3], [1, 2, 4, 5]], least=1)
    >>> t.ids_T.tolist(), t.positions_T.tolist(), t.lengths, t.parents
    ([1, 2, 3, 4, 5], [0, 1, 2, 2, 3], (2, 1, 2), (-1, 0, 0))
    >>> [place.tolist() for place in t.places]
    [[0, 1, 2], [0, 1, 3, 4]]
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    if least is None:
        order, common = list(range(len(arrays))), [0] * len(arrays)
    else:
        order = sorted(range(len(arrays)), key=lambda i: list(sequences[i]))
        common = common_beginnings(arrays, order)
    segments, leaf = _segments([len(arrays[i]) for i in order], common, max(1, least or 1))
    lengths = [end - begin for _, begin, end, _ in segments]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    parents = [parent for _, _, _, parent in segments]
    places: list[Ints] = [np.empty(0, np.int64)] * len(arrays)
    for rank, i in enumerate(order):
        place = np.empty(len(arrays[i]), np.int64)
        at = leaf[rank]
        while at >= 0:
            _, begin, end, parent = segments[at]
            place[begin:end] = np.arange(offsets[at], offsets[at + 1])
            at = parent
        places[i] = place
    pieces = [arrays[order[rank]][begin:end] for rank, begin, end, _ in segments]
    steps = [np.arange(begin, end) for _, begin, end, _ in segments]
    return Tree(joined(pieces), joined(steps), tuple(lengths), tuple(parents), tuple(places))


def common_beginnings(arrays: Sequence[Ints], order: Sequence[int]) -> list[int]:
    """For each sequence in sorted order: how many tokens it begins with as the one before it does; 0 for the first."""
    common = [0] * len(order)
    for rank in range(1, len(order)):
        one, two = arrays[order[rank - 1]], arrays[order[rank]]
        size = min(len(one), len(two))
        differs = one[:size] != two[:size]
        first = int(differs.argmax()) if size else 0
        common[rank] = first if size and differs[first] else size
    return common


def _segments(
    lengths: Sequence[int], common: Sequence[int], least: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Segments (a sorted sequence that has it, begin, end, parent), and the last segment of each sorted sequence.

    -1 is the last segment of an empty sequence. A run of neighbours is cut where they part; no recursion, because a
    conversation may fork at each of a thousand turns.
    """
    segments: list[tuple[int, int, int, int]] = []
    leaf = [-1] * len(lengths)
    waiting = [(0, len(lengths), 0, -1)] if lengths else []
    while waiting:
        low, high, depth, parent = waiting.pop()
        if high - low == 1:
            if lengths[low] > depth:
                segments.append((low, depth, lengths[low], parent))
                parent = len(segments) - 1
            leaf[low] = parent
            continue
        shared = min(common[low + 1 : high])
        if shared > depth and (high - low - 1) * (shared - depth) >= least:
            segments.append((low, depth, shared, parent))
            parent, depth = len(segments) - 1, shared
        cuts = [low, *(n for n in range(low + 1, high) if common[n] == shared), high]
        waiting += [(a, b, depth, parent) for a, b in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return segments, leaf


def depths_of(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The position of each segment's first token in its sequences.

    >>> depths_of((2, 1, 2), (-1, 0, 1))
    [0, 2, 3]
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + lengths[parent] if parent >= 0 else 0)
    return depths


def joined(parts: Sequence[Ints]) -> Ints:
    """The parts end to end, also where there are none."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
