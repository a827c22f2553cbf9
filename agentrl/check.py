"""Does an environment keep its promises? Every finding names what to change."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.environment import Instance, method_problems, reset_kwargs
from agentrl.errors import AgentRLError, EnvironmentFailed
from agentrl.pool import EnvironmentPool, validate_environment
from agentrl.registry import resolve
from agentrl.types import ToolResult

_TIMEOUT_S = 30.0  # for each reset, call and score
_EPISODES = 4
_CALLS = 12  # in an episode
_SLOW_INLINE_MS = 2.0
_CHEAP_MS = 0.1

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the check saw: errors break training, warnings harm it, notes are for the author to know."""

    level: Level
    what: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}"


def check_environment(
    env_or_factory: Any, *, rows: Sequence[Mapping[str, Any]] | None = None, seed: int = 0
) -> list[Finding]:
    """What is wrong with an environment, errors first; without errors it can be trained on.

    Its tools are described; `reset` gives the same start for the same seed and another for another; random calls
    neither break it nor end differently when they are repeated; `get_reward` gives the same number twice.

    Args:
        env_or_factory: A class, a function that builds one, a registered id, or an instance (which is not closed).
        rows: Dataset rows to reset with; one empty row if None.
        seed: Of the random calls and of the resets.

    Example:
        >>> class Broken:
        ...     def reset(self):
        ...         return "Say hello."
        ...     def greet(self, name):
        ...         return f"hello {name}"
        >>> for finding in check_environment(Broken):
        ...     print(finding)
        error: Broken.greet has no docstring. Describe it and its arguments (Google style), or start its name with \
an underscore if it is not a tool.
    """
    check = _Check([dict(row) for row in rows] if rows else [{}], seed)
    _run(check.everything(env_or_factory))
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(dict.fromkeys(check.findings), key=lambda finding: order[finding.level])


def random_arguments(schema: Mapping[str, Any], rng: random.Random, depth: int = 0) -> Any:
    """A value that fits a JSON schema, as far as types, enums and bounds go."""
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return random_arguments(rng.choice(list(options)), rng, depth + 1)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    low, high = schema.get("minimum", -3), schema.get("maximum", 12)
    if kind == "integer":
        return rng.randint(int(low), max(int(high), int(low)))
    if kind == "number":
        return rng.uniform(low, max(high, low))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        if "prefixItems" in schema:
            return [random_arguments(item, rng, depth + 1) for item in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        size = least if depth > 3 else rng.randint(least, max(schema.get("maxItems", least + 3), least))
        return [random_arguments(schema.get("items", {}), rng, depth + 1) for _ in range(size)]
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: random_arguments(sub, rng, depth + 1)
            for name, sub in schema.get("properties", {}).items()
            if name in required or (depth <= 3 and rng.random() < 0.7)
        }
    return rng.choice(["", "a", "left", "7", "hello world", "é漢😀", "x" * 200, "<|im_end|>"])


@dataclass
class _Check:
    rows: list[dict[str, Any]]
    seed: int
    findings: list[Finding] = field(default_factory=list)
    milliseconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, level: Level, what: str) -> None:
        self.findings.append(Finding(level, what))

    async def everything(self, given: Any) -> None:
        is_instance = not isinstance(given, (type, str)) and hasattr(type(given), "reset")
        try:
            factory = None if is_instance else resolve(given)
            cls = type(given) if is_instance else factory
            problems = method_problems(cls) if isinstance(cls, type) else []
            for problem in problems:
                self.add("error", problem)
            if problems:
                return
            if factory is None:
                validate_environment(given, type(given))
                instance = Instance(given, owned=False)
            else:
                instance = await EnvironmentPool(factory).acquire()
            await self.play(instance)
        except AgentRLError as error:
            return self.add("error", str(error))
        await instance.close(_TIMEOUT_S)
        if instance.close_error is not None:
            self.add("error", f"{instance.name}.close() failed: {instance.close_error}.")

    async def play(self, instance: Instance) -> None:
        if not instance.tools:
            self.add("warning", f"{instance.name} has no tools: the model can only answer once.")
        for row in self.rows:
            await self.check_reset(instance, row)
        for episode in range(_EPISODES):
            row = self.rows[episode % len(self.rows)]
            await self.check_episode(instance, row, self.seed + episode)
        self.report_times(instance)

    async def reset(self, instance: Instance, row: dict[str, Any], seed: int) -> Any:
        observation = await instance.reset(reset_kwargs(instance.env, row, seed, {"rollout_id": "check"}), _TIMEOUT_S)
        if instance.done:
            self.add("error", f"{instance.name}.done is still true after reset(). Set it to False there.")
        return observation

    async def check_reset(self, instance: Instance, row: dict[str, Any]) -> None:
        name = instance.name
        seen = [await self.reset(instance, row, self.seed) for _ in range(2)]
        seeded = "seed" in reset_kwargs(instance.env, row, self.seed)
        if not _same(seen[0], seen[1]):
            fix = "Derive everything random from it." if seeded else "Give reset() an argument `seed` and use it."
            self.add("warning", f"{name}.reset() started differently twice with the same row and seed. {fix}")
        elif seeded and "seed" not in row:
            others = [await self.reset(instance, row, self.seed + shift) for shift in range(1, 6)]
            if all(_same(other, seen[0]) for other in others):
                self.add("note", f"{name}.reset() shows the same start for six different seeds.")
        if seen[0] is None and "prompt" not in row:
            self.add("note", f"{name}.reset() returns nothing, so the rows need a column 'prompt'.")
        await self.score(instance, "right after reset()")

    async def check_episode(self, instance: Instance, row: dict[str, Any], seed: int) -> None:
        rng = random.Random(seed)
        await self.reset(instance, row, seed)
        calls: list[tuple[str, dict[str, Any]]] = []
        results: list[ToolResult] = []
        while instance.tools and len(calls) < _CALLS and not instance.done:
            name = rng.choice(list(instance.tools))
            parameters = instance.tools[name].schema["function"]["parameters"]
            calls.append((name, random_arguments({**parameters, "type": "object"}, rng)))
            results.append(await self.call(instance, *calls[-1]))
        first = await self.score(instance, "after some calls")
        if first is not None and await self.score(instance, "a second time") != first:
            self.add("warning", f"{instance.name}.get_reward() gave two numbers for one episode. Make it only read.")
        await self.reset(instance, row, seed)
        for (name, arguments), before in zip(calls, results, strict=True):
            if not _same((await self.call(instance, name, arguments)).content, before.content):
                self.add(
                    "warning",
                    f"{instance.name}.{name} answered differently in a repeated episode (same seed, same calls).",
                )
                return
        if first is not None and await self.score(instance, "after a repeated episode") != first:
            self.add("warning", f"{instance.name}.get_reward() differs in a repeated episode (same seed, same calls).")

    async def call(self, instance: Instance, name: str, arguments: dict[str, Any]) -> ToolResult:
        result = await instance.call(instance.tools[name], arguments, _TIMEOUT_S)
        self.milliseconds.setdefault(name, []).append(result.seconds * 1e3)
        if result.error == "raised":
            shown = json.dumps(arguments, ensure_ascii=False, default=str)[:120]
            already = any(f"{instance.name}.{name} raised" in finding.what for finding in self.findings)
            if not already:
                text = f"{instance.name}.{name} raised on {shown}. The model reads: {str(result.content)[:200]!r}"
                self.add("note", text)
        return result

    async def score(self, instance: Instance, when: str) -> float | None:
        try:
            return await instance.reward(_TIMEOUT_S)
        except EnvironmentFailed as error:
            if error.deadline:
                raise
            self.add("error", f"{error} ({when})")
            return None

    def report_times(self, instance: Instance) -> None:
        if not callable(getattr(instance.env, "get_reward", None)):
            self.add("note", f"{instance.name} has no get_reward(): training it needs reward functions.")
        for name, values in self.milliseconds.items():
            median = statistics.median(values)
            tool = instance.tools[name]
            self.add("note", f"{instance.name}.{name} takes {median:.3f} ms per call (median of {len(values)}).")
            if instance.inline and not tool.is_async and median > _SLOW_INLINE_MS:
                self.add(
                    "warning",
                    f"{instance.name} sets run_inline, but {name} takes {median:.1f} ms: every other rollout waits. "
                    "Leave run_inline off.",
                )
        slowest = max((max(values) for values in self.milliseconds.values()), default=_CHEAP_MS)
        if not instance.inline and slowest < _CHEAP_MS and not any(t.is_async for t in instance.tools.values()):
            self.add("note", f"Every tool of {instance.name} is cheap: run_inline = True saves it a thread.")


def _same(one: Any, two: Any) -> bool:
    """Equality that images, whose `==` may be an array, cannot trip."""
    try:
        return bool(one == two)
    except Exception:
        return repr(one) == repr(two)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """The coroutine has run, also where a loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    raised: list[BaseException] = []

    def target() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
