"""The parsing that transformers ships with some tokenizers, for turns whose form no reader here knows."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.render.formats.base import ReadCall, Schemas, call_from, kind
from agentrl.render.formats.turn import assemble
from agentrl.types import ParsedTurn

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"


def _literals(field: dict[str, Any], which: str) -> list[str]:
    """What a field of a response template says about its beginning or end, as far as it is no pattern."""
    literal = field.get(which, [])
    return [literal] if isinstance(literal, str) else list(literal)


class ShippedParser:
    """Reads turns with ``tokenizer.parse_response``, which follows the tokenizer's ``response_template``.

    Where it raises, and it does for a whole turn if one call in it is malformed, no call of the turn is run and the
    model reads the reason.
    """

    name = "transformers"
    hint = "Write every call of the turn again, in the form of your other calls."

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template: dict[str, Any] = tokenizer.response_template
        self._fields: dict[str, dict[str, Any]] = self._template.get("fields", {})
        without = {name: field for name, field in self._fields.items() if name != _CALLS}
        # A template that describes calls alone still needs somewhere to put the text.
        self._without_calls = {**self._template, "fields": without or {"content": {}}}
        self.markers = frozenset(self._markers())

    def _markers(self) -> set[str]:
        """The tokenizer's added tokens that the template names, but those that end the content: they end the turn."""
        spelled: list[str] = []
        for name, field in self._fields.items():
            sides = ("open",) if name == "content" else ("open", "close")
            for side in sides:
                spelled += _literals(field, side)
                spelled.append(re.sub(r"\\(\W)", r"\1", field.get(f"{side}_pattern", "")))
        text = "\n".join(spelled)
        eos = getattr(self._tokenizer, "eos_token", None)
        return {token for token in self._tokenizer.get_added_vocab() if token in text and token != eos}

    def read(self, text: str, schemas: Schemas | None, *, opened: bool, start: int) -> ParsedTurn:
        """See `TurnFormat.read`. Where no call of a turn can be run, the calls stay in the content as written."""
        if schemas is None:
            return self._turn(self._parse(text, self._without_calls, None, opened), [], start)
        message: dict[str, Any] = {}
        try:
            message = self._tokenizer.parse_response(
                text, prefix=self._prefix(opened), tools=[_tool(name, schema) for name, schema in schemas.items()]
            )
            found = [self._interpret(call) for call in message.get(_CALLS) or []]
        except Exception as e:  # a template's patterns and transforms may raise anything over a model's text
            found = [ReadCall(error=f"No tool call of this turn was run: {_reason(e)}. {self.hint}")]
        if found and all(call.error is not None for call in found):
            message = self._parse(text, self._without_calls, None, opened)
        return self._turn(message, found, start)

    def _prefix(self, opened: bool) -> str:
        """Text that puts the parser into the state in which the prompt left the turn."""
        if not opened:
            return ""
        tags = [tag for name in _REASONING if name in self._fields for tag in _literals(self._fields[name], "open")]
        return tags[0] if tags else ""

    def _parse(self, text: str, template: dict[str, Any], tools: Any, opened: bool) -> dict[str, Any]:
        try:
            return self._tokenizer.parse_response(text, template, prefix=self._prefix(opened), tools=tools)
        except Exception:  # as above; the text itself is then all that is known
            return {"content": text}

    def _interpret(self, call: Any) -> ReadCall:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict):
            return ReadCall(error=f"This tool call was not run: it must be a JSON object, not {kind(function)}.")
        call = call_from(function.get("name"), function.get("arguments"))
        try:
            json.dumps(call.arguments, allow_nan=False)
        except ValueError:  # transformers reads NaN and Infinity
            return ReadCall(call.name, error=f"This call of {call.name} was not run: NaN and Infinity are not JSON.")
        return call

    def _turn(self, message: dict[str, Any], found: list[ReadCall], start: int) -> ParsedTurn:
        thoughts = [message[name] for name in _REASONING if name in message]
        content = message.get("content", "")
        kept = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
        return assemble(str(thoughts[0]) if thoughts else None, kept, found, start)


def _tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": dict(schema)}}


def _reason(e: BaseException) -> str:
    """Why a turn could not be parsed, in one clause."""
    cause: BaseException | None = e
    while cause is not None:
        if isinstance(cause, json.JSONDecodeError):
            what = cause.msg.lower().removesuffix(" at")
            return f"one of them is not valid JSON ({what} at character {cause.pos} of its body)"
        cause = cause.__cause__
    lines = str(e).strip().splitlines()
    return f"they cannot be read ({lines[0].rstrip('.') if lines else type(e).__name__})"
