"""Metrics as sums and counts over micro-batches and ranks, divided once when they are logged."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.rollout.sequences import rendered_again
from agentrl.types import Rollout, RolloutGroup, ToolCallRecord, TrainingSequence

if TYPE_CHECKING:
    from agentrl.objective import Advantages
    from agentrl.train.generation import SharedRollout


class MetricWindow:
    """What happened since the last log."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # name: [sum, count], logged as their ratio
        self.lows: dict[str, float] = {}
        self.highs: dict[str, float] = {}
        self.totals: dict[str, float] = {}  # logged as they are
        self.parts: list[dict[str, Any]] = []  # clip sums of the objective, joined when logged
        self.prefix = ""

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Adds `count` measurements that sum to `total`."""
        entry = self.sums.setdefault(self.prefix + name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def add_all(self, name: str, values: Iterable[float]) -> None:
        values = list(values)
        if values:
            self.add(name, sum(values), len(values))

    def low(self, name: str, value: float) -> None:
        name = self.prefix + name
        self.lows[name] = min(self.lows.get(name, value), value)

    def high(self, name: str, value: float) -> None:
        name = self.prefix + name
        self.highs[name] = max(self.highs.get(name, value), value)

    def count(self, name: str, number: float) -> None:
        """Adds to a number that is logged as the sum over the window."""
        self.totals[self.prefix + name] = self.totals.get(self.prefix + name, 0.0) + number

    def under(self, prefix: str) -> MetricWindow:
        """A view of this window that writes names with `prefix` before them."""
        view = MetricWindow()
        view.sums, view.lows, view.highs, view.totals, view.parts = (
            self.sums, self.lows, self.highs, self.totals, self.parts
        )  # fmt: skip
        view.prefix = self.prefix + prefix
        return view

    def clear(self) -> None:
        self.__init__()

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums, "lows": self.lows, "highs": self.highs, "totals": self.totals}

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
            for name, value in state["totals"].items():
                joined.count(name, value)
        means = {name: total / count if count else 0.0 for name, (total, count) in joined.sums.items()}
        return means | joined.lows | joined.highs | joined.totals


@dataclass(frozen=True, slots=True)
class Reported:
    """What a run's metrics speak of."""

    tools: frozenset[str] = frozenset()  # names of all tools; none: no tools/*
    environments: tuple[str, ...] = ()  # values of the rows' `environment` column where several are mixed
    sources: tuple[str, ...] = ()  # of reward
    asked: Mapping[str, float] = field(default_factory=dict)  # share of the tasks by environment, where it is known


# --- rollouts, by the rank that played them --------------------------------------------
def add_rollout_metrics(window: MetricWindow, groups: Sequence[RolloutGroup], reported: Reported) -> None:
    """completions/*, tools/*, rollout/* and env/* of groups that this rank played. Tool results are never counted."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    played = [rollout for rollout in rollouts if not rollout.outcome.failed]
    _add_behaviour(window, rollouts, bool(reported.tools))
    for name in reported.environments:
        mine = [rollout for rollout in rollouts if rollout.task.environment == name]
        _add_behaviour(window.under(f"env/{name}/"), mine, bool(reported.tools))
        window.add(f"env/{name}/rollout_frac", len(mine), len(rollouts))
        dropped = [float(group.dropped) for group in groups if group.task.environment == name]
        _add_course(window.under(f"env/{name}/"), mine, dropped)
    if reported.tools:
        _add_calls(window, [call for rollout in played for call in rollout.tool_calls], reported.tools)
        window.add_all("tools/parallel_calls_mean", _calls_per_message(played))
    window.add_all("completions/duplicate_frac", _repeats(groups))
    window.add_all("rollout/attempts_mean", [rollout.attempts for rollout in rollouts])
    window.add_all("rollout/groups_dropped_frac", [float(group.dropped) for group in groups])
    window.add_all("rollout/duration_s", _seconds(rollouts, "total"))
    window.add_all("rollout/samples_per_rollout", [len(rollout.sequences) for rollout in played])
    _add_forks(window, played)
    for stage in ("reset", "reward"):
        window.add_all(f"env/{stage}_s", _seconds([r for r in played if r.environment is not None], stage))
    for group in groups:
        for name, values in group.metrics.items():
            window.add_all(name, values)


def _add_behaviour(window: MetricWindow, rollouts: Sequence[Rollout], has_tools: bool) -> None:
    """What is worth telling apart by environment: lengths, turns, calls, failures."""
    played = [rollout for rollout in rollouts if not rollout.outcome.failed]
    _add_lengths(window, played)
    if has_tools:
        calls = [call for rollout in played for call in rollout.tool_calls]
        window.add("tools/call_frequency", len(calls), len(played))
        window.add("tools/failure_frequency", sum(map(_failed, calls)), len(calls))
        exhausted = sum(rollout.outcome.value == "tool_limit" for rollout in played)
        window.add("tools/loop_exhausted_frac", exhausted, len(played))
    window.add("rollout/failed_frac", len(rollouts) - len(played), len(rollouts))
    window.add_all("rollout/turns_mean", [len(rollout.turns) for rollout in played])
    if played:
        window.high("rollout/turns_max", max(len(rollout.turns) for rollout in played))


def _add_course(window: MetricWindow, rollouts: Sequence[Rollout], dropped: Sequence[float]) -> None:
    """How the rollouts of one environment went: endings, tries, seconds."""
    for outcome, count in Counter(rollout.outcome.value for rollout in rollouts).items():
        window.count(f"outcome/{outcome}_count", count)
    window.add_all("rollout/groups_dropped_frac", dropped)
    window.add_all("rollout/attempts_mean", [rollout.attempts for rollout in rollouts])
    window.add_all("rollout/duration_s", _seconds(rollouts, "total"))
    for stage in ("reset", "tools", "reward"):
        window.add_all(f"{stage}_s", _seconds([r for r in rollouts if not r.outcome.failed], stage))


def _add_lengths(window: MetricWindow, played: Sequence[Rollout]) -> None:
    lengths = [sampled_tokens(rollout) for rollout in played]
    ended = [n for n, rollout in zip(lengths, played, strict=True) if not rollout.truncated]
    for name, values in (("length", lengths), ("terminated_length", ended)):
        window.add_all(f"completions/mean_{name}", values)
        if values:
            window.low(f"completions/min_{name}", min(values))
            window.high(f"completions/max_{name}", max(values))
    window.add_all("completions/clipped_ratio", [float(rollout.truncated) for rollout in played])


def _failed(call: ToolCallRecord) -> bool:
    return call.error not in (None, "episode_over")  # a call that comes too late is no failure


def _add_calls(window: MetricWindow, calls: Sequence[ToolCallRecord], known: Iterable[str]) -> None:
    """By tool. A name that the model made up has no metric of its own: they would never end."""
    ran = [call for call in calls if call.error in (None, "raised")]
    window.add_all("tools/latency_s", [call.seconds for call in ran])
    window.count("tools/unknown_name_count", sum(call.error == "unknown_tool" for call in calls))
    for name in sorted(known):
        mine = [call for call in calls if call.name == name and call.error != "unknown_tool"]
        window.count(f"tools/{name}/call_count", len(mine))
        window.count(f"tools/{name}/failure_count", sum(map(_failed, mine)))
        window.add_all(f"tools/{name}/latency_s", [call.seconds for call in ran if call.name == name])


def _calls_per_message(played: Sequence[Rollout]) -> list[int]:
    """For each assistant message that calls tools, how many."""
    counts: list[int] = []
    for rollout in played:
        turns = [call.turn for call in rollout.tool_calls]
        counts += [turns.count(turn) for turn in sorted(set(turns))]
    return counts


def _repeats(groups: Sequence[RolloutGroup]) -> Iterator[float]:
    """For each rollout, whether an earlier one of its group sampled the same tokens in all its turns."""
    for group in groups:
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for rollout in group.rollouts:
            if rollout.outcome.failed or any(turn.output_ids is None for turn in rollout.turns):
                continue
            ids = tuple(tuple(turn.output_ids or ()) for turn in rollout.turns)
            yield float(ids in seen)
            seen.add(ids)


def _add_forks(window: MetricWindow, played: Sequence[Rollout]) -> None:
    """rollout/fork_frac and rollout/drift_tokens_*, over the transitions from one turn to the next."""
    again = [count for rollout in played for count in rendered_again(rollout.turns)]
    window.add("rollout/fork_frac", sum(count > 0 for count in again), len(again))
    window.add("rollout/drift_tokens_mean", sum(again), len(again))
    window.high("rollout/drift_tokens_max", max(again, default=0))


def _seconds(rollouts: Sequence[Rollout], stage: str) -> list[float]:
    return [rollout.seconds[stage] for rollout in rollouts if stage in rollout.seconds]


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that the model sampled, over all turns."""
    return sum(len(turn.output_ids or ()) for turn in rollout.turns)


def prompt_tokens(rollout: Rollout) -> int:
    """Tokens of the first prompt."""
    return len(rollout.turns[0].prompt_ids or ()) if rollout.turns else 0


def add_speed(window: MetricWindow, groups: Sequence[RolloutGroup], seconds: float, world: int) -> None:
    """rollout/generated_tokens_per_s and rollout/concurrency of a phase that took `seconds`, of all ranks together."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    window.add("rollout/generated_tokens_per_s", world * sum(map(sampled_tokens, rollouts)), seconds)
    if lasted := _seconds(rollouts, "total"):
        window.add("rollout/concurrency", world * sum(lasted), seconds)


# --- rewards, of a whole generation batch ----------------------------------------------
def add_reward_metrics(
    window: MetricWindow, rollouts: Sequence[SharedRollout], compared: Advantages, reported: Reported
) -> None:
    """reward, reward_std, rewards/{name}/*, frac_reward_zero_std of all ranks' rollouts: call it on one rank.

    Rewards are raw, before any normalisation; rollouts that nobody scored are left out and counted apart. A standard
    deviation is that of one generation batch, or of one group; the window's mean of them is weighted by rollouts.
    """
    zero_std, group_std = compared.zero_std_N.tolist(), compared.group_std_N.tolist()
    _add_rewards(window, rollouts, zero_std)
    scored = [i for i, rollout in enumerate(rollouts) if rollout.reward is not None]
    window.add_all("reward_group_std", [group_std[i] for i in scored])
    for name in reported.environments:
        mine = [i for i, rollout in enumerate(rollouts) if rollout.environment == name]
        if mine:
            view = window.under(f"env/{name}/")
            _add_rewards(view, [rollouts[i] for i in mine], [zero_std[i] for i in mine])
    _add_mixture(window, rollouts, reported)
    for name in reported.sources:
        given = [(rollout.group, rollout.rewards.get(name)) for rollout in rollouts]
        values = [(group, value) for group, value in given if value is not None]
        if values:
            everyone = [value for _, value in values]
            window.add_all(f"rewards/{name}/mean", everyone)
            window.add(f"rewards/{name}/std", _std(everyone) * len(everyone), len(everyone))
            window.add(f"rewards/{name}/group_std", _within_groups(values), len(values))


def _add_mixture(window: MetricWindow, rollouts: Sequence[SharedRollout], reported: Reported) -> None:
    """mixture/*: what share of the tasks each environment was to have, and what share of what is trained it has."""
    trained = [rollout for rollout in rollouts if rollout.reward is not None]
    tokens = [sum(map(_trained_tokens, rollout.sequences)) for rollout in trained]
    for name in reported.environments:
        mine = [rollout.environment == name for rollout in trained]
        if name in reported.asked:
            window.add(f"mixture/{name}/asked_frac", reported.asked[name])
        window.add(f"mixture/{name}/realised_frac", sum(mine), len(trained))
        window.add(f"mixture/{name}/realised_token_frac", sum(itertools.compress(tokens, mine)), sum(tokens))


def _trained_tokens(sequence: TrainingSequence) -> int:
    return sum(sequence.completion_mask)


def _add_rewards(window: MetricWindow, rollouts: Sequence[SharedRollout], zero_std: Sequence[bool]) -> None:
    scored = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    window.add("rewards/unscored_frac", len(rollouts) - len(scored), len(rollouts))
    if not scored:
        return
    window.add("reward", sum(scored), len(scored))
    window.add("reward_std", _std(scored) * len(scored), len(scored))
    flags = [flag for flag, rollout in zip(zero_std, rollouts, strict=True) if rollout.reward is not None]
    window.add("frac_reward_zero_std", sum(flags), len(flags))


def _within_groups(values: Sequence[tuple[int, float]]) -> float:
    """The sum over all values of their own group's standard deviation."""
    groups: dict[int, list[float]] = {}
    for group, value in values:
        groups.setdefault(group, []).append(value)
    return sum(_std(members) * len(members) for members in groups.values())


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
