"""What entropy does to the loss: which tokens the policy term keeps, the bonus, and its adaptive coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError

TIE = 1e-5  # nats: above what fp32 makes of equal entropies, far below what tells tokens apart


def entropy_threshold(entropy_T: Tensor, top_entropy_quantile: float) -> float:
    """The (1 - rho)-quantile (linear interpolation) of the entropies: tokens at or above it are kept.

    `entropy_T` holds every trained token of the population, on all ranks, in any order. rho = 1 gives the smallest
    entropy, so that all are kept; rho = 0 the largest. -inf for an empty population. From "Beyond the 80/20 Rule",
    arXiv 2506.01939.

    >>> entropy_threshold(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), 0.25)
    3.0
    """
    if not 0.0 <= top_entropy_quantile <= 1.0:
        raise ConfigurationError(f"top_entropy_quantile must be between 0 and 1; it is {top_entropy_quantile}.")
    if entropy_T.numel() == 0:
        return -math.inf
    ordered_T = entropy_T.detach().double().flatten().sort().values
    place = (1.0 - top_entropy_quantile) * (ordered_T.numel() - 1)
    if abs(place - round(place)) < 1e-9:  # (1 - 0.7) x 10 is not quite 3, and must not drop the token at place 3
        place = round(place)
    below = math.floor(place)
    low = float(ordered_T[below])
    high = float(ordered_T[min(below + 1, ordered_T.numel() - 1)])
    return low + (place - below) * (high - low)


def keep_top_entropy(entropy_T: Tensor, threshold: float) -> Tensor:
    """[T] bool, True where the entropy is at or above the threshold, up to `TIE`.

    Ties are the rule: the first tokens of a group follow the same prompt, so their entropies are equal up to rounding,
    and rounding must not choose among them.

    >>> keep_top_entropy(torch.tensor([0.1, 0.4999999, 0.5, 0.9]), 0.5)
    tensor([False,  True,  True,  True])
    """
    return entropy_T.detach().double() >= threshold - TIE


def entropy_bonus(entropy_T: Tensor, keep_T: Tensor | None, coef: float, kept_tokens_total: int) -> Tensor:
    """The scalar -coef x (sum of the kept entropies) / kept_tokens_total, to be added to the loss.

    `kept_tokens_total` counts the kept tokens of the whole optimizer step on all ranks, so that the calls of one step
    add up to -coef x mean entropy whatever the loss type and the cut into micro-batches. 0 tokens: exactly 0.

    >>> entropy_bonus(torch.tensor([1.0, 3.0]), None, 0.1, 2)
    tensor(-0.2000)
    """
    kept_T = entropy_T if keep_T is None else torch.where(keep_T, entropy_T, torch.zeros_like(entropy_T))
    return kept_T.sum() * (-coef / max(kept_tokens_total, 1))


@dataclass(frozen=True, slots=True)
class AdaptiveEntropy:
    """A coefficient that holds the entropy near a target (Skywork-OR1, arXiv 2505.22312). Immutable.

    >>> state = AdaptiveEntropy(coef=0.01, target=1.0, delta=0.005, minimum=0.0, maximum=1.0)
    >>> state.active  # nothing measured yet: no bonus
    0.0
    >>> state = state.updated(0.5)
    >>> round(state.coef, 6), round(state.active, 6)
    (0.015, 0.015)
    >>> state.updated(2.0).active  # above the target: lowered, and off
    0.0
    """

    coef: float
    target: float  # nats per token
    delta: float
    minimum: float
    maximum: float
    last_entropy: float | None = None  # measured over the last optimizer step

    def __post_init__(self) -> None:
        if not 0.0 <= self.minimum <= self.maximum:
            raise ConfigurationError(
                f"entropy_coef_min ({self.minimum}) must be at least 0 and not above entropy_coef_max ({self.maximum})."
            )
        if not 0 <= self.delta < math.inf:
            raise ConfigurationError(f"entropy_coef_delta must be 0 or more and finite; it is {self.delta}.")

    @property
    def active(self) -> float:
        """The coefficient of the step that runs now: 0 unless the last measured entropy was at or below the target."""
        return self.coef if self.last_entropy is not None and self.last_entropy <= self.target else 0.0

    def updated(self, mean_entropy: float) -> AdaptiveEntropy:
        """The state after an optimizer step whose kept tokens had this mean entropy.

        The mean is over the tokens that the policy term keeps, of the whole accumulation window and all ranks. NaN (a
        step without such tokens) measures nothing and changes nothing.
        """
        if math.isnan(mean_entropy):
            return self
        if mean_entropy <= self.target:
            coef = min(self.coef + self.delta, self.maximum)
        else:
            coef = max(self.coef - self.delta, self.minimum)
        return replace(self, coef=coef, last_entropy=mean_entropy)
