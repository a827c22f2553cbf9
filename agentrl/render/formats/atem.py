"""Turns of Muse Glimmer: one block per recipient, calls in tags of the atem namespace."""

from __future__ import annotations

import re

from agentrl.render.formats.base import ReadCall, Schemas, skip_space
from agentrl.render.formats.turn import assemble
from agentrl.render.formats.typed import typed_arguments
from agentrl.types import ParsedTurn

_SPACE = r"[ \t\r\n]*+"
_OPEN, _CLOSE = "<atem:function_calls>", "</atem:function_calls>"
_HEADER = re.compile(rf"{_SPACE}(?:assistant)?(?:{_SPACE}to=([^\s<>]+))?{_SPACE}")
_END = re.compile(r"<\|eom\|>|<\|start\|>")
_INVOKE = re.compile(r'<atem:invoke name="([^"\n]*)">')
_PARAMETER = re.compile(r'<atem:parameter name="([^"\n]*)">')
# A value is plain text and may hold these tags itself: its closing tag stands before the next parameter or the end of
# the call.
_VALUE_END = re.compile(rf'</atem:parameter>(?={_SPACE}(?:<atem:parameter name="|</atem:invoke>))')
_HINT = (
    'Write <atem:function_calls>, <atem:invoke name="NAME">, for each parameter <atem:parameter name="KEY">VALUE'
    "</atem:parameter>, then </atem:invoke> and </atem:function_calls>."
)


class Atem:
    """``to=RECIPIENT<|message|>BODY``: self is reasoning, user is the text, a tool's name holds calls."""

    name = "atem"
    markers = frozenset({"<|start|>", "<|message|>", "<|eom|>"})

    def read(self, text: str, schemas: Schemas | None, *, opened: bool, start: int) -> ParsedTurn:
        """See `TurnFormat.read`. The generation prompt wrote <|start|>assistant, so a turn begins with its first
        recipient; `opened` says that it wrote to=self<|message|> too. Malformed calls stay in the content."""
        thoughts: list[str] = []
        kept: list[str] = []
        found: list[ReadCall] = []
        for recipient, body in _blocks(text, "self" if opened else None):
            if recipient == "self":
                thoughts.append(body)
            elif recipient == "user" or schemas is None:
                kept.append(body)
            else:
                calls = _calls(body, recipient, schemas)
                if all(call.error is not None for call in calls):
                    kept.append(body)
                found += calls
        return assemble("\n".join(thoughts) if thoughts else None, kept, found, start)


def _blocks(text: str, recipient: str | None) -> list[tuple[str, str]]:
    """The blocks of a turn as pairs of recipient and body; `recipient` of a first block that is already open."""
    out: list[tuple[str, str]] = []
    at = 0
    if recipient is not None:
        end = _END.search(text)
        out.append((recipient, text[: end.start()] if end else text))
        at = end.end() if end else len(text)
    while at < len(text):
        end = _END.search(text, at)
        stop = end.start() if end else len(text)
        message = text.find("<|message|>", at, stop)
        header = _HEADER.fullmatch(text, at, message) if message >= 0 else None
        if header is not None:
            out.append((header[1] or "user", text[message + len("<|message|>") : stop]))
        elif text[at:stop].strip():
            out.append(("user", text[at:stop]))  # under no header, or that of another role: it is text
        at = end.end() if end else len(text)
    return out


def _calls(body: str, recipient: str, schemas: Schemas) -> list[ReadCall]:
    """The calls in a block to a tool; from the first that cannot be read on, one with an error. Never empty."""
    at = skip_space(body, 0)
    if not body.startswith(_OPEN, at):
        return [_malformed(f"the block to={recipient} must begin with {_OPEN}, not {_near(body, at)}")]
    at = skip_space(body, at + len(_OPEN))
    calls: list[ReadCall] = []
    while at < len(body) and not body.startswith(_CLOSE, at):
        call, at = _call(body, at, schemas)
        calls.append(call)
        at = skip_space(body, at)
    return calls or [_malformed(f"{_OPEN} is followed by no <atem:invoke>")]


def _call(body: str, at: int, schemas: Schemas) -> tuple[ReadCall, int]:
    """The call at `at`, and where to read on: at the end of the block where it is malformed."""
    invoke = _INVOKE.match(body, at)
    if invoke is None:
        return _malformed(f'<atem:invoke name="NAME"> must follow, not {_near(body, at)}'), len(body)
    name, at = invoke[1], skip_space(body, invoke.end())
    if not name:
        return _malformed("<atem:invoke> names no tool"), len(body)
    pairs: dict[str, str] = {}
    while not body.startswith("</atem:invoke>", at):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            why = f'in the call of {name}, <atem:parameter name="KEY"> or </atem:invoke> must follow'
            return _malformed(f"{why}, not {_near(body, at)}"), len(body)
        key, end = parameter[1], _VALUE_END.search(body, parameter.end())
        if end is None:
            why = f"the parameter '{key}' of {name} has no closing </atem:parameter>, or </atem:invoke> is missing"
            return _malformed(why), len(body)
        if key in pairs:
            return _malformed(f"the parameter '{key}' of {name} is given twice"), len(body)
        pairs[key], at = body[parameter.end() : end.start()], skip_space(body, end.end())
    call = ReadCall(name, typed_arguments(pairs.items(), schemas.get(name)))
    return call, at + len("</atem:invoke>")


def _malformed(why: str) -> ReadCall:
    return ReadCall(error=f"This tool call was not run: {why}. {_HINT}")


def _near(body: str, at: int) -> str:
    return repr(body[at : at + 40].partition("\n")[0]) if at < len(body) else "the end of the block"
