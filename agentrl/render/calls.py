"""How an assistant turn is read: reasoning, text, tool calls.

One rule for training and evaluation: what stands in a closed think block is reasoning, never a call; a think block
that is never closed makes everything after its tag reasoning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.render.codec import without_lone_surrogates
from agentrl.types import Message, ParsedCall, ParsedTurn

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One call found in a text: where it ends, and what it says or why it cannot be run."""

    end: int
    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str | None = None


class CallFormat(Protocol):
    """How one family of models writes a tool call."""

    name: str
    markers: frozenset[str]  # tags that the policy itself may write in its turns
    opening: str  # the tag that begins a call

    def read(self, text: str, start: int) -> ReadCall:
        """The call whose opening tag begins at `start`."""
        ...


def _no_constant(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Qwen2.5, Qwen3, Hermes, SmolLM."""

    name = "hermes"
    opening, closing = "<tool_call>", "</tool_call>"
    markers = frozenset({opening, closing})

    def __init__(self) -> None:
        self._decode = json.JSONDecoder(parse_constant=_no_constant).raw_decode

    def read(self, text: str, start: int) -> ReadCall:
        """The call at `start`. The closing tag may be missing; it does not count inside a JSON string."""
        body = _skip_space(text, start + len(self.opening))
        try:
            value, at = self._decode(text, body)
        except json.JSONDecodeError as e:
            return self._malformed(text, body, _json_error(e, text, body, self.closing))
        except RecursionError:
            return self._malformed(text, body, "it is nested too deeply")
        except ValueError as e:
            return self._malformed(text, body, str(e))
        after = _skip_space(text, at)
        end, closed = self._bound(text, after)
        if not closed:
            return self._interpret(value, at)
        if end > after:
            more = repr(text[after : min(end, after + 20)])
            return self._malformed(
                text, after, f"after the JSON value, at character {after - body}, there is more: {more}"
            )
        return self._interpret(value, end + len(self.closing))

    def _bound(self, text: str, at: int) -> tuple[int, bool]:
        """Where a call that cannot be read ends, and whether a closing tag stands there."""
        close, following = text.find(self.closing, at), text.find(self.opening, at)
        if close >= 0 and (following < 0 or close < following):
            return close, True
        return (following if following >= 0 else len(text)), False

    def _malformed(self, text: str, at: int, why: str) -> ReadCall:
        end, closed = self._bound(text, at)
        message = f'This tool call was not run: {why}. Write {{"name": ..., "arguments": {{...}}}} as one JSON object.'
        return ReadCall(end + len(self.closing) if closed else end, error=message)

    def _interpret(self, value: Any, end: int) -> ReadCall:
        if not isinstance(value, dict):
            return ReadCall(end, error=f"This tool call was not run: it must be a JSON object, not {_kind(value)}.")
        name, arguments = value.get("name"), value.get("arguments")
        if not isinstance(name, str) or not name:
            return ReadCall(end, error='This tool call was not run: it has no "name" of a tool.')
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if not isinstance(arguments, dict):
            error = f'This call of {name} was not run: "arguments" must be a JSON object, not {_kind(arguments)}.'
            return ReadCall(end, name, error=error)
        return ReadCall(end, name, arguments)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \n\r\t":
        at += 1
    return at


def _json_error(e: json.JSONDecodeError, text: str, body: int, closing: str) -> str:
    at, left = e.pos - body, text[e.pos :].lstrip()
    if not left or left.startswith(closing):
        return f"it is not valid JSON: it ends too early, at character {at} ({e.msg.lower()})"
    return f"it is not valid JSON: {e.msg.lower()} at character {at}, near {text[max(body, e.pos - 12) : e.pos + 12]!r}"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else "an object")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_lone_surrogates(value)
    if isinstance(value, dict):
        return {without_lone_surrogates(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def read_turn(text: str, form: CallFormat | None, *, thinking: bool, start: int = 0) -> ParsedTurn:
    """The turn that a text says. `thinking`: the prompt has already opened a think block.

    Calls are numbered from `start`. Malformed calls stay in the content as they were written.
    """
    reasoning: str | None = None
    kept: list[str] = []
    found: list[ReadCall] = []
    at = 0
    if thinking or _closes_first(text, form):
        again = THINK_OPEN if text.lstrip().startswith(THINK_OPEN) else ""  # some open the block a second time
        reasoning, at = _until_close(text, text.index(again) + len(again))
    while True:
        opened = text.find(THINK_OPEN, at)
        called = text.find(form.opening, at) if form else -1
        if opened >= 0 and not 0 <= called < opened:
            kept.append(text[at:opened])
            thought, at = _until_close(text, opened + len(THINK_OPEN))
            reasoning = thought if not reasoning else f"{reasoning}\n{thought}"
        elif called >= 0 and form is not None:
            call = form.read(text, called)
            kept.append(text[at : called if call.error is None else call.end])
            found.append(call)
            at = call.end
        else:
            kept.append(text[at:])
            break
    return _assemble(reasoning, kept, found, start)


def _closes_first(text: str, form: CallFormat | None) -> bool:
    """True where the first tag closes a think block: its opening tag was lost, or stood in the prompt."""
    closed = text.find(THINK_CLOSE)
    if closed < 0:
        return False
    return all(text.find(tag, 0, closed) < 0 for tag in (THINK_OPEN, *([form.opening] if form else ())))


def _until_close(text: str, at: int) -> tuple[str, int]:
    close = text.find(THINK_CLOSE, at)
    if close < 0:
        return text[at:].strip("\n"), len(text)
    return text[at:close].strip("\n"), close + len(THINK_CLOSE)


def _assemble(reasoning: str | None, kept: list[str], found: list[ReadCall], start: int) -> ParsedTurn:
    content = kept[0] if len(kept) == 1 else _join(kept)
    if reasoning is not None:
        content = content.lstrip("\n")
    message: Message = {"role": "assistant", "content": content.rstrip("\n") if found else content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    calls: list[ParsedCall] = []
    for number, call in enumerate(found, start):
        name = without_lone_surrogates(call.name)
        calls.append(ParsedCall(f"call_{number}", name, _clean(call.arguments or {}), call.error))
    good = [call for call in calls if call.error is None]
    if good:
        # Copied: a tool that changes its arguments must not change the record of the call.
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _clean(c.arguments)}}
            for c in good
        ]
    return ParsedTurn(message, tuple(calls))


def _join(kept: list[str]) -> str:
    # Line breaks next to a call belong to the format, not to the text.
    parts = [part.strip("\n") for part in kept]
    return "\n".join(part for part in parts if part.strip())
