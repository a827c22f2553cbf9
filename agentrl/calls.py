"""One call into code that is not ours: sync or async, with a deadline, and no way to take the event loop down."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import AgentRLError, EnvironmentFailed
from agentrl.lane import Lane, Outcome, attempt
from agentrl.tool_schema import is_async_callable

_CANCEL_GRACE_S = 1.0  # for a coroutine to notice that it was cancelled
_ERROR_CHARS = 2000  # of an exception's text that a message repeats


class Late(Exception):
    """The deadline passed."""


class Caller:
    """Runs the calls of one environment: sync ones on its lane, or here if `inline`; async ones on the running loop."""

    __slots__ = ("_on_abandon", "broken", "inline", "lane")

    def __init__(self, lane: Lane, inline: bool, on_abandon: Callable[[Callable[[], bool]], None] | None) -> None:
        self.lane = lane
        self.inline = inline
        self.broken = False  # a call was abandoned: this caller is never used again
        self._on_abandon = on_abandon

    async def invoke(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        *,
        inline: bool | None = None,
    ) -> Outcome:
        """(True, result) or (False, exception). `inline` goes over the caller's own setting.

        Raises:
            Late: after `timeout` seconds. Inline calls have no deadline.
        """
        if self.broken:
            return False, EnvironmentFailed("This instance was abandoned and cannot be used again.")
        if is_async_callable(function):
            return await self.on_loop(function, args, kwargs, timeout)
        if self.inline if inline is None else inline:
            ok, value = call_inline(function, args, kwargs)
        else:
            ok, value = await self._on_lane(functools.partial(function, *args, **kwargs), timeout)
        if ok and hasattr(type(value), "__await__"):  # a sync wrapper around an async function
            return await self.on_loop(lambda: value, (), {}, timeout)
        return ok, value

    async def _on_lane(self, call: Callable[[], Any], timeout: float | None) -> Outcome:
        future = self.lane.submit(call)
        timer = None if timeout is None else future.get_loop().call_later(timeout, _expire, future)
        try:
            return await future
        except BaseException:  # late or cancelled: the call itself goes on
            self.lane.stuck = True
            self._abandon(lambda lane=self.lane: lane.alive)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def on_loop(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None
    ) -> Outcome:
        task = asyncio.ensure_future(_guarded(function, args, kwargs))
        try:
            await asyncio.wait({task}, timeout=timeout)
        except asyncio.CancelledError:
            await self._cancel(task)
            raise
        if not task.done():
            await self._cancel(task)
            raise Late
        ok, value = task.result() if not task.cancelled() else (False, asyncio.CancelledError())
        if isinstance(value, KeyboardInterrupt) and _on_main_thread():
            raise value
        return ok, value

    async def _cancel(self, task: asyncio.Future[Outcome]) -> None:
        task.cancel()
        self.broken = True
        await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
        if not task.done():  # it swallowed the cancellation
            self._abandon(lambda: not task.done())

    def _abandon(self, alive: Callable[[], bool]) -> None:
        self.broken = True
        if self._on_abandon is not None:
            self._on_abandon(alive)


async def _guarded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """The outcome of an async call. SystemExit must not leave a task: it would stop the event loop."""
    try:
        return True, await function(*args, **kwargs)
    except BaseException as error:
        return False, error


def call_inline(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    try:
        return True, function(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _on_main_thread():  # the user's Ctrl-C
            raise
        return False, error


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _expire(future: asyncio.Future[Outcome]) -> None:
    if not future.done():
        future.set_exception(Late())


def describe(error: BaseException) -> str:
    """`ValueError: no such place`, within bounds, whatever the exception's own `__str__` does."""
    ok, text = attempt(str, error)
    text = text if ok else "(its text cannot be read)"
    name = type(error).__name__
    if isinstance(error, AgentRLError) and text:
        return text[:_ERROR_CHARS]
    return f"{name}: {text}"[:_ERROR_CHARS] if text else name
