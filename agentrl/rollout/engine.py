"""The turn loop. There is one; training, evaluation and play all run it."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agentrl.environment import Instance
from agentrl.errors import AgentRLError, ConfigurationError, EnvironmentFailed, SamplerError
from agentrl.mixing import EnvironmentSpec
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
    num_sampler_logprobs: int = 0  # most likely tokens that the sampler records at each position; 0: none
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_attempts: int = 3  # tries of one rollout, each on a fresh instance, before it counts as failed
    min_survivors: int = 2  # members left below which a group of several is dropped
    max_concurrent: int = 512
    max_failures_in_row: int = 16  # failed rollouts in a row that stop the run
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise ConfigurationError(f"max_completion_length must be at least 1, not {self.max_completion_length}.")
        if self.max_tool_calling_iterations is not None and self.max_tool_calling_iterations < 0:
            raise ConfigurationError("max_tool_calling_iterations must be 0 (tools never run) or more, or None.")
        if self.num_sampler_logprobs < 0:
            raise ConfigurationError(f"num_sampler_logprobs must be 0 (none) or more, not {self.num_sampler_logprobs}.")
        for name in ("max_attempts", "max_concurrent", "max_failures_in_row"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}.")

    def of(self, spec: EnvironmentSpec | None) -> RolloutSettings:
        """These settings, with those of one environment over them."""
        if spec is None:
            return self
        lengths = [n for n in (self.max_completion_length, spec.max_completion_length) if n is not None]
        return replace(
            self,
            max_completion_length=min(lengths, default=None),
            max_tool_calling_iterations=self.max_tool_calling_iterations if spec.max_turns is None else spec.max_turns,
            max_concurrent=spec.max_concurrent or self.max_concurrent,
            max_failures_in_row=spec.max_failures_in_row or self.max_failures_in_row,
            deadlines=spec.all_deadlines(self.deadlines),
        )


class RolloutEngine:
    """Plays episodes of any environments with any sampler, each at its own pace.

    Args:
        sampler: What draws the turns.
        renderer: Messages to ids and back; None for samplers that take messages (evaluation only).
        pools: Environment instances by the row's ``environment`` value; the key None plays rows without one.
        tools: Standalone tools, offered beside those of the environment.
        settings: Budgets, deadlines, retries; a pool's `spec` goes over them for its own environment.
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
        self.warned: set[str] = set()  # environments whose groups were seen to start differently
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

    def tool_names(self) -> set[str]:
        """The tools that some row's prompt shows."""
        return {name for tools in self._toolsets.values() for name in tools}

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

    def settings_of(self, task: Task) -> RolloutSettings:
        """The settings that this task's environment is played with."""
        return self.settings.of(self.pool_of(task).spec)

    def concurrency(self) -> dict[str | None, int]:
        """Rollouts at a time of each environment that has a limit of its own."""
        limits = {key: pool.spec.max_concurrent for key, pool in self.pools.items() if pool.spec is not None}
        return {key: number for key, number in limits.items() if number is not None}

    async def play(
        self, task: Task, *, rollout_id: str, group_id: str, member: int = 0
    ) -> tuple[Rollout, Instance | None]:
        """Plays one rollout to its end, retried on fresh instances where the environment's side failed.

        Returns:
            The unscored rollout, and the instance that played it, which the caller gives back to its pool; None for
            a failed rollout, whose instances are back or closed already.

        Raises:
            ConfigurationError: The row cannot be played (no prompt, prompt longer than the model).
            RunStopped: Too many failures of this environment in a row.
        """
        key, names = self._key(task), (rollout_id, group_id, member)
        pool = self.pools[key]
        rollout, instance = await self._attempt(task, pool, names, 1)
        for attempt in range(2, self.settings.max_attempts + 1):
            if instance is not None:
                break
            rollout, instance = await self._attempt(task, pool, names, attempt)
        if instance is None:
            name = f"'{key}' ({pool.name})" if key is not None else pool.name
            self.failures.failed(rollout, name, key, self.settings_of(task).max_failures_in_row)
        else:
            self.failures.success(key)
        return rollout, instance

    async def _attempt(
        self, task: Task, pool: EnvironmentPool, names: tuple[str, str, int], attempt: int
    ) -> tuple[Rollout, Instance | None]:
        """One try. The instance comes along only where nothing failed."""
        started = time.perf_counter()
        try:
            instance = await self._acquire(pool, self.settings_of(task).deadlines.reset_s)
        except EnvironmentFailed as failure:
            nobody = self._episode(task, pool, Instance(None), names, attempt)
            return nobody.finish(_outcome_of(failure), traceback.format_exc(), time.perf_counter() - started), None
        keep = reusable = False
        episode = self._episode(task, pool, instance, names, attempt)
        try:
            outcome, error = await self._play_out(episode)
            rollout = episode.finish(outcome, error, time.perf_counter() - started)
            # A sampler that failed says nothing against the environment, and building another may take minutes.
            keep, reusable = not outcome.failed, outcome is Outcome.SAMPLER_FAILED
        finally:
            if not keep:
                pool.release(instance, healthy=reusable)
            self.sampler.release(episode.conversation_id)
        return rollout, instance if keep else None

    async def _acquire(self, pool: EnvironmentPool, seconds: float | None) -> Instance:
        """An instance; building one is part of a reset, and has its deadline."""
        try:
            async with asyncio.timeout(seconds):
                return await pool.acquire()
        except TimeoutError as e:
            raise EnvironmentFailed(
                f"Building an instance of {pool.name} took longer than {seconds} s.", stage="reset", deadline=True
            ) from e

    def _episode(
        self, task: Task, pool: EnvironmentPool, instance: Instance, names: tuple[str, str, int], attempt: int
    ) -> Episode:
        key, (rollout_id, group_id, member) = self._key(task), names
        stream = derive_seed(rollout_id) if attempt == 1 else derive_seed(rollout_id, attempt)
        return Episode(
            task=task, instance=instance, environment=pool.name or None, rollout_id=rollout_id, group_id=group_id,
            member=member, attempt=attempt, seed=(self.settings.seed & 0x7FFFFFFF, stream),
            tools=self._toolsets[key], schemas=self._schemas[key], sampler=self.sampler, renderer=self.renderer,
            settings=self.settings.of(pool.spec),
        )  # fmt: skip

    async def _play_out(self, episode: Episode) -> tuple[Outcome, str | None]:
        """How the episode ended, and the traceback where our side failed: that is an outcome, never a reward."""
        seconds = episode.settings.deadlines.episode_s
        whole = asyncio.timeout(seconds)
        try:
            async with whole:
                await episode.reset()
                outcome = await episode.turns_until_end()
                await episode.score()
                return outcome, None
        except EnvironmentFailed as failure:
            return _outcome_of(failure), traceback.format_exc()
        except SamplerError:
            return Outcome.SAMPLER_FAILED, traceback.format_exc()
        except TimeoutError:
            late = f"The episode took longer than {seconds} s." if whole.expired() else traceback.format_exc()
            return Outcome.DEADLINE, late
        except AgentRLError:
            raise
        except Exception:  # between reset and the next turn: nothing that a model or a row should be able to cause
            return Outcome.TOOL_FAILED, traceback.format_exc()


def _outcome_of(failure: EnvironmentFailed) -> Outcome:
    if failure.deadline:
        return Outcome.DEADLINE
    stages = {"reset": Outcome.RESET_FAILED, "reward": Outcome.REWARD_FAILED}
    return stages.get(failure.stage, Outcome.TOOL_FAILED)
