"""Functions to write: a composition of steps, with examples that are shown and cases that are not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl_envs.coding import steps
from agentrl_envs.coding.steps import Maker, Step

Case = tuple[tuple[Any, ...], Any]
NAME = "solve"
MOST_ALIKE = 0.4  # of the hidden cases, that one constant or the argument itself may answer
LEAST_DIFFERENT = 0.2  # of them, that show that a step was left out
_SYLLABLES = ("ba", "ne", "ti", "or", "sta", "lu", "mi", "ran", "e", "so", "al", "un", "pi", "ter")


@dataclass(frozen=True, slots=True)
class Task:
    """What the function gets and does, cases of both kinds, and a source that passes them all."""

    text: str
    examples: tuple[Case, ...]
    hidden: tuple[Case, ...]
    solution: str


@dataclass(frozen=True, slots=True)
class _Kind:
    argument: str
    gets: str
    inner: tuple[Maker, ...]
    last: tuple[Maker, ...]
    draw: Callable[[random.Random], Any]


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))


def _numbers(rng: random.Random) -> list[int]:
    drawn = [rng.randint(-20, 40) for _ in range(rng.randint(3, 9))]
    return drawn + rng.sample(drawn, 2) if rng.random() < 0.5 else drawn  # some numbers twice


def _text(rng: random.Random) -> str:
    words = [_word(rng) for _ in range(rng.randint(1, 4))]
    for place, word in enumerate(words):
        look = rng.random()
        words[place] = word.title() if look < 0.4 else f"{word}{rng.randint(0, 99)}" if look < 0.6 else word
    return " ".join(words) + rng.choice(("", "!", "aa", " oo"))


def _words(rng: random.Random) -> list[str]:
    drawn = [_word(rng) for _ in range(rng.randint(3, 7))]
    return drawn + rng.sample(drawn, 1) if rng.random() < 0.5 else drawn


KINDS = {
    "numbers": _Kind("numbers", "a list of whole numbers", steps.NUMBERS, steps.NUMBERS_LAST, _numbers),
    "text": _Kind("text", "a text", steps.TEXT, steps.TEXT_LAST, _text),
    "words": _Kind("words", "a list of words", steps.WORDS, steps.WORDS_LAST, _words),
    "number": _Kind(
        "number", "a whole number from 0", steps.NUMBER, steps.NUMBER_LAST, lambda rng: rng.randint(0, 9999)
    ),
}
EMPTY = {"numbers": [], "text": "", "words": [], "number": 0}


def make_task(seed: int | None, kind: str, depth: int, examples: int, hidden: int) -> Task:
    """A task of `depth` steps and a last one; `kind` is one of KINDS, or "any"."""
    rng = random.Random(seed)
    name = rng.choice(sorted(KINDS)) if kind == "any" else kind
    made = KINDS[name]
    while True:
        inputs = _inputs(name, examples + hidden, rng)
        makers = [*rng.sample(made.inner, depth), rng.choice(made.last)]
        chosen = [make(rng) for make in makers]
        cases = [((value,), _run(chosen, value)) for value in inputs]
        shown, kept = cases[:examples], cases[examples:]
        if _tells(chosen, kept):
            text = _described(made, chosen, shown)
            return Task(text, tuple(shown), tuple(kept), _source(made.argument, chosen))


def _inputs(name: str, count: int, rng: random.Random) -> list[Any]:
    """Different ones; the empty one is among those that are hidden, at the end."""
    found: dict[str, Any] = {}
    while len(found) < count - 1:
        value = KINDS[name].draw(rng)
        if value != EMPTY[name]:
            found[repr(value)] = value
    return [*found.values(), EMPTY[name]]


def _run(chosen: list[Step], value: Any) -> Any:
    for step in chosen:
        value = step.apply(value)
    return value


def _tells(chosen: list[Step], cases: list[Case]) -> bool:
    """Whether the cases tell this function from a constant, from its argument, and from itself without a step."""
    answers = [repr(expected) for _, expected in cases]
    most = MOST_ALIKE * len(cases)
    if max(Counter(answers).values()) > most:
        return False
    if sum(repr(arguments[0]) == answer for (arguments, _), answer in zip(cases, answers, strict=True)) > most:
        return False
    for left_out in range(len(chosen) - 1):
        rest = chosen[:left_out] + chosen[left_out + 1 :]
        other = [repr(_run(rest, arguments[0])) for arguments, _ in cases]
        if sum(a != b for a, b in zip(other, answers, strict=True)) < LEAST_DIFFERENT * len(cases):
            return False
    return True


def _described(made: _Kind, chosen: list[Step], shown: list[Case]) -> str:
    lines = [f"Write a Python function {NAME}({made.argument}). It gets {made.gets} and does this, in this order:"]
    lines += [f"{number}. {step.text}" for number, step in enumerate(chosen, 1)]
    lines += [f"{NAME}({arguments[0]!r}) == {expected!r}" for arguments, expected in shown]
    return "\n".join(lines)


def _source(argument: str, chosen: list[Step]) -> str:
    body = [f"    x = {step.source}" for step in chosen[:-1]]
    return "\n".join([f"def {NAME}({argument}):", f"    x = {argument}", *body, f"    return {chosen[-1].source}", ""])
