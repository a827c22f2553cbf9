"""Reward functions: called by name with everything they may ask for, their answers checked before they count."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.rollout.metric_names import check_metric
from agentrl.types import Rollout

RewardFunction = Callable[..., Any]

_SLOW_S = 0.002  # a sync function that takes longer moves to a thread


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
        ConfigurationError: Something that cannot be called, weights of another number than functions, or a weight that
            is no finite number.
    """
    check_weights(weights)
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


def check_weights(weights: Any) -> None:
    """`reward_weights` is None or a list of finite numbers.

    Raises:
        ConfigurationError: Names what stands there.
    """
    if weights is None:
        return
    if isinstance(weights, (str, bytes)) or not hasattr(weights, "__len__") or not hasattr(weights, "__iter__"):
        raise ConfigurationError(f"reward_weights is {weights!r:.80}; it must be a list of numbers, or None.")
    for index, weight in enumerate(weights):
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight):
            raise ConfigurationError(f"reward_weights[{index}] is {weight!r:.80}; it must be a finite number.")


def _readable_name(function: RewardFunction) -> str:
    if isinstance(function, functools.partial):
        return _readable_name(function.func)
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else name


class Scorer:
    """Calls every reward function once per group, and sums what they say.

    Async functions are awaited together. Sync ones run here, on the thread that trains, where users expect them
    (signals, database connections); one that proves slow, or brings an event loop of its own, moves to a thread, so
    that it does not hold up the episodes that are still playing. They run one at a time and need not be thread-safe.
    """

    def __init__(self, sources: Sequence[RewardSource]) -> None:
        self.sources = list(sources)
        self._thread: ThreadPoolExecutor | None = None
        self.reads_environments = any(_may_ask_for(source.function, "environments") for source in self.sources)
        self._places: dict[int, str] = {}  # by source: "thread", or "here" where it cannot leave; else not known yet

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
            ConfigurationError: A function returned something else than one number or None per completion, or needs
                an argument that there is not.
            Exception: What a function raised, with a note of its name.
        """
        log = _Log(len(rollouts))
        offered = _keyword_arguments(rollouts, environments)
        offered |= {"trainer_state": trainer_state, "log_extra": log.extra, "log_metric": log.metric}
        answers = await self._call_all(offered)
        columns = [
            check_rewards(answer, len(rollouts), source.name)
            for source, answer in zip(self.sources, answers, strict=True)
        ]
        return [self._scored(rollout, columns, log.extras, i) for i, rollout in enumerate(rollouts)], log.metrics

    async def _call_all(self, offered: dict[str, Any]) -> list[Any]:
        waiting = {
            index: asyncio.ensure_future(self._call(index, source, offered))
            for index, source in enumerate(self.sources)
            if _is_async(source.function)
        }
        try:
            answers = {
                index: await self._call(index, source, offered)
                for index, source in enumerate(self.sources)
                if index not in waiting
            }
            answers |= dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        except BaseException:  # nobody waits for the others any more
            for task in waiting.values():
                task.cancel()
            await asyncio.gather(*waiting.values(), return_exceptions=True)
            raise
        return [answers[index] for index in range(len(self.sources))]

    async def _call(self, index: int, source: RewardSource, offered: dict[str, Any]) -> Any:
        call = functools.partial(source.function, **_accepted(source, offered))
        try:
            answer = call() if _is_async(source.function) else await self._call_sync(index, call)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            error.add_note(f"Raised by the reward function '{source.name}'.")
            raise

    async def _call_sync(self, index: int, call: Callable[[], Any]) -> Any:
        loop, place = asyncio.get_running_loop(), self._places.get(index)
        if place != "thread":
            started = loop.time()
            try:
                answer = call()
            except RuntimeError as error:
                if place == "here" or "running event loop" not in str(error):
                    raise
                self._places[index] = "thread"  # it calls asyncio.run
            else:
                if place is None and loop.time() - started > _SLOW_S:
                    self._places[index] = "thread"
                return answer
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="agentrl-reward")
        try:
            return await loop.run_in_executor(self._thread, call)
        except Exception as error:
            # signal: "only works in main thread"; sqlite3: "can only be used in that same thread"
            if "main thread" not in str(error) and "same thread" not in str(error):
                raise
            self._places[index] = "here"
            return call()

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


def _accepted(source: RewardSource, offered: dict[str, Any]) -> dict[str, Any]:
    """Only what the signature names, unless it takes ``**kwargs``."""
    try:
        parameters = inspect.signature(source.function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return offered
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if missing:
        raise ConfigurationError(
            f"Reward function '{source.name}' needs '{missing[0]}', and no column of the dataset has that name. "
            f"There is: {', '.join(sorted(offered))}."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in named if p.name in offered}


def _may_ask_for(function: RewardFunction, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class _Log:
    """What reward functions log beside their rewards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the completions table: one value for each completion."""
        listed = list(values)
        if len(listed) != self._count or isinstance(values, str):
            what = "a string" if isinstance(values, str) else f"{len(listed)} values"
            raise ConfigurationError(
                f"log_extra('{column}') got {what} for {self._count} completions; give one value for each."
            )
        self.extras[column] = listed

    def metric(self, name: str, value: float) -> None:
        """A finite number to be logged beside the trainer's own metrics, under a name that is none of theirs."""
        number = check_metric(name, value)
        self.metrics.setdefault(name, []).append(number)


def check_rewards(answer: Any, count: int, name: str) -> list[float | None]:
    """One number or None per completion; NaN means None.

    >>> check_rewards([1, None, True], 3, "f")
    [1.0, None, 1.0]

    Raises:
        ConfigurationError: A scalar, a wrong number of values, or a value that is no finite number.
    """
    if hasattr(answer, "tolist"):  # numpy, torch
        answer = answer.tolist()
    wrong = isinstance(answer, (str, bytes, Mapping, Set))
    if wrong or not hasattr(answer, "__len__") or not hasattr(answer, "__iter__"):
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
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several elements: RuntimeError
        raise ConfigurationError(
            f"Reward function '{name}' returned {value!r:.80} for a completion; it must be a number or None."
        ) from None
    if math.isinf(number):
        raise ConfigurationError(
            f"Reward function '{name}' returned {number} for a completion; rewards must be finite."
        )
    return None if math.isnan(number) else number
