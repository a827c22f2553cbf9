"""Sort a belt of items into the right bins."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from agentrl.environment import Environment
from agentrl_envs._common import call

Bin = Literal["glass", "metal", "paper"]
BELONGS: dict[str, str] = {"bottle": "glass", "can": "metal", "letter": "paper"}
BINS: tuple[str, ...] = get_args(Bin)


class Recycle(Environment):
    """Which bin is right must be learnt, which item is next must be read: nothing can be copied from the result.

    Args:
        items: On the belt, one after another.
    """

    run_inline = True
    reward_range = (0.0, 1.0)

    def __init__(self, items: int = 3) -> None:
        if items < 1:
            raise ValueError(f"items must be at least 1, not {items}.")
        self._items = items
        self._belt: list[str] = []
        self._at = self._right = 0

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The first item of a belt that depends on the seed only."""
        self._belt = random.Random(seed).choices(list(BELONGS), k=self._items)
        self._at = self._right = 0
        self.done = False
        return f"sort what comes, first item: {self._belt[0]}"

    def put(self, bin: Bin) -> str:
        """Put the item into a bin.

        Args:
            bin: Where it belongs.

        Returns:
            The next item; not whether the bin was right.
        """
        item = self._belt[self._at]
        self._right += BELONGS[item] == bin
        self._at += 1
        self.done = self._at == len(self._belt)
        return f"the {bin} bin has it, " + ("the belt is empty" if self.done else f"next item: {self._belt[self._at]}")

    def get_reward(self) -> float:
        """The share of the belt that is in the right bin."""
        return self._right / len(self._belt)

    def _gold(self) -> dict[str, Any]:
        return call("put", bin=BELONGS[self._belt[self._at]])
