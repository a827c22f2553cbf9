"""Search a local corpus, read documents, and answer a question that needs several of them."""

from __future__ import annotations

import random
import re
import unicodedata
from functools import lru_cache
from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl_envs._common import Range, call, quoted, settle
from agentrl_envs.retrieval.corpus import Question, World, make_question, make_world
from agentrl_envs.retrieval.index import Index, load_bm25s

KNOBS: dict[str, Range] = {"hops": (1, 4), "documents": (30, 300), "asides": (0, 4), "max_calls": (0, 100)}
RESULTS = 5  # of one search
USED, WAY = 0.05, 0.35  # for a search that found something; the most for the documents of the way
LISTED = 0.25  # of the worth of a document that was read, for one that a search listed
_FILLERS = frozenset({"the", "a", "an", "in", "river"})


class Retrieval(Environment):
    """A made-up world of people, towns and companies, one document each; nothing in it can be known from elsewhere.

    Args:
        hops: Documents that must be read one after another, 1 to 4.
        documents: Of the corpus, 30 to 300.
        asides: Sentences of each document that answer no question, 0 to 4.
        max_calls: Tool calls after which the episode is over, 1 to 100; 0: 6 and 4 for each hop.

    Raises:
        MissingDependency: The package bm25s is not installed (extra `search`).
    """

    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, hops: int = 2, documents: int = 60, asides: int = 2, max_calls: int = 0) -> None:
        load_bm25s()
        self._defaults = settle(KNOBS, {}, hops=hops, documents=documents, asides=asides, max_calls=max_calls)
        self._key = (0, 30, 0)
        self._question = Question("", "", ())
        self._listed: set[str] = set()
        self._read: set[str] = set()
        self._calls = self._max_calls = 0
        self._right = False

    def reset(
        self,
        seed: int | None = None,
        hops: int | None = None,
        documents: int | None = None,
        asides: int | None = None,
        max_calls: int | None = None,
        **row: Any,
    ) -> str:
        """A question over a corpus; both depend on the seed and the difficulty only."""
        knobs = settle(KNOBS, self._defaults, hops=hops, documents=documents, asides=asides, max_calls=max_calls)
        rng = random.Random(seed)
        self._key = (rng.getrandbits(64), knobs["documents"], knobs["asides"])
        self._question = make_question(self._world, knobs["hops"], rng)
        self._listed, self._read = set(), set()
        self._calls, self._max_calls = 0, knobs["max_calls"] or 6 + 4 * knobs["hops"]
        self._right = self.done = False
        return (
            f"{self._question.text}\nThe answer stands in {knobs['documents']} documents, each about a person, a town "
            f"or a company: search for them, read them, then answer in a word or two. Calls: {self._max_calls}."
        )

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: Words to look for, for example a name.

        Returns:
            The best documents: number, title, kind.
        """
        if self.done:
            return "The episode is over."
        self._count()
        found = _index(self._key).search(query[:400], RESULTS)
        if not found:
            return f"no document has a word of {quoted(query)}; search for a name"
        documents = [(place, self._world.documents[place]) for place in found]
        self._listed |= {document.title for _, document in documents}
        return "\n".join(f"d{place + 1}: {document.title}, {document.kind}" for place, document in documents)

    def read(self, document: str) -> str:
        """Read a document.

        Args:
            document: Its number from a search, for example d12, or its title.

        Returns:
            Its text.
        """
        if self.done:
            return "The episode is over."
        self._count()
        wanted = document.strip().casefold()
        for place, found in enumerate(self._world.documents):
            if wanted in (f"d{place + 1}", found.title.casefold()):
                self._read.add(found.title)
                return " ".join(found.sentences)
        count = len(self._world.documents)
        return f"there is no document {quoted(document)}; give a number, d1 to d{count}, from a search"

    def answer(self, text: str) -> str:
        """Answer the question. This ends the episode.

        Args:
            text: The answer in a word or two, for example a name or a year.

        Returns:
            Whether it is right.
        """
        if self.done:
            return "The episode is over."
        self.done = True
        self._right = normalised(text) == normalised(self._question.answer)
        return "right" if self._right else "wrong"

    def get_reward(self) -> float:
        """1 for the right answer; else 0.05 for a search that found something, up to 0.35 for the way's documents."""
        if self._right:
            return 1.0
        way = self._question.way
        worth = sum(1.0 if t in self._read else LISTED if t in self._listed else 0.0 for t in way)
        return USED * bool(self._listed) + WAY * worth / max(1, len(way))

    @property
    def _world(self) -> World:
        return make_world(*self._key)

    def _count(self) -> None:
        self._calls += 1
        self.done = self._calls >= self._max_calls

    def _gold(self) -> dict[str, Any] | str:
        """Each document of the way is searched by its title and read; the answer stands in the last."""
        if self.done:
            return "Done."
        for title in self._question.way:
            if title in self._read:
                continue
            if title not in self._listed:
                return call("search", query=title)
            place = next(i for i, document in enumerate(self._world.documents) if document.title == title)
            return call("read", document=f"d{place + 1}")
        return call("answer", text=self._question.answer)


@lru_cache(maxsize=64)
def _index(key: tuple[int, int, int]) -> Index:
    return Index([" ".join((document.title, *document.sentences)) for document in make_world(*key).documents])


def normalised(text: str) -> str:
    """The text without case, punctuation, articles, "in" and "river": what two equal answers have in common.

    >>> normalised(" The River Olmar. "), normalised("olmar"), normalised("in 1873")
    ('olmar', 'olmar', '1873')
    """
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text[:400]).casefold())
    return " ".join(word for word in words if word not in _FILLERS)
