"""Messages as a template can rely on them: one shape, whatever the dataset stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.pictures import is_image
from agentrl.render.codec import Codec, map_strings
from agentrl.types import Content, Message


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template wants of an assistant message; families differ, and a wrong shape is written without a word."""

    json_arguments: bool = False  # arguments of calls as JSON text, not as a dict
    no_content: bool = False  # content None beside calls, where there is no text
    thought: str = "reasoning_content"  # the key under which it looks for reasoning
    short_ids: bool = False  # ids of calls as nine letters and digits (Mistral)
    blocks: bool = False  # content as a list of blocks, also where it is text only
    image: str = ""  # what to write for an image into content that is text; "" leaves it a block


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
        if isinstance(block, str):
            texts.append(block)
            continue
        if not isinstance(block, dict):
            raise ConfigurationError(f"A message's content holds {block!r:.60}; use text or content blocks.")
        kind = block.get("type", "text")
        if kind != "text":
            raise ConfigurationError(
                f"A message holds a content block of type '{kind}', and this renderer writes text only. "
                "Describe it as a text block."
            )
        texts.append(block.get("text") or "")
    return "".join(texts)


def check_order(messages: Sequence[Message], calls_in: Callable[[str], bool]) -> None:
    """Every tool result of a prompt follows a turn with a call. `calls_in` finds calls in the text of a turn.

    Raises:
        ConfigurationError: No messages, or a tool message without a call before it.
    """
    if not messages:
        raise ConfigurationError("The prompt has no messages.")
    called = False
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ConfigurationError(f"messages[{i}] of the prompt has no role: {message!r:.80}.")
        if role == "tool" and not called:
            raise ConfigurationError(
                f"messages[{i}] of the prompt is a tool result, but no assistant message with tool_calls stands "
                "before it. Add the call, or give the text to the user."
            )
        if role != "tool":
            called = role == "assistant" and bool(
                message.get("tool_calls") or calls_in(flatten(message.get("content")))
            )


def check_shown(messages: Sequence[Message], rendered: str, guard: Callable[[str], str]) -> None:
    """No message of an unusual role, or a system message in an unusual place, was left out of the prompt.

    Raises:
        ConfigurationError: Names the message that the template drops.
    """
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        usual = role in ("user", "assistant", "tool") or (role == "system" and i == 0)
        if usual or not isinstance(content, str) or not content.strip():
            continue
        words = guard(content).strip()
        if words not in rendered and json.dumps(words, ensure_ascii=False)[1:-1] not in rendered:
            raise ConfigurationError(
                f"The chat template leaves messages[{i}] (role '{role}') out of the prompt. Use the roles that it "
                "knows: one system message at the beginning, then user, assistant and tool."
            )


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


def check_schemas(tools: Sequence[Any]) -> None:
    """Every tool is a schema with a name.

    Raises:
        ConfigurationError: Names the one that is not.
    """
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigurationError(f"tools[{i}] must be a JSON schema of a function with a name, not {tool!r:.80}.")


_KEPT_NULLS = frozenset({"default", "const", "example"})


def without_nulls(schema: Any) -> Any:
    """A JSON schema without the nulls that Arrow fills in, so that absent keys are absent again.

    >>> without_nulls({"type": "object", "enum": None, "properties": {"a": {"type": "string"}, "b": None}})
    {'type': 'object', 'properties': {'a': {'type': 'string'}}}
    """
    if isinstance(schema, dict):
        # A tool without a description is written with an empty one: templates add texts to it.
        if schema.get("description", "") is None and "name" in schema:
            schema = schema | {"description": ""}
        return {k: without_nulls(v) for k, v in schema.items() if v is not None or k in _KEPT_NULLS}
    return [without_nulls(v) for v in schema] if isinstance(schema, list | tuple) else schema


def guard_json(value: Any, codec: Codec) -> Any:
    """A JSON value whose strings and keys spell no control token (stand-ins instead, see `Codec.guard`)."""
    return map_strings(value, lambda text: codec.guard(text, in_json=True))


def prepare(message: Message, codec: Codec, trusted: frozenset[str], shape: Shape) -> Message:
    """The message as the template expects it, with no control token spelled in it.

    `trusted` tokens (the tags of reasoning and calls) stay what they are in assistant messages, which the policy or the
    author of an example wrote. No other role is trusted.
    """
    role = message["role"]
    allowed = trusted if role == "assistant" else frozenset[str]()
    out: Message = {"role": role, "content": _guard_content(message.get("content"), codec, allowed, shape)}
    for key, value in message.items():
        if value is None or key in ("role", "content", "tool_calls"):
            continue
        if key in ("reasoning_content", "reasoning", "thinking") and isinstance(value, str):
            out[shape.thought] = codec.guard(value, trusted)
        else:
            out[key] = codec.guard(value) if isinstance(value, str) else guard_json(value, codec)
    if shape.short_ids and isinstance(out.get("tool_call_id"), str):
        out["tool_call_id"] = _short(out["tool_call_id"])
    calls = message.get("tool_calls")
    if calls:
        out["tool_calls"] = [_prepare_call(call, codec, shape) for call in calls]
        if shape.no_content and not out["content"]:
            out["content"] = None
    return out


def _guard_content(content: Any, codec: Codec, allowed: frozenset[str], shape: Shape) -> Content:
    """Text as a string; a list of blocks where an image is among them, or the template reads nothing else."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": flatten(content)}]
    if not shape.blocks and not any(map(is_image, blocks)):
        return codec.guard(flatten(content), allowed)
    texts = [None if is_image(block) else codec.guard(flatten([block]), allowed) for block in blocks]
    if shape.image:
        return "".join(shape.image if text is None else text for text in texts)
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]


def _prepare_call(call: dict[str, Any], codec: Codec, shape: Shape) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"A recorded call has no name of a tool: {call!r:.80}.")
    arguments = guard_json(normalise_arguments(function.get("arguments"), name), codec)
    made = {
        "name": codec.guard(name),
        "arguments": json.dumps(arguments, ensure_ascii=False) if shape.json_arguments else arguments,
    }
    name = codec.guard(call["id"]) if call.get("id") else None
    named = {} if name is None else {"id": _short(name) if shape.short_ids else name}
    return {"type": "function", "function": made} | named


def _short(name: str) -> str:
    """A name of exactly nine letters and digits, other for other names that end otherwise.

    >>> _short("call_12")
    '000call12'
    """
    return "".join(c for c in name if c.isascii() and c.isalnum())[-9:].rjust(9, "0")
