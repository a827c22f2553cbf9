"""The tests that every environment should pass, in a line of your own test.

Example:
    >>> class Door:
    ...     reward_range = (0.0, 1.0)
    ...     def reset(self, seed: int = 0) -> str:
    ...         self._open = self.done = False
    ...         return "Open the door."
    ...     def push(self) -> str:
    ...         '''Push the door.'''
    ...         self._open = self.done = True
    ...         return "It opens."
    ...     def get_reward(self) -> float:
    ...         return float(self._open)
    ...     def _gold(self):
    ...         return {"tool_calls": [{"name": "push", "arguments": {}}]}
    >>> episode = gold_episode(Door)
    >>> episode.reward, [message["role"] for message in episode.messages]
    (1.0, ['user', 'assistant', 'tool'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.check import CheckReport, Finding, Gold, check_environment, examine_environment, gold_of, read_turn
from agentrl.environment import Instance
from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.registry import resolve
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.play import failure_of
from agentrl.rollout.scoring import Scorer
from agentrl.types import Deadlines, Rollout, SampleOutput, SampleRequest, Task

__all__ = [
    "CheckReport",
    "Finding",
    "Gold",
    "assert_environment",
    "check_environment",
    "examine_environment",
    "gold_episode",
]


def assert_environment(
    env_or_factory: Any,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    gold: Gold | None = None,
    timeout: float = 30.0,
    warnings: bool = True,
) -> CheckReport:
    """The environment passes its check; the report, for its numbers.

    Args:
        env_or_factory: As for `check_environment`, and so are `rows`, `seed`, `gold` and `timeout`.
        rows: Dataset rows to reset with.
        seed: Of resets and random calls.
        gold: A policy that gets the top reward; None: the environment's `_gold`.
        timeout: Seconds for each reset, call and score.
        warnings: Whether warnings fail it as well.

    Raises:
        AssertionError: With one line for each error and warning.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    report = examine_environment(env_or_factory, rows=rows, seed=seed, gold=gold, timeout=timeout)
    levels = ("error", "warning") if warnings else ("error",)
    wrong = [str(finding) for finding in report.findings if finding.level in levels]
    if wrong:
        raise AssertionError("\n".join([f"{report.name or 'The environment'} does not pass its check.", *wrong]))
    return report


def gold_episode(
    env_or_factory: Any,
    row: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    gold: Gold | None = None,
    max_turns: int = 2000,
    timeout: float | None = 60.0,
) -> Rollout:
    """One episode of the gold policy, played by the engine as a model would play it.

    Args:
        env_or_factory: A class, a factory, a registered id, or an instance (which is not closed).
        row: Of a dataset.
        seed: Of the start state.
        gold: ``f(env, messages) -> text or message``; None: the environment's own `_gold`.
        max_turns: After which it is cut (`Outcome.TOOL_LIMIT`).
        timeout: Seconds for each reset, call and score; None: no limit.

    Raises:
        ConfigurationError: There is no gold policy, or what it returned is no turn.
        EnvironmentFailed: `reset`, a tool or `get_reward` broke; the traceback is in the message.
        SamplerError: The gold policy broke.
    """
    is_instance = not isinstance(env_or_factory, (str, type)) and hasattr(type(env_or_factory), "reset")
    pool = _Watched((lambda: env_or_factory) if is_instance else resolve(env_or_factory), owned=not is_instance)
    settings = RolloutSettings(
        max_completion_length=None, max_tool_calling_iterations=max_turns, max_attempts=1, min_survivors=0,
        deadlines=Deadlines(timeout, timeout, timeout, timeout, None), max_failures_in_row=2,
    )  # fmt: skip
    engine = RolloutEngine(_GoldSampler(pool, gold, timeout), None, {None: pool}, settings=settings)
    plan = GroupPlan(f"gold{seed}", Task(index=0, epoch=0, seed=seed, row=dict(row or {})), 1)
    (group,) = play_and_close(engine, Scorer([]), [plan])
    (rollout,) = group.rollouts
    if rollout.outcome.failed:
        raise failure_of(rollout, "The gold episode")
    return rollout


class _Watched(EnvironmentPool):
    """A pool whose latest instance is known: the gold policy looks into it."""

    latest: Instance | None = None

    async def acquire(self) -> Instance:
        self.latest = await super().acquire()
        return self.latest


class _GoldSampler:
    """Asks the gold policy for each turn, on the thread that the environment's calls run on."""

    def __init__(self, pool: _Watched, gold: Gold | None, timeout: float | None) -> None:
        self.pool, self.gold, self.timeout = pool, gold, timeout

    async def sample(self, request: SampleRequest) -> SampleOutput:
        instance = self.pool.latest
        assert instance is not None  # the engine resets one before it samples
        policy = gold_of(instance.env, self.gold)
        if policy is None:
            raise ConfigurationError(f"{instance.name} has no gold policy. Write a method _gold, or pass gold=.")
        turn = await instance.run(policy, request.messages, timeout=self.timeout)
        return SampleOutput(None, None, "stop", 0, read_turn(turn)[0])

    def release(self, conversation_id: str) -> None:
        """Nothing was held."""
