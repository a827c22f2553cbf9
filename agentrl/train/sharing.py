"""What sharing beginnings is worth on a step's rollouts, said before the first of them is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.train.pack import plan_rows
from agentrl.train.rows import TrainItem
from agentrl.train.tree import tree_of

WORTH_SAYING = 1.05


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tokens of a step: as they are, as they are computed, and as they would be in one row."""

    tokens: int
    computed: int
    distinct: int

    @property
    def at_best(self) -> float:
        """How many times fewer tokens one row would take."""
        return self.tokens / max(1, self.distinct)

    @property
    def now(self) -> float:
        """How many times fewer tokens are computed."""
        return self.tokens / max(1, self.computed)


def sharing_of(items: Sequence[TrainItem], budget: int, least: int | None) -> Sharing:
    """What the trained ones of `items` take in rows of at most `budget` tokens; `least` as in `make_row`."""
    trained = [item for item in items if item.trained_tokens]
    computed = 0
    for row in plan_rows(trained, budget, least):
        computed += len(tree_of([s.input_ids for i in row for s in trained[i].sequences], least).ids_T)
    every = [s.input_ids for item in trained for s in item.sequences]
    return Sharing(sum(map(len, every)), computed, len(tree_of(every, least or 1).ids_T))


def sharing_text(sharing: Sharing, least: int | None, why_not: str) -> str | None:
    """A sentence for the terminal; None where nothing is shared or could be.

    >>> sharing_text(Sharing(5120, 1536, 1536), 1, "")
    "Sharing is worth 3.3x on your data: of a step's 5,120 tokens 1,536 are computed, shared beginnings once."
    """
    if sharing.at_best < WORTH_SAYING:
        return None
    if least is None:
        return f"Sharing would be worth {sharing.at_best:.1f}x on your data, but {why_not}."
    what = f"of a step's {sharing.tokens:,} tokens {sharing.computed:,} are computed, shared beginnings once"
    if sharing.now < 0.8 * sharing.at_best:
        hint = f"{sharing.at_best:.1f}x with token_budget={sharing.distinct}, which takes more memory"
        return f"Sharing is worth {sharing.now:.1f}x on your data: {what} ({hint})."
    return f"Sharing is worth {sharing.now:.1f}x on your data: {what}."
