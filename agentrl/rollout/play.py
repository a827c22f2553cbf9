"""One episode in one call: meet an environment before meeting a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl import sampler as samplers
from agentrl.errors import AgentRLError, ConfigurationError, EnvironmentFailed, SamplerError
from agentrl.pool import EnvironmentPool
from agentrl.registry import resolve
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer, name_sources
from agentrl.tool_schema import build_tools
from agentrl.types import Outcome, Rollout, SampleOutput, Sampler, SampleRequest, SamplingParams, Task


def play_episode(
    environment: Any,
    policy: Any = None,
    *,
    task: Mapping[str, Any] | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    max_tool_calling_iterations: int | None = 32,
    max_completion_length: int | None = 4096,
    sampling: SamplingParams | None = None,
) -> Rollout:
    """One episode, played and scored. Works in scripts and inside a notebook's running loop.

    Args:
        environment: A class, a factory, a registered id, or a ready instance; None for tools without an environment.
        policy: A sampler; a list of turns (text, messages, or token ids) to play; a function
            ``f(messages, tools) -> text or message``; a transformers model (with `tokenizer`); None: random tool calls.
        task: A dataset row: ``prompt`` and whatever else `reset` takes.
        seed: Of the start state and of everything drawn.
        tokenizer: Plays in token ids, as training does.
        tools: Standalone tools.
        reward_funcs: Reward functions beside the environment's own reward.
        max_tool_calling_iterations: Turns whose tool calls are run.
        max_completion_length: Tokens of the completion, where there are tokens.
        sampling: Temperature and the like.

    Raises:
        ConfigurationError: Something that cannot be played.
        EnvironmentFailed: `reset`, a tool or `get_reward` broke; the traceback is in the message.
        SamplerError: The policy broke.

    >>> class Door:
    ...     def reset(self): self.open = False; return "Open the door."
    ...     def get_reward(self): return float(self.open)
    ...     def push(self) -> str:
    ...         '''Push the door.'''
    ...         self.open = True
    ...         return "It opens."
    >>> episode = play_episode(Door, [{"tool_calls": [{"name": "push", "arguments": {}}]}, "It is open."])
    >>> episode.reward, episode.outcome.value, [message["role"] for message in episode.messages]
    (1.0, 'finished', ['user', 'assistant', 'tool', 'assistant'])
    """
    sampler = _as_sampler(policy, tokenizer, seed)
    sources = name_sources([reward_funcs] if callable(reward_funcs) else list(reward_funcs))
    named = build_tools(tools)
    ready = environment is not None and not _is_factory(environment)
    factory = (lambda: environment) if ready else environment
    pool = EnvironmentPool(resolve(factory) if factory is not None else None, owned=not ready)
    renderer = None
    if tokenizer is not None:
        from agentrl.render import Renderer

        renderer = Renderer(tokenizer, with_tools=bool(pool.tools or tools))
    settings = RolloutSettings(
        max_completion_length=max_completion_length, max_tool_calling_iterations=max_tool_calling_iterations,
        sampling=sampling or SamplingParams(), max_attempts=1, min_survivors=0, seed=seed,
        max_context=_context(policy), max_failures_in_row=2,
    )  # fmt: skip
    engine = RolloutEngine(sampler, renderer, {None: pool}, named, settings)
    plan = GroupPlan(f"play{seed}", Task(index=0, epoch=0, seed=seed, row=dict(task or {})), 1)
    try:
        (group,) = play_and_close(engine, Scorer(sources), [plan])
    finally:
        if sampler is not policy and hasattr(sampler, "close"):
            sampler.close()  # type: ignore[attr-defined]
    (rollout,) = group.rollouts
    if rollout.outcome.failed:
        raise failure_of(rollout, "The episode")
    return rollout


def failure_of(rollout: Rollout, name: str) -> AgentRLError:
    """The error that a failed rollout is to whoever plays one; `name` begins its sentence."""
    what = f"{name} ended as {rollout.outcome.value}:\n{rollout.error}"
    if rollout.outcome is Outcome.SAMPLER_FAILED:
        return SamplerError(what)
    stage = rollout.outcome.value.removesuffix("_failed")
    return EnvironmentFailed(what, stage=stage, deadline=rollout.outcome is Outcome.DEADLINE)


def _is_factory(environment: Any) -> bool:
    return isinstance(environment, (str, type)) or not hasattr(environment, "reset")


def _context(policy: Any) -> int | None:
    config = getattr(policy, "config", None)
    return getattr(config, "max_position_embeddings", None)


def _as_sampler(policy: Any, tokenizer: Any, seed: int) -> Sampler:
    if policy is None:
        return samplers.RandomPolicy(seed, tokenizer=tokenizer)
    if isinstance(policy, type):
        raise ConfigurationError(f"policy is the class {policy.__name__}; pass an instance of it.")
    if hasattr(policy, "sample") and inspect.iscoroutinefunction(policy.sample):
        if not callable(getattr(policy, "release", None)):
            raise ConfigurationError(f"The sampler {type(policy).__name__} has no release(conversation_id); add one.")
        return policy
    if hasattr(policy, "generate") and hasattr(policy, "config"):
        if tokenizer is None:
            raise ConfigurationError("A model as policy needs its tokenizer: pass tokenizer=...")
        return samplers.TransformersSampler(policy, tokenizer)
    if isinstance(policy, (list, tuple)):
        return samplers.ScriptedSampler(list(policy), tokenizer=tokenizer)
    if callable(policy):
        return _FunctionPolicy(policy, tokenizer)
    raise ConfigurationError(
        f"policy is a {type(policy).__name__}; it must be a sampler, a list of turns, a function of (messages, tools), "
        "a transformers model, or None for random tool calls."
    )


class _FunctionPolicy:
    """A function of (messages, tools), sync or async, as a sampler."""

    def __init__(self, function: Callable[..., Any], tokenizer: Any) -> None:
        self.function = function
        self._writer = samplers.ScriptedSampler(self._turn, tokenizer=tokenizer)
        self._answer: Any = None

    def _turn(self, request: SampleRequest) -> Any:
        return self._answer

    async def sample(self, request: SampleRequest) -> SampleOutput:
        answer = self.function(request.messages, request.tools)
        self._answer = await answer if inspect.isawaitable(answer) else answer
        return await self._writer.sample(request)

    def release(self, conversation_id: str) -> None:
        self._writer.release(conversation_id)
