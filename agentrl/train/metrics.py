"""Metrics as sums and counts over micro-batches and ranks, divided once when they are logged."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.rollout.sequences import rendered_again
from agentrl.types import Rollout, RolloutGroup


class MetricWindow:
    """What happened since the last log."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # name: [sum, count]
        self.lows: dict[str, float] = {}
        self.highs: dict[str, float] = {}
        self.parts: list[dict[str, Any]] = []  # clip sums of the objective, joined when logged

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Adds `count` measurements that sum to `total`."""
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def add_all(self, name: str, values: Iterable[float]) -> None:
        values = list(values)
        if values:
            self.add(name, sum(values), len(values))

    def low(self, name: str, value: float) -> None:
        self.lows[name] = min(self.lows.get(name, value), value)

    def high(self, name: str, value: float) -> None:
        self.highs[name] = max(self.highs.get(name, value), value)

    def clear(self) -> None:
        self.__init__()

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums, "lows": self.lows, "highs": self.highs}

    @staticmethod
    def values(states: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The numbers to log, from the windows of all ranks."""
        joined = MetricWindow()
        for state in states:
            for name, (total, count) in state["sums"].items():
                joined.add(name, total, count)
            for name, value in state["lows"].items():
                joined.low(name, value)
            for name, value in state["highs"].items():
                joined.high(name, value)
        means = {name: total / count if count else 0.0 for name, (total, count) in joined.sums.items()}
        return means | joined.lows | joined.highs


def add_rollout_metrics(window: MetricWindow, groups: Sequence[RolloutGroup], *, has_tools: bool) -> None:
    """completions/*, tools/*, rollout/* and env/* of groups that this rank played. Tool results are never counted."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    played = [rollout for rollout in rollouts if not rollout.outcome.failed]
    _add_lengths(window, played)
    if has_tools:
        calls = [call for rollout in played for call in rollout.tool_calls]
        window.add("tools/call_frequency", len(calls), len(played))
        failed = sum(call.error not in (None, "episode_over") for call in calls)  # a call too late is no failure
        window.add("tools/failure_frequency", failed, len(calls))
        exhausted = sum(rollout.outcome.value == "tool_limit" for rollout in played)
        window.add("tools/loop_exhausted_frac", exhausted, len(played))
    window.add("rollout/failed_frac", len(rollouts) - len(played), len(rollouts))
    window.add_all("rollout/attempts_mean", [rollout.attempts for rollout in rollouts])
    window.add_all("rollout/groups_dropped_frac", [float(group.dropped) for group in groups])
    window.add_all("rollout/turns_mean", [len(rollout.turns) for rollout in played])
    if played:
        window.high("rollout/turns_max", max(len(rollout.turns) for rollout in played))
    window.add_all("rollout/samples_per_rollout", [len(rollout.sequences) for rollout in played])
    _add_forks(window, played)
    for stage in ("reset", "reward"):
        if any(rollout.environment is not None for rollout in played):
            window.add_all(f"env/{stage}_s", [rollout.seconds.get(stage, 0.0) for rollout in played])
    for group in groups:
        for name, values in group.metrics.items():
            window.add_all(name, values)


def _add_forks(window: MetricWindow, played: Sequence[Rollout]) -> None:
    """rollout/fork_frac and rollout/drift_tokens_*, over the transitions from one turn to the next."""
    again = [count for rollout in played for count in rendered_again(rollout.turns)]
    window.add("rollout/fork_frac", sum(count > 0 for count in again), len(again))
    window.add("rollout/drift_tokens_mean", sum(again), len(again))
    window.high("rollout/drift_tokens_max", max(again, default=0))


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that the model sampled, over all turns."""
    return sum(len(turn.output_ids or ()) for turn in rollout.turns)


def prompt_tokens(rollout: Rollout) -> int:
    """Tokens of the first prompt."""
    return len(rollout.turns[0].prompt_ids or ()) if rollout.turns else 0


def _add_lengths(window: MetricWindow, played: Sequence[Rollout]) -> None:
    lengths = [sampled_tokens(rollout) for rollout in played]
    ended = [n for n, rollout in zip(lengths, played, strict=True) if not rollout.truncated]
    for name, values in (("length", lengths), ("terminated_length", ended)):
        window.add_all(f"completions/mean_{name}", values)
        if values:
            window.low(f"completions/min_{name}", min(values))
            window.high(f"completions/max_{name}", max(values))
    window.add_all("completions/clipped_ratio", [float(rollout.truncated) for rollout in played])


def add_reward_metrics(
    window: MetricWindow, rewards: Sequence[float | None], by_source: Mapping[str, Sequence[float | None]],
    zero_std: Sequence[bool],
) -> None:  # fmt: skip
    """reward, reward_std, rewards/{name}/*, frac_reward_zero_std of a whole generation batch (all ranks: call once).

    Rewards are raw, before any normalisation; rollouts that nobody scored are left out and counted apart.
    """
    scored = [value for value in rewards if value is not None]
    window.add("rewards/unscored_frac", len(rewards) - len(scored), len(rewards))
    if not scored:
        return
    window.add("reward", sum(scored), len(scored))
    window.add("reward_std", _std(scored) * len(scored), len(scored))
    flags = [flag for flag, value in zip(zero_std, rewards, strict=True) if value is not None]
    window.add("frac_reward_zero_std", sum(flags), len(flags))
    for name, column in by_source.items():
        values = [value for value in column if value is not None]
        if values:
            window.add(f"rewards/{name}/mean", sum(values), len(values))
            window.add(f"rewards/{name}/std", _std(values) * len(values), len(values))


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
