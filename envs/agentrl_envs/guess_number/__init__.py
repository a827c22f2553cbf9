"""Find a hidden number from hints."""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, settle

KNOBS: dict[str, Range] = {"highest": (2, 1_000_000), "tries": (0, 100), "hints": ("direction", "warmth")}
EXTRA_TRIES = 3  # beyond par, where tries is 0
CLOSE, SLOW = 0.4, 0.6  # the most for a number that was not found; the least for one that was
EXTRA_CALLS = 10  # for numbers outside of the range, which cost no try


class GuessNumber(Environment):
    """A number from 1 to `highest` is hidden; each guess is answered with a hint.

    Args:
        highest: The largest number it can be, 2 to 1000000.
        tries: Guesses, 1 to 100; 0: three more than a search by halves needs.
        hints: "direction" says higher or lower, "warmth" whether a guess is closer than the one before.
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, highest: int = 100, tries: int = 0, hints: str = "direction") -> None:
        self._defaults = settle(KNOBS, {}, highest=highest, tries=tries, hints=hints)
        self._highest, self._tries, self._par, self._secret, self._hints = 2, 1, 1, 1, "direction"
        self._guesses: list[int] = []
        self._low = self._high = self._calls = 0

    def reset(
        self,
        seed: int | None = None,
        highest: int | None = None,
        tries: int | None = None,
        hints: str | None = None,
        **row: Any,
    ) -> str:
        """A number that depends on the seed and the range only."""
        knobs = settle(KNOBS, self._defaults, highest=highest, tries=tries, hints=hints)
        self._highest, self._hints = knobs["highest"], knobs["hints"]
        self._par = par(self._highest, self._hints)
        self._tries = knobs["tries"] or self._par + EXTRA_TRIES
        self._secret = random.Random(seed).randint(1, self._highest)
        self._guesses, self._calls = [], 0
        self._low, self._high = 1, self._highest
        self.done = False
        told = (
            "whether the hidden number is higher or lower"
            if self._hints == "direction"
            else "whether it is warmer (closer than the guess before) or colder"
        )
        return f"Guess the hidden number from 1 to {self._highest}. Each guess is told {told}. Tries: {self._tries}."

    def guess(self, number: int) -> str:
        """Guess the hidden number.

        Args:
            number: A whole number in the range.

        Returns:
            A hint, and how many tries are left.
        """
        if self.done:
            return "The game is over."
        self._calls += 1
        if not 1 <= number <= self._highest:
            self.done = self._calls >= self._tries + EXTRA_CALLS
            return f"The number must be from 1 to {self._highest}. This cost no try."
        hint = self._hint(number)
        self._guesses.append(number)
        left = self._tries - len(self._guesses)
        if number == self._secret:
            self.done = True
            return f"{number} is right"
        self.done = left == 0 or self._calls >= self._tries + EXTRA_CALLS
        return f"{hint}, {left} tries left" if left else f"{hint}, no tries left: it was {self._secret}"

    def get_reward(self) -> float:
        """1 for the number within par, 0.6 for the last try; else up to 0.4 for how close the best guess was."""
        if not self._guesses:
            return 0.0
        used = len(self._guesses)
        if self._guesses[-1] == self._secret:
            late = max(0, used - self._par) / max(1, self._tries - self._par)
            return 1.0 - (1.0 - SLOW) * late
        best = min(abs(guess - self._secret) for guess in self._guesses)
        return CLOSE * (1.0 - math.log(best + 1) / math.log(self._highest))

    def _hint(self, number: int) -> str:
        """What the model reads about a guess; what it rules out is kept for the gold policy."""
        if self._hints == "direction":
            if number < self._secret:
                self._low = max(self._low, number + 1)
                return f"higher than {number}"
            self._high = min(self._high, number - 1)
            return f"lower than {number}"
        if not self._guesses:
            return f"{number} is not it, guess again to compare"
        before = self._guesses[-1]
        was, now = abs(before - self._secret), abs(number - self._secret)
        self._low, self._high = narrowed(self._low, self._high, before, number, (now > was) - (now < was))
        return (
            f"{number} is "
            + ("as close as" if was == now else "warmer than" if now < was else "colder than")
            + (f" {before}")
        )

    def _gold(self) -> dict[str, Any] | str:
        """A search by halves that knows only the hints."""
        if self.done:
            return "Done."
        if self._hints == "direction":
            return call("guess", number=(self._low + self._high) // 2)
        before = self._guesses[-1] if self._guesses else None
        return call("guess", number=next_by_warmth(self._low, self._high, before, self._highest))


def par(highest: int, hints: str) -> int:
    """Guesses within which the gold policy finds every number up to `highest`.

    >>> par(100, "direction"), par(3, "direction"), par(100, "warmth")
    (7, 2, 13)
    """
    halvings = highest.bit_length()
    return halvings if hints == "direction" else 2 * halvings - 1


def narrowed(low: int, high: int, before: int, number: int, change: int) -> tuple[int, int]:
    """The numbers that are left once `number` is colder (1), warmer (-1) or as close as `before` (0).

    >>> narrowed(1, 100, 50, 60, -1), narrowed(1, 100, 50, 60, 1), narrowed(1, 100, 50, 60, 0)
    ((56, 100), (1, 54), (55, 55))
    """
    if before == number:
        return low, high
    total = before + number  # twice the middle between the two
    if change == 0:
        return total // 2, total // 2
    if (change < 0) == (number > before):
        return max(low, total // 2 + 1), high
    return low, min(high, (total - 1) // 2)


def next_by_warmth(low: int, high: int, before: int | None, highest: int) -> int:
    """A guess whose middle with the guess before halves what is left, as far as the range allows."""
    if before is None:
        return low + (high - low) // 4
    if low == high:
        return low
    mirrored = min(max(low + high - before, 1), highest)
    return mirrored if mirrored != before else mirrored + 1 if mirrored < high else mirrored - 1
