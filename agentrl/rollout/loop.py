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
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._complete(coroutine)
        return self._in_thread(coroutine)

    def _complete(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def _in_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                box["result"] = self._complete(coroutine)
            except BaseException as e:
                box["error"] = e

        thread = threading.Thread(target=work, name="agentrl-loop")
        thread.start()
        thread.join()
        if "error" in box:
            raise box["error"]
        return box["result"]

    def close(self) -> None:
        """The loop is gone; generators left open on it are closed first."""
        if self._loop is None or self._loop.is_closed() or self._loop.is_running():
            return
        self.run(self._loop.shutdown_asyncgens())
        self._loop.close()
