"""Stories about a stock of things that changes step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

CEILING = 10**9  # of every number on the way
THEMES = (
    ("warehouse", "bottles"), ("library", "books"), ("farm", "apples"), ("bakery", "rolls"), ("museum shop", "cards"),
    ("workshop", "screws"), ("harbor", "barrels"), ("school", "pencils"), ("nursery", "seedlings"), ("mill", "loaves"),
)  # fmt: skip
ASIDES = (
    "The building is {n} years old.", "The road there is {n} km long.", "A ticket costs {n} cents.",
    "The keeper has {n} keys.", "It opened with {n} visitors.", "The roof has {n} tiles.",
)  # fmt: skip
PERCENT = (10, 20, 25, 40, 50, 60, 75)


@dataclass(frozen=True, slots=True)
class Problem:
    """A story, the stock after each of its steps, and an expression for each step; the last stock is the answer."""

    text: str
    milestones: tuple[int, ...]
    expressions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One sentence, how its result is computed, and the result."""

    sentence: str
    expression: str
    result: int


def make_problem(seed: int | None, depth: int, largest: int, distractors: int) -> Problem:
    """A story that depends on the arguments only; every stock in it is a whole number from 1 to 10**9.

    >>> problem = make_problem(3, depth=2, largest=20, distractors=0)
    >>> print(problem.text)
    The bakery has 9 rolls. Then the number of rolls grows to 12 times what it was. Then 3 boxes with 3 rolls each are \
delivered. How many rolls does it have in the end?
    >>> problem.milestones, problem.expressions
    ((108, 117), ('9 * 12', '108 + 3 * 3'))
    """
    rng = random.Random(seed)
    place, things = rng.choice(THEMES)
    stock = rng.randint(max(5, largest // 4), largest)
    sentences = [f"The {place} has {stock} {things}."]
    steps: list[Step] = []
    for _ in range(depth):
        step = _draw_step(rng, stock, largest, things)
        steps.append(step)
        sentences.append(step.sentence)
        stock = step.result
    for aside in rng.sample(ASIDES, distractors):
        sentences.insert(rng.randint(1, len(sentences)), aside.format(n=rng.randint(2, largest)))
    sentences.append(f"How many {things} does it have in the end?")
    return Problem(" ".join(sentences), tuple(s.result for s in steps), tuple(s.expression for s in steps))


def _draw_step(rng: random.Random, stock: int, largest: int, things: str) -> Step:
    """A step that is possible from this stock and changes it."""
    while True:
        step = rng.choice(MAKERS)(rng, stock, largest, things)
        if step is not None and 1 <= step.result <= CEILING and step.result != stock:
            return step


def _add(rng: random.Random, stock: int, largest: int, things: str) -> Step:
    n = rng.randint(2, largest)
    return Step(f"Then {n} more {things} come in.", f"{stock} + {n}", stock + n)


def _take(rng: random.Random, stock: int, largest: int, things: str) -> Step | None:
    if stock < 4:
        return None
    n = rng.randint(2, min(largest, stock - 1))
    return Step(f"Then {n} {things} are sold.", f"{stock} - {n}", stock - n)


def _times(rng: random.Random, stock: int, largest: int, things: str) -> Step:
    n = rng.randint(3, 12)
    return Step(f"Then the number of {things} grows to {n} times what it was.", f"{stock} * {n}", stock * n)


def _boxes(rng: random.Random, stock: int, largest: int, things: str) -> Step:
    boxes, each = rng.randint(3, max(4, largest // 3)), rng.randint(3, max(4, largest // 2))
    sentence = f"Then {boxes} boxes with {each} {things} each are delivered."
    return Step(sentence, f"{stock} + {boxes} * {each}", stock + boxes * each)


def _share(rng: random.Random, stock: int, largest: int, things: str) -> Step | None:
    divisors = [d for d in range(2, 13) if stock % d == 0 and stock > d]
    if not divisors:
        return None
    n = rng.choice(divisors)
    sentence = f"Then the {things} are split equally among {n} places, and it keeps one share."
    return Step(sentence, f"{stock} / {n}", stock // n)


def _percent(rng: random.Random, stock: int, largest: int, things: str) -> Step | None:
    shares = [p for p in PERCENT if stock * p % 100 == 0]
    if not shares:
        return None
    p = rng.choice(shares)
    sentence = f"Then {p} percent of the {things} are given away."
    return Step(sentence, f"{stock} - {stock} * {p} / 100", stock - stock * p // 100)


MAKERS: tuple[Callable[[random.Random, int, int, str], Step | None], ...] = (
    _add, _take, _times, _boxes, _share, _percent,
)  # fmt: skip
