"""When failures mean that the run is broken, not the model."""

from __future__ import annotations

from agentrl.errors import RunStopped
from agentrl.types import Outcome, Rollout

_SAMPLER = ("sampler",)  # a key that no environment has


class FailureGuard:
    """Counts failed rollouts of each environment; too many of one in a row stop the run, and the error shows which.

    What other environments do meanwhile does not matter: they neither hide a broken one nor are blamed for it. A
    sampler that fails is counted by itself.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.in_row: dict[object, int] = {}

    def success(self, key: str | None = None) -> None:
        """A rollout of this environment was played to its end, and so the sampler works."""
        self.in_row[key] = self.in_row[_SAMPLER] = 0

    def failed(self, rollout: Rollout, environment: str, key: str | None = None, limit: int | None = None) -> None:
        """A rollout of this environment failed.

        Raises:
            RunStopped: As many as `limit` (by default the guard's) in a row.
        """
        counted = _SAMPLER if rollout.outcome is Outcome.SAMPLER_FAILED else key
        limit = self.limit if limit is None or counted is _SAMPLER else limit
        self.total += 1
        self.in_row[counted] = count = self.in_row.get(counted, 0) + 1
        if count >= limit:
            raise RunStopped(describe(rollout, environment, f"{count} rollouts in a row"))


def describe(rollout: Rollout, environment: str, how_many: str) -> str:
    """A message a person can act on: which environment, which row, which error."""
    row = {key: value for key, value in rollout.task.row.items() if key != "prompt"}
    return (
        f"{how_many} failed ({rollout.outcome.value}) in environment {environment}; the last was row "
        f"{rollout.task.index} {row!r:.300}, tried {rollout.attempts} times. Its error:\n{rollout.error}"
    )
