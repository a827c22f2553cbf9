"""Episodes of three policies: one that does nothing, one that knows nothing, and one that knows how it is done."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentrl.check.arguments import is_free
from agentrl.check.places import source_of, told
from agentrl.check.player import Player, schema_of, text_of
from agentrl.environment import Instance
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.sampler.random_policy import RandomPolicy
from agentrl.tool_schema import is_async_callable
from agentrl.types import Message, SampleRequest, SamplingParams

MAX_TURNS = 16  # of the random policy
MAX_GOLD_TURNS = 2000
_FAILING = 16  # calls of it in a row, after which it will not get anywhere
NO_OPS = 4  # episodes in which nothing is done, where there are not more rows

Gold = Callable[[Any, list[Message]], Any]
"""(environment, messages so far) -> the next turn: text, or a message with `tool_calls`. Sync or async."""


def gold_of(env: Any, gold: Gold | None) -> Callable[[list[Message]], Any] | None:
    """The gold policy of this environment: the one given, else its own `_gold`; None where there is none."""
    if gold is not None:
        return functools.partial(gold, env)
    own = getattr(env, "_gold", None)
    if not callable(own):
        return None
    return functools.partial(_without_messages_async if is_async_callable(own) else _without_messages, own)


def _without_messages(own: Callable[[], Any], messages: list[Message]) -> Any:
    return own()


async def _without_messages_async(own: Callable[[], Awaitable[Any]], messages: list[Message]) -> Any:
    return await own()


def read_turn(turn: Any) -> tuple[Message, list[tuple[str, Any]]]:
    """A scripted turn as a message, and its calls.

    Raises:
        ConfigurationError: It is neither text nor a message.

    >>> read_turn({"tool_calls": [{"name": "push", "arguments": {}}]})[1]
    [('push', {})]
    """
    if isinstance(turn, str):
        return {"role": "assistant", "content": turn}, []
    calls = turn.get("tool_calls") or () if isinstance(turn, Mapping) else None
    if calls is None or not ("content" in turn or calls):
        raise ConfigurationError(
            f"The gold policy returned {turn!r:.80}. A turn is text, or a message with tool_calls: "
            '{"tool_calls": [{"name": ..., "arguments": {...}}]}.'
        )
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments") or {}
        if not isinstance(function.get("name"), str):
            raise ConfigurationError(f"The gold policy made the call {call!r:.80}, which has no name of a tool.")
        read.append((function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    shaped = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in read]
    return {"role": "assistant", "content": turn.get("content") or "", "tool_calls": shaped}, read


class Policies:
    """Plays each policy on one instance.

    Args:
        budget: Seconds for each of them, after which it begins no further episode.
    """

    def __init__(self, player: Player, instance: Instance, rows: list[dict[str, Any]], seed: int, budget: float):
        self.player, self.instance, self.rows, self.seed, self.budget = player, instance, rows, seed, budget
        self.rewards: dict[str, list[float]] = {}
        self.solutions: set[str] = set()  # how the gold policy did it, one for each task
        self.trouble = ""  # why the gold policy may not have got there

    async def play_no_op(self, episodes: int) -> None:
        """The rewards of episodes in which nothing was done are known."""
        for number in range(max(1, min(episodes, max(NO_OPS, len(self.rows))))):
            await self.player.reset(self.instance, self.rows[number % len(self.rows)], self.seed + number)
            self._got("no-op", await self.player.score(self.instance, "doing nothing"))

    async def play_random(self, episodes: int) -> None:
        """The rewards of `RandomPolicy` are known, of episodes of at most 16 turns."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.budget
        for number in range(episodes if self.instance.tools else 0):
            if loop.time() > end:
                self.player.add("note", f"The random policy was stopped after {number} episodes: they are slow.")
                return
            await self._random_episode(self.rows[number % len(self.rows)], self.seed + number)

    async def _random_episode(self, row: dict[str, Any], seed: int) -> None:
        policy, schemas = RandomPolicy(seed), [tool.schema for tool in self.instance.tools.values()]
        messages = await self._start(row, seed)
        for turn in range(MAX_TURNS):
            request = SampleRequest(messages, schemas, None, 64, SamplingParams(), (seed, turn), "check")
            message = (await policy.sample(request)).message or {}
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                await self._call(messages, call["function"]["name"], call["function"]["arguments"])
            if self.instance.done:
                break
        self._got("random", await self.player.score(self.instance, "random calls"))

    async def play_gold(self, gold: Callable[[list[Message]], Any], episodes: int) -> None:
        """The rewards of the gold policy are known, of two episodes at least."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.budget
        for number in range(episodes):
            if number > 1 and loop.time() > end:
                return
            try:
                await self._gold_episode(gold, self.rows[number % len(self.rows)], self.seed + number)
            except EnvironmentFailed:
                raise
            except Exception as error:  # somebody's code
                said = told(error, source_of(self.instance.env))
                return self.player.add("error", f"The gold policy of {self.player.name} failed: {said}")

    async def _gold_episode(self, gold: Callable[[list[Message]], Any], row: dict[str, Any], seed: int) -> None:
        messages = await self._start(row, seed)
        end, failing = time.monotonic() + 2 * self.budget, 0
        for turns in range(MAX_GOLD_TURNS + 1):
            if turns == MAX_GOLD_TURNS or failing == _FAILING or time.monotonic() > end:
                self.trouble = self.trouble or f"it was still playing after {turns} turns"
                break
            with self.player.watch.doing(f"the gold policy of {self.player.name}"):
                turn = await self.instance.run(gold, messages, timeout=self.player.timeout)
            message, calls = read_turn(turn)
            messages.append(message)
            for name, arguments in calls:
                if self.instance.done:
                    break
                failing = 0 if await self._gold_call(messages, name, arguments) else failing + 1
            if not calls or self.instance.done:
                break
        self.solutions.add(str([m["tool_calls"] for m in messages if m.get("tool_calls")] or messages[1:]))
        self._got("gold", await self.player.score(self.instance, "the gold policy"))

    async def _gold_call(self, messages: list[Message], name: str, arguments: Any) -> bool:
        """True where the call was run."""
        if name not in self.instance.tools:
            self.trouble = self.trouble or f"it called '{name}', which is no tool"
            return False
        error, content = await self._call(messages, name, arguments)
        if error is not None:
            self.trouble = self.trouble or f"a call was refused: {str(content)[:200]}"
        return error is None

    async def _start(self, row: dict[str, Any], seed: int) -> list[Message]:
        start = await self.player.reset(self.instance, row, seed)
        return [{"role": "user", "content": f"{row.get('prompt') or ''} {text_of(start)}".strip()}]

    async def _call(self, messages: list[Message], name: str, arguments: Any) -> tuple[str | None, Any]:
        result = await self.player.call(self.instance, name, arguments)
        messages.append({"role": "tool", "name": name, "content": result.content})
        return result.error, result.content

    def _got(self, policy: str, reward: float | None) -> None:
        if reward is not None:
            self.rewards.setdefault(policy, []).append(reward)

    def closed_choices(self) -> bool:
        """True where random calls can make every call that there is: no tool takes free text."""
        return not any(is_free(schema_of(tool)) for tool in self.instance.tools.values())


def reward_range_of(env: Any) -> tuple[float, float] | None:
    """The environment's `reward_range`, (least, most); None where it has none.

    Raises:
        ConfigurationError: It has one that is no such pair.
    """
    found = getattr(env, "reward_range", None)
    if found is None:
        return None
    try:
        low, high = (float(edge) for edge in found)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not low < high:
        raise ConfigurationError(
            f"{type(env).__name__}.reward_range is {found!r:.80}; it must be two numbers, (least, most)."
        )
    return low, high
