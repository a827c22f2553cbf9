"""The generation phase: play and score this rank's groups, share what training needs, compute advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object

from agentrl.errors import RunStopped
from agentrl.objective import Advantages, group_advantages
from agentrl.rollout.failures import describe
from agentrl.rollout.group import GroupPlan, with_advantages
from agentrl.train.guard import check_advantages
from agentrl.train.rows import TrainItem
from agentrl.types import Rollout, RolloutGroup, TrainingSequence

T = TypeVar("T")
PlayGroups = Callable[[Sequence[GroupPlan]], list[RolloutGroup]]


@dataclass(frozen=True, slots=True)
class SharedRollout:
    """What every rank needs to know of a rollout, wherever it was played."""

    sequences: tuple[TrainingSequence, ...]
    rewards: dict[str, float | None]
    reward: float | None
    truncated: bool
    group: int  # place of its group in the batch
    environment: str | None  # the row's, where several are mixed


@dataclass(frozen=True, slots=True)
class Cycle:
    """One generation batch of N rollouts, in group order."""

    groups: tuple[RolloutGroup, ...]  # those that this rank played, with advantages
    items: tuple[TrainItem, ...]  # [N] of all ranks
    advantages: Advantages
    shared: tuple[SharedRollout, ...]  # [N]


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages."""

    scale: str
    aggregation: str
    weights: dict[str, float]  # by reward source, in order
    mask_truncated: bool


def play_cycle(
    plans: Sequence[GroupPlan], play: PlayGroups, settings: AdvantageSettings, rank: int, world: int, each: int = 1
) -> Cycle:
    """Plays this rank's share of the plans and returns the whole batch, the same on all ranks.

    A group that was dropped, a rollout that failed and one that nobody scored have advantage 0, are out of every mean
    and std, and train nothing.

    Raises:
        RunStopped: No rollout of the batch survived.
        ConfigurationError: Rewards whose advantages are too large to train on.
    """
    mine = play(share_of(plans, rank, world, each))
    shared = gather_groups(mine, plans, rank, world, each)
    flat = [rollout for group in shared for rollout in group]
    if all(rollout.reward is None and not rollout.sequences for rollout in flat):
        raise RunStopped(_nothing_survived(mine))
    sizes = [len(group) for group in shared]
    advantages = compare(flat, settings)
    check_advantages(advantages, settings.scale)
    values = advantages.advantages_N.tolist()
    items = [
        TrainItem(
            index=i, sequences=rollout.sequences, advantage=values[i],
            active=rollout.reward is not None and not (rollout.truncated and settings.mask_truncated),
            group=rollout.group,
        )
        for i, rollout in enumerate(flat)
    ]  # fmt: skip
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    mine = [
        with_advantages(group, values[starts[i] : starts[i] + sizes[i]])
        for group, i in zip(mine, share_of(range(len(plans)), rank, world, each), strict=True)
    ]
    return Cycle(tuple(mine), tuple(items), advantages, tuple(flat))


def share_of(groups: Sequence[T], rank: int, world: int, each: int = 1) -> Sequence[T]:
    """The groups that a rank plays, whole; none where there are fewer groups than ranks.

    Where `each` ranks make up one engine, the first of them plays for all of them.

    >>> [share_of("abcde", rank, 4, each=2) for rank in range(4)]
    ['ace', '', 'bd', '']
    """
    return groups[:0] if rank % each else groups[rank // each :: world // each]


def compare(rollouts: Sequence[SharedRollout], settings: AdvantageSettings) -> Advantages:
    """The advantages of a whole batch, and the statistics of its groups."""
    return group_advantages(
        _reward_matrix(rollouts, list(settings.weights)),
        torch.tensor([rollout.group for rollout in rollouts]),
        weights_K=torch.tensor(list(settings.weights.values()), dtype=torch.float64),
        scale=settings.scale,  # type: ignore[arg-type]
        aggregation=settings.aggregation,  # type: ignore[arg-type]
    )


def gather_groups(
    mine: Sequence[RolloutGroup], plans: Sequence[GroupPlan], rank: int, world: int, each: int = 1
) -> list[list[SharedRollout]]:
    """Every group's shared rollouts in the order of the plans."""
    numbered = [(i, [_share(r, i, group.dropped) for r in group.rollouts])
                for group, i in zip(mine, share_of(range(len(plans)), rank, world, each), strict=True)]  # fmt: skip
    everyone = gather_object(numbered) if world > 1 else numbered
    return [rollouts for _, rollouts in sorted(everyone, key=lambda pair: pair[0])]


def _share(rollout: Rollout, group: int, dropped: bool) -> SharedRollout:
    nothing = dropped or rollout.outcome.failed
    sequences, rewards = ((), {}) if nothing else (rollout.sequences, rollout.rewards)
    reward = None if nothing else rollout.reward
    return SharedRollout(sequences, rewards, reward, rollout.truncated, group, rollout.task.environment)


def _reward_matrix(flat: Sequence[SharedRollout], names: Sequence[str]) -> torch.Tensor:
    """[N, K] float64 with NaN where a source gave nothing."""
    rows = [[_or_nan(rollout.rewards.get(name)) for name in names] for rollout in flat]
    return torch.tensor(rows, dtype=torch.float64).view(len(flat), len(names))


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _nothing_survived(groups: Sequence[RolloutGroup]) -> str:
    for group in groups:
        for rollout in group.rollouts:
            if rollout.outcome.failed:
                return describe(rollout, rollout.environment or "none", "All rollouts of a generation batch")
    return "No rollout of a generation batch had a reward: every reward function returned None."


def with_tensors(item: TrainItem, **tensors: torch.Tensor | None) -> TrainItem:
    """The item with its log-prob tensors."""
    return replace(item, **tensors)  # type: ignore[arg-type]


def recorded_log_probs(item: TrainItem) -> torch.Tensor:
    """[N] the sampler's log-probs of the item's trained tokens, as recorded."""
    values: list[Any] = []
    for s in item.sequences:
        values += [lp for lp, mask in zip(s.old_log_probs, s.completion_mask, strict=True) if mask]
    return torch.tensor(values, dtype=torch.float32)
