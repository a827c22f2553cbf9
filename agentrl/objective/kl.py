"""The KL penalty towards a reference model."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.objective._shapes import MAX_LOG_RATIO, widen


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The per-token estimate exp(f - l) - (f - l) - 1 of KL(policy || reference): never negative, 0 where equal.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, used by GRPO (arXiv 2402.03300). Any equal shapes; nats.
    A gap f - l above 60 counts as 60 (no overflow, no gradient).

    >>> k3(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]))  # 0 and exp(-1) + 1 - 1
    tensor([0.0000, 0.3679])
    """
    gap = (widen(ref_log_probs) - widen(log_probs)).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(gap) - gap
