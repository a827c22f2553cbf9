"""From rewards to advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError

STD_FLOOR = 1e-4
"""Added to every standard deviation that divides. Ours to keep: existing runs depend on it."""

LARGEST_REWARD = 1e100
"""Beyond it, squares and sums leave float64; also for a reward times its weight."""

ScaleRewards = Literal["group", "batch", "none"] | bool
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the rewards of a generation batch come to. float64, N rollouts."""

    advantages_N: Tensor  # 0 where nobody scored the rollout
    rewards_N: Tensor  # weighted sums, NaN where nobody scored the rollout
    zero_std_N: Tensor  # bool: its group gives no signal (all equal, or fewer than two scored)
    group_std_N: Tensor  # sample std of the group's rewards, 0 for fewer than two scored, NaN for none

    @property
    def scored_N(self) -> Tensor:
        """[N] bool: somebody scored the rollout."""
        return ~torch.isnan(self.rewards_N)


def group_advantages(
    rewards_NK: Tensor,
    group_N: Tensor,
    *,
    weights_K: Tensor | None = None,
    scale: ScaleRewards = "group",
    aggregation: Aggregation = "sum_then_normalize",
) -> Advantages:
    """Rewards are compared within their groups: the advantages of every group sum to 0.

    `rewards_NK` has one row per rollout (never per sequence) and one column per reward source, NaN where a source
    returned None; `group_N` names each row's group, in any order and of any size; all rows of the generation batch, of
    all ranks. A row of NaN only is unscored: it is out of every mean and std and its advantage is 0. A group of one and
    a group of equal rewards have advantage exactly 0.

    `scale`: "group"/True divides by the group's sample std + 1e-4, "batch" by that of all rewards of the batch,
    "none"/False by nothing. "normalize_then_sum" (GDPO, arXiv 2601.05242) standardises each source within its group,
    sums with the weights, and standardises the sums over the batch; it knows no other scale than "group".

    Raises ConfigurationError for an unknown mode, a wrong number of weights, or a reward (also times its weight)
    beyond 1e100 in magnitude, an infinite one included.

    >>> result = group_advantages(torch.tensor([[0.0], [1.0], [0.35], [0.35]]), torch.tensor([0, 0, 1, 1]))
    >>> result.advantages_N  # -+0.5 / (0.7071 + 0.0001), then exactly 0
    tensor([-0.7070,  0.7070,  0.0000,  0.0000], dtype=torch.float64)
    """
    check_scaling(scale, aggregation)
    rewards_NK, group_N, weights_K = _checked(rewards_NK, group_N, weights_K)
    seen_NK = ~torch.isnan(rewards_NK)
    scored_N = seen_NK.any(dim=1)
    terms_NK = torch.where(seen_NK, rewards_NK * weights_K, 0.0)
    total_N = torch.where(scored_N, terms_NK.sum(dim=1), torch.nan)
    # Rounding of the summed terms may differ between equal totals: 0.1 + 0.2 against 0.3.
    size_N = terms_NK.abs().sum(dim=1)
    centred_N, std_N = _group_statistics(total_N, group_N, size_N)
    signal_N = centred_N
    if aggregation == "normalize_then_sum":
        signal_N = _sum_of_standardised(rewards_NK, group_N, weights_K)
        advantages_N = _standardised_over_batch(signal_N, scored_N)
    elif scale in ("group", True):
        advantages_N = centred_N / (std_N + STD_FLOOR)
    elif scale == "batch":
        _, batch_std_N = _group_statistics(total_N, torch.zeros_like(group_N), size_N)
        advantages_N = centred_N / (batch_std_N + STD_FLOOR)
    else:
        advantages_N = centred_N
    zero_std_N = ~_any_in_group(signal_N != 0.0, group_N)
    advantages_N = torch.where(scored_N & ~zero_std_N, advantages_N, 0.0)
    return Advantages(advantages_N, total_N, zero_std_N, std_N)


def check_scaling(scale: ScaleRewards, aggregation: Aggregation) -> None:
    """The two options are known and go together; otherwise a ConfigurationError names them and the choices."""
    if scale not in ("group", "batch", "none", True, False):
        raise ConfigurationError(f"Unknown scale_rewards {scale!r}; choose 'group', 'batch', 'none', True or False.")
    if aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        raise ConfigurationError(
            f"Unknown multi_objective_aggregation {aggregation!r}; choose 'sum_then_normalize' or 'normalize_then_sum'."
        )
    if aggregation == "normalize_then_sum" and scale not in ("group", True):
        raise ConfigurationError(
            f"multi_objective_aggregation='normalize_then_sum' always scales within groups; leave scale_rewards at "
            f"'group' instead of {scale!r}."
        )


def _checked(rewards_NK: Tensor, group_N: Tensor, weights_K: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if rewards_NK.dim() != 2 or group_N.shape != rewards_NK.shape[:1]:
        raise ValueError(
            f"rewards_NK must have shape [N, K] and group_N [N]; they have {tuple(rewards_NK.shape)} "
            f"and {tuple(group_N.shape)}."
        )
    rewards_NK = rewards_NK.detach().double()
    if bool(torch.isinf(rewards_NK).any()):
        row, column = (int(i) for i in torch.isinf(rewards_NK).nonzero()[0])
        raise ConfigurationError(f"Reward source {column} gave an infinite reward to rollout {row}; return a number.")
    if weights_K is None:
        weights_K = rewards_NK.new_ones(rewards_NK.shape[1])
    if weights_K.shape != rewards_NK.shape[1:]:
        raise ConfigurationError(
            f"reward_weights has {weights_K.numel()} entries for {rewards_NK.shape[1]} reward sources; give one each."
        )
    weights_K = weights_K.to(rewards_NK)
    _check_range(rewards_NK, "The rewards")
    _check_range(rewards_NK * weights_K, "The rewards times reward_weights")
    _, group_N = group_N.unique(return_inverse=True)
    return rewards_NK, group_N, weights_K


def _check_range(values_NK: Tensor, what: str) -> None:
    seen = values_NK[~torch.isnan(values_NK)]
    if seen.numel() and float(seen.abs().max()) > LARGEST_REWARD:
        raise ConfigurationError(
            f"{what} of a generation batch reach from {float(seen.min()):.3g} to {float(seen.max()):.3g}; beyond "
            f"{LARGEST_REWARD:.0e} in magnitude they cannot be compared, whatever scale_rewards is."
        )


def _group_statistics(values_N: Tensor, group_N: Tensor, size_N: Tensor) -> tuple[Tensor, Tensor]:
    """(value - group mean, group's sample std), NaN values left out; both exactly 0 where a group's values are equal.

    Two passes in float64, around the group's smallest value: no difference of squares, so no residue that a division
    could blow up. Values closer than rounding at their own size (`size_N`: what each was summed from) count as equal.
    """
    groups = int(group_N.max()) + 1 if group_N.numel() else 0
    seen_N = ~torch.isnan(values_N)
    count_G = values_N.new_zeros(groups).index_add(0, group_N, seen_N.double())

    def extreme(values_N: Tensor, how: str) -> Tensor:
        start = torch.inf if how == "amin" else -torch.inf
        filled_N = torch.where(seen_N, values_N, start)
        return values_N.new_full((groups,), start).scatter_reduce(0, group_N, filled_N, how)

    low_G, high_G, size_G = extreme(values_N, "amin"), extreme(values_N, "amax"), extreme(size_N, "amax")
    equal_G = high_G - low_G <= 8 * torch.finfo(torch.float64).eps * size_G
    shifted_N = torch.where(seen_N & ~equal_G[group_N], values_N - low_G[group_N], 0.0)
    mean_G = shifted_N.new_zeros(groups).index_add(0, group_N, shifted_N) / count_G.clamp(min=1.0)
    centred_N = torch.where(seen_N, shifted_N - mean_G[group_N], 0.0)
    squares_G = centred_N.new_zeros(groups).index_add(0, group_N, centred_N.square())
    std_G = (squares_G / (count_G - 1).clamp(min=1.0)).sqrt()
    return centred_N, torch.where(count_G > 0, std_G, torch.nan)[group_N]


def _sum_of_standardised(rewards_NK: Tensor, group_N: Tensor, weights_K: Tensor) -> Tensor:
    """[N] weighted sums of each source's rewards, standardised within the group; a missing reward adds nothing."""
    terms_NK = torch.zeros_like(rewards_NK)
    for k in range(rewards_NK.shape[1]):
        reward_N = rewards_NK[:, k]
        centred_N, std_N = _group_statistics(reward_N, group_N, reward_N.abs())
        terms_NK[:, k] = torch.where(torch.isnan(reward_N), 0.0, weights_K[k] * centred_N / (std_N + STD_FLOOR))
    total_N = terms_NK.sum(dim=1)
    # Two sources that cancel leave rounding behind, which would read as a signal.
    rounding_N = 16 * torch.finfo(torch.float64).eps * terms_NK.abs().sum(dim=1)
    return torch.where(total_N.abs() <= rounding_N, 0.0, total_N)


def _standardised_over_batch(values_N: Tensor, scored_N: Tensor) -> Tensor:
    values_N = torch.where(scored_N, values_N, torch.nan)
    centred_N, std_N = _group_statistics(values_N, torch.zeros_like(scored_N, dtype=torch.long), values_N.abs())
    return centred_N / (std_N + STD_FLOOR)


def _any_in_group(flag_N: Tensor, group_N: Tensor) -> Tensor:
    """[N] bool: the flag is set for some member of the row's group."""
    groups = int(group_N.max()) + 1 if group_N.numel() else 0
    return (flag_N.new_zeros(groups, dtype=torch.float64).index_add(0, group_N, flag_N.double()) > 0)[group_N]
