"""Look up where somebody lives, and deliver a parcel there."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from agentrl.environment import Environment
from agentrl_envs._common import call

Person = Literal["anna", "bruno", "carla", "dario", "elena", "fabio"]
Place = Literal["bakery", "castle", "harbor", "library", "museum", "school"]
PEOPLE: tuple[str, ...] = get_args(Person)
PLACES: tuple[str, ...] = get_args(Place)
LOOKUP_REWARD = 0.3  # for the right question without the right delivery


class Courier(Environment):
    """Two tools with different arguments: the answer of one is the argument of the other.

    There is one parcel: it can be delivered once, to the right place or to a wrong one.

    Args:
        max_calls: Calls after which the episode is over.
    """

    run_inline = True
    reward_range = (0.0, 1.0)

    def __init__(self, max_calls: int = 3) -> None:
        if max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, not {max_calls}.")
        self._max_calls = max_calls
        self._homes: dict[str, str] = {}
        self._addressee = ""
        self._calls = 0
        self._asked = self._delivered = False

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """A parcel for somebody; who, and who lives where, depends on the seed only."""
        rng = random.Random(seed)
        self._homes = dict(zip(PEOPLE, rng.sample(PLACES, len(PEOPLE)), strict=True))
        self._addressee = rng.choice(PEOPLE)
        self._calls = 0
        self._asked = self._delivered = self.done = False
        return f"parcel for {self._addressee}"

    def lookup(self, person: Person) -> str:
        """Look up where a person lives.

        Args:
            person: Whose home to look up.

        Returns:
            The place.
        """
        self._asked = self._asked or person == self._addressee
        self._count()
        return f"{person} lives at the {self._homes[person]}"

    def deliver(self, place: Place) -> str:
        """Deliver the parcel to a place.

        Args:
            place: Where to deliver it.

        Returns:
            Whether the addressee was there.
        """
        self._delivered = place == self._homes[self._addressee]
        self._count()
        self.done = True
        return f"delivered at the {place}" if self._delivered else f"nobody at the {place}"

    def get_reward(self) -> float:
        """1.0 for the delivery, 0.3 for having looked up the right person."""
        if self._delivered:
            return 1.0
        return LOOKUP_REWARD if self._asked else 0.0

    def _gold(self) -> dict[str, Any]:
        if not self._asked:
            return call("lookup", person=self._addressee)
        return call("deliver", place=self._homes[self._addressee])

    def _count(self) -> None:
        self._calls += 1
        self.done = self._calls >= self._max_calls
