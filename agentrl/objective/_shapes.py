"""Sums per rollout over flat tokens, and the shape checks that every function of this room shares."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 60.0
"""Ratios are exp(d) of d clamped to this: e^60 is far outside every trust region and still finite in float32, and a
clipped token with an infinite ratio would have the gradient 0 x inf = NaN."""


def check_flat(rollout_T: Tensor, **tensors: Tensor | None) -> None:
    """Every tensor has the flat shape [T] of the rollout index; otherwise a ValueError names the first that has not."""
    if rollout_T.dim() != 1:
        raise ValueError(f"rollout_T must be flat, with shape [T]; it has shape {tuple(rollout_T.shape)}.")
    if rollout_T.dtype != torch.long:
        raise ValueError(f"rollout_T must hold int64 indices 0..R-1; it has dtype {rollout_T.dtype}.")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != rollout_T.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; rollout_T has {tuple(rollout_T.shape)}.")


def check_present(**tensors: Tensor | None) -> None:
    """No recorded log-prob is missing (NaN): a trained token without one is an error, never a guess."""
    for name, tensor in tensors.items():
        if tensor is not None and bool(torch.isnan(tensor).any()):
            first = int(torch.isnan(tensor).nonzero()[0, 0])
            raise ValueError(f"{name} is missing (NaN) at trained token {first}; every trained token needs a log-prob.")


def widen(values: Tensor) -> Tensor:
    """At least float32: log-probs of half precision are too coarse to be subtracted, float64 stays."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def count_rollouts(rollout_T: Tensor, num_rollouts: int | None) -> int:
    """R, the size of tensors per rollout. Read from the index where the caller does not say."""
    if num_rollouts is not None:
        return num_rollouts
    return int(rollout_T.max()) + 1 if rollout_T.numel() else 0


def rollout_sum(values_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """[R] sums of the values over each rollout's tokens; 0 for a rollout without tokens. Differentiable.

    >>> rollout_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 0]), 3)
    tensor([5., 0., 2.])
    """
    return values_T.new_zeros(num_rollouts).index_add(0, rollout_T, values_T)


def rollout_mean(values_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """[R] means of the values over each rollout's tokens; 0 for a rollout without tokens. Differentiable.

    >>> rollout_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 0]), 3)
    tensor([2.5000, 0.0000, 2.0000])
    """
    counts_R = rollout_sum(torch.ones_like(values_T), rollout_T, num_rollouts)
    return rollout_sum(values_T, rollout_T, num_rollouts) / counts_R.clamp(min=1.0)
