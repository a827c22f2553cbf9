"""A JSON list of calls behind a tag: Cohere's Command R and R7B, and Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentrl.render.formats.base import Block, ReadCall, Schemas, call_from, kind, read_json, skip_space

_NO_CALL = frozenset({"directly_answer", "directly-answer"})


@dataclass(frozen=True, slots=True)
class JsonList:
    """Calls in one JSON list: after `opening`, before `closing` where there is one.

    An entry whose name is ``directly_answer`` means that no tool is called; a list of nothing else is text.
    """

    name: str
    opening: re.Pattern[str]
    closing: str  # "" where the list itself ends the block
    keys: tuple[str, str]  # of a call's name and of its arguments
    markers: frozenset[str]
    hint: str

    def find(self, text: str, at: int) -> int:
        """Where the next list that calls a tool stands."""
        for match in self.opening.finditer(text, at):
            read = read_json(text, skip_space(text, match.end()), self.closing)
            if read.error is not None or not isinstance(read.value, list) or not read.value:
                return match.start()
            if not all(self._answers(entry) for entry in read.value):
                return match.start()
        return -1

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The calls of the list at `start`. Its closing tag may be missing."""
        match = self.opening.match(text, start)
        body = skip_space(text, match.end() if match else start)
        read = read_json(text, body, self.closing)
        if read.error is not None:
            return self._broken(text, body, read.error)
        entries = [read.value] if isinstance(read.value, dict) else read.value  # one call without its list
        if not isinstance(entries, list) or not entries:
            what = "an empty list" if entries == [] else kind(entries)
            return self._broken(text, body, f"it must be a JSON list of calls, not {what}")
        after = skip_space(text, read.end)
        if self.closing and text.startswith(self.closing, after):
            end = after + len(self.closing)
        elif not self.closing or after == len(text) or self.opening.match(text, after):
            end = read.end
        else:
            more = f"after the JSON list, at character {after - body}, there is more: {text[after : after + 20]!r}"
            return self._broken(text, after, more)
        return Block(end, tuple(self._interpret(entry) for entry in entries if not self._answers(entry)))

    def _answers(self, entry: Any) -> bool:
        name = entry.get(self.keys[0]) if isinstance(entry, dict) else None
        return isinstance(name, str) and name in _NO_CALL

    def _interpret(self, entry: Any) -> ReadCall:
        if not isinstance(entry, dict):
            return ReadCall(error=f"This tool call was not run: it must be a JSON object, not {kind(entry)}.")
        key, arguments = self.keys
        if not isinstance(entry.get(key), str) or not entry[key]:
            return ReadCall(error=f'This tool call was not run: it has no "{key}" of a tool.')
        return call_from(entry[key], entry.get(arguments), key=arguments)

    def _broken(self, text: str, at: int, why: str) -> Block:
        following = self.opening.search(text, at)
        end = following.start() if following else len(text)
        close = text.find(self.closing, at, end) if self.closing else -1
        end = close + len(self.closing) if close >= 0 else end
        return Block(end, (ReadCall(error=f"This tool call was not run: {why}. {self.hint}"),))


def _form(name_key: str, arguments_key: str) -> str:
    return f'Write a JSON list of {{"{name_key}": ..., "{arguments_key}": {{...}}}}.'


COMMAND_R7B = JsonList(
    "command_r7b",
    re.compile(r"<\|START_ACTION\|>"),
    "<|END_ACTION|>",
    ("tool_name", "parameters"),
    frozenset({"<|START_ACTION|>", "<|END_ACTION|>"}),
    _form("tool_name", "parameters"),
)
COMMAND_R = JsonList(
    "command_r",
    re.compile(r"Action:[ \t]*\n?```(?:json)?[ \t]*\n(?=\s*\[)"),
    "```",
    ("tool_name", "parameters"),
    frozenset(),
    _form("tool_name", "parameters"),
)
MISTRAL = JsonList(
    "mistral",
    re.compile(r"\[TOOL_CALLS\]"),
    "",
    ("name", "arguments"),
    frozenset({"[TOOL_CALLS]"}),
    _form("name", "arguments"),
)
