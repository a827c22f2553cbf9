"""Calls as pairs of keys and values: GLM-4.5, GLM-4.6, GLM-4.7."""

from __future__ import annotations

import re

from agentrl.render.formats.base import Block, ReadCall, Schemas, last_end, near, skip_space
from agentrl.render.formats.typed import typed_arguments

_SPACE = r"[ \t\r\n]*+"
_NAME = r"[^\s<>{}()\[\]\"']++"
_NEXT = rf"<tool_call>{_SPACE}{_NAME}{_SPACE}<(?:arg_key|/tool_call)>"
# A value is plain text and may hold these tags itself. Templates write the next key or the end of the call after a
# value, so a closing tag counts only before one of those, or before another call or the end of the turn. The second
# branch is the end of one call and the beginning of another without a closing tag in between: a tag was forgotten,
# and the next call must not become part of the value.
_BORDER = re.compile(
    rf"(?P<close></arg_value>)(?={_SPACE}(?:<arg_key>|</tool_call>|{_NEXT}|\Z))"
    rf"|</tool_call>(?={_SPACE}{_NEXT})"
)
_HEAD = re.compile(r"<tool_call>([^<\n]*)")
_WHOLE_NAME = re.compile(_NAME)
_KEY = re.compile(rf"<arg_key>([^<>\n]*)</arg_key>{_SPACE}<arg_value>")
_TAG = re.compile(r"</?tool_call>")


class Glm:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``, line breaks between or not."""

    name = "glm"
    opening, closing = "<tool_call>", "</tool_call>"
    markers = frozenset({opening, closing, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"})
    hint = (
        "Write <tool_call>NAME, for each argument <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>, then "
        "</tool_call>."
    )

    def find(self, text: str, at: int) -> int:
        """Where the next opening tag stands."""
        return text.find(self.opening, at)

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The call at `start`. Values are taken exactly as they stand between their tags."""
        head = _HEAD.match(text, start)
        name, at = (head[1].strip(), head.end()) if head else ("", start + len(self.opening))
        if not name:  # the name on a line of its own
            head = _WHOLE_NAME.match(text, skip_space(text, at))
            name, at = (head[0], head.end()) if head else ("", at)
        if not _WHOLE_NAME.fullmatch(name):
            wrong = f"{name[:24]!r} is not the name of a tool" if name else "no name of a tool follows <tool_call>"
            return self._malformed(text, at, wrong)
        pairs: dict[str, str] = {}
        while True:
            at = skip_space(text, at)
            key = _KEY.match(text, at)
            if key is None:
                return self._finish(text, at, ReadCall(name, typed_arguments(pairs.items(), schemas.get(name))))
            border = _BORDER.search(text, key.end()) if key.end() <= last_end(_BORDER, text) else None
            told = key[1].strip()
            if border is None or border["close"] is None:
                why = f"the value of '{told}' of {name} has no closing </arg_value>"
                return self._malformed(text, border.start() if border else key.end(), why)
            if not told or told in pairs:
                why = f"the argument '{told}' of {name} is given twice" if told else f"an argument of {name} has no key"
                return self._malformed(text, border.end(), why)
            pairs[told], at = text[key.end() : border.start()], border.end()

    def _finish(self, text: str, at: int, call: ReadCall) -> Block:
        """The block of a call whose pairs end at `at`. Only its closing tag or the next call shows that the turn was
        not cut before another pair."""
        if text.startswith(self.closing, at):
            return Block(at + len(self.closing), (call,))
        if text.startswith(self.opening, at):
            return Block(at, (call,))
        wanted = "<arg_key>KEY</arg_key><arg_value> or </tool_call>"
        why = f"in the call of {call.name}, {wanted} must follow, not {near(text, at)}"
        return self._malformed(text, at, why)

    def _malformed(self, text: str, at: int, why: str) -> Block:
        resume = _TAG.search(text, at)
        end = len(text) if resume is None else resume.end() if resume[0] == self.closing else resume.start()
        return Block(end, (ReadCall(error=f"This tool call was not run: {why}. {self.hint}"),))
