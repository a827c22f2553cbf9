"""An assistant turn in the common form: reasoning between tags, then text with calls in it.

One rule for training and evaluation, with and without tools: what stands in a closed block of reasoning is reasoning,
never a call; a block that is never closed makes everything after its opening tag reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.render.codec import map_strings, without_lone_surrogates
from agentrl.render.formats.base import CallFormat, ReadCall, Schemas, Think
from agentrl.types import Message, ParsedCall, ParsedTurn


@dataclass(frozen=True, slots=True)
class Tagged:
    """Reads turns whose reasoning stands between the tags of `think`, and whose calls `calls` can read."""

    think: Think
    calls: CallFormat | None

    @property
    def name(self) -> str:
        return self.calls.name if self.calls else "text"

    @property
    def markers(self) -> frozenset[str]:
        tags = frozenset({self.think.open.strip(), self.think.close.strip()})
        return tags | self.calls.markers if self.calls else tags

    def read(self, text: str, schemas: Schemas | None, *, opened: bool, start: int) -> ParsedTurn:
        """See `TurnFormat.read`. Malformed calls stay in the content as they were written."""
        think, at = self.think, 0
        thoughts: list[str] = []
        kept: list[str] = []
        found: list[ReadCall] = []
        form = self.calls if schemas is not None else None
        next_thought = _Search(lambda at: text.find(think.open, at))
        next_call = _Search((lambda at: form.find(text, at)) if form else (lambda at: -1))
        if opened or self._closes_first(text):
            again = think.open if text.lstrip().startswith(think.open) else ""  # some open the block a second time
            at = self._thought(text, text.index(again) + len(again), thoughts)
        while True:
            thought_at, called = next_thought.after(at), next_call.after(at)
            if thought_at >= 0 and not 0 <= called < thought_at:
                kept.append(text[at:thought_at])
                at = self._thought(text, thought_at + len(think.open), thoughts)
                if form is not None and not form.markers:
                    next_call = _Search(lambda at: form.find(text, at))  # without tags, a call begins what is left
            elif called >= 0 and form is not None:
                block = form.read(text, called, schemas or {})
                broken = all(call.error is not None for call in block.calls)
                kept.append(text[at : block.end if broken else called])
                found += block.calls
                at = block.end
            else:
                kept.append(text[at:])
                break
        first = next((n for n, thought in enumerate(thoughts) if thought), len(thoughts))
        return assemble("\n".join(thoughts[first:]) if thoughts else None, kept, found, start)

    def _closes_first(self, text: str) -> bool:
        """True where the first tag closes a block of reasoning: its opening tag was lost, or stood in the prompt."""
        closed = text.find(self.think.close)
        if closed < 0 or text.find(self.think.open, 0, closed) >= 0:
            return False
        return self.calls is None or not 0 <= self.calls.find(text, 0) < closed

    def _thought(self, text: str, at: int, thoughts: list[str]) -> int:
        """Adds the block of reasoning whose text begins at `at`; where it ends."""
        close = text.find(self.think.close, at)
        thoughts.append(text[at : close if close >= 0 else len(text)].strip("\n"))
        return close + len(self.think.close) if close >= 0 else len(text)


class _Search:
    """Remembers the last place found, so that reading a turn searches every stretch of it once."""

    def __init__(self, find: Callable[[int], int]) -> None:
        self._find = find
        self._place: int | None = None

    def after(self, at: int) -> int:
        """The first place at or after `at`, which never goes back; -1 where there is none."""
        if self._place is None or 0 <= self._place < at:
            self._place = self._find(at)
        return self._place


def assemble(reasoning: str | None, kept: list[str], found: list[ReadCall], start: int) -> ParsedTurn:
    """The turn of its parts: reasoning, stretches of text between calls, and the calls in order."""
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


def _clean(value: Any) -> Any:
    return map_strings(value, without_lone_surrogates)
