"""Search over documents by BM25, through the library bm25s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from agentrl.errors import ConfigurationError, MissingDependency

MOST_QUERY, MOST_RESULTS, SNIPPET, MOST_READ = 400, 10, 160, 8000  # characters, but for the results


class Search:
    """Documents by name. Its methods are tools; nothing in it changes, so that any number of rollouts may share it.

    Args:
        documents: Texts by name, at least one.
        results: That one search lists, 1 to 10.

    Raises:
        MissingDependency: The package bm25s is not installed (extra `search`).
        ConfigurationError: There are no documents, or a text is none.
    """

    def __init__(self, documents: Mapping[str, str], *, results: int = 5) -> None:
        if not documents or not all(isinstance(text, str) for text in documents.values()):
            raise ConfigurationError("Search needs a mapping of names to texts, with at least one.")
        if not 1 <= results <= MOST_RESULTS:
            raise ConfigurationError(f"results must be from 1 to {MOST_RESULTS}, not {results}.")
        self._texts, self._names, self._results = dict(documents), list(documents), results
        self._bm25 = _bm25s().BM25(backend="numpy")
        self._bm25.index(_words([f"{name} {text}" for name, text in documents.items()]), show_progress=False)

    @classmethod
    def _from_folder(cls, folder: Path, pattern: str) -> dict[str, str]:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_text("utf-8", "replace") for path in found}

    @classmethod
    def folder(cls, folder: str | Path, pattern: str = "**/*.txt", *, results: int = 5) -> Self:
        """A search over the files of a folder, whose names are their paths in it."""
        documents = cls._from_folder(Path(folder), pattern)
        if not documents:
            raise ConfigurationError(f"No file in {folder} fits {pattern!r}.")
        return cls(documents, results=results)

    def tools(self) -> list[Callable[..., str]]:
        """`search` and `read`."""
        return [self.search, self.read]

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: Words to look for.

        Returns:
            The best documents, each with its name and a part of its text.
        """
        found = self.find(query)
        if not found:
            return "No document has any of these words; try others."
        return "\n".join(f"{name}: {self._part(name, query)}" for name in found)

    def read(self, document: str) -> str:
        """Read a document.

        Args:
            document: Its name, as a search shows it.

        Returns:
            Its text.
        """
        text = self._texts.get(document.strip())
        if text is None:
            shown = " ".join(document.split())[:60]
            return f"There is no document '{shown}'. Give a name that a search has shown."
        return text if len(text) <= MOST_READ else f"{text[:MOST_READ]}\n[cut: it has {len(text)} characters]"

    def find(self, query: str) -> list[str]:
        """Names of the best documents, the best first; of equal ones the earlier. Not a tool: for your own code."""
        words = [word for word in _words([query[:MOST_QUERY]])[0] if word in self._bm25.vocab_dict]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
        return [self._names[place] for place in order[: self._results] if scores[place] > 0]

    def _part(self, name: str, query: str) -> str:
        """The text around the first word of the query that is in it."""
        text = " ".join(self._texts[name].split())
        places = [place for word in _words([query])[0] if (place := text.casefold().find(word)) >= 0]
        start = max(0, min(places, default=0) - SNIPPET // 4)
        part = text[start : start + SNIPPET]
        return f"{'...' if start else ''}{part}{'...' if start + SNIPPET < len(text) else ''}"


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise MissingDependency("bm25s", "search", "The tool Search") from error
    return bm25s


def _words(texts: list[str]) -> list[list[str]]:
    """The words of each text in lower case, without the most frequent ones of English."""
    return _bm25s().tokenize(texts, token_pattern=r"(?u)\w+", stopwords="en", return_ids=False, show_progress=False)
