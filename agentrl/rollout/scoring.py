"""Reward functions: called by name with everything they may ask for, their answers checked before they count."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.types import Rollout

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardSource:
    """One reward function with its unique, readable name and its weight."""

    name: str
    function: RewardFunction
    weight: float = 1.0


def name_sources(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None = None, taken: Sequence[str] = ()
) -> list[RewardSource]:
    """Reward functions with names that are unique and that a person recognises.

    >>> [source.name for source in name_sources([len, len, lambda completions: [0.0]])]
    ['len', 'len_2', 'lambda']

    Raises:
        ConfigurationError: Something that cannot be called, or weights of another number than functions.
    """
    if weights is not None and len(weights) != len(functions):
        raise ConfigurationError(
            f"reward_weights has {len(weights)} values for {len(functions)} reward functions; give one for each "
            "(an environment's own reward always has weight 1)."
        )
    used = set(taken)
    sources = []
    for index, function in enumerate(functions):
        if not callable(function):
            raise ConfigurationError(f"Reward function {index} is a {type(function).__name__}, which cannot be called.")
        base = _readable_name(function)
        name, k = base, 1
        while name in used:
            k += 1
            name = f"{base}_{k}"
        used.add(name)
        sources.append(RewardSource(name, function, 1.0 if weights is None else float(weights[index])))
    return sources


def _readable_name(function: RewardFunction) -> str:
    if isinstance(function, functools.partial):
        return _readable_name(function.func)
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else name


class Scorer:
    """Calls every reward function once per group, and sums what they say.

    Async functions are awaited together; sync ones run one after another on one thread, so that slow ones do not
    stop the episodes that are still playing and need not be thread-safe.
    """

    def __init__(self, sources: Sequence[RewardSource]) -> None:
        self.sources = list(sources)
        self._thread: ThreadPoolExecutor | None = None
        self._inline = True  # until a sync function proves slow

    async def score(
        self, rollouts: Sequence[Rollout], environments: Sequence[Any] | None, trainer_state: Any
    ) -> tuple[list[Rollout], dict[str, list[float]]]:
        """Rollouts with `rewards` by source and their weighted sum in `reward` (None where nobody scored).

        Args:
            rollouts: [S] the members of one group that did not fail.
            environments: [S] their instances, or None without environments.
            trainer_state: Passed on to functions that ask for it.

        Returns:
            The scored rollouts, and the values given to `log_metric` by name.

        Raises:
            ConfigurationError: A function returned something else than one number or None per completion.
        """
        extras: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(rollouts):
                raise ConfigurationError(
                    f"log_extra('{column}') got {len(values)} values for {len(rollouts)} completions; give one for each."
                )
            extras[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            metrics.setdefault(name, []).append(float(value))

        offered = _keyword_arguments(rollouts, environments)
        offered |= {"trainer_state": trainer_state, "log_extra": log_extra, "log_metric": log_metric}
        answers = await self._call_all(offered)
        columns = [
            check_rewards(answer, len(rollouts), source.name)
            for source, answer in zip(self.sources, answers, strict=True)
        ]
        return [self._scored(rollout, columns, extras, i) for i, rollout in enumerate(rollouts)], metrics

    async def _call_all(self, offered: dict[str, Any]) -> list[Any]:
        answers: list[Any] = [None] * len(self.sources)
        waiting = {}
        for index, source in enumerate(self.sources):
            if _is_async(source.function):
                waiting[index] = asyncio.ensure_future(source.function(**_accepted(source.function, offered)))
        for index, source in enumerate(self.sources):
            if index not in waiting:
                call = functools.partial(source.function, **_accepted(source.function, offered))
                answers[index] = await self._call_sync(call)
        for index, answer in zip(waiting, await asyncio.gather(*waiting.values()), strict=True):
            answers[index] = answer
        return answers

    async def _call_sync(self, call: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._inline:
            started = loop.time()
            answer = call()
            self._inline = loop.time() - started < 0.002
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="agentrl-reward")
            answer = await loop.run_in_executor(self._thread, call)
        return await answer if inspect.isawaitable(answer) else answer

    def _scored(self, rollout: Rollout, columns: list[list[float | None]], extras: dict[str, list[Any]], i: int):
        rewards = dict(rollout.rewards)  # the environment's own, with weight 1
        total, scored = 0.0, False
        for value in rewards.values():
            if value is not None:
                total, scored = total + value, True
        for source, column in zip(self.sources, columns, strict=True):
            value = rewards[source.name] = column[i]
            if value is not None:
                total, scored = total + source.weight * value, True
        extra = rollout.extra | {column: values[i] for column, values in extras.items()}
        return replace(rollout, rewards=rewards, reward=total if scored else None, extra=extra)


def _keyword_arguments(rollouts: Sequence[Rollout], environments: Sequence[Any] | None) -> dict[str, Any]:
    columns = {key for rollout in rollouts for key in rollout.task.row if key != "prompt"}
    offered: dict[str, Any] = {key: [rollout.task.row.get(key) for rollout in rollouts] for key in columns}
    fields = {key for rollout in rollouts for key in rollout.extra}
    offered |= {key: [rollout.extra.get(key) for rollout in rollouts] for key in fields}
    offered["prompts"] = [rollout.prompt for rollout in rollouts]
    offered["completions"] = [rollout.completion for rollout in rollouts]
    offered["completion_ids"] = [rollout.completion_ids for rollout in rollouts]
    if environments is not None:
        offered["environments"] = list(environments)
    return offered


def _is_async(function: RewardFunction) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _accepted(function: RewardFunction, offered: dict[str, Any]) -> dict[str, Any]:
    """Only what the signature names, unless it takes ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return offered
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in parameters if p.name in offered and p.kind is not p.POSITIONAL_ONLY}


def check_rewards(answer: Any, count: int, name: str) -> list[float | None]:
    """One number or None per completion; NaN means None.

    >>> check_rewards([1, None, True], 3, "f")
    [1.0, None, 1.0]

    Raises:
        ConfigurationError: A scalar, a wrong number of values, or a value that is no finite number.
    """
    if hasattr(answer, "tolist"):  # numpy, torch
        answer = answer.tolist()
    if isinstance(answer, (str, bytes)) or not hasattr(answer, "__len__") or not hasattr(answer, "__iter__"):
        raise ConfigurationError(
            f"Reward function '{name}' returned a {type(answer).__name__}; it must return a list of {count} numbers "
            "or None, one for each completion."
        )
    if len(answer) != count:
        raise ConfigurationError(
            f"Reward function '{name}' returned {len(answer)} values for {count} completions; return one for each."
        )
    return [_number(value, name) for value in answer]


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"Reward function '{name}' returned {value!r:.80} for a completion; it must be a number or None."
        ) from None
    if math.isinf(number):
        raise ConfigurationError(f"Reward function '{name}' returned {number} for a completion; rewards must be finite.")
    return None if math.isnan(number) else number
