"""Correction for a sampler whose log-probs are not the trainer's."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.objective._shapes import MAX_LOG_RATIO, check_flat, check_present, count_rollouts, rollout_sum, widen

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def check_correction(mode: str, clip_min: float | None, clip_max: float | None) -> None:
    """The mode is known and the bounds leave a range; otherwise a ConfigurationError says what to change."""
    if mode not in get_args(CorrectionMode):
        raise ConfigurationError(
            f"Unknown importance sampling mode {mode!r}; choose one of {', '.join(get_args(CorrectionMode))}."
        )
    for name, bound in (("clip_min", clip_min), ("clip_max", clip_max)):
        if bound is not None and not bound >= 0:
            raise ConfigurationError(f"Importance sampling {name} must be at least 0 or None; it is {bound}.")
    if clip_min is not None and clip_max is not None and clip_min > clip_max:
        raise ConfigurationError(f"Importance sampling clip_min {clip_min} is above clip_max {clip_max}.")


def raw_ratio(
    old_log_probs_T: Tensor,
    sampler_log_probs_T: Tensor,
    rollout_T: Tensor,
    mode: CorrectionMode,
    *,
    num_rollouts: int | None = None,
) -> Tensor:
    """[T] trainer probability over sampler probability, before any bound; per rollout in the sequence modes.

    The sequence ratio is the plain product over the rollout's tokens, exp(sum of o - q), not length-normalised.
    """
    check_flat(rollout_T, old_log_probs_T=old_log_probs_T, sampler_log_probs_T=sampler_log_probs_T)
    check_present(old_log_probs_T=old_log_probs_T, sampler_log_probs_T=sampler_log_probs_T)
    with torch.no_grad():
        gap_T = widen(old_log_probs_T) - widen(sampler_log_probs_T)
        if mode.startswith("sequence"):
            gap_T = rollout_sum(gap_T, rollout_T, count_rollouts(rollout_T, num_rollouts))[rollout_T]
        return torch.exp(gap_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sampler_correction(
    old_log_probs_T: Tensor,
    sampler_log_probs_T: Tensor,
    rollout_T: Tensor,
    mode: CorrectionMode,
    clip_min: float | None,
    clip_max: float | None,
    *,
    num_rollouts: int | None = None,
) -> Tensor:
    """[T] weights without gradient that turn a mean over the sampler's tokens into one over the trainer's.

    `old_log_probs_T` is the trainer's own recomputation, `sampler_log_probs_T` what was recorded when the token was
    drawn. ``*_truncate`` clamps the ratio to [clip_min, clip_max]; ``*_mask`` sets it to 0 outside (both ends belong
    to the inside). A bound of None does not bound. In the sequence modes every token of a rollout has the same weight,
    from all its trained tokens. Raises ConfigurationError on bad bounds, ValueError on a missing log-prob.

    >>> old, sampler = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -2.0])
    >>> rollout = torch.tensor([0, 0, 1])
    >>> sampler_correction(old, sampler, rollout, "token_truncate", None, 2.0)  # 1, e and e, at most 2
    tensor([1., 2., 2.])
    >>> sampler_correction(old, sampler, rollout, "sequence_mask", None, 3.0)  # e for both rollouts
    tensor([2.7183, 2.7183, 2.7183])
    """
    check_correction(mode, clip_min, clip_max)
    ratio_T = raw_ratio(old_log_probs_T, sampler_log_probs_T, rollout_T, mode, num_rollouts=num_rollouts)
    return restrict(ratio_T, mode, clip_min, clip_max)


def restrict(ratio: Tensor, mode: CorrectionMode, clip_min: float | None, clip_max: float | None) -> Tensor:
    """The ratio after truncation or masking, whichever the mode names. Any shape.

    >>> restrict(torch.tensor([0.1, 1.0, 9.0]), "token_mask", 0.5, 5.0)
    tensor([0., 1., 0.])
    """
    low = 0.0 if clip_min is None else clip_min
    high = float("inf") if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
