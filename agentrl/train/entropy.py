"""The trainer's side of entropy: which tokens a step keeps, and the coefficient that lives through a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.objective import AdaptiveEntropy, entropy_threshold, keep_top_entropy
from agentrl.train.rows import TrainItem

SAVED_AS = "agentrl_entropy"  # in the trainer's state, which is in every checkpoint


@dataclass(frozen=True, slots=True)
class EntropySettings:
    """What is asked for. Checked where the config is."""

    top_quantile: float = 1.0
    coef: float = 0.0
    adaptive: AdaptiveEntropy | None = None


def entropy_settings(
    top_quantile: float, coef: float, adaptive: bool, coef_min: float, coef_max: float, coef_delta: float, target: float
) -> EntropySettings:
    """The settings behind the options of these names, with ``entropy_`` in front of the last four.

    Raises:
        ConfigurationError: A value out of range, or options that contradict each other.
    """
    entropy_threshold(torch.zeros(0), top_quantile)  # checks it
    if not 0.0 <= coef < math.inf:
        raise ConfigurationError(f"entropy_coef must be 0 or more and finite; it is {coef}.")
    if not adaptive:
        if (coef_min, coef_max, coef_delta, target) != (0.0, 1.0, 0.005, 0.2):
            raise ConfigurationError(
                "entropy_coef_min, entropy_coef_max, entropy_coef_delta and entropy_target do nothing without "
                "use_adaptive_entropy=True."
            )
        return EntropySettings(top_quantile, coef)
    state = AdaptiveEntropy(coef, target, coef_delta, coef_min, coef_max)
    if not math.isfinite(target):
        raise ConfigurationError(f"entropy_target must be finite; it is {target}.")
    if not coef_min <= coef <= coef_max:
        raise ConfigurationError(
            f"entropy_coef ({coef}) is where use_adaptive_entropy begins, so it must lie between entropy_coef_min "
            f"({coef_min}) and entropy_coef_max ({coef_max})."
        )
    return EntropySettings(top_quantile, coef, state)


class EntropyControl:
    """The entropy bonus of a run. The same on every rank, because what it measures is summed over them."""

    def __init__(self, settings: EntropySettings) -> None:
        self.settings = settings
        self.adaptive = settings.adaptive

    @property
    def selects(self) -> bool:
        """Whether the policy term keeps only some tokens."""
        return self.settings.top_quantile < 1.0

    @property
    def regularises(self) -> bool:
        """Whether there is a bonus, now or later."""
        return self.adaptive is not None or self.settings.coef != 0.0

    @property
    def coef(self) -> float:
        """The coefficient as it is logged: an adaptive one after the last optimizer step."""
        return self.settings.coef if self.adaptive is None else self.adaptive.coef

    @property
    def active(self) -> float:
        """What the bonus of the step that runs now is multiplied by."""
        return self.settings.coef if self.adaptive is None else self.adaptive.active

    def measured(self, total: float, tokens: int, world: int) -> None:
        """An optimizer step ran, and this rank's kept tokens had this sum of entropies."""
        if self.adaptive is None:
            return
        parts = gather_object([(total, tokens)]) if world > 1 else [(total, tokens)]
        tokens = sum(n for _, n in parts)
        if tokens:
            self.adaptive = self.adaptive.updated(sum(part for part, _ in parts) / tokens)

    def save(self, store: dict[str, Any]) -> None:
        """`store` holds what `load` needs."""
        if self.adaptive is not None:
            store[SAVED_AS] = {"coef": self.adaptive.coef, "last_entropy": self.adaptive.last_entropy}

    def load(self, store: Mapping[str, Any] | None) -> None:
        """The state is the stored one; without one, that of a run's beginning."""
        start = self.adaptive = self.settings.adaptive
        saved = (store or {}).get(SAVED_AS)
        if start is not None and saved is not None:
            coef = min(max(saved["coef"], start.minimum), start.maximum)  # the bounds may be other ones today
            self.adaptive = replace(start, coef=coef, last_entropy=saved["last_entropy"])


@dataclass(frozen=True, slots=True)
class Kept:
    """Which trained tokens the policy term and the bonus act on."""

    mask_of: dict[int, Tensor]  # id(item): [N] bool
    total: int  # of the optimizer step, over all ranks


def keep_top(
    items: Sequence[TrainItem], microbatch: Sequence[int], accumulation: int, entropy_of: Mapping[int, Tensor],
    top_quantile: float, world: int,
) -> Kept:  # fmt: skip
    """Each micro-batch keeps its top share, by a threshold over its trained tokens on all ranks.

    `entropy_of` maps id(item) to the [N] entropies of its trained tokens, from a pass without gradient: the pass with
    gradient may differ in the last bit, and the token that is the threshold must not fall under it.
    """
    mine = [torch.zeros(0)] * accumulation
    for item, m in zip(items, microbatch, strict=True):
        if id(item) in entropy_of:
            mine[m] = torch.cat([mine[m], entropy_of[id(item)]])
    everyone = gather_object([mine]) if world > 1 else [mine]
    populations = [torch.cat([rank[m] for rank in everyone]) for m in range(accumulation)]
    thresholds = [entropy_threshold(population, top_quantile) for population in populations]
    masks = {
        id(item): keep_top_entropy(entropy_of[id(item)], thresholds[m])
        for item, m in zip(items, microbatch, strict=True)
        if id(item) in entropy_of
    }
    kept = [int(keep_top_entropy(p, t).sum()) for p, t in zip(populations, thresholds, strict=True)]
    return Kept(masks, sum(kept))
