"""Many episodes of one policy, and what they say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.cli.numbers import counted, mean_interval, pass_at_k
from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer, name_sources
from agentrl.tasks import TaskSource, derive_seed
from agentrl.tool_schema import Tool
from agentrl.types import Rollout, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class Contest:
    """What is played: environments by name (None: the only one), rows, standalone tools, reward functions."""

    pools: dict[str | None, EnvironmentPool]
    rows: Any = None
    tools: Mapping[str, Tool] | None = None
    reward_functions: Sequence[Callable[..., Any]] = ()
    reward_weights: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an episode may be, and how it is sampled."""

    max_completion_length: int | None = 4096
    max_tool_calling_iterations: int | None = 32
    temperature: float = 1.0
    concurrent: int = 64


def play(contest: Contest, policy: Any, limits: Limits, *, tasks: int, samples: int, seed: int) -> list[RolloutGroup]:
    """`samples` episodes of each of `tasks` tasks, failed ones included."""
    renderer = None
    if policy.tokenizer is not None:
        from agentrl.render import Renderer

        shown = bool(contest.tools) or any(pool.tools for pool in contest.pools.values())
        renderer = Renderer(policy.tokenizer, with_tools=shown)
    settings = RolloutSettings(
        max_completion_length=limits.max_completion_length,
        max_tool_calling_iterations=limits.max_tool_calling_iterations,
        max_context=policy.context,
        sampling=SamplingParams(temperature=limits.temperature),
        min_survivors=0,
        max_concurrent=limits.concurrent,
        seed=seed,
    )
    weights = None
    if None not in contest.pools:
        weights = {str(name): pool.spec.weight if pool.spec else None for name, pool in contest.pools.items()}
    alone = contest.pools.get(None)
    source = TaskSource(
        contest.rows, seed=derive_seed(seed, "eval"), shuffle=False, environments=weights,
        prompt_required=alone is not None and not alone.name,
    )  # fmt: skip
    engine = RolloutEngine(policy.sampler, renderer, contest.pools, contest.tools, settings)
    scorer = Scorer(name_sources(contest.reward_functions, contest.reward_weights))
    plans = [GroupPlan(f"eval{i}", source.task(0, i), samples) for i in range(tasks)]
    return play_and_close(engine, scorer, plans)


def summary(groups: Sequence[RolloutGroup], *, k: int, success: float) -> dict[str, Any]:
    """The numbers of an evaluation. Failed and unscored episodes are counted, and are in no mean.

    `pass_at_k` is the mean over tasks with at least k scored samples; None where there is none.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_task = [[r.reward for r in group.rollouts if r.reward is not None] for group in groups]
    scored = [reward for rewards in by_task for reward in rewards]
    mean, interval = mean_interval(by_task)
    enough = [rewards for rewards in by_task if len(rewards) >= k]
    passed = [pass_at_k(len(rewards), sum(r >= success for r in rewards), k) for rewards in enough]
    failed = [rollout for rollout in rollouts if rollout.outcome.failed]
    return {
        "episodes": len(rollouts),
        "tasks": len(groups),
        "scored": len(scored),
        "failed": len(failed),
        "reward": mean,
        "interval_95": interval,
        "interval": "Student's t over tasks",
        "k": k,
        "success": success,
        "pass_at_k": math.fsum(passed) / len(passed) if passed else None,
        "pass_at_k_tasks": len(passed),
        "outcomes": counted([rollout.outcome.value for rollout in rollouts]),
        "turns": _mean([len(rollout.turns) for rollout in rollouts]),
        "tool_calls": _mean([len(rollout.tool_calls) for rollout in rollouts]),
        "tool_errors": _mean([sum(call.error is not None for call in rollout.tool_calls) for rollout in rollouts]),
        "sources": _sources(rollouts),
        "first_failure": _last_line(failed[0].error) if failed else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _sources(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """The mean of each source of reward."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    return {name: _mean([x for r in rollouts if (x := r.rewards.get(name)) is not None]) for name in names}


def _last_line(error: str | None) -> str:
    lines = [line for line in (error or "").strip().split("\n") if line.strip()]
    return lines[-1].strip() if lines else ""


def check_counts(episodes: int, samples: int, k: int) -> int:
    """The number of tasks that so many episodes are.

    Raises:
        ConfigurationError: Fewer samples of a task than pass@k needs, or episodes that are no whole tasks.
    """
    if samples < k:
        raise ConfigurationError(f"pass@{k} needs at least {k} samples of each task; --samples is {samples}.")
    if episodes % samples:
        raise ConfigurationError(
            f"{episodes} episodes are no whole number of tasks with {samples} samples each; "
            f"use -n {max(1, round(episodes / samples)) * samples}."
        )
    return episodes // samples
