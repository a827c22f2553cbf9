"""Episodes of a check: every reset, call and score is bounded in time, measured, and looked at for oddities."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.check.arguments import is_free, random_arguments
from agentrl.check.places import place_of, source_of, told
from agentrl.check.report import Level
from agentrl.check.returns import judge
from agentrl.check.watch import Watch
from agentrl.environment import Instance, reset_kwargs
from agentrl.errors import EnvironmentFailed
from agentrl.tool_schema import Tool
from agentrl.types import Content, ToolResult

CALLS = 12  # in an episode of random calls
_SLOW_EPISODE_S = 0.8  # after which it ends with what it has, but for two calls

Call = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class Played:
    """One episode: what it began with, what was called, what came back."""

    row: dict[str, Any]
    seed: int
    start: Content | None = None
    calls: list[Call] = field(default_factory=list)
    answers: list[Content] = field(default_factory=list)
    reward: float | None = None

    def difference(self, other: Played) -> str | None:
        """What is not the same in `other`, which made the same calls; None where nothing is."""
        if not same(self.start, other.start):
            return "reset() started differently"
        for (name, _), one, two in zip(self.calls, self.answers, other.answers, strict=True):
            if not same(one, two):
                return f"{name} answered differently"
        return None if self.reward == other.reward else "get_reward() differs"


@dataclass(slots=True)
class Seen:
    """What happened inside one tool call."""

    ran: bool = False
    value: Any = None
    raised: BaseException | None = None


@dataclass(slots=True)
class Raises:
    """How often a tool was called, and what it raised first."""

    calls: int = 0
    raised: int = 0
    shown: str = ""  # the arguments, and what the model read


@dataclass(slots=True)
class Slowest:
    """The call of a tool that took longest, and the way there."""

    seconds: float
    row: dict[str, Any]
    seed: int
    before: list[Call]
    arguments: dict[str, Any]


class Player:
    """Plays on instances of one environment, and knows how long everything took and what was odd."""

    def __init__(self, name: str, add: Callable[[Level, str], None], watch: Watch) -> None:
        self.name, self.add, self.watch, self.timeout = name, add, watch, watch.timeout
        self.scores = True  # until get_reward() failed
        self.slowest: dict[str, Slowest] = {}
        self.rewards: list[tuple[str, float]] = []  # who got it, and how much
        self._milliseconds: dict[str, list[float]] = {}
        self._tools: dict[str, Raises] = {}
        self._odd: set[tuple[str, str]] = set()

    # --- one step ----------------------------------------------------------------------
    async def reset(self, instance: Instance, row: dict[str, Any], seed: int) -> Content | None:
        kwargs = reset_kwargs(instance.env, row, seed, {"rollout_id": "check"})
        started = time.perf_counter()
        with self.watch.doing(f"{self.name}.reset()"):
            content = await instance.reset(kwargs, self.timeout)
            self.took("reset", time.perf_counter() - started)
            done = instance.done
        if done:
            self.add("error", f"{self.name}.done is still true after reset(). Set it to False there.")
        self._judge("reset()", content, content)
        return content

    async def call(self, instance: Instance, name: str, arguments: Any, seen: Seen | None = None) -> ToolResult:
        """What the model reads; `seen` is filled with what happened inside."""
        seen = Seen() if seen is None else seen
        with self.watch.doing(f"{self.name}.{name}"):
            result = await instance.call(_observed(instance.tools[name], seen), arguments, self.timeout)
        if not seen.ran:
            return result
        self.took(name, result.seconds)
        counted = self._tools.setdefault(name, Raises())
        counted.calls += 1
        if result.error == "raised" and seen.raised is not None:
            counted.raised += 1
            place = place_of(seen.raised, source_of(instance.env))
            said = f"on {shown(arguments)}. The model reads: {str(result.content)[:200]!r}"
            counted.shown = counted.shown or (f"{said} ({place})" if place else said)
        elif result.error is None:
            self._judge(name, seen.value, result.content)
        return result

    async def score(self, instance: Instance, who: str, when: str = "") -> float | None:
        """The reward, None where there is none or it failed, which is a finding."""
        if not self.scores:
            return None
        started = time.perf_counter()
        try:
            with self.watch.doing(f"{self.name}.get_reward()"):
                reward = await instance.reward(self.timeout)
        except EnvironmentFailed as error:
            if error.deadline:
                raise
            self.scores = False
            self.add("error", told(error, source_of(instance.env)) + (f" It was called {when}." if when else ""))
            return None
        if reward is not None:
            self.took("get_reward", time.perf_counter() - started)
            self.rewards.append((who, reward))
        return reward

    # --- whole episodes ----------------------------------------------------------------
    async def play(
        self, instance: Instance, row: dict[str, Any], seed: int, calls: list[Call] | None = None, *,
        most: int = CALLS, yielding: bool = False,
    ) -> Played:  # fmt: skip
        """One episode of the given calls, or of random ones; `yielding`: others get their turn between the steps."""
        played = Played(row, seed, await self.reset(instance, row, seed))
        rng, started = random.Random(seed), time.perf_counter()
        while instance.tools and len(played.calls) < (most if calls is None else len(calls)):
            if yielding:
                await asyncio.sleep(0)
            if calls is not None:
                name, arguments = calls[len(played.calls)]
            elif instance.done or (len(played.calls) > 1 and time.perf_counter() - started > _SLOW_EPISODE_S):
                break
            else:
                name = rng.choice(list(instance.tools))
                arguments = random_arguments({**schema_of(instance.tools[name]), "type": "object"}, rng)
            result = await self.call(instance, name, arguments)
            known = self.slowest.get(name)
            if not yielding and (known is None or result.seconds > known.seconds):
                self.slowest[name] = Slowest(result.seconds, row, seed, list(played.calls), arguments)
            played.calls.append((name, arguments))
            played.answers.append(result.content)
        if yielding:
            await asyncio.sleep(0)
        played.reward = await self.score(instance, "random calls", "after some calls")
        return played

    # --- what was seen -----------------------------------------------------------------
    def took(self, what: str, seconds: float) -> None:
        self._milliseconds.setdefault(what, []).append(seconds * 1e3)

    def medians(self) -> dict[str, float]:
        """Milliseconds of reset, get_reward and each tool."""
        return {name: statistics.median(values) for name, values in self._milliseconds.items()}

    def slowest_ms(self, names: list[str], least: float) -> float:
        """The longest call of these tools, at least `least`."""
        return max((max(self._milliseconds.get(name, [least])) for name in names), default=least)

    def _judge(self, what: str, value: Any, content: Content | None) -> None:
        for level, text in judge(f"{self.name}.{what}", value, content):
            kind = re_numbers(text)
            if (what, kind) not in self._odd:
                self._odd.add((what, kind))
                self.add(level, text)

    def report_raises(self, tools: dict[str, Tool]) -> None:
        """Tools that raised are named once each; one that always does, although its arguments fitted, is a warning."""
        for name, seen in self._tools.items():
            if not seen.raised:
                continue
            always = seen.raised == seen.calls and seen.calls > 2
            level: Level = "warning" if always and not is_free(schema_of(tools[name])) else "note"
            often = f"each of {seen.calls} times" if always else f"{seen.raised} of {seen.calls} times"
            self.add(level, f"{self.name}.{name} raised on {seen.shown.removeprefix('on ')} It raised {often}.")


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    return tool.schema["function"]["parameters"]


def shown(arguments: Any) -> str:
    """The arguments as JSON, cut to what a sentence bears.

    >>> shown({"place": "x" * 200})[-20:]
    'xxxxxxxxxxxxxxxxx...'
    """
    try:
        text = json.dumps(arguments, ensure_ascii=True, default=str)
    except (ValueError, RecursionError):
        text = "arguments that are nested too deeply to show"
    return text if len(text) <= 120 else f"{text[:120]}..."


def re_numbers(text: str) -> str:
    """The text without its digits: two findings that differ in a number are one.

    >>> re_numbers("returned 1,200 characters")
    'returned , characters'
    """
    return "".join(letter for letter in text if not letter.isdigit())


def same(one: Any, two: Any) -> bool:
    """Equality that images, whose `==` may be an array, cannot trip."""
    try:
        return bool(one == two)
    except Exception:
        return repr(one) == repr(two)


def text_of(content: Content | None) -> str:
    """The text of an observation; "" where there is none.

    >>> text_of([{"type": "text", "text": "go"}, {"type": "image", "image": None}])
    'go'
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.get("text", "") for block in content if block.get("type") == "text")


def _observed(tool: Tool, seen: Seen) -> Tool:
    """The tool, which also writes down what it does."""
    function = tool.function

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        seen.ran = True
        try:
            seen.value = await function(*args, **kwargs)
        except BaseException as error:
            seen.raised = error
            raise
        return seen.value

    def run(*args: Any, **kwargs: Any) -> Any:
        seen.ran = True
        try:
            seen.value = function(*args, **kwargs)
        except BaseException as error:
            seen.raised = error
            raise
        return seen.value

    return replace(tool, function=run_async if tool.is_async else run)
