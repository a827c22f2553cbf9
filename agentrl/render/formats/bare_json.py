"""A JSON object that is the whole turn: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

import re
from typing import Any

from agentrl.render.formats.base import Block, ReadCall, Schemas, call_from, read_json, skip_space

_TAG = "<|python_tag|>"
# A turn's text begins where the turn does, after its reasoning, or after the control token that announces a call.
_CANDIDATE = re.compile(rf"(?:\A|(?<=</think>))\s*(?=\{{)|{re.escape(_TAG)}\s*")
# An object that cannot be decoded is meant as a call if "name" comes first, and no key follows that calls do not have.
_BEGINS = re.compile(
    r"""\{\s*(?:["']type["']\s*:\s*["']function["']\s*,\s*)?["']name["']\s*:\s*["']"""
    r"""(?![^"'\n]*["']\s*,\s*["'](?!parameters|arguments)[^"'\n]*["'])"""
)
_BETWEEN = re.compile(r"[\s;,]*")


def _is_call(value: Any, *, announced: bool = False) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return announced or "parameters" in value or "arguments" in value


class BareJson:
    """``{"name": ..., "parameters": {...}}`` and nothing before it; several stand one after the other.

    Nothing marks such a call, so an object is one only at the start of a turn's text and only with both keys.
    """

    name = "bare_json"
    opening = _TAG
    markers = frozenset({_TAG})
    hint = 'Write {"name": ..., "parameters": {...}} as one JSON object and nothing else.'

    def find(self, text: str, at: int) -> int:
        """Where the next object that is a call, or is meant as one, stands."""
        for match in _CANDIDATE.finditer(text, at):
            if match.group().startswith(_TAG):
                return match.start()  # nobody else can write this token: whatever follows is meant as a call
            read = read_json(text, match.end())
            if _is_call(read.value) or (read.error is not None and _BEGINS.match(text, match.end())):
                return match.end()
        return -1

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The calls that stand one after the other from `start` on, between them spaces, `;` or `,`."""
        tagged = text.startswith(_TAG, start)
        at = skip_space(text, start + len(_TAG) if tagged else start)
        calls: list[ReadCall] = []
        end = start
        while not calls or text.startswith("{", at):
            read = read_json(text, at)
            if _is_call(read.value, announced=tagged):
                value, end = read.value, read.end
                key = "arguments" if "arguments" in value and "parameters" not in value else "parameters"
                calls.append(call_from(value["name"], value.get(key), key=key))
            elif not calls or (read.error is not None and _BEGINS.match(text, at)):
                why = read.error or 'it must be a JSON object with "name" and "parameters"'
                calls.append(ReadCall(error=f"This tool call was not run: {why}. {self.hint}"))
                return Block(self._end_of_malformed(text, at), tuple(calls))
            else:
                break
            between = _BETWEEN.match(text, end)
            at = between.end() if between else end
        return Block(end, tuple(calls))

    def _end_of_malformed(self, text: str, at: int) -> int:
        following = text.find(_TAG, at)
        return following if following >= 0 else len(text)
