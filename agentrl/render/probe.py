"""What a template does, found out by rendering it: history, tools, calls, the end of a turn."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render.calls import THINK_CLOSE, THINK_OPEN, CallFormat, Hermes
from agentrl.render.codec import Codec
from agentrl.render.template import ChatTemplate
from agentrl.types import Message

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "What to look up."}},
            "required": ["word"],
        },
    },
}
FORMATS: tuple[CallFormat, ...] = (Hermes(),)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which template is used, whether its prompts continue what is held, and why."""

    preserving: bool
    why: str
    template: str  # "original", "custom", "qwen3", "chatml" or "none"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str = "", *, calls: int = 0, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": "probe_tool", "arguments": {"word": f"w{i}"}},
            }
            for i in range(calls)
        ]
    return message


def tool(text: str, number: int = 0) -> Message:
    return {"role": "tool", "name": "probe_tool", "tool_call_id": f"call_{number}", "content": text}


class Style(enum.Enum):
    """What the generation prompt does about thinking; turns of probe conversations are as `read_turn` gives them."""

    PLAIN = None  # nothing: a turn may think or not
    EMPTY = ""  # closes an empty think block: no turn thinks
    OPEN = "Hm."  # opens a think block: every turn thinks


def style_of(generation: str) -> Style:
    """The style that a generation prompt asks for."""
    if THINK_CLOSE not in generation and THINK_OPEN not in generation:
        return Style.PLAIN
    return Style.OPEN if generation.rfind(THINK_OPEN) > generation.rfind(THINK_CLOSE) else Style.EMPTY


def _conversations(with_tools: bool, style: Style) -> list[list[Message]]:
    """Conversations that make history-rewriting templates show themselves."""

    def turn(text: str = "", calls: int = 0, thought: str | None = None) -> Message:
        return assistant(text, calls=calls, reasoning=(thought or style.value) if style is not Style.EMPTY else "")

    system: Message = {"role": "system", "content": "Be brief."}
    talk = [user("Hi there."), turn("Hello."), user("And now?"), turn("Yes."), user("Bye.")]
    thought = [user("One?"), turn("Two.", thought="It is one more."), user("Three?"), turn("Four."), user("Five?")]
    out = [talk, [system, *talk], thought]
    if with_tools:
        call = turn(calls=1)
        out += [
            [user("Look."), call, tool("found"), call, tool("again"), turn("Done."), user("More?")],
            [system, user("Look."), call, tool("found"), turn("Done."), user("x"), call, tool("y")],
            [user("Look."), turn("Both.", calls=2), tool("a"), tool("b", 1), call, tool("c")],
            [user("Look."), turn(calls=1, thought="Let me see."), tool("found"), user("And?"), call, tool("d")],
        ]
    return out


def rewriting(template: ChatTemplate, *, with_tools: bool, style: Style) -> str | None:
    """None where every prompt of the probe conversations continues the one before; else what went wrong."""
    tools = [TOOL] if with_tools else None
    try:
        for messages in _conversations(with_tools, style):
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            for k, end in zip(turns, [*turns[1:], len(messages)], strict=True):
                done = template.render(messages[: k + 1], tools, generate=False)
                starts = done.startswith(template.render(messages[:k], tools))
                if not starts or not template.render(messages[:end], tools).startswith(done):
                    return _describe(messages, k)
    except ConfigurationError as e:
        return str(e)
    return None


def _describe(messages: list[Message], k: int) -> str:
    thought = " with reasoning" if messages[k].get("reasoning_content") else ""
    call = " with a tool call" if messages[k].get("tool_calls") else ""
    return f"it writes an assistant turn{thought}{call} differently once the conversation goes on"


def end_of_turn(template: ChatTemplate, codec: Codec, style: Style) -> tuple[int | None, str]:
    """The id that ends an assistant turn, and the text after it (the border); (None, "") without one."""
    mark = "zqanswerqz"
    try:
        done = template.render([user("x"), assistant(mark, reasoning=style.value)], generate=False)
    except ConfigurationError:
        return None, ""
    segments = codec.segments(done[done.rindex(mark) + len(mark) :]) if mark in done else []
    for i, segment in enumerate(segments):
        if isinstance(segment, int):
            return segment, codec.text_of(segments[i + 1 :])
    return None, ""


def ignores_tools(template: ChatTemplate) -> bool:
    """True where the prompt is the same with and without tools, or tools make the template fail."""
    try:
        return template.render([user("x")], [TOOL]) == template.render([user("x")])
    except ConfigurationError:
        return True


def call_format(template: ChatTemplate) -> CallFormat | None:
    """The format in which this template writes calls, by reading back one that it rendered."""
    want = {"word": "a <b> & 'c' \"d\" é漢"}
    message = assistant(calls=1)
    message["tool_calls"][0]["function"]["arguments"] = want
    try:
        text = template.render([user("x"), message, tool("y")], [TOOL])
    except ConfigurationError:
        return None
    for form in FORMATS:
        start = text.rfind(form.opening)
        if start >= 0:
            call = form.read(text, start)
            if call.error is None and call.name == "probe_tool" and call.arguments == want:
                return form
    return None


def generation_text(template: ChatTemplate) -> str:
    """What the template appends for the assistant to go on from; "" where it cannot be told apart."""
    try:
        text, bare = template.render([user("x")]), template.render([user("x")], generate=False)
    except ConfigurationError:
        return ""
    return text[len(bare) :] if text.startswith(bare) else ""


def same_prompts(one: ChatTemplate, other: ChatTemplate, *, with_tools: bool) -> bool:
    """True where both templates write the same first prompts and the same text after a tool call."""
    system: Message = {"role": "system", "content": "Be brief."}
    first = [[user("Hi.")], [system, user("Hi.")]]
    called = [user("Hi."), assistant(calls=1), tool("found")]
    schema = json.loads(json.dumps(TOOL).replace("probe_tool", "second"))
    try:
        for tools in (None, [TOOL], [TOOL, schema]) if with_tools else (None,):
            if any(one.render(m, tools) != other.render(m, tools) for m in first):
                return False
        return not with_tools or one.render(called, [TOOL]) == other.render(called, [TOOL])
    except ConfigurationError:
        return False
