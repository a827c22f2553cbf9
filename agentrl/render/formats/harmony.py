"""A turn as messages in channels: GPT-OSS."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from agentrl.render.formats.base import ReadCall, Schemas, call_from, read_json, skip_space
from agentrl.render.formats.turn import assemble
from agentrl.types import ParsedTurn

_MESSAGE = "<|message|>"
_THINKING = "<|channel|>analysis<|message|>"
_HEADER_ENDS = re.compile(r"<\|(?:message|end|call|return|start)\|>")
_BODY_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_ROLE = re.compile(r"\s*(?:assistant\b)?\s*(?:to=[^\s<]*)?\s*")


@dataclass(slots=True)
class _Parts:
    """What was read so far."""

    thoughts: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    found: list[ReadCall] = field(default_factory=list)


class Harmony:
    """Reads what follows ``<|start|>assistant``: messages with a channel, some with a recipient.

    A message to somebody is a call, whatever its channel and whether the recipient stands before the channel (as the
    template writes it) or after (as models do). Of the others, the channel `analysis` is reasoning, everything else
    content.
    """

    name = "harmony"
    markers = frozenset({"<|start|>", "<|channel|>", _MESSAGE, "<|constrain|>", "<|end|>"})
    hint = (
        "Write the arguments as one JSON object: "
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}"
    )

    def read(self, text: str, schemas: Schemas | None, *, opened: bool, start: int) -> ParsedTurn:
        """See `TurnFormat.read`. Of a malformed call the body stays in the content, without its header."""
        if opened and not text.lstrip().startswith("<|channel|>"):
            text = _THINKING + text
        parts, at = _Parts(), 0
        while at < len(text):
            ends = _HEADER_ENDS.search(text, at)
            stop = ends.start() if ends else len(text)
            header = text[at:stop]
            if ends is not None and ends.group() == _MESSAGE:
                at = self._message(text, header, ends.end(), parts, tools=schemas is not None)
                continue
            self._without_body(header, parts, tools=schemas is not None)
            at = ends.end() if ends else len(text)
        reasoning = "\n".join(parts.thoughts) if parts.thoughts else None
        return assemble(reasoning, parts.kept, parts.found, start)

    def _message(self, text: str, header: str, body: int, parts: _Parts, *, tools: bool) -> int:
        """Where the message whose body begins at `body` ends. It was added to `parts`."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        before = header[: channel.start()] if channel else header
        if stray := _ROLE.sub("", before, count=1):
            parts.kept.append(stray)  # text where a header should be
        if recipient is not None and tools:
            call, stop = self._call(text, recipient.group(1), body)
            parts.found.append(call)
            if call.error is not None:
                parts.kept.append(text[body:stop])
        else:
            ends = _BODY_ENDS.search(text, body)
            stop = ends.start() if ends else len(text)
            thought = recipient is None and channel is not None and channel.group(1) == "analysis"
            (parts.thoughts if thought else parts.kept).append(text[body:stop])
        # <|start|> of the next message is passed here too: what follows is its header.
        ends = _BODY_ENDS.match(text, stop)
        return ends.end() if ends else stop

    def _call(self, text: str, recipient: str, body: int) -> tuple[ReadCall, int]:
        """The call whose arguments begin at `body`, and where they end."""
        name = recipient.removeprefix("functions.")
        at = stop = skip_space(text, body)
        value, why = None, None
        if at < len(text) and not _BODY_ENDS.match(text, at):
            read = read_json(text, at, "<|")
            value, why, stop = read.value, read.error, skip_space(text, read.end)
            if why is None and stop < len(text) and not _BODY_ENDS.match(text, stop):
                why = f"after the JSON value, at character {stop - at}, there is more: {text[stop : stop + 20]!r}"
            elif why is not None:
                stop = at  # decoding may have run into later messages
        if not name:
            why = "no name of a tool stands after to=functions."
        if why is None:
            return call_from(name, value), stop
        ends = _BODY_ENDS.search(text, stop)
        return self._broken(name, why), ends.start() if ends else len(text)

    def _broken(self, name: str, why: str) -> ReadCall:
        what = f"call of {name}" if name else "tool call"
        return ReadCall(name, error=f"This {what} was not run: {why.removesuffix('.')}. {self.hint}")

    def _without_body(self, header: str, parts: _Parts, *, tools: bool) -> None:
        """A message that has no <|message|>: text where it has no header either, otherwise nothing or a broken call."""
        recipient = _RECIPIENT.search(header) if "<|channel|>" in header or header.lstrip().startswith("to=") else None
        if recipient is not None and tools:
            name = recipient.group(1).removeprefix("functions.")
            parts.found.append(self._broken(name, f"there is no {_MESSAGE} before its arguments"))
        rest = header.removeprefix("assistant")
        if rest.strip():
            parts.kept.append(rest)
