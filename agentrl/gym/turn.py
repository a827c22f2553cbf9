"""An assistant's turn as plain text: tool calls in JSON, or an answer."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.types import ParsedCall

_CALL = re.compile(r"\s*(\{|\[\s*(\{|\]))")
_SHAPE = '{"name": ..., "arguments": {...}}'


def read_turn(text: str, *, start: int = 0) -> tuple[ParsedCall, ...]:
    """The calls of a turn, none where it is a final answer.

    A turn that begins with ``{``, ``[{`` or ``[]`` is meant as calls: one that cannot be read is a call with an error
    for the agent to read. Everything else is an answer.

    >>> [call.name for call in read_turn('[{"name": "a"}, {"name": "b", "arguments": {"x": 1}}]')]
    ['a', 'b']
    >>> read_turn("It is 42.")
    ()
    >>> [call.error for call in read_turn('[{"arguments": {}}]')]
    ['This call was not run: it has no "name" of a tool; write {"name": ..., "arguments": {...}}.']
    """
    if not _CALL.match(text):
        return ()
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        why = f"it is not valid JSON ({error.msg[:1].lower()}{error.msg[1:]} at character {error.pos})"
        return (_bad(start, why),)
    except (ValueError, RecursionError) as error:
        return (_bad(start, str(error) or "it is nested too deeply"),)
    listed = found if isinstance(found, list) else [found]
    if not listed:
        return (_bad(start, f"the list is empty; write {_SHAPE}"),)
    return tuple(_call(one, start + index) for index, one in enumerate(listed))


def _call(value: Any, number: int) -> ParsedCall:
    if not isinstance(value, dict):
        return _bad(number, f"a call must be a JSON object {_SHAPE}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return _bad(number, f'it has no "name" of a tool; write {_SHAPE}')
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        return _bad(number, '"arguments" must be a JSON object', name)
    return ParsedCall(f"call_{number}", name, arguments)


def _bad(number: int, why: str, name: str = "") -> ParsedCall:
    of = f" of {name}" if name else ""
    return ParsedCall(f"call_{number}", name, {}, f"This call{of} was not run: {why}.")


def _no_constant(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")
