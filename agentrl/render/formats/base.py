"""What every reader of assistant turns shares: records, protocols, JSON with errors that a model can act on."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.types import ParsedTurn

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool to the JSON schema of its parameters (an object schema), for formats whose values carry no types."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One call as a text says it, or why it cannot be run (`error`, text for the model)."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of text that holds calls: where it ends, and what it says. Never without a call."""

    end: int
    calls: tuple[ReadCall, ...]


@dataclass(frozen=True, slots=True)
class Think:
    """The tags around reasoning. Text inside a closed block is never a call."""

    open: str
    close: str


class CallFormat(Protocol):
    """How one family of models writes tool calls between its text."""

    @property
    def name(self) -> str:
        """Short, for people."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Tags that the policy itself may write in its turns."""
        ...

    @property
    def hint(self) -> str:
        """How to write a call, in one sentence: ends the error messages that the model reads."""
        ...

    def find(self, text: str, at: int) -> int:
        """Where the next block of calls begins, at or after `at`; -1 where none does."""
        ...

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The block that begins at `start`. Raises nothing: what cannot be read is a call with an error."""
        ...


class TurnFormat(Protocol):
    """How one family of models writes a whole assistant turn."""

    @property
    def name(self) -> str:
        """Short, for people."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Tags that the policy itself may write in its turns."""
        ...

    def read(self, text: str, schemas: Schemas | None, *, opened: bool, start: int) -> ParsedTurn:
        """The turn that a text says, control tokens of `markers` included, end-of-turn token not. `schemas` None:
        there are no tools, nothing is a call. `opened`: the prompt has already opened a block of reasoning. Calls are
        numbered from `start`."""
        ...


def _no_constant(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


# An error costs json a count of the lines of all that it was given. With a text of many broken calls that would be
# quadratic, so that a window is decoded, and a larger one where the window's end may have been the cause.
_WINDOW, _MARGIN = 2048, 64
_DECODE = json.JSONDecoder(parse_constant=_no_constant).raw_decode


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A JSON value read from the middle of a text, or why there is none."""

    value: Any
    end: int  # after the value; where reading stopped in case of an error
    error: str | None = None


def read_json(text: str, at: int, closing: str = "") -> JsonValue:
    """The JSON value at `at`. `closing`: the tag that follows a complete value, for the error message.

    >>> read_json('x {"a": "}"} y', 2)
    JsonValue(value={'a': '}'}, end=12, error=None)
    >>> read_json('{"a": ', 0).error
    'it is not valid JSON: it ends too early, at character 6 (expecting value)'
    """
    size = _WINDOW
    while True:
        part = text[at : at + size]
        read, cut = _read_part(part, closing)
        if not cut or at + size >= len(text):
            return JsonValue(read.value, at + read.end, read.error)
        size *= 8


def _read_part(part: str, closing: str) -> tuple[JsonValue, bool]:
    """The value at the beginning of `part`, and whether the end of `part` may have changed what was read."""
    try:
        value, end = _DECODE(part)
    except json.JSONDecodeError as e:
        cut = e.pos + _MARGIN > len(part) or e.msg.startswith("Unterminated string")
        return JsonValue(None, e.pos, _json_error(e, part, 0, closing)), cut
    except RecursionError:
        return JsonValue(None, 0, "it is nested too deeply"), False
    except ValueError as e:
        return JsonValue(None, 0, str(e)), False
    return JsonValue(value, end), end == len(part)


def _json_error(e: json.JSONDecodeError, text: str, body: int, closing: str) -> str:
    at, left = e.pos - body, skip_space(text, e.pos)
    if left == len(text) or (closing and text.startswith(closing, left)):
        return f"it is not valid JSON: it ends too early, at character {at} ({e.msg.lower()})"
    return f"it is not valid JSON: {e.msg.lower()} at character {at}, near {text[max(body, e.pos - 12) : e.pos + 12]!r}"


def skip_space(text: str, at: int) -> int:
    """The first position at or after `at` that holds no space."""
    while at < len(text) and text[at] in " \n\r\t":
        at += 1
    return at


def near(text: str, at: int) -> str:
    """What stands at `at`, for a sentence."""
    return repr(text[at : at + 40].partition("\n")[0]) if at < len(text) else "the end of the turn"


@functools.lru_cache(maxsize=4)
def last_end(pattern: re.Pattern[str], text: str) -> int:
    """Where the last match ends, -1 without one: a turn of unclosed values is not searched again for each."""
    last = -1
    for match in pattern.finditer(text):
        last = match.end()
    return last


def kind(value: Any) -> str:
    """What a JSON value is, for a sentence."""
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else "an object")


def call_from(name: Any, arguments: Any, *, key: str = "arguments") -> ReadCall:
    """The call that a decoded name and decoded arguments make. None and blank text are no arguments; a string that
    holds a JSON object is that object; everything else than an object is an error for the model (F073).

    >>> call_from("go", '{"to": "cave"}')
    ReadCall(name='go', arguments={'to': 'cave'}, error=None)
    >>> call_from("go", [1]).error
    'This call of go was not run: "arguments" must be a JSON object, not a list.'
    """
    if not isinstance(name, str) or not name:
        return ReadCall(error='This tool call was not run: it has no "name" of a tool.')
    if isinstance(arguments, str) and arguments.strip():
        inner = read_json(arguments, skip_space(arguments, 0))
        if inner.error is None and isinstance(inner.value, dict) and not arguments[inner.end :].strip():
            arguments = inner.value
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        return ReadCall(
            name, error=f'This call of {name} was not run: "{key}" must be a JSON object, not {kind(arguments)}.'
        )
    return ReadCall(name, arguments)
