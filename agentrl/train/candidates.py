"""Sets of ids beside trained tokens: what a token was drawn from, and what the sampler found most likely there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.types import TrainingSequence


def sampling_sets(sequences: Sequence[TrainingSequence]) -> Tensor | None:
    """[N, K] candidate ids of all trained tokens, -1 behind the end of each set; None where no token has a set.

    >>> one = TrainingSequence([5, 6, 7], [False, True, True], [], sampling_mask=[[6, 8], []])
    >>> sampling_sets([one])
    tensor([[ 6,  8],
            [-1, -1]])
    """
    if all(s.sampling_mask is None for s in sequences):
        return None
    sets = [entry for s in sequences for entry in _entries(s, s.sampling_mask, ())]
    return _padded(sets, -1, np.int64)


def sampler_heads(sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor] | None:
    """The sampler's most likely ids [N, H] and their log-probs [N, H], padded with -1 and -inf; None without any.

    >>> one = TrainingSequence([5, 6, 7], [False, True, True], [], sampler_logprobs=[{6: -0.5, 8: -1.0}, {7: -0.25}])
    >>> sampler_heads([one])[1]
    tensor([[-0.5000, -1.0000],
            [-0.2500,    -inf]])
    """
    if all(s.sampler_logprobs is None for s in sequences):
        return None
    heads = [entry for s in sequences for entry in _entries(s, s.sampler_logprobs, {})]
    ids = _padded(heads, -1, np.int64)
    log_probs = _padded([list(head.values()) for head in heads], -np.inf, np.float32)
    return None if ids is None or log_probs is None else (ids, log_probs)


def _entries(sequence: TrainingSequence, entries: Sequence[Any] | None, nothing: Any) -> Sequence[Any]:
    """One entry for each trained token.

    Raises:
        ValueError: There are more or fewer.
    """
    trained = sum(sequence.completion_mask)
    if entries is None:
        return [nothing] * trained
    if len(entries) != trained:
        raise ValueError(f"a sequence has {trained} trained tokens but {len(entries)} sets of ids")
    return entries


def _padded(
    sets: Sequence[Sequence[int] | Sequence[float] | Mapping[int, float]], pad: float, dtype: type
) -> Tensor | None:
    sizes = np.fromiter(map(len, sets), np.int64, len(sets))
    width = int(sizes.max(initial=0))
    if not width:
        return None
    out = np.full((len(sets), width), pad, dtype)
    out[np.arange(width) < sizes[:, None]] = np.fromiter(chain.from_iterable(sets), dtype, int(sizes.sum()))
    return torch.from_numpy(out)


def joined(sets_NK: Tensor | None, ids_NH: Tensor | None) -> Tensor | None:
    """Both side by side, [N, K + H], so that one pass through the output layer serves both."""
    if sets_NK is None or ids_NH is None:
        return ids_NH if sets_NK is None else sets_NK
    return torch.cat([sets_NK, ids_NH], dim=-1)
