"""Which rollouts share a row: groups together, rows within a budget of tokens, alike in what attention costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.train.rows import TrainItem
from agentrl.train.tree import common_beginnings, depths_of, tree_of


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rollouts that stay together, and at most what they take: what they share with others is not known here."""

    members: tuple[int, ...]
    tokens: int  # distinct ones
    pairs: int  # of queries and keys


def plan_rows(items: Sequence[TrainItem], budget: int, least: int | None = None) -> list[list[int]]:
    """Which items share a row, so that no row has more than `budget` tokens unless one rollout alone does.

    A group is cut only where it does not fit. There are at most 11/9 of the fewest rows possible and one more (first
    fit on decreasing size); over them, pairs of queries and keys are spread evenly where the budget allows it.

    Args:
        items: Rollouts, by their groups.
        budget: Tokens of a row; those that stand for several sequences count once.
        least: As in `make_row`; None: nothing is shared.
    """
    if sum(item.tokens for item in items) <= budget:
        return [list(range(len(items)))] if items else []
    units = _units(items, budget, least)
    rows = _first_fit(units, budget)
    rows = _balanced(units, budget, len(rows)) or rows
    plan = [sorted(i for unit in row for i in unit.members) for row in rows]
    if least is None or least == 1:
        return plan
    return [part for row in plan for part in _cut_to_fit(items, row, budget, least)]


def _cut_to_fit(items: Sequence[TrainItem], row: list[int], budget: int, least: int) -> list[list[int]]:
    """The row, or parts of it: what two share by themselves may be too little for a segment beside a third."""
    sequences = [sequence.input_ids for i in row for sequence in items[i].sequences]
    fits = sum(map(len, sequences)) <= budget or len(tree_of(sequences, least).ids_T) <= budget
    if fits or len(row) == 1:
        return [row]
    half = len(row) // 2
    return [part for some in (row[:half], row[half:]) for part in _cut_to_fit(items, some, budget, least)]


def share_out(items: Sequence[TrainItem], ranks: int, least: int | None = None) -> list[list[int]]:
    """Which rank trains which items: groups together as far as they go round, alike in what attention costs.

    Each rank has at least one item where there are enough.
    """
    total = sum(item.tokens for item in items)
    units = _units(items, max(1, total // ranks), least)
    if len(units) < ranks:
        units = _units(items, 1, None)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    cost = [0] * ranks
    for unit in sorted(units, key=lambda unit: (-unit.pairs, unit.members)):
        lightest = min(range(ranks), key=lambda r: (cost[r], len(parts[r]), r))
        parts[lightest] += unit.members
        cost[lightest] += unit.pairs
    return [sorted(part) for part in parts]


def _units(items: Sequence[TrainItem], budget: int, least: int | None) -> list[_Unit]:
    """Groups, each cut into as many parts as the budget asks for; single rollouts where nothing is shared."""
    alone = [_alone(item, least) for item in items]
    if least is None:
        return [_Unit((i,), *alone[i]) for i in range(len(items))]
    groups: dict[int, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.group, []).append(i)
    units: list[_Unit] = []
    for members in groups.values():
        firsts = [list(items[i].sequences[0].input_ids) if items[i].sequences else [] for i in members]
        order = sorted(range(len(members)), key=firsts.__getitem__)
        common = common_beginnings([np.asarray(first, dtype=np.int64) for first in firsts], order)
        part, tokens, pairs = [], 0, 0
        for rank, n in enumerate(order):
            i, shared = members[n], common[rank] if common[rank] >= least else 0
            if part and tokens + alone[i][0] - shared > budget:
                units.append(_Unit(tuple(part), tokens, pairs))
                part, tokens, pairs = [], 0, 0
            shared = shared if part else 0
            part.append(i)
            tokens += alone[i][0] - shared
            pairs += alone[i][1] - shared * (shared + 1) // 2
        units.append(_Unit(tuple(part), tokens, pairs))
    return units


def _alone(item: TrainItem, least: int | None) -> tuple[int, int]:
    """Tokens and pairs of a row that holds this rollout only."""
    sequences = [sequence.input_ids for sequence in item.sequences]
    if len(sequences) == 1:
        return len(sequences[0]), attention_pairs((len(sequences[0]),), (-1,))
    tree = tree_of(sequences, least)
    return len(tree.ids_T), attention_pairs(tree.lengths, tree.parents)


def attention_pairs(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """Pairs of a token and one that it attends to, itself among them.

    >>> attention_pairs((2, 1, 2), (-1, 0, 0))
    13
    """
    return sum(n * d + n * (n + 1) // 2 for n, d in zip(lengths, depths_of(lengths, parents), strict=True))


def _first_fit(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    rows: list[list[_Unit]] = []
    left: list[int] = []
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.members)):
        for r, room in enumerate(left):
            if unit.tokens <= room:
                rows[r].append(unit)
                left[r] -= unit.tokens
                break
        else:
            rows.append([unit])
            left.append(budget - unit.tokens)
    return rows


def _balanced(units: Sequence[_Unit], budget: int, count: int) -> list[list[_Unit]] | None:
    """`count` rows of about the same number of pairs; None where that needs another row."""
    rows: list[list[_Unit]] = [[] for _ in range(count)]
    tokens, pairs = [0] * count, [0] * count
    for unit in sorted(units, key=lambda unit: (-unit.pairs, unit.members)):
        fits = [r for r in range(count) if tokens[r] + unit.tokens <= budget or not rows[r]]
        if not fits:
            return None
        r = min(fits, key=lambda r: (pairs[r], r))
        rows[r].append(unit)
        tokens[r] += unit.tokens
        pairs[r] += unit.pairs
    return rows
