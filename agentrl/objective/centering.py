"""The asynchronous loss: the sampler is the old policy, and its own pull on the policy is subtracted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.objective._shapes import MAX_LOG_RATIO, check_flat, check_present, widen
from agentrl.objective.importance import check_correction, restrict
from agentrl.objective.losses import LossTerms, clipped_surrogate

TINY_TAIL = 1e-6
"""A probability mass outside the head at or below this is rounding of 1 - sum in float32 and counts as none."""


@dataclass(frozen=True, slots=True)
class AsyncLossConfig:
    """The numbers of the asynchronous loss. Checked where it is made."""

    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon
    score_centering: bool = True
    clip_min: float | None = 0.5  # tokens whose ratio is outside are dropped, not clamped
    clip_max: float | None = 5.0

    def __post_init__(self) -> None:
        check_correction("token_mask", self.clip_min, self.clip_max)
        for name in ("epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} must be at least 0 and finite; it is {value}.")

    @property
    def upper(self) -> float:
        """epsilon_high with its default filled in."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def async_policy_loss(
    log_probs_T: Tensor,
    sampler_log_probs_T: Tensor,
    advantages_T: Tensor,
    rollout_T: Tensor,
    config: AsyncLossConfig,
    *,
    head_log_probs_TH: Tensor | None = None,
    head_sampler_log_probs_TH: Tensor | None = None,
) -> LossTerms:
    """The loss of every trained token against the policy that sampled it; gradient to the two policy log-probs.

    A token whose ratio w = policy / sampler is outside [clip_min, clip_max] has loss 0 and keeps its weight. With
    score centering (Marek and Ryabinin, arXiv 2609.20807) L_t = -A [ sg(w) l_t - sum over head of sg(c_v) log p_v ];
    the head are the sampler's H most likely tokens of each position, `head_log_probs_TH` the policy's log-probs of
    them (with gradient) and `head_sampler_log_probs_TH` the sampler's (NaN or -inf pads a short head). Without it:
    the clipped surrogate with the masked ratio.

    ratio_T is before the mask. Extras: ``dropped_T`` (bool), and with score centering ``sampler_mass_T``, the head's
    mass under the sampler. low_T and high_T count clipped tokens; with score centering, where nothing is clipped,
    every token outside [1 - epsilon, 1 + epsilon_high] whatever its advantage.

    >>> l, q = torch.tensor([-1.0, -1.0]), torch.tensor([-5.0, -1.1])
    >>> config = AsyncLossConfig(score_centering=False)
    >>> async_policy_loss(l, q, -torch.ones(2), torch.zeros(2, dtype=torch.long), config).loss_T  # e^4 is dropped
    tensor([0.0000, 1.1052])
    """
    check_flat(rollout_T, log_probs_T=log_probs_T, sampler_log_probs_T=sampler_log_probs_T, advantages_T=advantages_T)
    check_present(sampler_log_probs_T=sampler_log_probs_T)
    log_probs_T = widen(log_probs_T)
    advantages_T = advantages_T.detach().to(log_probs_T.dtype)
    ratio_T = torch.exp((log_probs_T - widen(sampler_log_probs_T).detach()).clamp(max=MAX_LOG_RATIO))
    raw_T = ratio_T.detach()
    masked_T = restrict(raw_T, "token_mask", config.clip_min, config.clip_max)
    inside_T = masked_T == raw_T
    extras = {"dropped_T": ~inside_T}
    low_T, high_T = raw_T < 1 - config.epsilon, raw_T > 1 + config.upper
    if config.score_centering:
        if head_log_probs_TH is None or head_sampler_log_probs_TH is None:
            raise ConfigurationError("score_centering=True needs the log-probs of the sampler's most likely tokens.")
        head_log_probs_TH = widen(head_log_probs_TH)
        head_q_TH = widen(head_sampler_log_probs_TH).detach()
        weight = _masked_identity(config.clip_min, config.clip_max)
        expected_T = _expected_score(head_log_probs_TH, head_q_TH, weight)
        loss_T = -advantages_T * (_scaled(masked_T, log_probs_T) - expected_T)
        extras["sampler_mass_T"] = torch.where(_known(head_q_TH), head_q_TH.exp(), 0.0).sum(dim=-1)
    else:
        surrogate_T = clipped_surrogate(ratio_T, advantages_T, config.epsilon, config.upper)
        loss_T = torch.where(inside_T, surrogate_T, torch.zeros_like(surrogate_T))
        low_T, high_T = low_T & (advantages_T < 0), high_T & (advantages_T > 0)
    return LossTerms(loss_T=loss_T, kl_T=None, ratio_T=raw_T, low_T=low_T, high_T=high_T, extras=extras)


def _masked_identity(clip_min: float | None, clip_max: float | None) -> Callable[[Tensor], Tensor]:
    return lambda ratio: restrict(ratio, "token_mask", clip_min, clip_max)


def _known(log_q_TH: Tensor) -> Tensor:
    """True where the head has a token; NaN and -inf pad heads shorter than H."""
    return torch.isfinite(log_q_TH)


def _expected_score(log_p_TH: Tensor, log_q_TH: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
    """[T] sum over the head of sg(c_v) log p_v, whose gradient is the expected weighted score under the sampler."""
    return _scaled(head_coefficients(log_p_TH, log_q_TH, weight), log_p_TH).sum(dim=-1)


def _scaled(weight: Tensor, log_p: Tensor) -> Tensor:
    """weight x log_p, 0 where the weight is 0: a token that the policy cannot draw has -inf, and 0 x -inf is NaN."""
    return weight * torch.where(weight != 0, log_p, torch.zeros_like(log_p))


def head_coefficients(log_p_TH: Tensor, log_q_TH: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
    """[T, H] c_v = q_v g(p_v / q_v) - alpha g(1 / alpha) p_v without gradient, with g = `weight`; 0 on padding.

    alpha = (1 - Q) / (1 - P) for the head's masses P and Q: outside the head the sampler is taken as proportional to
    the policy. A tail of at most 1e-6 under the sampler is no tail (alpha = 0), so that a head that is the whole
    vocabulary gives exactly c_v = q_v g(p_v / q_v).

    >>> p, q = torch.tensor([[0.6, 0.4]]), torch.tensor([[0.5, 0.5]])
    >>> head_coefficients(p.log(), q.log(), torch.ones_like)
    tensor([[0.5000, 0.5000]])
    """
    with torch.no_grad():
        known_TH = _known(log_q_TH)
        zeros_TH = torch.zeros_like(log_p_TH)
        p_TH = torch.where(known_TH, log_p_TH.exp(), zeros_TH)
        q_TH = torch.where(known_TH, log_q_TH.exp(), zeros_TH)
        ratio_TH = torch.exp((log_p_TH - log_q_TH).clamp(max=MAX_LOG_RATIO))  # exactly 0 where log p is -inf
        tail_p_T1 = (1 - p_TH.sum(dim=-1, keepdim=True)).clamp(min=TINY_TAIL)
        tail_q_T1 = 1 - q_TH.sum(dim=-1, keepdim=True)
        has_tail_T1 = tail_q_T1 > TINY_TAIL
        tail_q_T1 = tail_q_T1.clamp(min=TINY_TAIL)
        alpha_T1 = torch.where(has_tail_T1, tail_q_T1 / tail_p_T1, 0.0)
        tail_T1 = torch.where(has_tail_T1, alpha_T1 * weight(tail_p_T1 / tail_q_T1), 0.0)
        return torch.where(known_TH, q_TH * weight(ratio_TH) - tail_T1 * p_TH, 0.0)
