"""What a check found, as data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.check.tokens import TokenCost

Level = Literal["error", "warning", "note"]
ORDER: dict[Level, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the check saw: errors break training, warnings harm it, notes are for the author to know."""

    level: Level
    what: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}"


@dataclass(frozen=True, slots=True)
class RewardSpread:
    """Rewards that a policy got.

    >>> str(RewardSpread.of([0.0, 1.0, 0.5]))
    'mean 0.5, least 0, most 1 (3 episodes)'
    """

    episodes: int
    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, rewards: list[float]) -> RewardSpread:
        """The spread of at least one reward."""
        return cls(len(rewards), statistics.fmean(rewards), min(rewards), max(rewards))

    def __str__(self) -> str:
        word = "episode" if self.episodes == 1 else "episodes"
        return f"mean {self.mean:.3g}, least {self.least:.3g}, most {self.most:.3g} ({self.episodes} {word})"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything that a check saw, findings in the order of their weight."""

    name: str  # of the environment's class; "" where none could be built
    findings: tuple[Finding, ...]
    rewards: dict[str, RewardSpread] = field(default_factory=dict)  # by policy: "no-op", "random", "gold"
    milliseconds: dict[str, float] = field(default_factory=dict)  # median of reset, get_reward and each tool
    observation: str = ""  # the first text that a prompt shows
    schemas: tuple[dict[str, Any], ...] = ()  # of its tools
    tokens: TokenCost | None = None  # of the tools in a prompt; None where the check did not get that far

    def count(self, level: Level) -> int:
        """Findings of this level."""
        return sum(finding.level == level for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))
