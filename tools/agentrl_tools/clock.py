"""The time, in UTC; a test or an episode may set it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from agentrl.errors import ConfigurationError
from agentrl.tool_schema import tool


def _now() -> datetime:
    return datetime.now(UTC)


class Clock:
    """A clock whose time comes from `now`: a function, or one moment at which it stands still.

    Raises:
        ConfigurationError: The moment has no time zone.

    >>> Clock(datetime(2026, 3, 1, 8, 30, tzinfo=UTC)).clock()
    '2026-03-01 08:30:00 UTC, Sunday'
    """

    def __init__(self, now: Callable[[], datetime] | datetime = _now) -> None:
        if isinstance(now, datetime) and now.tzinfo is None:
            raise ConfigurationError(f"The moment {now} has no time zone: add tzinfo=datetime.UTC, for example.")
        self._now = now

    @tool(run_inline=True)
    def clock(self) -> str:
        """Tell the present date, time and day of the week, in UTC."""
        moment = self._now if isinstance(self._now, datetime) else self._now()
        return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC, %A")


clock = Clock().clock
