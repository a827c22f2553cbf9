"""The policy losses, one per trained token.

Everything is flat: T trained tokens in any order with the index of their rollout. What a token counts in the end is
`agentrl.objective.weights`; the loss of a step is the sum of weight x L_t.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.objective._shapes import (
    MAX_LOG_RATIO,
    check_flat,
    check_present,
    count_rollouts,
    rollout_mean,
    rollout_sum,
    widen,
)
from agentrl.objective.kl import k3
from agentrl.objective.weights import LossType, check_loss_type

CLIPPED_SURROGATE = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})
Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which loss, and its numbers. Checked where it is made: ConfigurationError names the field and the fix."""

    loss_type: LossType = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon, and 5.0 for cispo
    delta: float | None = None  # upper bound of the ratio where A < 0 (INTELLECT-2's two-sided clipping)
    importance_sampling_level: Level = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None

    def __post_init__(self) -> None:
        check_loss_type(self.loss_type)
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ConfigurationError(
                f"Unknown importance_sampling_level {self.importance_sampling_level!r}; choose 'token' or 'sequence'."
            )
        for name in ("epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg", "beta",
                     "off_policy_mask_threshold"):  # fmt: skip
            value = getattr(self, name)
            zero_is_fine = name in ("epsilon", "epsilon_high", "beta")
            if value is not None and not (0 < value < math.inf or (zero_is_fine and value == 0)):
                raise ConfigurationError(
                    f"{name} must be {'at least' if zero_is_fine else 'greater than'} 0 and finite; it is {value}."
                )
        for name in ("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} must be at least 0 and finite; it is {value}.")
        if self.delta is not None and self.loss_type not in CLIPPED_SURROGATE:
            raise ConfigurationError(f"delta has no meaning for loss_type={self.loss_type!r}; leave it at None.")
        if self.delta is not None and self.delta <= 1 + self.epsilon:
            raise ConfigurationError(
                f"delta ({self.delta}) must be above 1 + epsilon ({1 + self.epsilon}): it bounds ratios that the "
                "clipping leaves alone."
            )
        if self.epsilon_high is not None and self.loss_type in ("sapo", "vespo"):
            raise ConfigurationError(f"epsilon_high has no meaning for loss_type={self.loss_type!r}; leave it at None.")
        if self.loss_type == "luspo" and self.importance_sampling_level != "sequence":
            warnings.warn(
                "loss_type='luspo' was made for importance_sampling_level='sequence'; with 'token' it is dapo's "
                "surrogate with longer rollouts counting more.",
                stacklevel=3,
            )

    @property
    def upper(self) -> float:
        """epsilon_high with its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self.loss_type == "cispo" else self.epsilon


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What each trained token contributes, and what the metrics need. Only `loss_T` carries gradient."""

    loss_T: Tensor  # policy term + beta x KL, not yet weighted
    kl_T: Tensor | None  # as it enters the loss, before beta
    ratio_T: Tensor  # policy over old policy, at the chosen level
    low_T: Tensor  # bool: below the region with A < 0
    high_T: Tensor  # bool: above the region with A > 0 (cispo: ratio above epsilon_high with A > 0)
    level: Level = "token"  # what one unit of the clip metrics is
    clip_metric: str | None = "clip_ratio"  # the metric's prefix; None where the loss clips nothing
    extras: dict[str, Tensor] = field(default_factory=dict)  # see policy_loss


def policy_loss(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    rollout_T: Tensor,
    config: LossConfig,
    *,
    ref_log_probs_T: Tensor | None = None,
    sampler_log_probs_T: Tensor | None = None,
    correction_T: Tensor | None = None,
    correction_level: Level = "token",
    keep_T: Tensor | None = None,
    num_rollouts: int | None = None,
) -> LossTerms:
    """The loss of every trained token, with gradient to `log_probs_T` only.

    Shapes [T]; nats of softmax(logits / temperature). `rollout_T` are indices 0..R-1; where a ratio or a mask is per
    rollout (level "sequence", vespo, the off-policy mask) *all* trained tokens of a rollout must be in this call.
    `old_log_probs_T` were frozen before the first update on these rollouts; `sampler_log_probs_T` are those recorded,
    for the off-policy mask (the old ones stand in). `ref_log_probs_T` give `kl_T`, also without beta.

    `correction_T`, from `sampler_correction`, multiplies the policy term; vespo has it inside its weight, and counts
    it once where `correction_level` says that it is one number per rollout. `keep_T` (bool, the entropy quantile) are
    the tokens that the policy term keeps; the KL term keeps all.

    Extras: ``kept_by_threshold_T`` (bool, off-policy mask), ``phi_R`` (vespo's weight, NaN for a rollout without
    tokens). Raises ValueError on shapes and on a missing (NaN) recorded log-prob.

    >>> lp = torch.tensor([1.1, 0.9, 1.5]).log()
    >>> one, rollout = torch.ones(3), torch.zeros(3, dtype=torch.long)
    >>> policy_loss(lp, torch.zeros(3), one, rollout, LossConfig()).loss_T
    tensor([-1.1000, -0.9000, -1.2000])
    """
    recorded = {"old_log_probs_T": old_log_probs_T, "sampler_log_probs_T": sampler_log_probs_T}
    recorded["ref_log_probs_T"] = ref_log_probs_T
    check_flat(rollout_T, log_probs_T=log_probs_T, advantages_T=advantages_T, **recorded)
    check_flat(rollout_T, correction_T=correction_T, keep_T=keep_T)
    check_present(**recorded)
    log_probs_T, old_log_probs_T = widen(log_probs_T), widen(old_log_probs_T).detach()
    advantages_T = advantages_T.detach().to(log_probs_T.dtype)
    rollouts = count_rollouts(rollout_T, num_rollouts)
    gap_T = log_probs_T - old_log_probs_T
    ratio_T = _ratio(gap_T, rollout_T, rollouts, config.importance_sampling_level)
    extras: dict[str, Tensor] = {}
    if config.loss_type == "vespo":
        phi_R, phi_T = _vespo_phi(gap_T, advantages_T, rollout_T, rollouts, config, correction_T, correction_level)
        extras["phi_R"] = phi_R
        loss_T = -phi_T * advantages_T * log_probs_T
    else:
        loss_T = _surrogate(log_probs_T, ratio_T, advantages_T, config)
        if correction_T is not None:
            loss_T = loss_T * correction_T.detach().to(loss_T.dtype)
    threshold = config.off_policy_mask_threshold
    if threshold is not None:
        behaviour_T = old_log_probs_T if sampler_log_probs_T is None else widen(sampler_log_probs_T)
        near_T = _near_policy(behaviour_T - log_probs_T, advantages_T, rollout_T, rollouts, threshold)
        extras["kept_by_threshold_T"] = near_T
        keep_T = near_T if keep_T is None else keep_T & near_T
    if keep_T is not None:
        loss_T = torch.where(keep_T, loss_T, torch.zeros_like(loss_T))
    kl_T = _kl(log_probs_T, ref_log_probs_T, ratio_T, config)
    if kl_T is not None and config.beta:
        loss_T = loss_T + config.beta * kl_T
    return _with_metrics(loss_T, kl_T, ratio_T.detach(), advantages_T, config, extras)


def _near_policy(drift_T: Tensor, advantages_T: Tensor, rollout_T: Tensor, rollouts: int, threshold: float) -> Tensor:
    """[T] bool, False for the tokens of a rollout with A < 0 whose mean drift is above the threshold.

    DeepSeek-V3.2's off-policy mask (eq. 9). Written so that a NaN drift keeps its tokens: a broken policy must show.
    """
    far_R = rollout_mean(drift_T.detach(), rollout_T, rollouts) > threshold
    return ~(far_R[rollout_T] & (advantages_T < 0))


def _kl(log_probs_T: Tensor, ref_log_probs_T: Tensor | None, ratio_T: Tensor, config: LossConfig) -> Tensor | None:
    """The KL of each token as it enters the loss, before beta; None without a reference."""
    if ref_log_probs_T is None:
        if config.beta:
            raise ConfigurationError("beta is set but the reference model's log-probs are missing: ref_log_probs_T.")
        return None
    kl_T = k3(log_probs_T, ref_log_probs_T.detach())
    return kl_T * ratio_T if config.use_bias_correction_kl else kl_T


def _with_metrics(
    loss_T: Tensor,
    kl_T: Tensor | None,
    ratio_T: Tensor,
    advantages_T: Tensor,
    config: LossConfig,
    extras: dict[str, Tensor],
) -> LossTerms:
    if config.loss_type == "cispo":
        low_T, high_T = torch.zeros_like(ratio_T, dtype=torch.bool), ratio_T > config.upper
        metric = "cispo_clip_ratio"
    else:
        low_T, high_T = ratio_T < 1 - config.epsilon, ratio_T > 1 + config.upper
        metric = "clip_ratio" if config.loss_type in CLIPPED_SURROGATE else None
    return LossTerms(
        loss_T=loss_T,
        kl_T=None if kl_T is None else kl_T.detach(),
        ratio_T=ratio_T,
        low_T=low_T & (advantages_T < 0),
        high_T=high_T & (advantages_T > 0),
        level=config.importance_sampling_level,
        clip_metric=metric,
        extras=extras,
    )


def _ratio(gap_T: Tensor, rollout_T: Tensor, rollouts: int, level: Level) -> Tensor:
    """exp of the gap, per token or (GSPO, arXiv 2507.18071) of its mean over the rollout's tokens; differentiable."""
    if level == "sequence":
        gap_T = rollout_mean(gap_T, rollout_T, rollouts)[rollout_T]
    return torch.exp(gap_T.clamp(max=MAX_LOG_RATIO))


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A), per token; without delta, r is unbounded.

    >>> clipped_surrogate(torch.tensor([9.0, 9.0]), torch.tensor([1.0, -1.0]), 0.2, 0.28, delta=4.0)
    tensor([-1.2800,  4.0000])
    """
    clipped_T = ratio_T.clamp(1 - epsilon, 1 + epsilon_high)
    bounded_T = ratio_T if delta is None else ratio_T.clamp(max=delta)
    return -torch.minimum(bounded_T * advantages_T, clipped_T * advantages_T)


def _surrogate(log_probs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: LossConfig) -> Tensor:
    """The policy term of every loss but vespo."""
    if config.loss_type == "cispo":  # MiniMax-M1, arXiv 2506.13585
        return -ratio_T.detach().clamp(max=config.upper) * advantages_T * log_probs_T
    if config.loss_type == "sapo":  # arXiv 2511.20347
        positive, negative = config.sapo_temperature_pos, config.sapo_temperature_neg
        tau_T = _choose(advantages_T > 0, positive, negative, ratio_T)
        return -(4.0 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1)) * advantages_T
    return clipped_surrogate(ratio_T, advantages_T, config.epsilon, config.upper, config.delta)


def _choose(flag_T: Tensor, if_set: float, if_not: float, like_T: Tensor) -> Tensor:
    """One of two numbers per token, in the dtype of `like_T` (torch.where of two floats would be float32)."""
    return torch.where(flag_T, torch.full_like(like_T, if_set), torch.full_like(like_T, if_not))


def _vespo_phi(
    gap_T: Tensor,
    advantages_T: Tensor,
    rollout_T: Tensor,
    rollouts: int,
    config: LossConfig,
    correction_T: Tensor | None,
    correction_level: Level,
) -> tuple[Tensor, Tensor]:
    """vespo's weight (arXiv 2602.10693) per rollout and per token, without gradient."""
    with torch.no_grad():
        log_w_R = rollout_sum(gap_T.clamp(-20.0, 20.0), rollout_T, rollouts)
        if correction_T is not None:
            log_correction_T = correction_T.to(gap_T.dtype).log()
            reduce = rollout_mean if correction_level == "sequence" else rollout_sum
            log_w_R = log_w_R + reduce(log_correction_T, rollout_T, rollouts)
        log_w_T = log_w_R.clamp(math.log(1e-8), 20.0)[rollout_T]
        positive_T = advantages_T >= 0
        k_T = _choose(positive_T, config.vespo_k_pos, config.vespo_k_neg, gap_T)
        lambda_T = _choose(positive_T, config.vespo_lambda_pos, config.vespo_lambda_neg, gap_T).clamp(min=1e-4)
        phi_T = torch.exp(lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp())
        phi_T = torch.where(torch.isfinite(phi_T), phi_T, 0.0)
        has_tokens_R = rollout_sum(torch.ones_like(gap_T), rollout_T, rollouts) > 0
        phi_R = torch.where(has_tokens_R, rollout_mean(phi_T, rollout_T, rollouts), torch.nan)
    return phi_R, phi_T
