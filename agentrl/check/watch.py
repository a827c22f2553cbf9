"""The check runs on a thread that may get stuck in somebody's code: whoever waits for it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.check.shared import Shared

_GRACE_S = 3.0  # beyond a call's own deadline, which only code that blocks the event loop can miss
_STOP_S = 5.0  # for a check that was interrupted to close what it built


class Abandoned(BaseException):
    """Nobody waits for this check any more. No Exception, so that nothing on the way takes it for a failure."""


class Watch:
    """Knows what of the environment's code is at work, and since when."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._now: dict[object, tuple[str, float]] = {}
        self._given_up = False
        self.shared = Shared()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Inside, `what` is at work.

        Raises:
            Abandoned: It took so long that the check was given up.
        """
        token = object()
        self._now[token] = (what, time.monotonic())
        try:
            yield
        finally:
            self._now.pop(token, None)
            self.shared.put_back()
        if self._given_up:
            raise Abandoned

    def stuck(self) -> str | None:
        """What has been at work for longer than any deadline allows."""
        late = time.monotonic() - self.timeout - _GRACE_S
        return next((what for what, since in list(self._now.values()) if since < late), None)

    def run(self, work: Coroutine[Any, Any, None]) -> str | None:
        """The coroutine has run, on a thread of its own; what it got stuck in, where it did."""
        done, raised = threading.Event(), list[BaseException]()
        loop = asyncio.new_event_loop()
        task = loop.create_task(work)

        def target() -> None:
            try:
                with asyncio.Runner(loop_factory=lambda: loop) as runner:
                    runner.run(_finished(task))
            except Abandoned:
                pass
            except BaseException as error:
                raised.append(error)
            finally:
                done.set()

        threading.Thread(target=target, name="agentrl-check", daemon=True).start()
        try:
            while not done.wait(0.05):
                if (what := self.stuck()) is not None:
                    self._given_up = True
                    return what
        except BaseException:  # Ctrl-C arrives here, in the main thread
            self._given_up = True
            loop.call_soon_threadsafe(task.cancel)
            done.wait(_STOP_S)
            raise
        if raised:
            raise raised[0]
        return None


async def _finished(task: asyncio.Task[None]) -> None:
    await task
