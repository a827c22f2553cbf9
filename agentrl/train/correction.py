"""Where another engine than the trainer drew the rollouts: weights that make up for it, and what they measure."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.objective import CorrectionMode, LossTerms, sampler_correction, sampling_metrics
from agentrl.objective.importance import check_correction
from agentrl.objective.losses import Level
from agentrl.train.metrics import MetricWindow
from agentrl.train.rows import Row, TrainItem


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """The mode and the bounds.

    Raises:
        ConfigurationError: No such mode, or bounds that leave nothing between them.
    """

    mode: CorrectionMode = "sequence_mask"
    clip_min: float | None = None
    clip_max: float | None = 3.0

    def __post_init__(self) -> None:
        check_correction(self.mode, self.clip_min, self.clip_max)

    @property
    def level(self) -> Level:
        """What has one weight: "token", or "sequence" for a whole rollout."""
        return "sequence" if self.mode.startswith("sequence") else "token"

    def weights(self, row: Row, old_N: Tensor) -> Tensor | None:
        """[N] factors of the loss, 1 for tokens of rollouts that are not corrected; None where none of them is."""
        chosen = corrected_tokens(row)
        if chosen is None:
            return None
        sampler_N = row.gathered("sampler_N")
        assert sampler_N is not None
        weights_N = torch.ones_like(old_N)
        weights_N[chosen] = sampler_correction(
            old_N[chosen], sampler_N[chosen].to(old_N.dtype), row.rollout_N[chosen], self.mode, self.clip_min,
            self.clip_max, num_rollouts=len(row.items),
        )  # fmt: skip
        return weights_N

    def measure(self, window: MetricWindow, row: Row, old_N: Tensor, weights_N: Tensor) -> None:
        """Adds sampling/*: differences over tokens; weights, after restriction, over tokens or rollouts."""
        chosen, sampler_N = corrected_tokens(row), row.gathered("sampler_N")
        assert chosen is not None and sampler_N is not None
        add_sampling(window, old_N[chosen], sampler_N[chosen], weights_N[chosen], row.rollout_N[chosen], self.mode)


def corrected_tokens(row: Row) -> Tensor | None:
    """Indices of the tokens whose rollouts are corrected; None where there are none."""
    if not any(item.corrected for item in row.items):
        return None
    flags = torch.tensor([item.corrected for item in row.items], device=row.rollout_N.device)
    return flags[row.rollout_N].nonzero()[:, 0]


def add_sampling(
    window: MetricWindow, log_probs_N: Tensor, sampler_N: Tensor, ratio_N: Tensor, rollout_N: Tensor,
    mode: CorrectionMode,
) -> None:  # fmt: skip
    """sampling/sampling_logp_difference/* and sampling/importance_sampling_ratio/*, exact over rows and ranks."""
    if not len(rollout_N):
        return
    # on the CPU: in float64, which MPS does not have
    log_probs_N, sampler_N, ratio_N = (tensor.detach().cpu() for tensor in (log_probs_N, sampler_N, ratio_N))
    measured = sampling_metrics(log_probs_N, sampler_N, ratio_N, rollout_N.cpu(), mode)
    sums = {name: float(value) for name, value in measured.items()}
    window.add("sampling/sampling_logp_difference/mean", sums["difference_sum"], sums["difference_count"])
    window.high("sampling/sampling_logp_difference/max", sums["difference_max"])
    window.add("sampling/importance_sampling_ratio/mean", sums["ratio_sum"], sums["ratio_count"])
    window.low("sampling/importance_sampling_ratio/min", sums["ratio_min"])
    window.high("sampling/importance_sampling_ratio/max", sums["ratio_max"])


def add_async_sampling(window: MetricWindow, terms: LossTerms, log_probs_N: Tensor, row: Row) -> None:
    """sampling/* of the asynchronous loss: ratios before any bound, the share of dropped tokens, the heads' mass."""
    sampler_N = row.gathered("sampler_N")
    assert sampler_N is not None
    add_sampling(window, log_probs_N, sampler_N, terms.ratio_T, row.rollout_N, "token_mask")
    dropped_N = terms.extras["dropped_T"]
    window.add("sampling/masked_mean", float(dropped_N.sum()), len(dropped_N))
    if (mass_N := terms.extras.get("sampler_mass_T")) is not None:
        window.add("sampling/sampler_mass", float(mass_N.double().cpu().sum()), len(mass_N))


def applies(items: Sequence[TrainItem], *, truncated: bool) -> bool:
    """Whether the sampler's log-probs of these rollouts are known; a `rollout_func` may say that it has none.

    `truncated`: top-k, top-p or min-p is set. Warns where a token's candidates are not known then.

    Raises:
        ConfigurationError: They are known for some trained tokens only. Names the first without.
    """
    known, missing = False, ""
    for item in items:
        for sequence in item.sequences if item.active else ():
            pairs = zip(sequence.old_log_probs, sequence.completion_mask, strict=True)
            trained = [math.isnan(log_prob) for log_prob, mask in pairs if mask]
            known = known or not all(trained)
            if not missing and any(trained):
                missing = f"Rollout {item.index} of the generation batch has no log-prob for its {trained.index(True)}."
    if known and missing:
        raise ConfigurationError(
            f"{missing[:-1]}th sampled token (None or NaN), and the sampler correction needs one for every trained "
            "token. Give all of them, return 'logprobs': None if there are none at all, or set "
            "vllm_importance_sampling_correction=False."
        )
    sequences = [sequence for item in items if item.trained_tokens for sequence in item.sequences]
    if known and truncated and any(sequence.sampling_mask is None for sequence in sequences):
        warnings.warn(
            "top_k, top_p or min_p is set, but the sampler did not record the candidates that tokens were drawn from: "
            "if it drew from candidates, the importance sampling ratios are too small by their probability.",
            stacklevel=2,
        )
    return known


def fill_missing(sampler_N: Tensor | None, old_N: Tensor) -> Tensor | None:
    """The sampler's log-probs, the trainer's where one is missing; None where there are no rollouts."""
    return None if sampler_N is None else torch.where(torch.isnan(sampler_N), old_N, sampler_N.to(old_N.dtype))
