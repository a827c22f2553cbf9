"""When failures mean that the run is broken, not the model."""

from __future__ import annotations

from agentrl.errors import RunStopped
from agentrl.types import Rollout


class FailureGuard:
    """Counts failed rollouts; stops the run after too many in a row, showing the environment, the row and why."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total, self.in_row = limit, 0, 0

    def success(self) -> None:
        self.in_row = 0

    def failed(self, rollout: Rollout, environment: str) -> None:
        self.total += 1
        self.in_row += 1
        if self.in_row >= self.limit:
            raise RunStopped(describe(rollout, environment, f"{self.in_row} rollouts in a row"))


def describe(rollout: Rollout, environment: str, how_many: str) -> str:
    """A message a person can act on: which environment, which row, which error."""
    row = {key: value for key, value in rollout.task.row.items() if key != "prompt"}
    return (
        f"{how_many} failed ({rollout.outcome.value}) in environment {environment}; the last was row "
        f"{rollout.task.index} {row!r:.300}, tried {rollout.attempts} times. Its error:\n{rollout.error}"
    )
