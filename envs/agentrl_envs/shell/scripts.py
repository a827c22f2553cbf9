"""Small scripts, each with ways to be broken, inputs, and a second implementation that tells what they should print."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("ana", "ben", "cleo", "dov", "eva", "finn", "gus", "hana")
WORDS = ("river", "stone", "lamp", "orchard", "tin", "candle", "a", "window", "oak", "thunder")


@dataclass(frozen=True, slots=True)
class Broken:
    """`told` says what the script should do; `bugs` are (right, wrong) parts of its source."""

    told: str
    source: str
    bugs: tuple[tuple[str, str], ...]
    draw: Callable[[random.Random], list[str]]  # lines of an input
    run: Callable[[list[str]], list[str]]  # lines that should be printed


def _sales(rng: random.Random) -> list[str]:
    names = rng.sample(NAMES, 4)
    return [f"{name},{rng.randint(2, 90)}" for name in rng.sample(names * 3, 12)]  # each name three times, unsorted


def _totals(lines: list[str]) -> list[str]:
    pairs = [line.split(",") for line in lines]
    names = sorted({name for name, _ in pairs})
    return [f"{name} {sum(int(amount) for other, amount in pairs if other == name)}" for name in names]


def _sentences(rng: random.Random) -> list[str]:
    drawn = [" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) for _ in range(rng.randint(4, 8))]
    return [*drawn[:2], "", *drawn[2:]]


def _measures(lines: list[str]) -> list[str]:
    words = " ".join(lines).split()
    longest = sorted(words, key=lambda word: (-len(word), word))[0]
    return [f"lines {sum(1 for line in lines if line)}", f"words {len(words)}", f"longest {longest}"]


def _readings(rng: random.Random) -> list[str]:
    low, high = rng.sample(range(1, 40), 3), rng.sample(range(60, 99), 3)
    return [str(n) for n in rng.sample(low + high, 6)]


def _above(lines: list[str]) -> list[str]:
    numbers = [int(line) for line in lines]
    mean = sum(numbers) / len(numbers)
    above = [n for n in numbers if n > mean]
    return [f"mean {mean:.2f}", *map(str, sorted(above)), f"{len(above)} of {len(numbers)}"]


SCRIPTS = (
    Broken(
        "reads lines such as 'ana,12' from standard input and should print, for each name in the order of the "
        "alphabet, the name and the sum of its amounts, such as 'ana 30'",
        """import sys

totals = {}
for line in sys.stdin:
    name, amount = line.strip().split(",")
    totals[name] = totals.get(name, 0) + int(amount)
for name in sorted(totals):
    print(name, totals[name])
""",
        (
            ("totals.get(name, 0) + int(amount)", "int(amount)"),
            ("totals.get(name, 0)", "totals.get(name, 1)"),
            ("int(amount)", "amount"),
            ('split(",")', 'split(";")'),
            ("sorted(totals)", "sorted(totals, key=totals.get, reverse=True) + ['total']"),
            ("in sys.stdin:", "in sys.stdin"),
            ("print(name, totals[name])", "print(totals[name], name)"),
        ),
        _sales,
        _totals,
    ),
    Broken(
        "reads a text from standard input and should print three lines: how many lines are not empty, such as "
        "'lines 4', how many words there are, such as 'words 17', and the longest word, of several the first in the "
        "order of the alphabet, such as 'longest candle'",
        """import sys

lines = [line.strip() for line in sys.stdin]
lines = [line for line in lines if line]
words = [word for line in lines for word in line.split()]
print("lines", len(lines))
print("words", len(words))
print("longest", min(words, key=lambda word: (-len(word), word)))
""",
        (
            ("lines = [line for line in lines if line]\n", ""),
            ("for word in line.split()", "for word in line"),
            ("len(words)", "len(set(words)) - 1"),
            ("(-len(word), word)", "(len(word), word)"),
            ("import sys\n", ""),
            ('"longest", min', '"longest ", min'),
        ),
        _sentences,
        _measures,
    ),
    Broken(
        "reads one whole number a line from standard input and should print their mean with two digits after the "
        "point, such as 'mean 41.50', then each number greater than the mean on a line of its own, the smallest first, "
        "then how many of all these were, such as '3 of 6'",
        """import sys

numbers = [int(line) for line in sys.stdin]
mean = sum(numbers) / len(numbers)
above = sorted(number for number in numbers if number > mean)
print(f"mean {mean:.2f}")
for number in above:
    print(number)
print(f"{len(above)} of {len(numbers)}")
""",
        (
            ("number > mean", "number < mean"),
            ("/ len(numbers)", "// len(numbers) + 1"),
            ("int(line)", "line"),
            ("in above:", "in above[1:]:"),
            ("print(number)", "print(numbers)"),
            ("{len(above)} of", "{len(numbers) - len(above) + 1} of"),
        ),
        _readings,
        _above,
    ),
)
