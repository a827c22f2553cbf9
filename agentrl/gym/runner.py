"""Running an environment's coroutines from plain code, also where an event loop runs already (a notebook)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from gymnasium.error import ClosedEnvironmentError

from agentrl.pool import EnvironmentPool


class Runner:
    """An event loop that outlives single calls, so that async environments can keep their connections."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result, in a thread of its own where a loop runs already (a notebook)."""
        if self._closed:
            work.close()
            raise ClosedEnvironmentError("The environment was closed.")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return loop.run_until_complete(work)
        outcome: list[Any] = []

        def complete() -> None:
            try:
                outcome.extend((True, loop.run_until_complete(work)))
            except BaseException as error:
                outcome.extend((False, error))

        thread = threading.Thread(target=complete, name="agentrl-gym")
        thread.start()
        thread.join()
        ok, value = outcome
        if not ok:
            raise value
        return value

    def __del__(self) -> None:  # Gymnasium environments are often not closed
        if self._loop is not None and not self._loop.is_running():
            self._loop.close()

    def close(self, pool: EnvironmentPool) -> None:
        if not self._closed:
            self.run(pool.close())
            self._closed = True
            if self._loop is not None:
                self._loop.close()
