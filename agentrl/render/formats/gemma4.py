"""Gemma 4's own notation, which is not JSON: bare keys, and strings between control tokens."""

from __future__ import annotations

import math
import re
from typing import Any

from agentrl.render.formats.base import Block, ReadCall, Schemas, skip_space

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([^\s{}<]*)\s*")
_KEY = re.compile(r"(?!\")[^:,{}\[\]<>\n]*(?=:)")
_WORD = re.compile(r"[^\s,{}\[\]<>:]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
# Older revisions of Gemma's template let Python write null, and with it `None`.
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_DEEPEST = 100


class _Problem(Exception):
    """Why the text is no value of this notation, and where."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at `at`, and where it ends."""
    at = skip_space(text, at)
    if text.startswith(_QUOTE, at):
        return _string(text, at)
    if text.startswith("{", at):
        return _object(text, at, depth)
    if text.startswith("[", at):
        return _list(text, at, depth)
    match = _WORD.match(text, at)
    word = match.group() if match else ""
    if word in _CONSTANTS:
        return _CONSTANTS[word], at + len(word)
    if _NUMBER.fullmatch(word) is None:
        raise _Problem(at, f"a value is expected, and strings stand between {_QUOTE} and {_QUOTE}")
    try:
        number = float(word) if set(word) & set(".eE") else int(word)
    except ValueError as e:  # Python refuses to read thousands of digits
        raise _Problem(at, str(e)) from e
    if not math.isfinite(number):
        raise _Problem(at, "the number is too large")
    return number, at + len(word)


def _string(text: str, at: int) -> tuple[str, int]:
    body = at + len(_QUOTE)
    end = text.find(_QUOTE, body)
    if end < 0:
        raise _Problem(at, f"a string begins that no second {_QUOTE} ends")
    return text[body:end], end + len(_QUOTE)


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _enter(text, at, depth)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        values.append(value)
        at = _next(text, at, "]")
    return values, at + 1


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    at = _enter(text, at, depth)
    while not text.startswith("}", at):
        key, at = _key(text, at)
        values[key], at = _value(text, at, depth + 1)
        at = _next(text, at, "}")
    return values, at + 1


def _enter(text: str, at: int, depth: int) -> int:
    if depth >= _DEEPEST:
        raise _Problem(at, "it is nested too deeply")
    return skip_space(text, at + 1)


def _key(text: str, at: int) -> tuple[str, int]:
    """The key at `at`, and where its value begins."""
    if text.startswith(_QUOTE, at):
        key, end = _string(text, at)
        end = skip_space(text, end)
    else:
        match = _KEY.match(text, at)
        key, end = (match.group().strip(), match.end()) if match else ("", at)
    if not text.startswith(":", end):
        raise _Problem(end, "a key and a colon are expected")
    return key, end + 1


def _next(text: str, at: int, close: str) -> int:
    """Where the next element or `close` stands, after an element that ends at `at`."""
    at = skip_space(text, at)
    if text.startswith(close, at):
        return at
    if not text.startswith(",", at):
        raise _Problem(at, f"a comma or {close!r} is expected")
    return skip_space(text, at + 1)


class Gemma4:
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:3,b:true,o:{...},l:[...]}<tool_call|>``."""

    name = "gemma4"
    opening, closing = "<|tool_call>", "<tool_call|>"
    # The tags around Gemma's reasoning are <|channel>thought and <channel|>; only parts of them are tokens.
    markers = frozenset({opening, closing, _QUOTE, "<|channel>", "<channel|>"})
    hint = f"Write call:NAME{{key:value}}, strings between {_QUOTE} and {_QUOTE}."

    def find(self, text: str, at: int) -> int:
        """Where the next opening tag stands."""
        return text.find(self.opening, at)

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The call at `start`. The closing tag may be missing; it does not count inside a string."""
        body, name = start + len(self.opening), ""
        try:
            head = _HEAD.match(text, body)
            if head is None:
                raise _Problem(skip_space(text, body), "'call:' and the name of a tool are expected")
            name, at = head.group(1), head.end()
            if not name:
                raise _Problem(at, "the name of a tool is expected")
            if not text.startswith("{", at):
                raise _Problem(at, "'{' is expected after the name of the tool")
            arguments, at = _object(text, at, 0)
            end = skip_space(text, at)
            if text.startswith(self.closing, end):
                end += len(self.closing)
            elif end < len(text) and not text.startswith(self.opening, end):
                raise _Problem(end, "there is more after the closing brace")
        except _Problem as e:
            return Block(self._bound(text, body), (ReadCall(name, error=self._message(text, body, e)),))
        return Block(end, (ReadCall(name, arguments),))

    def _bound(self, text: str, at: int) -> int:
        """Where a call that cannot be read ends: after its closing tag, before the next call."""
        following = text.find(self.opening, at)
        last = following if following >= 0 else len(text)
        close = text.find(self.closing, at, last)
        return close + len(self.closing) if close >= 0 else last

    def _message(self, text: str, body: int, e: _Problem) -> str:
        left = text[e.at : e.at + 20]
        if not left or left.startswith(self.closing):
            where = f"at character {e.at - body}, where it ends"
        else:
            where = f"at character {e.at - body}, near {left!r}"
        return f"This tool call was not run: {e} {where}. {self.hint}"
