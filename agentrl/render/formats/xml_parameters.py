"""Calls with one tag per parameter: Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3."""

from __future__ import annotations

import re

from agentrl.render.formats.base import Block, ReadCall, Schemas, last_end, near, skip_space
from agentrl.render.formats.typed import typed_arguments

_SPACE = r"[ \t\r\n]*+"
# A value is plain text and may hold these tags itself. Templates write "\n</parameter>\n" and then either the next
# parameter or the end of the function, so a closing tag counts only before one of those. It also counts where the call
# ends without </function>: before </tool_call> or nothing, and then the next call or the end of the turn. The second
# branch is the end of one call and the beginning of another without a closing tag in between: a tag was forgotten,
# and the next call must not become part of the value.
_BORDER = re.compile(
    rf"(?P<close>\n?</parameter>)(?={_SPACE}(?:<parameter=|</function>"
    rf"|(?:</tool_call>{_SPACE})?(?:<tool_call>{_SPACE}<function=|\Z)))"
    rf"|</function>{_SPACE}</tool_call>(?={_SPACE}<tool_call>{_SPACE}<function=)"
)
_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?")
_BEGIN = re.compile(r"<tool_call>|<function=")
_RESUME = re.compile(r"</tool_call>|<tool_call>|<function=")


class XmlParameters:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, a line break between."""

    name = "xml_parameters"
    markers = frozenset({"<tool_call>", "</tool_call>", "</function>", "</parameter>"})
    hint = (
        "Write <tool_call>, <function=NAME>, for each parameter <parameter=KEY>, its value and </parameter>, then "
        "</function> and </tool_call>, each on a line of its own."
    )

    def find(self, text: str, at: int) -> int:
        """Where the next opening tag stands; the outer one may be missing."""
        match = _BEGIN.search(text, at)
        return match.start() if match else -1

    def read(self, text: str, start: int, schemas: Schemas) -> Block:
        """The call at `start`. Each value loses the one line break at each of its ends that belongs to the format."""
        at = start + len("<tool_call>") if text.startswith("<tool_call>", start) else start
        at = skip_space(text, at)
        function = _FUNCTION.match(text, at)
        if function is None:
            begun = at + text.startswith("<function=", at)  # a broken tag is no new call
            return self._malformed(text, start, begun, f"<function=NAME> must come first, not {near(text, at)}")
        name, at = function[1].strip(), function.end()
        if not name:
            return self._malformed(text, start, at, "<function=> names no tool")
        pairs: dict[str, str] = {}
        while True:
            at = skip_space(text, at)
            parameter = _PARAMETER.match(text, at)
            if parameter is None:
                break
            key = parameter[1].strip()
            border = _BORDER.search(text, parameter.end()) if parameter.end() <= last_end(_BORDER, text) else None
            if border is None or border["close"] is None:
                why = f"the parameter '{key}' of {name} has no closing </parameter>"
                return self._malformed(text, start, border.start() if border else parameter.end(), why)
            if not key or key in pairs:
                why = f"the parameter '{key}' of {name} is given twice" if key else f"a parameter of {name} has no name"
                return self._malformed(text, start, border.end(), why)
            pairs[key], at = text[parameter.end() : border.start()], border.end()
        return self._finish(text, start, at, ReadCall(name, typed_arguments(pairs.items(), schemas.get(name))))

    def _finish(self, text: str, start: int, at: int, call: ReadCall) -> Block:
        """The block of a call whose parameters end at `at`. </tool_call> may be missing; where </function> is missing
        too, only </tool_call> or the next call shows that the turn was not cut before another parameter."""
        ended = text.startswith("</function>", at)
        end = at + len("</function>") if ended else at
        after = skip_space(text, end)
        if text.startswith("</tool_call>", after):
            return Block(after + len("</tool_call>"), (call,))
        if ended or _BEGIN.match(text, after):
            return Block(end, (call,))
        why = f"in the call of {call.name}, <parameter=KEY> or </function> must follow, not {near(text, at)}"
        return self._malformed(text, start, at, why)

    def _malformed(self, text: str, start: int, at: int, why: str) -> Block:
        resume = _RESUME.search(text, max(at, start + 1))
        end = len(text) if resume is None else resume.end() if resume[0] == "</tool_call>" else resume.start()
        return Block(end, (ReadCall(error=f"This tool call was not run: {why}. {self.hint}"),))
