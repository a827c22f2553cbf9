"""Find a hidden word from coloured letters."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, quoted, settle
from agentrl_envs.wordle.words import WORDS

KNOBS: dict[str, Range] = {"length": (4, 6), "tries": (1, 20), "choices": (0, 40), "guesses": ("any", "known")}
CLOSE = 0.5  # the most for a word that was not found
EXTRA_CALLS = 10  # for words that are not valid, which cost no try
_NAMES = {"G": "green", "Y": "yellow", "-": "grey"}


def score(guess: str, secret: str) -> str:
    """G: right letter, right place; Y: in the word elsewhere; -: no more of it in the word.

    Green letters are taken first; then, from left to right, a letter is yellow as long as the secret has one left.

    >>> score("eerie", "tepee"), score("speed", "abide")
    ('YG--G', '--Y-Y')
    """
    left = [wanted for letter, wanted in zip(guess, secret, strict=True) if letter != wanted]
    marks = []
    for letter, wanted in zip(guess, secret, strict=True):
        if letter == wanted:
            marks.append("G")
        elif letter in left:
            left.remove(letter)
            marks.append("Y")
        else:
            marks.append("-")
    return "".join(marks)


class Wordle(Environment):
    """A common English word is hidden; each guess is answered with one colour per letter.

    Args:
        length: Letters of the word, 4 to 6.
        tries: Guesses, 1 to 20.
        choices: 0: any of about 500 words, which are not shown; 1 to 40: one of this many, which are listed.
        guesses: "any": any letters of the right length are a guess; "known": it must be in the list of words.
    """

    run_inline = True
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, length: int = 5, tries: int = 6, choices: int = 0, guesses: str = "any") -> None:
        self._defaults = settle(KNOBS, {}, length=length, tries=tries, choices=choices, guesses=guesses)
        self._length, self._tries, self._only_known = 5, 6, False
        self._secret = ""
        self._words: tuple[str, ...] = ()  # that the secret was drawn from
        self._guessed: list[tuple[str, str]] = []  # (word, its marks)
        self._fitting: tuple[int, list[str]] = (0, [])  # for the gold policy: words that fit so many answers
        self._calls = 0

    def reset(
        self,
        seed: int | None = None,
        length: int | None = None,
        tries: int | None = None,
        choices: int | None = None,
        guesses: str | None = None,
        **row: Any,
    ) -> str:
        """A word that depends on the seed, its length and the choices only."""
        knobs = settle(KNOBS, self._defaults, length=length, tries=tries, choices=choices, guesses=guesses)
        rng = random.Random(seed)
        self._length, self._tries, self._only_known = knobs["length"], knobs["tries"], knobs["guesses"] == "known"
        words = WORDS[self._length]
        listed = sorted(rng.sample(words, knobs["choices"]))
        self._words = tuple(listed) or words
        self._secret = rng.choice(self._words)
        self._fitting = (0, list(self._words))
        self._guessed, self._calls, self.done = [], 0, False
        among = f" It is one of: {', '.join(listed)}." if listed else ""
        return (
            f"Guess the hidden English word of {self._length} letters.{among} Each letter of a guess is answered: "
            f"green (right place), yellow (in the word, other place) or grey (not in the word again). "
            f"Tries: {self._tries}."
        )

    def guess(self, word: str) -> str:
        """Guess the hidden word.

        Args:
            word: The guess, in letters a to z.

        Returns:
            The colour of each letter, and how many tries are left.
        """
        if self.done:
            return "The game is over."
        self._calls += 1
        guess = word.strip().lower()
        if (problem := self._problem(guess)) is not None:
            self.done = self._calls >= self._tries + EXTRA_CALLS
            return f"{problem} This cost no try."
        marks = score(guess, self._secret)
        self._guessed.append((guess, marks))
        left = self._tries - len(self._guessed)
        self.done = guess == self._secret or not left or self._calls >= self._tries + EXTRA_CALLS
        shown = ", ".join(f"{letter} {_NAMES[mark]}" for letter, mark in zip(guess, marks, strict=True))
        if guess == self._secret:
            return f"{shown}: {guess} is the word"
        return f"{shown}: {left} tries left" if left else f"{shown}: no tries left, the word was {self._secret}"

    def get_reward(self) -> float:
        """1 for the word; else up to 0.5 for the best guess: a green letter counts 1, a yellow one a half."""
        best = max((2 * m.count("G") + m.count("Y") for _, m in self._guessed), default=0) / (2 * self._length)
        return 1.0 if best == 1.0 else CLOSE * best

    def _problem(self, guess: str) -> str | None:
        """Why this is no guess, for the model; None where it is one."""
        if len(guess) != self._length:
            return f"{quoted(guess)} has {len(guess)} letters; a guess must have {self._length}."
        if not (guess.isascii() and guess.isalpha()):
            return f"{quoted(guess)} is not a word; a guess has letters a to z only."
        if self._only_known and guess not in self._words:
            return f"{quoted(guess)} is not in the list of words; guess a common English word."
        return None

    def _gold(self) -> dict[str, Any] | str:
        """The possible word that tells most; on the last try the hidden word itself."""
        if self.done:
            return "Done."
        if len(self._guessed) == self._tries - 1:
            return call("guess", word=self._secret)
        return call("guess", word=_telling(self._possible()))

    def _possible(self) -> list[str]:
        """The words that all answers so far fit."""
        seen, words = self._fitting
        for guess, marks in self._guessed[seen:]:
            words = [word for word in words if score(guess, word) == marks]
        self._fitting = (len(self._guessed), words)
        return words


def _telling(possible: list[str]) -> str:
    """Of few words the one that separates the others best; of many one with many frequent letters."""
    if len(possible) <= 40:
        return max(possible, key=lambda word: len({score(word, other) for other in possible}))
    frequent = Counter(letter for word in possible for letter in set(word))
    return max(possible, key=lambda word: sum(frequent[letter] for letter in set(word)))
