"""Follow a chain of clues to a treasure."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from agentrl.environment import Environment
from agentrl_envs._common import call

Place = Literal["cave", "forest", "lake", "mill", "shrine", "tower"]
PLACES: tuple[str, ...] = get_args(Place)


class Hunt(Environment):
    """Each clue stands only in the previous tool result, so the policy must read what its tools answer.

    Args:
        hops: Places in the chain; the treasure is in the last one.
        max_calls: Searches after which the episode is over.
    """

    run_inline = True
    reward_range = (0.0, 1.0)

    def __init__(self, hops: int = 3, max_calls: int = 4) -> None:
        if not 1 <= hops <= len(PLACES):
            raise ValueError(f"hops must be between 1 and {len(PLACES)}, not {hops}.")
        if max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, not {max_calls}.")
        self._hops = hops
        self._max_calls = max_calls
        self._chain: list[str] = []
        self._solved = 0
        self._calls = 0

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The first clue of a chain that depends on the seed only."""
        self._chain = random.Random(seed).sample(PLACES, self._hops)
        self._solved = self._calls = 0
        self.done = False
        return f"find the treasure, first clue: {self._chain[0]}"

    def search(self, place: Place) -> str:
        """Search a place.

        Args:
            place: Where to search.

        Returns:
            The next clue, or that there is nothing.
        """
        self._calls += 1
        found = self._solved < self._hops and place == self._chain[self._solved]
        self._solved += found
        self.done = self._solved == self._hops or self._calls >= self._max_calls
        if not found:
            return f"nothing in the {place}"
        if self._solved == self._hops:
            return f"in the {place} is the treasure"
        return f"in the {place} a note says: {self._chain[self._solved]}"

    def get_reward(self) -> float:
        """The share of the chain that was followed."""
        return self._solved / self._hops

    def _gold(self) -> dict[str, Any]:
        return call("search", place=self._chain[self._solved])
