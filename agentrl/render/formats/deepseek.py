"""JSON between DeepSeek's own control tokens: V3, R1 and V3.1."""

from __future__ import annotations

import re

from agentrl.render.formats.base import Block, ReadCall, Schemas, call_from, read_json, skip_space

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_ANY = re.compile("|".join((_BEGIN, _END, _CALL, _CALL_END, _SEP)))
_BOUND = re.compile("|".join((_BEGIN, _END, _CALL, _CALL_END)))
_NAME_ENDS = re.compile(f"\n|```|{_ANY.pattern}")
_OPENING = re.compile(f"{_BEGIN}|{_CALL}")
_FENCE = "```"


class DeepSeek:
    """Calls between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``, in the form of V3 or of V3.1.

    V3 writes ``function<｜tool▁sep｜>NAME`` and the arguments in a fenced block below, V3.1 writes
    ``NAME<｜tool▁sep｜>{...}``.
    """

    name = "deepseek"
    markers = frozenset({_BEGIN, _END, _CALL, _CALL_END, _SEP})
    hint = f"Write the name of the tool, and its arguments as one JSON object before {_CALL_END}."

    def find(self, text: str, at: int) -> int:
        """Where the next block begins. A call may stand alone: DeepSeek-V3's template writes later turns so."""
        match = _OPENING.search(text, at)
        return match.start() if match else -1

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """All calls of the block at `start`; tags that are missing at its end do not matter."""
        calls: list[ReadCall] = []
        end = start + len(_BEGIN) if text.startswith(_BEGIN, start) else start
        while True:
            at = skip_space(text, end)
            if text.startswith(_END, at):
                end = at + len(_END)
                break
            if not text.startswith(_CALL, at):
                break
            call, end = self._one(text, at + len(_CALL))
            calls.append(call)
        if calls:
            return Block(end, tuple(calls))
        if not text.startswith(_END, end - len(_END)):
            end = self._bound(text, end)
        return Block(end, (self._broken(f"there is no {_CALL} after {_BEGIN}"),))

    def _one(self, text: str, at: int) -> tuple[ReadCall, int]:
        """The call whose opening tag ends at `at`, and where it ends."""
        sep = _ANY.search(text, at)
        if sep is None or sep.group() != _SEP:
            return self._broken(f"there is no {_SEP} in it"), self._bound(text, at)
        name, body = text[at : sep.start()].strip(), skip_space(text, sep.end())
        if name == "function" and not text.startswith("{", body):
            name, body = self._name_below(text, sep.end())
        fenced = text.startswith(_FENCE, body)
        if fenced:
            language = len("json") if text.startswith("json", body + len(_FENCE)) else 0
            body = skip_space(text, body + len(_FENCE) + language)
        if text.startswith((_CALL_END, _FENCE), body):
            value, end = None, body
        else:
            read = read_json(text, body, _FENCE if fenced else _CALL_END)
            if read.error is not None:
                return self._broken(read.error, name), self._bound(text, body)
            value, end = read.value, read.end
        after = skip_space(text, end)
        if text.startswith(_FENCE, after):
            after = skip_space(text, after + len(_FENCE))
        if text.startswith(_CALL_END, after):
            return call_from(name, value), after + len(_CALL_END)
        if after == len(text) or _BOUND.match(text, after):
            return call_from(name, value), after
        more = f"after the JSON value, at character {after - body}, there is more: {text[after : after + 20]!r}"
        return self._broken(more, name), self._bound(text, after)

    def _name_below(self, text: str, at: int) -> tuple[str, int]:
        """The name in the form of V3, from `at` to the end of the line, and where the arguments begin."""
        stop = _NAME_ENDS.search(text, at)
        end = stop.start() if stop else len(text)
        return text[at:end].strip(), skip_space(text, end)

    def _bound(self, text: str, at: int) -> int:
        """Where a call that cannot be read ends: after its own closing tag, before any other tag."""
        bound = _BOUND.search(text, at)
        if bound is None:
            return len(text)
        return bound.end() if bound.group() in (_CALL_END, _END) else bound.start()

    def _broken(self, why: str, name: str = "") -> ReadCall:
        return ReadCall(name, error=f"This tool call was not run: {why}. {self.hint}")
