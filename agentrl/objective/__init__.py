"""The objective as pure tensor functions over flat trained tokens with a rollout index.

Suffixes are shapes: T trained tokens, R rollouts of a call, N rollouts of a generation batch, K reward sources, H the
sampler's most likely tokens at a position. Nothing here knows a model, a config of the trainer or a device mesh.
"""

from agentrl.objective.advantages import Advantages, check_scaling, group_advantages
from agentrl.objective.centering import AsyncLossConfig, async_policy_loss
from agentrl.objective.entropy import AdaptiveEntropy, entropy_bonus, entropy_threshold, keep_top_entropy
from agentrl.objective.importance import CorrectionMode, raw_ratio, restrict, sampler_correction
from agentrl.objective.kl import k3
from agentrl.objective.losses import LossConfig, LossTerms, policy_loss
from agentrl.objective.metrics import clip_metrics, clip_summary, sampling_metrics, sampling_summary
from agentrl.objective.weights import LossType, token_weights

__all__ = [
    "AdaptiveEntropy",
    "Advantages",
    "AsyncLossConfig",
    "CorrectionMode",
    "LossConfig",
    "LossTerms",
    "LossType",
    "async_policy_loss",
    "check_scaling",
    "clip_metrics",
    "clip_summary",
    "entropy_bonus",
    "entropy_threshold",
    "group_advantages",
    "k3",
    "keep_top_entropy",
    "policy_loss",
    "raw_ratio",
    "restrict",
    "sampler_correction",
    "sampling_metrics",
    "sampling_summary",
    "token_weights",
]
