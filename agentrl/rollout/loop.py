"""Running coroutines from plain code, also where an event loop already runs (a notebook)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that outlives single calls, so that async tools can keep connections between steps.

    Coroutines run in the caller's thread where no loop runs there, else in a thread of this loop's own.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; Ctrl-C cancels it and is raised here."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._in_thread(coroutine) if _loop_runs_here() else self._complete(self._loop.create_task(coroutine))

    def _complete(self, task: asyncio.Task[T]) -> T:
        assert self._loop is not None
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def _in_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        errors: list[BaseException] = []
        ended = threading.Event()  # Thread.join() takes the thread for ended once Ctrl-C has interrupted it

        def work() -> None:
            try:
                self._complete(task)
            except BaseException as e:
                errors.append(e)
            finally:
                ended.set()

        threading.Thread(target=work, name="agentrl-loop").start()
        try:
            ended.wait()
        except BaseException:  # Ctrl-C arrives here, in the main thread
            self._loop.call_soon_threadsafe(task.cancel)
            ended.wait()
            raise
        if errors:
            raise errors[0]
        return task.result()

    def close(self) -> None:
        """The loop is gone; tasks and generators left open on it are ended first."""
        loop = self._loop
        if loop is None or loop.is_closed() or loop.is_running():
            return
        self.run(_end_tasks())
        self.run(loop.shutdown_asyncgens())
        loop.close()


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=1.0)


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
