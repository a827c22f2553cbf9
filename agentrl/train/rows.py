"""Rows: whole rollouts as flat tensors of segments, in which what sequences begin with in common stands once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentrl.train.candidates import sampler_heads, sampling_sets
from agentrl.train.tree import Ints, joined, tree_of
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
    group: int = 0  # rollouts of one prompt have the same; they go into one row where it holds them

    @property
    def trained_tokens(self) -> int:
        """N, or 0 where nothing of the rollout is trained."""
        return sum(sum(s.completion_mask) for s in self.sequences) if self.active else 0

    @property
    def tokens(self) -> int:
        """Tokens of its sequences, shared ones counted in each."""
        return sum(len(s.input_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Row:
    """What one forward pass sees: T tokens in segments, which hold S sequences of M tokens, N of them trained.

    Without sharing, the sequences are the segments. With it, a segment may continue another, and a token that several
    sequences begin with stands once. Each trained token is scored by its predecessor in its own sequence, so one
    position may score several; no term crosses a sequence's start.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor  # a token's place in its sequences
    lengths: tuple[int, ...]  # of the segments, in order
    parents: tuple[int, ...]  # for each segment the one that it continues; -1: none
    sequence_lengths: tuple[int, ...]  # [S], in the order of `items`
    places_M: Tensor  # where each token of each sequence lies in [0, T)
    scored_at_N: Tensor  # index in [0, M) of the token before the trained one
    targets_N: Tensor
    rollout_N: Tensor  # 0..R-1, the place of the token's rollout in `items`
    items: tuple[TrainItem, ...]  # [R]
    sets_NK: Tensor | None = (
        None  # ids that each token was drawn from, -1: padding; a row of -1: all; None: all, always
    )
    heads_NH: Tensor | None = None  # the sampler's most likely ids where each token was drawn, -1: padding
    head_log_probs_NH: Tensor | None = None  # what the sampler gave them; -inf: padding

    @property
    def scored_by_N(self) -> Tensor:
        """Index in [0, T) of the position whose logits predict the trained token."""
        return self.places_M.index_select(0, self.scored_at_N)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.sequence_lengths, default=0)

    @property
    def shared(self) -> bool:
        """Whether a token stands for several sequences."""
        return len(self.places_M) > len(self.input_ids_T)

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


def make_row(items: Sequence[TrainItem], device: torch.device, least: int | None = None) -> Row:
    """The row that holds every sequence of `items`.

    Args:
        items: Rollouts. A sequence without tokens is left out.
        device: Of the tensors.
        least: What sequences begin with in common stands once where that saves so many tokens; None: nothing does.

    Raises:
        ValueError: A trained token at the start of a sequence: nothing predicts it. Or ids and mask that do not fit.
    """
    pairs = [(place, s) for place, item in enumerate(items) for s in item.sequences if len(s.input_ids)]
    sequences = [sequence for _, sequence in pairs]
    tree = tree_of([sequence.input_ids for sequence in sequences], least)
    trained = [_trained(sequence) for sequence in sequences]
    starts = np.cumsum([0, *(len(place) for place in tree.places)])
    scored_at = [start + at - 1 for start, at in zip(starts, trained, strict=False)]
    places_M = joined(tree.places)
    targets = tree.ids_T[places_M[joined(scored_at) + 1]] if len(places_M) else places_M
    rollouts = [np.full(len(at), place) for (place, _), at in zip(pairs, trained, strict=True)]

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    sets, heads = sampling_sets(sequences), sampler_heads(sequences)
    return Row(
        tensor(tree.ids_T),
        tensor(tree.positions_T),
        tree.lengths,
        tree.parents,
        tuple(len(place) for place in tree.places),
        tensor(places_M),
        tensor(joined(scored_at)),
        tensor(targets),
        tensor(joined(rollouts)),
        tuple(items),
        None if sets is None else sets.to(device),
        None if heads is None else heads[0].to(device),
        None if heads is None else heads[1].to(device),
    )


def _trained(sequence: TrainingSequence) -> Ints:
    mask = np.asarray(sequence.completion_mask, dtype=bool)
    if len(mask) != len(sequence.input_ids):
        raise ValueError(f"a sequence of {len(sequence.input_ids)} tokens has a mask of {len(mask)}")
    if mask[0]:
        raise ValueError("the first token of a sequence is marked as trained, but nothing predicts it")
    return np.flatnonzero(mask)


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
        parents=(*row.parents, -1),
    )


def each_sequence(row: Row) -> list[Row]:
    """A row for each sequence of `row`, in order, without what its trained tokens are compared with."""
    sequences = [(item, s) for item in row.items for s in item.sequences if len(s.input_ids)]
    parts, start = [], 0
    for length, (item, sequence) in zip(row.sequence_lengths, sequences, strict=True):
        inside = (row.scored_at_N >= start) & (row.scored_at_N < start + length)
        place = row.places_M[start : start + length]
        parts.append(
            Row(
                row.input_ids_T[place],
                row.position_ids_T[place],
                (length,),
                (-1,),
                (length,),
                torch.arange(length, device=place.device),
                row.scored_at_N[inside] - start,
                row.targets_N[inside],
                torch.zeros_like(row.targets_N[inside]),
                (replace(item, sequences=(sequence,)),),
            )
        )
        start += length
    return parts
