"""Guesses of how a turn goes on, so that one forward can draw several tokens. They change the speed, never an id.

Turns of one policy and its tools repeat each other: the frame of a tool call, names, endings. A guessed token is fed
behind the last drawn one; every position is drawn with its own random number as ever, and what was drawn behind a
wrong guess is thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

_DEPTH = 64  # tokens of a turn that are remembered
_MOST_NODES = 65_536  # in memory; then all is forgotten, which also keeps up with a policy that changes
_MOST_TURNS = 4_096
_EVIDENCE = 4  # turns that a guess rests on, at least
_CHANCE = 0.75  # that the whole guess is right, at least
_LONGEST = 16  # tokens guessed at once
_FIXED = 64  # a forward's fixed cost, in tokens: launches on a GPU, modules and reading the weights on a CPU


class Node:
    """The turns that began with the same tokens."""

    __slots__ = ("count", "likely", "next")

    def __init__(self) -> None:
        self.count = 0  # of turns
        self.next: dict[int, Node] = {}
        self.likely: int | None = None  # the most frequent next token


class Drafts:
    """What the latest turns said, from their first token on.

    >>> drafts = Drafts()
    >>> for _ in range(4):
    ...     drafts.learn([1, 2, 3, 9])
    >>> drafts.guess(drafts.root, 8), drafts.guess(drafts.root.next[1], 1), drafts.guess(None, 8)
    ([1, 2, 3], [2], [])
    """

    def __init__(self) -> None:
        self.root = Node()
        self._nodes = 0

    def clear(self) -> None:
        """Nothing is remembered."""
        self.root = Node()
        self._nodes = 0

    def learn(self, ids: Sequence[int]) -> None:
        """One more turn is remembered."""
        if self._nodes >= _MOST_NODES or self.root.count >= _MOST_TURNS:
            self.clear()
        node = self.root
        node.count += 1
        for token in ids[:_DEPTH]:
            child = node.next.get(token)
            if child is None:
                child = node.next[token] = Node()
                self._nodes += 1
            child.count += 1
            if node.likely != token and (node.likely is None or child.count > node.next[node.likely].count):
                node.likely = token
            node = child

    def guess(self, node: Node | None, most: int) -> list[int]:
        """What probably follows after `node`: at most `most` tokens, none where turns differ."""
        guessed: list[int] = []
        if node is None:
            return guessed
        least = max(_EVIDENCE, _CHANCE * node.count)
        while node.likely is not None and len(guessed) < min(most, _LONGEST):
            child = node.next[node.likely]
            if child.count < least:
                break
            guessed.append(node.likely)
            node = child
        if guessed and not node.next:
            guessed.pop()  # the turn probably ends with it: nothing is drawn behind it, so it need not be fed
        return guessed


def worthwhile(lengths: Iterable[int]) -> int:
    """How many guessed tokens a forward takes at most, where its rows have guesses of these `lengths`.

    All rows are as wide as the widest, so that one row's long guess must not be paid by all.

    >>> worthwhile([3] * 64), worthwhile([0] * 63 + [16]), worthwhile([16])
    (3, 0, 16)
    """
    counts = Counter(lengths)
    rows = sum(counts.values())
    best, most = 0.0, 0
    for length in sorted(counts | {0: 0}):
        drawn = sum((min(guess, length) + 1) * count for guess, count in counts.items())
        if (rate := drawn / (_FIXED + rows * (length + 1))) > best:
            best, most = rate, length
    return most
