"""Messages as a template can rely on them: one shape, whatever the dataset stored."""

from __future__ import annotations

import json
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render.codec import Codec
from agentrl.types import Message


def flatten(content: Any) -> str:
    """Content as text: None is "", text blocks are joined. Blocks with media are a ConfigurationError."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    texts: list[str] = []
    for block in content:
        kind = block.get("type", "text")
        if kind != "text":
            raise ConfigurationError(
                f"A message holds a content block of type '{kind}', and this renderer writes text only. "
                "Describe it as a text block."
            )
        texts.append(block.get("text") or "")
    return "".join(texts)


def normalise_arguments(arguments: Any, name: str) -> dict[str, Any]:
    """Arguments of a recorded call as a dict; datasets store them as JSON strings too, and nothing as "" or None."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as e:
            raise ConfigurationError(f"The arguments of a recorded call of '{name}' are not JSON: {e}.") from e
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str) and not arguments.strip():
        return {}
    if not isinstance(arguments, dict):
        raise ConfigurationError(
            f"The arguments of a recorded call of '{name}' must be a JSON object, not {type(arguments).__name__}."
        )
    return arguments


def guard_json(value: Any, codec: Codec) -> Any:
    """A JSON value whose strings and keys spell no control token (stand-ins instead, see `Codec.guard`)."""
    if isinstance(value, str):
        return codec.guard(value, in_json=True)
    if isinstance(value, dict):
        return {codec.guard(str(k), in_json=True): guard_json(v, codec) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [guard_json(v, codec) for v in value]
    return value


def prepare(message: Message, codec: Codec, trusted: frozenset[str]) -> Message:
    """The message as templates expect it, with no control token spelled in it.

    `trusted` tokens (think and call tags, and others that are not special) stay what they are in system and assistant
    messages: those are written by the author of the run or by the policy. User and tool messages are never trusted.
    """
    role = message["role"]
    allowed = trusted if role in ("system", "assistant", "developer") else frozenset[str]()
    out: Message = {"role": role, "content": codec.guard(flatten(message.get("content")), allowed)}
    for key, value in message.items():
        if value is None or key in ("role", "content", "tool_calls"):
            continue
        trust = trusted if key == "reasoning_content" else frozenset[str]()
        out[key] = codec.guard(value, trust) if isinstance(value, str) else guard_json(value, codec)
    calls = message.get("tool_calls")
    if calls:
        out["tool_calls"] = [_prepare_call(call, codec) for call in calls]
    return out


def _prepare_call(call: dict[str, Any], codec: Codec) -> dict[str, Any]:
    function = call.get("function") or call
    name = function.get("name") or ""
    arguments = normalise_arguments(function.get("arguments"), name)
    made = {"name": codec.guard(name), "arguments": guard_json(arguments, codec)}
    return {"type": "function", "function": made} | ({"id": codec.guard(call["id"])} if call.get("id") else {})
