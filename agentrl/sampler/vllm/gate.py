"""Whether requests may go out: closed while weights change, and shut while nobody knows what weights there are."""

from __future__ import annotations

import asyncio
import contextlib

from agentrl.errors import SamplerError


class Gate:
    """Requests pass while it is open, wait while it is held, and fail while it is broken.

    `hold`, `open` and `broken` return at once and may be called from any thread; `passed` is awaited by requests, on
    any loop.
    """

    def __init__(self) -> None:
        self.breaks = 0  # how often it broke: what was sent before is not to be trusted after
        self._held = False
        self._why: str | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def why(self) -> str | None:
        """Why it is broken; None: it is not."""
        return self._why

    def hold(self) -> None:
        self._held = True

    def open(self) -> None:
        self._held, self._why = False, None
        self._wake()

    def broken(self, why: str) -> None:
        self._why = why
        self.breaks += 1
        self._wake()

    async def passed(self) -> None:
        """It is open now, and stays so until this task waits for something else.

        Raises:
            SamplerError: It is broken.
        """
        while True:
            if self._why is not None:
                raise SamplerError(self._why)
            if not self._held:
                return
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                if self._held and self._why is None:  # still: `open` may have come from another thread
                    await future
            finally:
                self._waiting.discard(future)

    def _wake(self) -> None:
        for future in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # a loop that is over: nobody waits there
                future.get_loop().call_soon_threadsafe(_let_go, future)


def _let_go(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
