"""Conversations that make a template show what it does with history, and the words for what it did."""

from __future__ import annotations

import enum
import secrets
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render.formats import Think
from agentrl.render.template import ChatTemplate, Tools
from agentrl.types import Message

MARK = f"zq{secrets.token_hex(6)}qz"  # nobody else can write it
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "What to look up."},
                "count": {"type": "integer", "description": "How many."},
                "exact": {"type": "boolean", "description": "No variants."},
                "places": {"type": "array", "items": {"type": "string"}, "description": "Where."},
            },
            "required": ["word"],
        },
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(
    text: str = "", *, calls: int = 0, reasoning: str | None = None, arguments: dict[str, Any] | None = None
) -> Message:
    """An assistant message; without `arguments` its calls are told apart by their word."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": "probe_tool", "arguments": arguments or {"word": f"w{i}"}},
            }
            for i in range(calls)
        ]
    return message


def tool(text: str, number: int = 0) -> Message:
    return {"role": "tool", "name": "probe_tool", "tool_call_id": f"call_{number}", "content": text}


def shaped(call: dict[str, Any], number: int) -> dict[str, Any]:
    """A call in OpenAI's shape, with an id; people script ``{"name": ..., "arguments": ...}``."""
    return {"id": f"call_{number}", "type": "function"} | (call if "function" in call else {"function": call})


class Style(enum.Enum):
    """What the generation prompt does about thinking; turns of probe conversations are as parsing gives them."""

    PLAIN = None  # nothing: a turn may think or not
    EMPTY = ""  # closes an empty think block: no turn thinks
    OPEN = "Hm."  # opens a think block: every turn thinks


def style_of(generation: str, think: Think) -> Style:
    """The style that a generation prompt asks for."""
    opened, closed = think.open.strip(), think.close.strip()
    if opened not in generation and closed not in generation:
        return Style.PLAIN
    return Style.OPEN if generation.rfind(opened) > generation.rfind(closed) else Style.EMPTY


def _conversations(with_calls: bool, style: Style, several: bool) -> list[list[Message]]:
    """Conversations that make history-rewriting templates show themselves."""

    def turn(text: str = "", calls: int = 0, thought: str | None = None) -> Message:
        return assistant(text, calls=calls, reasoning=(thought or style.value) if style is not Style.EMPTY else "")

    system: Message = {"role": "system", "content": "Be brief."}
    talk = [user("Hi there."), turn("Hello."), user("And now?"), turn("Yes."), user("Bye.")]
    thought = [user("One?"), turn("Two.", thought="It is one more."), user("Three?"), turn("Four."), user("Five?")]
    out = [talk, [system, *talk], thought]
    call = turn(calls=1)
    if with_calls:
        out += [
            [user("Look."), call, tool("found"), call, tool("again"), turn("Done."), user("More?")],
            [system, user("Look."), call, tool("found"), turn("Done."), user("x"), call, tool("y")],
            [user("Look."), turn(calls=1, thought="Let me see."), tool("found"), user("And?"), call, tool("d")],
        ]
    if with_calls and several:
        out.append([user("Look."), turn("Both.", calls=2), tool("a"), tool("b", 1), call, tool("c")])
    return out


def rewriting(template: ChatTemplate, tools: Tools, style: Style, *, several: bool = True) -> str | None:
    """None where every prompt of the probe conversations continues the one before; else what went wrong.

    `several`: turns with more than one call are among them.
    """
    try:
        for messages in _conversations(bool(tools), style, several):
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


def ignores_tools(template: ChatTemplate) -> bool:
    """True where the prompt is the same with and without tools, or tools make the template fail."""
    try:
        return template.render([user("x")], [TOOL]) == template.render([user("x")])
    except ConfigurationError:
        return True
