"""JSON between tags: Qwen2.5, Qwen3, Hermes, SmolLM."""

from __future__ import annotations

import re
from typing import Any

from agentrl.render.formats.base import Block, ReadCall, Schemas, call_from, kind, read_json, skip_space

_TAG = re.compile("</?tool_call>")


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name = "hermes"
    opening, closing = "<tool_call>", "</tool_call>"
    markers = frozenset({opening, closing})
    hint = 'Write {"name": ..., "arguments": {...}} as one JSON object.'

    def find(self, text: str, at: int) -> int:
        """Where the next opening tag stands."""
        return text.find(self.opening, at)

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The call at `start`. The closing tag may be missing; it does not count inside a JSON string."""
        body = skip_space(text, start + len(self.opening))
        read = read_json(text, body, self.closing)
        if read.error is not None:
            return self._malformed(text, body, read.error)
        after = skip_space(text, read.end)
        end, closed = self._bound(text, after)
        if not closed:
            return Block(read.end, (self._interpret(read.value),))
        if end > after:
            more = repr(text[after : min(end, after + 20)])
            return self._malformed(
                text, after, f"after the JSON value, at character {after - body}, there is more: {more}"
            )
        return Block(end + len(self.closing), (self._interpret(read.value),))

    def _bound(self, text: str, at: int) -> tuple[int, bool]:
        """Where a call that cannot be read ends, and whether a closing tag stands there."""
        tag = _TAG.search(text, at)  # either, in one go: two searches would each read to the end of the turn
        return (tag.start(), tag.group() == self.closing) if tag else (len(text), False)

    def _malformed(self, text: str, at: int, why: str) -> Block:
        end, closed = self._bound(text, at)
        message = f"This tool call was not run: {why}. {self.hint}"
        return Block(end + len(self.closing) if closed else end, (ReadCall(error=message),))

    def _interpret(self, value: Any) -> ReadCall:
        if not isinstance(value, dict):
            return ReadCall(error=f"This tool call was not run: it must be a JSON object, not {kind(value)}.")
        return call_from(value.get("name"), value.get("arguments"))
