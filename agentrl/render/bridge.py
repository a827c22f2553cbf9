"""The ids that lie between a sampled turn and the next: new messages, their frame, and the generation prompt.

The text around new messages (the *frame*) is found once per shape by rendering, checked with a second conversation and
with several contents, and kept as ids; then a tool result costs its own tokens only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.render import probe
from agentrl.render.codec import Codec
from agentrl.render.learn import Behaviour, marked_turn, suffix
from agentrl.render.messages import flatten
from agentrl.render.template import ChatTemplate, Tools
from agentrl.types import Message

Shape = tuple[object, ...]

_FRAMES = 1024
_FILLINGS = ("{}", ' \n {} {{"a": [1]}} é "q"\n 2 \n', "<b>{}</b>\n\n")


@dataclass(frozen=True, slots=True)
class _Part:
    """Ids that never change (`ids`), or text with the contents of messages in it (`pieces`: text, or an index)."""

    ids: list[int]
    pieces: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    parts: tuple[_Part, ...]
    strip: bool  # the template strips contents


_SLOT = secrets.token_hex(6)  # not the mark: that one is looked for from the end


def _slot(i: int) -> str:
    return f"zq{_SLOT}s{i}z"


class Bridge:
    """Writes what follows the body of a sampled turn, for templates that keep earlier turns as they are."""

    def __init__(self, template: ChatTemplate, codec: Codec, behaviour: Behaviour) -> None:
        self._template = template
        self._codec = codec
        self._behaviour = behaviour
        self._none = behaviour.style.value
        self._frames: dict[Shape, _Frame | None] = {}
        self._names_matter = self._writes_names()

    def ids(
        self, turn: Message, new: Sequence[Message], tools: Tools, fill: Callable[[str], str] | None = None
    ) -> list[int] | None:
        """Ids from the end-of-turn token of `turn` up to the next sampled token; None where no check vouches for them.

        The first of them is the token that ends the turn: where the policy sampled it, it is held already. `fill` puts
        the images of `new` into its text.
        """
        if fill is not None:
            text = self._suffix(self._lead(turn, new), new, tools)
            # The other conversation has an image too, should the template number them.
            if text is None or text != self._suffix(self._lead(turn, new, long=True, image=True), new, tools):
                return None
            return self._codec.encode(fill(text))
        shape: Shape = (
            bool(turn.get("content")),
            bool(turn.get("tool_calls")),
            None if (thought := turn.get("reasoning_content")) is None else bool(thought),
            self._template.tools_key(tools),
            *[m["role"] for m in new],
        )
        if self._names_matter:
            shape = (*shape, *[m.get("name") for m in new])
        if shape not in self._frames:
            if len(self._frames) >= _FRAMES:
                self._frames.clear()
            self._frames[shape] = self._make(turn, new, tools)
        frame = self._frames[shape]
        contents = [c if isinstance(c := m.get("content"), str) else flatten(c) for m in new]
        if frame is None or not all(content and not content.isspace() for content in contents):
            text = self._suffix(self._lead(turn, new), new, tools)
            if text is None or text != self._suffix(self._lead(turn, new, long=True), new, tools):
                return None
            return self._codec.encode(text)
        return self._fill(frame, contents)

    def _writes_names(self) -> bool:
        """True where the name on a message shows in the text: policies invent names, and each would need a frame."""
        turn = probe.assistant("Well.", calls=1)
        for role in ("tool", "user"):
            texts: set[str | None] = set()
            for name in ({}, {"name": "zqname"}, {"name": "other"}):
                new: list[Message] = [{"role": role, "tool_call_id": "call_0", "content": "x"} | name]
                texts.add(self._suffix(self._lead(turn, new), new, [probe.TOOL]))
            if len(texts) > 1:
                return True
        return False

    def _lead(self, turn: Message, new: Sequence[Message], *, long: bool = False, image: bool = False) -> list[Message]:
        """A short conversation that ends in a turn of the same kind as `turn`, marked at its end."""
        results = [m for m in new if m["role"] == "tool"]
        calls = max(1, len(results) if self._behaviour.several else 1) if turn.get("tool_calls") else 0
        thought = turn.get("reasoning_content")
        last = marked_turn(calls=calls, reasoning="Hm." if thought else thought)
        if calls and turn.get("content"):
            last["content"] = "Well."
        # The calls must fit the tool messages, should a template compare them or write the name of the one before.
        for call, message in zip(last.get("tool_calls", ()), results, strict=False):
            call["id"] = message.get("tool_call_id") or call["id"]
            call["function"]["name"] = message.get("name") or "unknown"
        if not long:
            return [probe.user("x"), last]
        system: Message = {"role": "system", "content": "Be brief."}
        ago = probe.user("Long ago.")
        if image:
            ago["content"] = [{"type": "image"}, {"type": "text", "text": "Long ago."}]
        talk = [system, ago, probe.assistant("So?", reasoning=self._none), probe.user("More.")]
        return [*talk, probe.assistant("Yes.", reasoning=self._none), probe.user("y"), last]

    def _suffix(self, lead: list[Message], new: Sequence[Message], tools: Tools) -> str | None:
        return suffix(self._template, self._codec, self._behaviour.form, lead, new, tools)

    def _make(self, turn: Message, new: Sequence[Message], tools: Tools) -> _Frame | None:
        """The frame of this shape; None where the text around contents depends on more than the shape."""
        texts: list[tuple[list[str], str]] = []
        for long in (False, True):
            for filling in _FILLINGS:
                contents = [filling.format(_slot(i)) for i in range(len(new))]
                filled = [m | {"content": c} for m, c in zip(new, contents, strict=True)]
                if any("tool_call_id" in m for m in filled) and not long:
                    filled = [m | {"tool_call_id": f"other{i}"} for i, m in enumerate(filled)]
                text = self._suffix(self._lead(turn, filled, long=long), filled, tools)
                if text is None:
                    return None
                texts.append((contents, text))
        parts = self._parts(texts[0][1], len(new))
        for strip in (False, True):
            frame = _Frame(parts, strip)
            if all(self._fill(frame, contents) == self._codec.encode(text) for contents, text in texts):
                return frame
        return None

    def _parts(self, base: str, count: int) -> tuple[_Part, ...]:
        parts: list[_Part] = []
        fixed: list[int] = []
        for segment in self._codec.segments(base):
            if isinstance(segment, int):
                fixed.append(segment)
                continue
            pieces: list[str | int] = [segment]
            for i in range(count):
                pieces = [p for piece in pieces for p in _split(piece, i)]
            if pieces == [segment]:
                fixed += self._codec.encode_plain(segment)
            else:
                parts += [_Part(fixed), _Part([], tuple(pieces))]
                fixed = []
        return (*parts, _Part(fixed))

    def _fill(self, frame: _Frame, contents: list[str]) -> list[int]:
        if frame.strip:
            contents = [content.strip() for content in contents]
        out: list[int] = []
        for part in frame.parts:
            if part.pieces:
                text = "".join([p if isinstance(p, str) else contents[p] for p in part.pieces])
                out += self._codec.encode_plain(text)
            else:
                out += part.ids
        return out


def _split(piece: str | int, i: int) -> list[str | int]:
    if isinstance(piece, int) or _slot(i) not in piece:
        return [piece]
    before, _, after = piece.partition(_slot(i))
    return [p for p in (before, i, after) if p != ""]
