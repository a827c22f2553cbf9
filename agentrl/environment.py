"""An environment from the outside: its tools, what its `reset` gets, and one instance at work.

Model errors are text, environment failures are exceptions: everything that a model can cause comes back as a
`ToolResult`; what the environment breaks by itself is `EnvironmentFailed`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.calls import Caller, Late, describe
from agentrl.errors import ConfigurationError, EnvironmentFailed, ToolArgumentError, ToolDefinitionError
from agentrl.lane import Closer, Lane, attempt
from agentrl.tool_schema import Tool, build_tool, clean_text, is_async_callable, to_content
from agentrl.types import Content, ToolResult

MOST_CHARACTERS = 1_000_000  # of a text that a tool returns: more than any context holds, and tokenised in a second
_ROW_KEYS = frozenset({"prompt", "environment"})  # ours; reset does not get them


class Environment:
    """A base class to derive from, if you like. Any class with a `reset` will do; nothing defined here is a tool.

    Write `reset(**row)`, perhaps `get_reward()`, and public methods with type hints and Google-style docstrings.
    """

    run_inline: bool = False  # True: sync methods are cheap and run on the event loop, without a thread
    done: bool = False  # set to True to end the episode after the current tool call

    def close(self) -> None:
        """Resources are freed. Called once, when the instance is thrown away."""


# --- reading a class -------------------------------------------------------------------
_tools: weakref.WeakKeyDictionary[type, dict[str, Tool]] = weakref.WeakKeyDictionary()
_signatures: weakref.WeakKeyDictionary[type, tuple[frozenset[str], frozenset[str], bool]] = weakref.WeakKeyDictionary()


def discover_tools(env: object) -> dict[str, Tool]:
    """The tools of an environment (an instance or its class), by name, base classes first.

    Public methods except `reset`, `get_reward` and a `close` that needs no argument. The class is read, not the
    instance, so that no property runs.

    Raises:
        ToolDefinitionError: naming the method and the argument that lack a type or a description.
    """
    cls = env if isinstance(env, type) else type(env)
    found = _tools.get(cls)
    if found is None:
        found = _tools[cls] = {name: _method_tool(cls, name, raw) for name, raw in _public_methods(cls)}
    return dict(found)


def method_problems(cls: type) -> list[str]:
    """What keeps methods of this class from being tools, one sentence for each, where `discover_tools` stops at one."""
    problems = []
    for name, raw in _public_methods(cls):
        try:
            _method_tool(cls, name, raw)
        except ToolDefinitionError as error:
            problems.append(str(error))
    return problems


def _public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base is not object and base is not Environment:
            names.update(dict.fromkeys(vars(base)))
    for name in names:
        if name.startswith("_") or name in ("reset", "get_reward"):
            continue
        if name == "close" and (issubclass(cls, Environment) or _closes(cls)):
            continue
        raw = inspect.getattr_static(cls, name)
        is_method = isinstance(raw, (types.FunctionType, staticmethod, classmethod, functools.partialmethod))
        binds = callable(raw) and not isinstance(raw, type) and hasattr(type(raw), "__get__")
        if is_method or binds:
            yield name, raw


def _method_tool(cls: type, name: str, raw: Any) -> Tool:
    on_instance = not isinstance(raw, (staticmethod, classmethod))
    function = getattr(cls, name) if not on_instance or isinstance(raw, functools.partialmethod) else raw
    doc = None
    for base in cls.__mro__:
        doc = doc or getattr(vars(base).get(name), "__doc__", None)
    scope: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        scope.update(vars(base))
    tool = build_tool(function, owner=cls.__name__, on_instance=on_instance, doc=doc, namespace=scope)
    return tool


def _closes(cls: type) -> bool:
    """True where `close` is a method that needs no argument."""
    raw = inspect.getattr_static(cls, "close", None)
    if raw is None or not (callable(raw) or isinstance(raw, (staticmethod, classmethod))):
        return False
    try:
        parameters = list(inspect.signature(getattr(cls, "close")).parameters.values())  # noqa: B009
    except (TypeError, ValueError):
        return False
    if not isinstance(raw, (staticmethod, classmethod)):
        parameters = parameters[1:]
    return not any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def close_method(env: object) -> Callable[[], Any] | None:
    cls = type(env)
    """What frees the environment, None where there is nothing to call."""
    if not _closes(cls) or inspect.getattr_static(cls, "close", None) is vars(Environment)["close"]:
        return None
    return env.close  # type: ignore[attr-defined]


def reset_kwargs(
    env: object, row: Mapping[str, Any], seed: int, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `reset` is called with: the row's columns, `seed` if it can take it, and of `extra` what it names.

    `prompt` and `environment` are the trainer's. A column named `seed` wins over ours. Columns that are None and that
    `reset` does not name are left out (a dataset for several environments fills them in).

    Raises:
        ConfigurationError: `reset` needs a column that the row lacks, or cannot take one that it has.

    Example:
        >>> class Count:
        ...     def reset(self, target, seed, rollout_id):
        ...         pass
        >>> reset_kwargs(Count(), {"prompt": "Go.", "target": 3}, 7, {"rollout_id": "r1", "other": 0})
        {'target': 3, 'seed': 7, 'rollout_id': 'r1'}
    """
    named, needed, open_ended = _reset_signature(env)
    kwargs = {}
    for key, value in row.items():
        if key in _ROW_KEYS or (value is None and key not in named and not open_ended):
            continue
        kwargs[key] = value
    if "seed" in named or open_ended:
        kwargs.setdefault("seed", seed)
    for key, value in (extra or {}).items():
        if key in named:
            kwargs.setdefault(key, value)
    name = type(env).__name__
    unknown = [] if open_ended else [key for key in kwargs if key not in named]
    if unknown:
        raise ConfigurationError(
            f"{name}.reset() does not take the column '{unknown[0]}' of the dataset. "
            "Add it to its arguments, add **kwargs, or drop the column."
        )
    missing = sorted(needed - kwargs.keys())
    if missing:
        raise ConfigurationError(
            f"{name}.reset() needs '{missing[0]}', and the row has no such column. "
            f"It has: {', '.join(row) or 'no columns'}."
        )
    return kwargs


def _reset_signature(env: object) -> tuple[frozenset[str], frozenset[str], bool]:
    """(names it takes, names it needs, whether it takes **kwargs)."""
    found = _signatures.get(type(env))
    if found is None:
        parameters = inspect.signature(env.reset).parameters.values()  # type: ignore[attr-defined]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        found = (
            frozenset(p.name for p in named),
            frozenset(p.name for p in named if p.default is p.empty),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )
        if hasattr(type(env), "reset"):  # a proxy's reset differs from instance to instance
            _signatures[type(env)] = found
    return found


def _is_finite(number: numbers.Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int that no float can hold
        return False


# --- one instance at work --------------------------------------------------------------
class Instance:
    """One environment object and the thread that its sync calls run on. `env` is None for rollouts without one."""

    def __init__(
        self,
        env: Any,
        *,
        lane: Lane | None = None,
        owned: bool = True,  # False: never call its close()
        on_abandon: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        self.env = env
        self.name = "" if env is None else type(env).__name__
        self.tools = {} if env is None else discover_tools(env)
        lane = lane or Lane()
        self._caller = Caller(lane, getattr(env, "run_inline", False) is True, on_abandon)
        self._closer = Closer(close_method(env) if owned and env is not None else None, lane, self._caller.inline)
        # The finalizer must not refer to self. At exit the closers are called by agentrl.lane, with a common deadline.
        weakref.finalize(self, self._closer.close_nowait).atexit = False

    @property
    def inline(self) -> bool:
        """True when sync calls run on the event loop."""
        return self._caller.inline

    @property
    def broken(self) -> bool:
        """True when a call was abandoned: this instance is never to be used again."""
        return self._caller.broken

    @property
    def done(self) -> bool:
        """True when the environment has ended its episode: a truthy attribute `done` that is not a method."""
        ok, flag = attempt(getattr, self.env, "done", False)
        if not ok:
            raise EnvironmentFailed(f"{self.name}.done failed: {describe(flag)}.", stage="tool") from flag
        return not callable(flag) and bool(flag)

    async def reset(self, kwargs: Mapping[str, Any], timeout: float | None = None) -> Content | None:
        """The first observation. Any exception is EnvironmentFailed(stage="reset")."""
        value = await self._stage("reset", self.env.reset, kwargs, timeout)
        if value is None:
            return None
        if isinstance(value, tuple):
            raise ConfigurationError(
                f"{self.name}.reset() returned a tuple; it must return text, a list of content blocks, or None. "
                "Gymnasium's (observation, info) is not text: see GymnasiumEnvironment."
            )
        try:
            return to_content(value)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{self.name}.reset(): {error}", stage="reset") from error

    async def reward(self, timeout: float | None = None) -> float | None:
        """The environment's own score, None where it has no `get_reward`."""
        method = getattr(self.env, "get_reward", None)
        if method is None:
            return None
        value = await self._stage("reward", method, {}, timeout)
        number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if not isinstance(number, numbers.Real) or not _is_finite(number):
            raise EnvironmentFailed(
                f"{self.name}.get_reward() returned {value!r:.80}. It must return a finite number.", stage="reward"
            )
        return float(number)

    async def call(self, tool: Tool, arguments: Mapping[str, Any] | None, timeout: float | None = None) -> ToolResult:
        """What the model reads after calling a tool, its own mistakes included.

        Raises:
            EnvironmentFailed: the tool raised it, or did not return in `timeout` seconds (an inline tool always may).
        """
        start = time.perf_counter()
        try:
            kwargs = tool.bind(arguments)
        except ToolArgumentError as error:
            return ToolResult(str(error), "bad_arguments", time.perf_counter() - start)
        args = (self.env,) if tool.on_instance else ()
        try:
            # a cheap environment says nothing about the standalone tools beside it
            inline = tool.inline or (self.inline and tool.on_instance)
            ok, value = await self._caller.invoke(tool.function, args, kwargs, timeout, inline=inline)
            if ok:
                return ToolResult(_bounded(to_content(value)), None, time.perf_counter() - start)
        except Late:
            raise EnvironmentFailed(
                f"{self._label(tool)} did not return within {timeout:g} s and was abandoned.",
                stage="tool",
                deadline=True,
            ) from None
        except EnvironmentFailed as error:  # content that nobody can read
            raise EnvironmentFailed(f"{self._label(tool)}: {error}", stage="tool") from error
        if isinstance(value, EnvironmentFailed):
            raise EnvironmentFailed(str(value), stage="tool", deadline=value.deadline) from value
        if isinstance(value, ToolArgumentError):
            return ToolResult(clean_text(str(value)), "bad_arguments", time.perf_counter() - start)
        text = clean_text(f"{tool.name} failed: {describe(value)}")
        return ToolResult(text, "raised", time.perf_counter() - start)

    async def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The result of a function run where this environment's calls run: sync on its thread, async on the loop.

        Raises whatever it raises; what would stop the process (SystemExit) and a missed deadline are EnvironmentFailed.
        """
        try:
            ok, value = await self._caller.invoke(function, args, kwargs, timeout)
        except Late:
            name = getattr(function, "__qualname__", repr(function))
            raise EnvironmentFailed(f"{name} did not return within {timeout:g} s.", deadline=True) from None
        if ok:
            return value
        if isinstance(value, Exception):
            raise value
        raise EnvironmentFailed(f"{self.name or 'A function'} failed: {describe(value)}.") from value

    async def close(self, timeout: float = 10.0) -> None:
        """`env.close()` was called, once, on the environment's thread; waited for at most `timeout` seconds."""
        waiting = self.start_close(timeout)
        if waiting is not None and not (await asyncio.wait({waiting}, timeout=timeout + 1.0))[0]:
            self._closer.failed(f"it takes longer than {timeout:g} s")

    def start_close(self, timeout: float = 10.0) -> asyncio.Future[Any] | None:
        """`env.close()` is on its way; a future on the running loop where there is something to wait for."""
        closer = self._closer
        if closer.method is None or self.broken:
            closer.close_nowait()
            return None
        if is_async_callable(closer.method):
            return asyncio.ensure_future(self._close_async(timeout))
        if closer.inline:
            closer.close_nowait()
            return None
        return closer.close_on_lane()

    async def _close_async(self, timeout: float) -> None:
        method = self._closer.begin()
        if method is None:
            return
        try:
            ok, value = await self._caller.on_loop(method, (), {}, timeout)
            if not ok:
                self._closer.failed(describe(value))
        except Late:
            self._closer.failed(f"it took longer than {timeout:g} s")
        finally:
            self._closer.end()

    def close_nowait(self) -> None:
        """`env.close()` was called or will be, after what runs now; needs no event loop."""
        self._closer.close_nowait()

    @property
    def close_error(self) -> str | None:
        """Why `env.close()` failed, if it did."""
        return self._closer.error

    def _label(self, tool: Tool) -> str:
        return f"{self.name}.{tool.name}" if tool.on_instance else tool.name

    async def _stage(
        self, stage: str, method: Callable[..., Any], kwargs: Mapping[str, Any], timeout: float | None
    ) -> Any:
        label = f"{self.name}.{'get_reward' if stage == 'reward' else stage}()"
        try:
            ok, value = await self._caller.invoke(method, (), kwargs, timeout)
        except Late:
            raise EnvironmentFailed(
                f"{label} did not return within {timeout:g} s and was abandoned.", stage=stage, deadline=True
            ) from None
        if ok:
            return value
        deadline = isinstance(value, EnvironmentFailed) and value.deadline
        raise EnvironmentFailed(f"{label} failed: {describe(value)}.", stage=stage, deadline=deadline) from value


def _bounded(content: Content) -> Content:
    """What a tool returned, texts cut where nobody reads on; the model is told.

    >>> _bounded("x" * 1_000_001)[-40:]
    'xx... (cut: 1,000,001 characters in all)'
    """
    if isinstance(content, str):
        if len(content) <= MOST_CHARACTERS:
            return content
        return f"{content[:MOST_CHARACTERS]}... (cut: {len(content):,} characters in all)"
    return [block | {"text": _bounded(block["text"])} if block.get("type") == "text" else block for block in content]
