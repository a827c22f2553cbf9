"""Calls as a list in Python: LFM2, LFM2.5 (between tags), Llama 3.2 (the bare list). Read, never evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from agentrl.render.formats.base import Block, ReadCall, Schemas, call_from, kind, read_json, skip_space
from agentrl.render.formats.typed import python_literal

_WORD = r"[^\s()\[\]{}=,:'\"<>]++"  # wider than Python's names: a tool may have a parameter called "from"
_KEYWORD = re.compile(rf"({_WORD})\s*=(?!=)\s*")
_NAME = re.compile(rf"({_WORD})\s*\(")
_TRIPLE = r'"""(?:[^"\\]++|\\.|"(?!""))*+"""|' + r"'''(?:[^'\\]++|\\.|'(?!''))*+'''"
_PLAIN = r'"(?:[^"\\\r\n]++|\\.)*+"|' + r"'(?:[^'\\\r\n]++|\\.)*+'"
_STRING = re.compile(rf"[rRuU]?(?:{_TRIPLE}|{_PLAIN})", re.DOTALL)
_QUOTE = re.compile(r"[rRuU]?[\"']")
_PIECE = re.compile(rf"{_STRING.pattern}|[\[\](){{}},]|[^\[\](){{}},'\"\\]+|\\?.", re.DOTALL)
_BARE = re.compile(rf"\[\s*{_WORD}\s*\(")


class _Malformed(Exception):
    """The list cannot be read on from `at`."""

    def __init__(self, why: str, at: int) -> None:
        self.why, self.at = why, at


class Pythonic:
    """``[name(key='value', ...), ...]`` between tags, or with empty tags: the list is the whole text."""

    hint = "Write [NAME(KEY=VALUE, ...)], with the arguments by name, strings in quotes, and quotes inside escaped."

    def __init__(self, name: str, opening: str, closing: str) -> None:
        self.name, self._open, self._close = name, opening, closing
        self.markers = frozenset({opening, closing} - {""})
        self._tag = re.compile(f"{re.escape(opening)}|{re.escape(closing)}") if opening else re.compile(r"\Z")
        stop = rf"(?:{re.escape(closing)}|\Z)" if closing else r"\Z"
        after = rf"\)\s*(?:,\s*(?P<name>{_WORD})\s*\(|\]?\s*{stop})"
        self._ending = {q: re.compile(rf"{q}\s*(?:,\s*(?P<key>{_WORD})\s*=(?!=)|{after})") for q in "\"'"}

    def find(self, text: str, at: int) -> int:
        """Where the next block begins. A bare list must be all that is left of the text."""
        if self._open:
            return text.find(self._open, at)
        start = skip_space(text, at)
        return start if _BARE.match(text, start) and text.rstrip().endswith("]") else -1

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The calls of the list at `start`: as Python reads them, else as templates write strings without escapes. JSON
        objects in the same place are read as well. A list that cannot be read is one call with an error."""
        body = skip_space(text, start + len(self._open))
        follower = text.find(self._open, body) if self._open else -1
        limit = len(text) if follower < 0 else follower
        json_at = skip_space(text, body + 1) if text.startswith("[", body) else body
        if text.startswith("{", json_at):
            return self._read_json(text, body, limit)
        first: _Malformed | None = None
        for raw in (False, True):
            scan = _Scan(text, body, self._tag, limit, self._ending if raw else None, schemas)
            try:
                calls = scan.calls()
                return Block(self._end(text, scan.at), tuple(calls))
            except _Malformed as e:
                first = first or e
        assert first is not None
        return self._malformed(text, first.at, first.why)

    def _end(self, text: str, at: int) -> int:
        """Where the block ends whose list ends at `at`; the closing tag may be missing."""
        after = skip_space(text, at)
        tag = self._tag.search(text, after)
        if tag is None or tag[0] != self._close:
            return at
        if tag.start() > after:
            raise _Malformed("after the list there is more", after)
        return tag.end()

    def _read_json(self, text: str, body: int, limit: int) -> Block:
        read = read_json(text[body:limit], 0, self._close)
        if read.error is not None:
            return self._malformed(text, body + read.end, read.error)
        try:
            end = self._end(text, body + read.end)
        except _Malformed as e:
            return self._malformed(text, e.at, e.why)
        calls = read.value if isinstance(read.value, list) else [read.value]
        return Block(end, tuple(self._call_of(value) for value in calls))

    def _call_of(self, value: Any) -> ReadCall:
        if not isinstance(value, dict):
            return ReadCall(error=f"This tool call was not run: it must be a JSON object, not {kind(value)}.")
        key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
        return call_from(value.get("name"), value.get(key), key=key)

    def _malformed(self, text: str, at: int, why: str) -> Block:
        tag = self._tag.search(text, at)
        end = len(text) if tag is None else tag.end() if tag[0] == self._close else tag.start()
        near = text[at : min(at + 24, len(text) if tag is None else tag.start())]
        near = f", near {near!r}" if near else ", at its end"
        return Block(end, (ReadCall(error=f"This tool call was not run: {why}{near}. {self.hint}"),))


@dataclass
class _Scan:
    """A reader of one list. `ending` None: strings as Python writes them. Otherwise strings as some templates write
    them, quotes and line breaks as they are: such a string ends at a quote before the next argument of this tool, the
    next call of a known tool, or the end of the list."""

    text: str
    at: int
    tag: re.Pattern[str]  # what may stand around the list
    limit: int  # a string without escapes does not reach into another block
    ending: dict[str, re.Pattern[str]] | None
    schemas: Schemas
    found: list[ReadCall] = field(default_factory=list)

    def calls(self) -> list[ReadCall]:
        """All calls of the list; `at` is then where it ends. The brackets may be missing."""
        bracket = self._take("[")
        while not self._take("]"):
            self.found.append(self._call())
            if self._take(",") or self.text.startswith("]", self.at):
                continue
            if bracket and self.at < len(self.text) and not self.tag.match(self.text, self.at):
                raise _Malformed("a comma or ] must follow here", self.at)
            break
        if not self.found:
            raise _Malformed("the list holds no call", self.at)
        return self.found

    def _take(self, mark: str) -> bool:
        at = skip_space(self.text, self.at)
        took = self.text.startswith(mark, at)
        self.at = at + len(mark) if took else at
        return took

    def _call(self) -> ReadCall:
        name = _NAME.match(self.text, self.at)
        if name is None:
            raise _Malformed("it is not a list of calls: NAME( must follow", self.at)
        self.at = name.end()
        arguments: dict[str, Any] = {}
        fault = ""
        while not self._take(")"):
            key = _KEYWORD.match(self.text, self.at)
            self.at = key.end() if key else self.at
            value = self._value(f"the value of '{key[1]}'" if key else "an argument", name[1])
            if key is None:
                fault = f"its arguments must be given by name, as KEY=VALUE, and {value!r:.40} is not"
            elif key[1] in arguments:
                fault = f"the argument '{key[1]}' is given twice"
            else:
                arguments[key[1]] = value
            if not self._take(",") and not self.text.startswith(")", self.at):
                raise _Malformed("a comma or ) must follow here", self.at)
        if fault:
            return ReadCall(name[1], error=f"This call of {name[1]} was not run: {fault}.")
        return ReadCall(name[1], arguments)

    def _value(self, what: str, tool: str) -> Any:
        text, start = self.text, self.at
        if _QUOTE.match(text, start):
            return self._string(what, tool)
        self.at = self._extent(start)
        written = text[start : self.at].strip()
        read = read_json(written, 0)
        if read.error is None and read.end == len(written):
            return read.value
        try:
            return python_literal(written)
        except ValueError as e:
            raise _Malformed(f"{what} is no value: {e}", start) from None

    def _extent(self, at: int) -> int:
        """Where the value ends that begins at `at`: before a comma or ) outside of its brackets."""
        depth = 0
        for piece in _PIECE.finditer(self.text, at, self.limit):
            mark = piece[0]
            if depth == 0 and mark in (",", ")"):
                return piece.start()
            depth += (mark in ("[", "(", "{")) - (mark in ("]", ")", "}"))
        raise _Malformed("a bracket is never closed", at)

    def _string(self, what: str, tool: str) -> str:
        start = self.at
        plain = _STRING.match(self.text, start)
        if plain is not None:
            value = _decoded(plain[0]) if self._ends(plain.end(), tool) else None
            if value is not None:
                self.at = plain.end()
                return value
        if self.ending is None:
            raise _Malformed(f"{what} is a string without a closing quote, or with a quote or line break inside", start)
        at = start + 1
        quote = self.text[start]
        while quote in self.ending:
            end = self.ending[quote].search(self.text, at, self.limit)
            if end is None:
                break
            at = end.start() + 1
            if self._belongs(end, tool):
                self.at = at
                return self.text[start + 1 : end.start()]
        raise _Malformed(f"{what} is a string without a closing quote", start)

    def _ends(self, at: int, tool: str) -> bool:
        """True where a string that ends at `at` can end there."""
        if self.ending is None:
            return self.text.startswith((",", ")"), skip_space(self.text, at))
        end = self.ending[self.text[at - 1]].match(self.text, at - 1, self.limit)
        return end is not None and self._belongs(end, tool)

    def _belongs(self, end: re.Match[str], tool: str) -> bool:
        """True where the name after a closing quote is one that can stand there."""
        if end["key"] is not None:
            known = self.schemas.get(tool, {}).get("properties")
            return not known or end["key"] in known
        return end["name"] is None or not self.schemas or end["name"] in self.schemas


def _decoded(literal: str) -> str | None:
    """The text that a string literal means; None where Python would refuse it."""
    if "\\" not in literal and literal[0] in "\"'" and literal[:3] not in ('"""', "'''"):
        return literal[1:-1]
    try:
        value = python_literal(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
