"""Rows: whole rollouts laid end to end as flat tensors with segment borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.train.candidates import sampler_heads, sampling_sets
from agentrl.types import TrainingSequence


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One rollout as the loss sees it. N trained tokens over all its sequences."""

    index: int  # of the rollout in its generation batch
    sequences: tuple[TrainingSequence, ...]
    advantage: float
    active: bool  # False: truncated and masked, failed or unscored: nothing of it is trained
    old_N: Tensor | None = None  # log-probs before the first update; None: the current ones, detached
    sampler_N: Tensor | None = None  # log-probs recorded at sampling time
    ref_N: Tensor | None = None  # log-probs under the reference model
    corrected: bool = False  # another engine drew it, and its log-probs `sampler_N` are known

    @property
    def trained_tokens(self) -> int:
        """N, or 0 where nothing of the rollout is trained."""
        return sum(sum(s.completion_mask) for s in self.sequences) if self.active else 0

    @property
    def tokens(self) -> int:
        """Tokens that a forward pass sees."""
        return sum(len(s.input_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Row:
    """What one forward pass sees: T tokens in segments, N of them trained.

    No term crosses a segment's start: token i is scored by position `scored_by[i]`, its predecessor in its segment.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor  # restarts at 0 in every segment
    lengths: tuple[int, ...]  # of the segments, in order
    scored_by_N: Tensor  # index in [0, T) of the position whose logits predict the trained token
    targets_N: Tensor
    rollout_N: Tensor  # 0..R-1, the place of the token's rollout in `items`
    items: tuple[TrainItem, ...]  # [R]
    sets_NK: Tensor | None = (
        None  # ids that each token was drawn from, -1: padding; a row of -1: all; None: all, always
    )
    heads_NH: Tensor | None = None  # the sampler's most likely ids where each token was drawn, -1: padding
    head_log_probs_NH: Tensor | None = None  # what the sampler gave them; -inf: padding

    @property
    def has_media(self) -> bool:
        """True where a sequence of the row shows images."""
        return any(sequence.media for item in self.items for sequence in item.sequences)

    def gathered(self, name: str) -> Tensor | None:
        """`old_N`, `sampler_N` or `ref_N` of all items, end to end; None where an item has none."""
        parts = [getattr(item, name) for item in self.items]
        if not parts or any(part is None for part in parts):
            return None
        return torch.cat(parts).to(self.targets_N.device)

    def per_token(self, values_R: Sequence[float]) -> Tensor:
        """One value per rollout, spread over its trained tokens, [N]."""
        return torch.tensor(values_R, dtype=torch.float32, device=self.targets_N.device)[self.rollout_N]


def make_row(items: Sequence[TrainItem], device: torch.device) -> Row:
    """The row that holds every sequence of `items`.

    Raises:
        ValueError: A trained token at the start of a sequence: nothing predicts it.
    """
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    scored_by: list[int] = []
    targets: list[int] = []
    rollouts: list[int] = []
    for place, item in enumerate(items):
        for sequence in item.sequences:
            start, tokens = len(ids), sequence.input_ids
            if sequence.completion_mask[0]:
                raise ValueError("the first token of a sequence is marked as trained, but nothing predicts it")
            trained = [t for t, mask in enumerate(sequence.completion_mask) if mask]
            ids += tokens
            positions += range(len(tokens))
            lengths.append(len(tokens))
            scored_by += [start + t - 1 for t in trained]
            targets += [tokens[t] for t in trained]
            rollouts += [place] * len(trained)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    sequences = [sequence for item in items for sequence in item.sequences]
    sets, heads = sampling_sets(sequences), sampler_heads(sequences)
    return Row(
        tensor(ids),
        tensor(positions),
        tuple(lengths),
        tensor(scored_by),
        tensor(targets),
        tensor(rollouts),
        tuple(items),
        None if sets is None else sets.to(device),
        None if heads is None else heads[0].to(device),
        None if heads is None else heads[1].to(device),
    )


def filled(row: Row, multiple: int) -> Row:
    """The row with a last segment that nothing is trained in, so that `multiple` divides T; itself where it does."""
    missing = -len(row.input_ids_T) % multiple
    if not missing:
        return row
    more = torch.zeros(missing, dtype=torch.long, device=row.input_ids_T.device)
    return replace(
        row,
        input_ids_T=torch.cat([row.input_ids_T, more]),
        position_ids_T=torch.cat([row.position_ids_T, torch.arange(missing, device=more.device)]),
        lengths=(*row.lengths, missing),
    )


def each_sequence(row: Row) -> list[Row]:
    """A row for each sequence of `row`, in order, without what its trained tokens are compared with."""
    sequences = [(item, sequence) for item in row.items for sequence in item.sequences]
    parts, start = [], 0
    for length, (item, sequence) in zip(row.lengths, sequences, strict=True):
        inside = (row.scored_by_N >= start) & (row.scored_by_N < start + length)
        parts.append(
            Row(
                row.input_ids_T[start : start + length],
                row.position_ids_T[start : start + length],
                (length,),
                row.scored_by_N[inside] - start,
                row.targets_N[inside],
                torch.zeros_like(row.targets_N[inside]),
                (replace(item, sequences=(sequence,)),),
            )
        )
        start += length
    return parts


def plan_rows(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Which rollouts share a row, so that no row exceeds `budget` tokens unless one rollout alone does.

    First fit on decreasing size: at most 22% more rows than the fewest possible.

    >>> plan_rows([5, 3, 2, 4], budget=7)
    [[0, 2], [3, 1]]
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    rows: list[list[int]] = []
    left: list[int] = []
    for i in order:
        for r, room in enumerate(left):
            if sizes[i] <= room:
                rows[r].append(i)
                left[r] -= sizes[i]
                break
        else:
            rows.append([i])
            left.append(budget - sizes[i])
    return rows
