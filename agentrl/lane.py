"""A thread of one's own: every sync call of one environment runs on its lane, in order.

SQLite connections and browsers may only be used on the thread that made them. Threads are daemons, because a call that
never returns must not keep the interpreter alive; closing is therefore done by hand, at exit too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("agentrl")

Outcome = tuple[bool, Any]
"""(True, value) or (False, exception). Exceptions travel as values: a future cannot carry StopIteration, and SystemExit
set on a task would stop the event loop."""

_EXIT_GRACE_S = 5.0  # for every close() at interpreter exit together
_STUCK_GRACE_S = 0.5  # before a hung environment is closed from another thread, which is better than never


class Lane:
    """Runs one call at a time on its own daemon thread, which starts with the first call."""

    __slots__ = ("_jobs", "_stopped", "_thread", "stuck")

    def __init__(self) -> None:
        self.stuck = False  # a call was abandoned on it
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def post(self, job: Callable[[], None]) -> None:
        """The job will run after those before it; what it raises is logged."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="agentrl-lane", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Outcome]:
        """A future on the running loop that holds the call's outcome. The call sees the caller's context variables."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            outcome = attempt(context.run, call)
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                loop.call_soon_threadsafe(_settle, future, outcome)

        self.post(job)
        return future

    def run(self, call: Callable[[], Any]) -> Outcome:
        """The call's outcome, waited for without an event loop."""
        box: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.post(lambda: box.put(attempt(call)))
        return box.get()

    def stop(self) -> None:
        """The thread ends after the jobs that wait now."""
        if not self._stopped:
            self._stopped = True
            if self._thread is not None:
                self._jobs.put(None)


def attempt(call: Callable[..., Any], *args: Any) -> Outcome:
    """The outcome of a call, whatever it raises."""
    try:
        return True, call(*args)
    except BaseException as error:
        return False, error


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            logger.exception("A job on an environment's thread failed.")
        del job  # or the last environment would stay alive while the thread waits


class Closer:
    """Calls an environment's `close()` exactly once, whoever asks first: pool, collector or exit."""

    __slots__ = ("_begun", "_finished", "_lock", "_pid", "_posted", "error", "inline", "lane", "method")

    def __init__(self, method: Callable[[], Any] | None, lane: Lane, inline: bool) -> None:
        self.method = method
        self.lane = lane
        self.inline = inline
        self.error: str | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._posted = False
        self._finished = threading.Event()
        self._pid = os.getpid()
        if method is not None:
            _open.add(self)

    def begin(self) -> Callable[[], Any] | None:
        """The method to call, for the first who asks; None for everybody else."""
        with self._lock:
            method, self._begun = (None if self._begun else self.method), True
        return method

    def end(self) -> None:
        _open.discard(self)
        self._finished.set()
        self.lane.stop()

    def close_nowait(self) -> None:
        """`close()` has been called or will be, on the environment's own thread, after what runs there now."""
        if os.getpid() != self._pid:  # a forked child must not close what its parent uses
            return
        if self.method is None or self.inline:
            self.close_here()
        elif not self._posted:
            self._posted = True
            self.lane.post(self.close_here)
            self.lane.stop()

    def close_on_lane(self) -> asyncio.Future[Outcome] | None:
        """A future on the running loop for `close_nowait`; None where somebody else asked before."""
        if self._posted:
            return None
        self._posted = True
        future = self.lane.submit(self.close_here)
        self.lane.stop()
        return future

    def close_here(self) -> None:
        """`close()` has been called on this thread, if nobody did before."""
        method = self.begin()
        if method is None:
            if self.method is None:
                self.end()
            return
        ok, value = attempt(_run_to_end, method)
        if not ok:
            self.failed(f"{type(value).__name__}: {value}")
        self.end()

    def failed(self, why: str) -> None:
        owner = type(getattr(self.method, "__self__", None)).__name__
        self.error = why
        logger.warning("%s.close() failed: %s.", owner, why)

    def wait(self, seconds: float) -> bool:
        return self._finished.wait(max(seconds, 0.0))


def _run_to_end(method: Callable[[], Any]) -> None:
    result = method()
    if inspect.iscoroutine(result):
        asyncio.run(result)


_open: set[Closer] = set()


@atexit.register
def _close_all() -> None:
    """Every environment that is still open is closed, within a bounded time."""
    closers = [closer for closer in list(_open) if closer._pid == os.getpid()]
    until = time.monotonic() + _EXIT_GRACE_S
    for closer in closers:
        closer.close_nowait()
    soon = time.monotonic() + _STUCK_GRACE_S
    hung = [c for c in closers if not c.wait((soon if c.lane.stuck else until) - time.monotonic())]
    for closer in hung:  # its own thread will not get to it any more
        threading.Thread(target=closer.close_here, daemon=True).start()
    until = time.monotonic() + _EXIT_GRACE_S / 2
    for closer in hung:
        closer.wait(until - time.monotonic())
