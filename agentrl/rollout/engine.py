"""The turn loop. There is one; training, evaluation and play all run it."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.environment import Instance, reset_kwargs
from agentrl.errors import AgentRLError, ConfigurationError, EnvironmentFailed, RunStopped, SamplerError
from agentrl.pool import EnvironmentPool
from agentrl.rollout.episode import Episode
from agentrl.rollout.failures import FailureGuard
from agentrl.tasks import derive_seed
from agentrl.tool_schema import Tool
from agentrl.types import Deadlines, Outcome, Rollout, Sampler, SamplingParams, Task

if TYPE_CHECKING:
    from agentrl.render import Renderer


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How episodes are played.

    Raises:
        ConfigurationError: A number out of range.
    """

    max_completion_length: int | None = 512  # tokens of the whole completion, tool results included
    turn_budget: bool = False  # True: max_completion_length bounds each turn instead (async)
    max_tool_calling_iterations: int | None = None  # turns whose calls are run; 0: tools never run
    max_context: int | None = None  # tokens the model can see
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_attempts: int = 3  # tries of one rollout, each on a fresh instance, before it counts as failed
    min_survivors: int = 2  # scored members below which a group of several is dropped
    max_concurrent: int = 512
    max_failures_in_row: int = 16  # failed rollouts in a row that stop the run
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise ConfigurationError(f"max_completion_length must be at least 1, not {self.max_completion_length}.")
        if self.max_tool_calling_iterations is not None and self.max_tool_calling_iterations < 0:
            raise ConfigurationError("max_tool_calling_iterations must be 0 (tools never run) or more, or None.")
        if self.max_attempts < 1 or self.max_concurrent < 1:
            raise ConfigurationError("max_attempts and max_concurrent must be at least 1.")


class RolloutEngine:
    """Plays episodes of any environments with any sampler, each at its own pace.

    Args:
        sampler: What draws the turns.
        renderer: Messages to ids and back; None for samplers that take messages (evaluation only).
        pools: Environment instances by the row's ``environment`` value; the key None plays rows without one.
        tools: Standalone tools, offered beside those of the environment.
        settings: Budgets, deadlines, retries.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer | None,
        pools: Mapping[str | None, EnvironmentPool],
        tools: Mapping[str, Tool] | None = None,
        settings: RolloutSettings | None = None,
    ) -> None:
        self.sampler, self.renderer, self.pools = sampler, renderer, dict(pools)
        self.settings = settings or RolloutSettings()
        self.failures = FailureGuard(self.settings.max_failures_in_row)
        self._toolsets = {key: self._merge(pool, tools or {}) for key, pool in self.pools.items()}
        self._schemas = {key: [tool.schema for tool in tools.values()] for key, tools in self._toolsets.items()}

    @staticmethod
    def _merge(pool: EnvironmentPool, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        both = sorted(set(pool.tools) & set(tools))
        if both:
            raise ConfigurationError(
                f"The name '{both[0]}' is both a standalone tool and a method of {pool.name}; rename one of them."
            )
        return {**pool.tools, **tools}

    def has_tools(self) -> bool:
        """True when some row's prompt shows a tool."""
        return any(self._toolsets.values())

    def tools_of(self, task: Task) -> dict[str, Tool]:
        """The tools that this task's prompt shows, and no others."""
        return self._toolsets[self._key(task)]

    def _key(self, task: Task) -> str | None:
        if task.environment in self.pools:
            return task.environment
        known = ", ".join(str(key) for key in self.pools)
        raise ConfigurationError(f"Row {task.index} names the environment {task.environment!r}; known: {known}.")

    def pool_of(self, task: Task) -> EnvironmentPool:
        return self.pools[self._key(task)]

    async def play(self, task: Task, *, rollout_id: str, group_id: str, member: int = 0) -> tuple[Rollout, Instance]:
        """Plays one rollout to its end, retried on fresh instances where the environment's side failed.

        Returns:
            The unscored rollout, and the instance that played it, which the caller gives back to its pool.

        Raises:
            ConfigurationError: The row cannot be played (no prompt, prompt longer than the model).
            RunStopped: Too many failures in a row.
        """
        pool = self.pool_of(task)
        for attempt in range(1, self.settings.max_attempts + 1):
            instance = await pool.acquire()
            episode = self._episode(task, instance, rollout_id, group_id, member, attempt)
            try:
                rollout = await self._attempt(episode)
            except BaseException:
                pool.release(instance, healthy=False)
                raise
            finally:
                self.sampler.release(episode.conversation_id)
            if not rollout.outcome.failed:
                self.failures.success()
                return rollout, instance
            if attempt < self.settings.max_attempts:
                pool.release(instance, healthy=False)
        self.failures.failed(rollout, pool.name)
        return rollout, instance

    def _episode(self, task: Task, instance: Instance, rollout_id: str, group_id: str, member: int, attempt: int):
        key = self._key(task)
        seed = (self.settings.seed & 0x7FFFFFFF, derive_seed(rollout_id, attempt) if attempt > 1 else derive_seed(rollout_id))
        return Episode(
            task=task, instance=instance, rollout_id=rollout_id, group_id=group_id, member=member, attempt=attempt,
            seed=seed, tools=self._toolsets[key], schemas=self._schemas[key], sampler=self.sampler,
            renderer=self.renderer, settings=self.settings,
        )  # fmt: skip

    async def _attempt(self, episode: Episode) -> Rollout:
        """One try; failures of our side become outcomes, never rewards."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.settings.deadlines.episode_s):
                kwargs = reset_kwargs(
                    episode.instance.env, episode.task.row, episode.task.seed, {"rollout_id": episode.rollout_id}
                )
                await episode.reset(kwargs)
                outcome = await episode.turns_until_end()
                await episode.score()
                error = None
        except (ConfigurationError, RunStopped):
            raise
        except EnvironmentFailed as failure:
            outcome, error = _outcome_of(failure), traceback.format_exc()
        except SamplerError:
            outcome, error = Outcome.SAMPLER_FAILED, traceback.format_exc()
        except TimeoutError:
            outcome, error = Outcome.DEADLINE, f"the episode took longer than {self.settings.deadlines.episode_s} s"
        except AgentRLError:
            raise
        except Exception:
            outcome, error = Outcome.SAMPLER_FAILED, traceback.format_exc()
        return episode.finish(outcome, error, time.perf_counter() - started)


def _outcome_of(failure: EnvironmentFailed) -> Outcome:
    if failure.deadline:
        return Outcome.DEADLINE
    stages = {"reset": Outcome.RESET_FAILED, "tool": Outcome.TOOL_FAILED, "reward": Outcome.REWARD_FAILED}
    return stages[failure.stage]


def summary(rollout: Rollout) -> dict[str, Any]:
    """The few facts of a rollout that a person reads first."""
    return {
        "outcome": rollout.outcome.value, "turns": len(rollout.turns), "calls": len(rollout.tool_calls),
        "reward": rollout.reward,
    }  # fmt: skip
