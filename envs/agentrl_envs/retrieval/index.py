"""Search over documents by BM25, through the library bm25s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.errors import MissingDependency

_PATTERN = r"(?u)\w+"


def load_bm25s() -> Any:
    """The library.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        import bm25s
    except ImportError as error:
        raise MissingDependency("bm25s", "search", "The environment Retrieval") from error
    return bm25s


class Index:
    """Texts that can be searched; where scores are equal, the earlier text comes first."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25 = load_bm25s().BM25(backend="numpy")
        self._bm25.index(_words(texts), show_progress=False)

    def search(self, query: str, most: int) -> list[int]:
        """Places of the texts that share a word with the query, the best first, at most `most`."""
        words = [word for word in _words([query])[0] if word in self._bm25.vocab_dict]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
        return [place for place in order[:most] if scores[place] > 0]


def _words(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text in lower case, without the most frequent ones of English."""
    return load_bm25s().tokenize(
        list(texts), token_pattern=_PATTERN, stopwords="en", return_ids=False, show_progress=False
    )
