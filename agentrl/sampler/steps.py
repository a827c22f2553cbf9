"""Where the steps of a sampler run: on the event loop while they are quick, else on one thread of the sampler's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class Steps:
    """Runs steps, one at a time, and remembers how long each kind takes."""

    def __init__(self, thread_name: str) -> None:
        self._name = thread_name
        self._thread: ThreadPoolExecutor | None = None
        self._seconds: dict[str, float] = {}  # per unit of work, a moving average

    async def run(self, kind: str, units: int, work: Callable[[], _T], inline_below_s: float) -> _T:
        """The work's result; the event loop goes on meanwhile, unless the work is expected to be quick."""
        expected = self._seconds.get(kind, float("inf")) * units
        began = time.perf_counter()
        result = work() if expected < inline_below_s else await self.in_thread(work)
        took = (time.perf_counter() - began) / units
        self._seconds[kind] = took if kind not in self._seconds else 0.7 * self._seconds[kind] + 0.3 * took
        return result

    async def in_thread(self, work: Callable[[], _T], *, cancelled: Callable[[], None] = lambda: None) -> _T:
        """The work's result, from the thread. Where this is cancelled, `cancelled` is called and the work awaited.

        The tensors are the thread's until it is done, and a forward cannot be interrupted.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        running = self._thread.submit(work)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            cancelled()
            if not running.cancel():
                running.exception()
            raise

    def close(self) -> None:
        """The thread is gone; the next step that needs one has another."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
