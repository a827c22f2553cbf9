"""Resets, calls and scores, repeated where a promise says that they repeat."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.check.arguments import random_arguments
from agentrl.check.report import Level
from agentrl.environment import Instance, reset_kwargs
from agentrl.errors import EnvironmentFailed
from agentrl.types import Content, ToolResult

TIMEOUT_S = 30.0  # for each reset, call and score
_EPISODES = 4
_CALLS = 12  # in an episode
_SLOW_INLINE_MS = 2.0
_CHEAP_MS = 0.1

Call = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class Played:
    """One episode: what it began with, what was called, what came back."""

    start: Content | None
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


class Probe:
    """The promises of an environment, tried on three instances, or on one where only one was given."""

    def __init__(
        self, instances: list[Instance], rows: list[dict[str, Any]], seed: int, add: Callable[[Level, str], None]
    ) -> None:
        self.one, self.other, self.fresh = instances[0], instances[len(instances) // 2], instances[-1]
        self.rows, self.seed, self.add = rows, seed, add
        self.name = self.one.name
        self.observation = ""
        self._steady = True  # until something differs by chance: then nothing can be said about what is left behind
        self._milliseconds: dict[str, list[float]] = {}
        self._raised: set[str] = set()

    def medians(self) -> dict[str, float]:
        """Milliseconds of reset, get_reward and each tool."""
        return {name: statistics.median(values) for name, values in self._milliseconds.items()}

    async def everything(self) -> None:
        if not self.one.tools:
            self.add("warning", f"{self.name} has no tools: the model can only answer once.")
        for row in self.rows:
            await self.check_reset(row)
        episodes = []
        for episode in range(_EPISODES):
            row = self.rows[episode % len(self.rows)]
            episodes.append(await self.check_episode(row, self.seed + episode, first=episode == 0))
        if len(self.rows) == 1:
            self.check_variation(self.rows[0], episodes)
        self.report_times()

    # --- resets ------------------------------------------------------------------------
    async def reset(self, instance: Instance, row: dict[str, Any], seed: int) -> Content | None:
        kwargs = reset_kwargs(instance.env, row, seed, {"rollout_id": "check"})
        started = time.perf_counter()
        observation = await instance.reset(kwargs, TIMEOUT_S)
        self._took("reset", time.perf_counter() - started)
        if instance.done:
            self.add("error", f"{self.name}.done is still true after reset(). Set it to False there.")
        return observation

    async def check_reset(self, row: dict[str, Any]) -> None:
        starts = []
        for instance in (self.one, self.other):
            starts.append(await self.reset(instance, row, self.seed))
            await self.score(instance, "right after reset()")
        self.observation = self.observation or text_of(starts[0])
        if not same(*starts):
            fix = "Derive everything random from it."
            if not self._seeded(row):
                fix = "Give reset() an argument `seed` and use it."
            self.add("warning", f"{self.name}.reset() started differently twice with the same row and seed. {fix}")
            self._steady = False
        if starts[0] is None and "prompt" not in row:
            self.add("note", f"{self.name}.reset() returns nothing, so the rows need a column 'prompt'.")

    def _seeded(self, row: dict[str, Any]) -> bool:
        return "seed" in reset_kwargs(self.one.env, row, self.seed)

    def check_variation(self, row: dict[str, Any], episodes: list[Played]) -> None:
        """Several seeds give several starts."""
        if not self._seeded(row) or "seed" in row or any(not same(e.start, episodes[0].start) for e in episodes):
            return
        self.add(
            "note",
            f"{self.name}.reset() shows the same start for {len(episodes)} different seeds. "
            "Unless the difference is hidden, every group plays the same task.",
        )

    # --- episodes ----------------------------------------------------------------------
    async def check_episode(self, row: dict[str, Any], seed: int, *, first: bool) -> Played:
        """Plays random calls and plays them again: on the other instance, on a used one, with another one at work.

        Until the first episode, both instances have the same past, so that a difference between them is chance and
        one that a used instance makes is a leak.
        """
        played = await self.play(self.one, row, seed)
        if played.reward is not None and await self.score(self.one, "a second time") != played.reward:
            self.add("warning", f"{self.name}.get_reward() gave two numbers for one episode. Make it only read.")
            self._steady = False
        again = await self.play(self.other, row, seed, played.calls)
        if self._steady and (what := played.difference(again)) is not None:
            self.add("warning", f"{self.name}.{what} in a repeated episode (same seed, same calls).")
            self._steady = False
        if self._steady and first and self.one is not self.other:
            await self.check_leaks(row, seed, played)
        return played

    async def check_leaks(self, row: dict[str, Any], seed: int, clean: Played) -> None:
        second = await self.play(self.one, row, seed + 1)
        what = second.difference(await self.play(self.fresh, row, seed + 1, second.calls))
        what = what or clean.difference(await self.play(self.one, row, seed, clean.calls))
        if what is not None:
            self.add(
                "error",
                f"{self.name}.{what} in an instance that had played before: something is left over from the last "
                "episode. Set everything that an episode changes in reset().",
            )
            self._steady = False
            return

        async def meanwhile() -> None:
            await self.play(self.other, row, seed + 1)

        if (what := clean.difference(await self.play(self.one, row, seed, clean.calls, meanwhile))) is not None:
            self.add(
                "error",
                f"{self.name}.{what} while a second instance was playing: they share something (a class attribute, a "
                "global, a file). Keep what an episode changes on self.",
            )
            self._steady = False

    async def play(
        self,
        instance: Instance,
        row: dict[str, Any],
        seed: int,
        calls: list[Call] | None = None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> Played:
        """One episode of the given calls, or of random ones; `meanwhile` runs after its reset."""
        played = Played(await self.reset(instance, row, seed))
        if meanwhile is not None:
            await meanwhile()
        rng = random.Random(seed)
        while instance.tools and len(played.calls) < (_CALLS if calls is None else len(calls)):
            if calls is not None:
                call = calls[len(played.calls)]
            elif instance.done:
                break
            else:
                name = rng.choice(list(instance.tools))
                parameters = instance.tools[name].schema["function"]["parameters"]
                call = (name, random_arguments({**parameters, "type": "object"}, rng))
            played.calls.append(call)
            played.answers.append((await self.call(instance, *call)).content)
        played.reward = await self.score(instance, "after some calls")
        return played

    async def call(self, instance: Instance, name: str, arguments: dict[str, Any]) -> ToolResult:
        result = await instance.call(instance.tools[name], arguments, TIMEOUT_S)
        self._took(name, result.seconds)
        if result.error == "raised" and name not in self._raised:
            self._raised.add(name)
            shown = json.dumps(arguments, ensure_ascii=False, default=str)[:120]
            self.add("note", f"{self.name}.{name} raised on {shown}. The model reads: {str(result.content)[:200]!r}")
        return result

    async def score(self, instance: Instance, when: str) -> float | None:
        started = time.perf_counter()
        try:
            reward = await instance.reward(TIMEOUT_S)
        except EnvironmentFailed as error:
            if error.deadline:
                raise
            self.add("error", f"{error} ({when})")
            return None
        if reward is not None:
            self._took("get_reward", time.perf_counter() - started)
        return reward

    # --- times -------------------------------------------------------------------------
    def _took(self, what: str, seconds: float) -> None:
        self._milliseconds.setdefault(what, []).append(seconds * 1e3)

    def report_times(self) -> None:
        instance, medians = self.one, self.medians()
        if not callable(getattr(instance.env, "get_reward", None)):
            self.add("note", f"{self.name} has no get_reward(): training it needs reward functions.")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in medians.items())
        self.add("note", f"{self.name} takes, in ms per call (median): {shown}.")
        for name, tool in instance.tools.items():
            if instance.inline and not tool.is_async and medians.get(name, 0.0) > _SLOW_INLINE_MS:
                self.add(
                    "warning",
                    f"{self.name} sets run_inline, but {name} takes {medians[name]:.1f} ms: every other rollout waits. "
                    "Leave run_inline off.",
                )
        slowest = max((max(self._milliseconds.get(name, [_CHEAP_MS])) for name in instance.tools), default=_CHEAP_MS)
        if not instance.inline and slowest < _CHEAP_MS and not any(t.is_async for t in instance.tools.values()):
            self.add("note", f"Every tool of {self.name} is cheap: run_inline = True saves it a thread.")


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
