"""Text to ids and back, where only the template can place a control token."""

from __future__ import annotations

import functools
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

from agentrl.errors import ConfigurationError

Segment = str | int
"""A stretch of plain text, or the id of a control token that the template placed."""

_CACHED_TEXT = 256  # characters; longer texts are not worth remembering
_CACHE_SIZE = 8192


def _is_vocabulary(token: dict[str, Any]) -> bool:
    # People add whole words, and some tokenizers add runs of spaces; those carry no control and stay ordinary text.
    return not token["special"] and all(c.isalnum() or c.isspace() or c in "_-'.,&" for c in token["content"])


def without_lone_surrogates(text: str) -> str:
    """The text with code points that UTF-8 cannot write replaced by U+FFFD; JSON escapes can smuggle them in."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string and key changed.

    >>> map_strings({"a": ["b", 1]}, str.upper)
    {'A': ['B', 1]}
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(k)): map_strings(v, change) for k, v in value.items()}
    return [map_strings(v, change) for v in value] if isinstance(value, list | tuple) else value


def copy_json(value: Any) -> Any:
    """A JSON value in which no dict or list is the same object as before.

    >>> copy_json({"a": ["b", 1]})
    {'a': ['b', 1]}
    """
    if isinstance(value, list):
        return [item if isinstance(item, str) else copy_json(item) for item in value]
    if isinstance(value, dict):
        return {key: item if isinstance(item, str) else copy_json(item) for key, item in value.items()}
    return value


class Codec:
    """A tokenizer taken apart: its control tokens on one side, plain text on the other.

    A control token is an added token that is special or holds a character other than letters, digits, spaces and
    ``_-'.,&``. Plain text is encoded by a clone of the tokenizer that has none of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str"):
            raise ConfigurationError(
                f"{type(tokenizer).__name__} is not a fast tokenizer. Load it with AutoTokenizer, or save a "
                "tokenizer.json for it."
            )
        self._backend = backend  # for decoding and facts only: others switch its padding and truncation on and off
        spec = json.loads(backend.to_str())
        self._kind = spec["model"]["type"], '"ByteLevel"' in json.dumps(spec["pre_tokenizer"]), spec["normalizer"]
        added = spec["added_tokens"]
        control = [token for token in added if not _is_vocabulary(token)]
        kept = [token for token in added if _is_vocabulary(token)]
        bare = {"truncation": None, "padding": None, "post_processor": None}
        self._plain = Tokenizer.from_str(json.dumps(spec | bare | {"added_tokens": kept}))
        self._renumber = {self._plain.token_to_id(t["content"]): t["id"] for t in kept}
        self._renumber = {a: b for a, b in self._renumber.items() if a is not None and a != b}
        self.control: dict[str, int] = {token["content"]: token["id"] for token in control}
        self.tags: frozenset[str] = frozenset(token["content"] for token in control if not token["special"])
        self._names = {token: content for content, token in self.control.items()}
        unknown = getattr(tokenizer, "unk_token_id", None)
        self.control_ids: frozenset[int] = frozenset(self.control.values()) - {unknown}
        self._marker = _alternation(self.control)
        self._nonce = "qz" + secrets.token_hex(6)  # letters and digits: survives JSON, stripping and escaping
        self._guard_tables: dict[frozenset[str], tuple[re.Pattern[str] | None, dict[str, str], dict[str, str]]] = {}
        self._spelled = {f"{self._nonce}{i}z": token for i, token in enumerate(self.control)}
        self._spelled |= {
            f"{self._nonce}{i}j": json.dumps(t, ensure_ascii=False)[1:-1] for i, t in enumerate(self.control)
        }
        self._sentinel = re.compile(self._nonce + r"\d+[zj]")
        self._cache: dict[str, list[int]] = {}
        self.bos_id: int | None = self._leading_bos(tokenizer)
        # Tokens that swallow the white space beside them when a text is encoded; their segments lose it likewise.
        self._right = frozenset(token["id"] for token in control if token["rstrip"])
        self._left = frozenset(token["id"] for token in control if token["lstrip"])
        self._segments_exact = self._check_segments(control)

    # --- control tokens that untrusted text spells -------------------------------------
    def guard(self, text: str, allowed: frozenset[str] = frozenset(), *, in_json: bool = False) -> str:
        """The text with every control token that it spells, but those allowed, replaced by an inert stand-in.

        `segments` turns a stand-in back into the characters it stands for, as plain text. `in_json` is for strings
        that the template writes as JSON.
        """
        table = self._guard_tables.get(allowed)
        if table is None:
            names = {token: f"{self._nonce}{i}" for i, token in enumerate(self.control) if token not in allowed}
            raw = {token: name + "z" for token, name in names.items()}
            table = _alternation(names), raw, {token: name + "j" for token, name in names.items()}
            self._guard_tables[allowed] = table
        pattern, raw, escaped = table
        if pattern is None or pattern.search(text) is None:
            return text
        names = escaped if in_json else raw
        return pattern.sub(lambda match: names[match.group()], text)

    def segments(self, rendered: str) -> list[Segment]:
        """A rendered text as control tokens (ids) and the plain text between them, stand-ins undone."""
        if self._marker is None:
            return [self.spell(rendered)] if rendered else []
        found = self._cut(rendered)
        if not self._right and not self._left:
            return found
        for i, segment in enumerate(found):
            if isinstance(segment, str) and i and found[i - 1] in self._right:
                segment = segment.lstrip()
            if isinstance(segment, str) and found[i + 1 : i + 2] and found[i + 1] in self._left:
                segment = segment.rstrip()
            found[i] = segment
        return [segment for segment in found if segment != ""]

    def _cut(self, rendered: str) -> list[Segment]:
        assert self._marker is not None
        out: list[Segment] = []
        at = 0
        for match in self._marker.finditer(rendered):
            if match.start() > at:
                out.append(self.spell(rendered[at : match.start()]))
            out.append(self.control[match.group()])
            at = match.end()
        if at < len(rendered):
            out.append(self.spell(rendered[at:]))
        return out

    def controls(self, rendered: str, at: int = 0) -> Iterator[tuple[int, str]]:
        """Position and name of every control token in a rendered text, from `at` on."""
        for match in self._marker.finditer(rendered, at) if self._marker else ():
            yield match.start(), match.group()

    def spell(self, text: str) -> str:
        """The text with stand-ins turned back into what they stand for."""
        if self._nonce not in text:
            return text
        return self._sentinel.sub(lambda match: self._spelled[match.group()], text)

    def text_of(self, segments: Iterable[Segment]) -> str:
        """The segments as one text."""
        return "".join(s if isinstance(s, str) else self._names[s] for s in segments)

    # --- encoding ----------------------------------------------------------------------
    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered (and guarded) text. Markers that the template wrote are control tokens."""
        if not self._segments_exact and self._nonce not in rendered:
            return self._whole.encode(without_lone_surrogates(rendered), add_special_tokens=False).ids
        return self.encode_segments(self.segments(rendered))

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of segments, in order."""
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, int):
                ids.append(segment)
            else:
                ids += self.encode_plain(segment)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token, whatever it spells. Do not change the list."""
        ids = self._cache.get(text)
        if ids is not None:
            return ids
        try:
            ids = self._plain.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError):
            return self.encode_plain(without_lone_surrogates(text))
        if self._renumber:
            ids = [self._renumber.get(i, i) for i in ids]
        if not self.control_ids.isdisjoint(ids):
            ids = self._encode_leaky(text)
        if len(text) <= _CACHED_TEXT:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[text] = ids
        return ids

    def _encode_leaky(self, text: str) -> list[int]:
        # Models with a vocabulary of whole pieces (Unigram, WordLevel) know a control token's spelling even without
        # its entry among the added tokens. Shorter pieces cannot spell it; what still does is left out.
        if len(text) <= 1:
            return []
        ids: list[int] = []
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            got = self._plain.encode(part, add_special_tokens=False).ids
            got = [self._renumber.get(i, i) for i in got]
            ids += got if self.control_ids.isdisjoint(got) else self._encode_leaky(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, control tokens written out."""
        return self._backend.decode(ids, skip_special_tokens=False)

    # --- facts about the tokenizer -----------------------------------------------------
    @functools.cached_property
    def _whole(self) -> Tokenizer:
        """The tokenizer with its control tokens, without padding and truncation."""
        whole = Tokenizer.from_str(self._backend.to_str())
        whole.no_padding()
        whole.no_truncation()
        return whole

    def _as_it_is(self) -> Tokenizer:
        """An encoder like `_whole` for use at once; real vocabularies take a second to copy."""
        clean = self._backend.padding is None and self._backend.truncation is None
        return self._backend if clean else self._whole

    def _leading_bos(self, tokenizer: Any) -> int | None:
        """The BOS id where this tokenizer puts one before a text of its own accord."""
        bos = getattr(tokenizer, "bos_token_id", None)
        ids = self._as_it_is().encode("a", add_special_tokens=True).ids
        return bos if bos is not None and ids[:1] == [bos] else None

    def _check_segments(self, control: list[dict[str, Any]]) -> bool:
        """True where encoding around control tokens equals encoding the whole text at once."""
        if any(token["single_word"] for token in control):
            return False
        encoder = self._as_it_is()
        for content in self.control:
            text = f"a b{content}\nword 12{content} x\n\n{content}"
            if encoder.encode(text, add_special_tokens=False).ids != self.encode_segments(self.segments(text)):
                return False
        return True

    @functools.cached_property
    def longest_token(self) -> int:
        """No token stands for more characters than this; sys.maxsize where that cannot be known."""
        model, byte_level, normalizer = self._kind
        if model != "BPE" or not byte_level or (normalizer or {"type": "NFC"})["type"] != "NFC":
            return sys.maxsize
        longest = max(map(len, self._backend.get_vocab()), default=1)
        return longest * (3 if normalizer else 1)  # NFC makes one character of at most three


def _alternation(tokens: Iterable[str]) -> re.Pattern[str] | None:
    # Longest first: where one token begins another, the tokenizer takes the longer one.
    ordered = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
