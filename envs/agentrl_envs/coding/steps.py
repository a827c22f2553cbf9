"""What a function of a task may do, step by step: in words, as Python source, and as a function that does it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

VOWELS = "aeiouAEIOU"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `source` is an expression of x, and `apply` does the same without it."""

    text: str
    source: str
    apply: Callable[[Any], Any]


Maker = Callable[[random.Random], Step]


def _plain(text: str, source: str, apply: Callable[[Any], Any]) -> Maker:
    return lambda rng: Step(text, source, apply)


def _with(low: int, high: int, text: str, source: str, apply: Callable[[Any, int], Any]) -> Maker:
    def make(rng: random.Random) -> Step:
        k = rng.randint(low, high)
        return Step(text.format(k=k), source.replace("{k}", str(k)), lambda x: apply(x, k))

    return make


def _letter(text: str, source: str, apply: Callable[[Any, str], Any]) -> Maker:
    def make(rng: random.Random) -> Step:
        c = rng.choice("aeinorst")
        return Step(text.format(c=c), source.replace("{c}", repr(c)), lambda x: apply(x, c))

    return make


def _shifted(text: str, k: int) -> str:
    return text.translate({ord(a): LETTERS[(i + k) % 26] for i, a in enumerate(LETTERS)})


def _kept(values: Sequence[Any], keep: Callable[[Any], bool]) -> list[Any]:
    return list(filter(keep, values))


NUMBERS: tuple[Maker, ...] = (
    _with(2, 5, "Keep only the numbers that are divisible by {k}.", "[n for n in x if n % {k} == 0]",
          lambda x, k: _kept(x, lambda n: not n % k)),
    _with(2, 4, "Drop the numbers that are divisible by {k}.", "[n for n in x if n % {k} != 0]",
          lambda x, k: _kept(x, lambda n: bool(n % k))),
    _with(-3, 9, "Keep only the numbers greater than {k}.", "[n for n in x if n > {k}]",
          lambda x, k: _kept(x, lambda n: n > k)),
    _with(2, 9, "Add {k} to each number.", "[n + {k} for n in x]", lambda x, k: list(map(k.__add__, x))),
    _with(2, 5, "Multiply each number by {k}.", "[n * {k} for n in x]", lambda x, k: list(map(k.__mul__, x))),
    _with(4, 9, "Replace each number n by the remainder of n divided by {k} (never negative, as % in Python).",
          "[n % {k} for n in x]", lambda x, k: [n - k * (n // k) for n in x]),
    _plain("Replace each number by its absolute value.", "[abs(n) for n in x]", lambda x: [max(n, -n) for n in x]),
    _plain("Square each number.", "[n * n for n in x]", lambda x: [n**2 for n in x]),
    _plain("Reverse the order.", "x[::-1]", lambda x: list(reversed(x))),
    _plain("Sort the numbers, the smallest first.", "sorted(x)", sorted),
    _plain("Sort the numbers, the largest first.", "sorted(x, reverse=True)", lambda x: sorted(x)[::-1]),
    _plain("Drop repeated numbers: of equal ones only the first stays.", "list(dict.fromkeys(x))",
           lambda x: [n for i, n in enumerate(x) if n not in x[:i]]),
    _with(2, 3, "Keep only the numbers at the positions 0, {k}, 2 * {k} and so on.", "x[::{k}]",
          lambda x, k: [n for i, n in enumerate(x) if not i % k]),
    _with(1, 3, "Move the first {k} numbers to the end (all, where there are fewer), in the same order.",
          "x[{k}:] + x[:{k}]", lambda x, k: [*x[k:], *x[:k]]),
    _plain("Replace each number by the sum of all numbers up to it, itself included.",
           "[sum(x[:i + 1]) for i in range(len(x))]", lambda x: list(accumulate(x))),
    _plain("Replace the list by the differences of neighbours: each number but the first, minus the one before it.",
           "[b - a for a, b in zip(x, x[1:])]", lambda x: [x[i] - x[i - 1] for i in range(1, len(x))]),
    _plain("Replace each negative number by 0.", "[max(n, 0) for n in x]", lambda x: [n if n > 0 else 0 for n in x]),
)  # fmt: skip
NUMBERS_LAST: tuple[Maker, ...] = (
    _plain("Return the list.", "x", list),
    _plain("Return the sum of the numbers.", "sum(x)", lambda x: next(reversed([0, *accumulate(x)]))),
    _plain("Return the largest number, or 0 if there is none.", "max(x, default=0)",
           lambda x: sorted(x)[-1] if x else 0),
    _plain("Return the largest number minus the smallest, or 0 if there is none.", "max(x) - min(x) if x else 0",
           lambda x: sorted(x)[-1] - sorted(x)[0] if x else 0),
    _plain("Return how many numbers there are, and their sum, as a list of two numbers.", "[len(x), sum(x)]",
           lambda x: [len(x), sum(x)]),
)  # fmt: skip

TEXT: tuple[Maker, ...] = (
    _plain("Reverse the text.", "x[::-1]", lambda x: "".join(reversed(x))),
    _plain("Make capital letters small and small letters capital.", "x.swapcase()",
           lambda x: "".join(c.lower() if c.isupper() else c.upper() for c in x)),
    _plain("Make all letters small.", "x.lower()", str.casefold),
    _plain("Remove all vowels (a, e, i, o, u, small and capital).", "''.join(c for c in x if c not in 'aeiouAEIOU')",
           lambda x: x.translate(dict.fromkeys(map(ord, VOWELS)))),
    _plain("Remove all digits.", "''.join(c for c in x if not c.isdigit())",
           lambda x: x.translate(dict.fromkeys(range(48, 58)))),
    _plain("Write each character twice.", "''.join(c * 2 for c in x)", lambda x: "".join(c + c for c in x)),
    _with(2, 3, "Keep only the characters at the positions 0, {k}, 2 * {k} and so on.", "x[::{k}]",
          lambda x, k: "".join(c for i, c in enumerate(x) if not i % k)),
    _with(1, 4, "Move the first {k} characters to the end (all, where there are fewer), in the same order.",
          "x[{k}:] + x[:{k}]", lambda x, k: "".join([x[k:], x[:k]])),
    _with(1, 9, "Replace each small letter by the letter {k} places after it in the alphabet; after z comes a.",
          "''.join(chr((ord(c) - 97 + {k}) % 26 + 97) if 'a' <= c <= 'z' else c for c in x)", _shifted),
    _letter("Replace each {c} by an asterisk (*).", "x.replace({c}, '*')", lambda x, c: "*".join(x.split(c))),
    _plain("Reverse the order of the words, which are separated by one space each.", "' '.join(x.split(' ')[::-1])",
           lambda x: " ".join(reversed(x.split(" ")))),
    _plain("Write each word backwards; words are separated by one space each and keep their order.",
           "' '.join(w[::-1] for w in x.split(' '))", lambda x: " ".join(reversed(x[::-1].split(" ")))),
    _plain("Of equal characters next to each other keep one.",
           "''.join(c for i, c in enumerate(x) if i == 0 or x[i - 1] != c)",
           lambda x: "".join(c for c, _ in groupby(x))),
    _plain("Sort the characters by their code points.", "''.join(sorted(x))",
           lambda x: "".join(c * x.count(c) for c in sorted(set(x)))),
)  # fmt: skip
TEXT_LAST: tuple[Maker, ...] = (
    _plain("Return the text.", "x", str),
    _plain("Return the words of the text, separated by spaces, as a list without empty ones.", "x.split()",
           lambda x: _kept(x.split(" "), bool)),
    _plain("Return the length of the text and its number of vowels as a list of two numbers.",
           "[len(x), sum(c in 'aeiouAEIOU' for c in x)]", lambda x: [len(x), sum(map(x.count, VOWELS))]),
    _plain("Return a dictionary from each character that occurs to how often it does.",
           "{c: x.count(c) for c in x}", lambda x: dict(Counter(x))),
)  # fmt: skip

WORDS: tuple[Maker, ...] = (
    _with(3, 5, "Keep only the words with more than {k} letters.", "[w for w in x if len(w) > {k}]",
          lambda x, k: _kept(x, lambda w: bool(w[k:]))),
    _letter("Drop the words that contain {c}.", "[w for w in x if {c} not in w]",
            lambda x, c: _kept(x, lambda w: not w.count(c))),
    _letter("Add {c} to the end of each word.", "[w + {c} for w in x]", lambda x, c: [f"{w}{c}" for w in x]),
    _plain("Write each word backwards.", "[w[::-1] for w in x]", lambda x: ["".join(reversed(w)) for w in x]),
    _plain("Write each word in capital letters.", "[w.upper() for w in x]", lambda x: list(map(str.upper, x))),
    _plain("Sort the words as Python sorts text.", "sorted(x)", sorted),
    _plain("Sort the words by length, the shortest first; words of the same length keep their order.",
           "sorted(x, key=len)", lambda x: [w for k in range(99) for w in x if len(w) == k]),
    _plain("Drop repeated words: of equal ones only the first stays.", "list(dict.fromkeys(x))",
           lambda x: [w for i, w in enumerate(x) if w not in x[:i]]),
    _with(2, 4, "Keep only the first {k} letters of each word.", "[w[:{k}] for w in x]",
          lambda x, k: ["".join(c for c, _ in zip(w, range(k), strict=False)) for w in x]),
    _with(2, 3, "Keep only the words at the positions 0, {k}, 2 * {k} and so on.", "x[::{k}]",
          lambda x, k: [w for i, w in enumerate(x) if not i % k]),
    _plain("Reverse the order of the words.", "x[::-1]", lambda x: list(reversed(x))),
)  # fmt: skip
WORDS_LAST: tuple[Maker, ...] = (
    _plain("Return the list.", "x", list),
    _plain("Return the words as one text with a hyphen (-) between them.", "'-'.join(x)",
           lambda x: "".join(f"-{w}" for w in x)[1:]),
    _plain("Return the longest word, of several the first, or '' if there is none.", "max(x, key=len, default='')",
           lambda x: sorted(x, key=len, reverse=True)[0] if x else ""),
    _plain("Return a list with the length of each word.", "[len(w) for w in x]", lambda x: list(map(len, x))),
    _plain("Return a dictionary from each first letter that occurs to how many words begin with it.",
           "{w[0]: sum(v[0] == w[0] for v in x) for w in x}", lambda x: dict(Counter(w[0] for w in x))),
)  # fmt: skip

NUMBER: tuple[Maker, ...] = (
    _with(3, 9, "Multiply it by {k}.", "x * {k}", lambda x, k: sum([x] * k)),
    _with(11, 99, "Add {k}.", "x + {k}", lambda x, k: x - -k),
    _with(100, 999, "Replace it by its remainder when divided by {k}.", "x % {k}", lambda x, k: x - x // k * k),
    _with(2, 7, "Divide it by {k} and drop what is after the point.", "x // {k}", lambda x, k: (x - x % k) // k),
    _plain("Reverse its decimal digits (zeros that come to the front go away).", "int(str(x)[::-1])",
           lambda x: sum(int(d) * 10**i for i, d in enumerate(str(x)))),
    _plain("Add the sum of its decimal digits.", "x + sum(int(d) for d in str(x))", lambda x: x + sum(digits(x))),
    _plain("If it is even, halve it; otherwise multiply it by 3 and add 1.", "x // 2 if x % 2 == 0 else 3 * x + 1",
           lambda x: 3 * x + 1 if x & 1 else x >> 1),
    _with(1, 63, "Replace it by its bitwise exclusive or with {k}.", "x ^ {k}", lambda x, k: (x | k) - (x & k)),
    _plain("Square it.", "x * x", lambda x: x**2),
)  # fmt: skip
NUMBER_LAST: tuple[Maker, ...] = (
    _plain("Return the number.", "x", int),
    _plain("Return its decimal digits as a list of numbers, from left to right.", "[int(d) for d in str(x)]",
           lambda x: digits(x)),
    _plain("Return it in binary, as a text of 0 and 1.", "bin(x)[2:]", "{:b}".format),
    _plain("Return the sum of its decimal digits.", "sum(int(d) for d in str(x))", lambda x: sum(digits(x))),
)  # fmt: skip


def digits(number: int) -> list[int]:
    """The decimal digits from left to right.

    >>> digits(409), digits(0)
    ([4, 0, 9], [0])
    """
    found = [number % 10]
    while number := number // 10:
        found.insert(0, number % 10)
    return found
