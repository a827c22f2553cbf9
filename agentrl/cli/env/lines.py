"""What a person types for a turn: a tool call in a few ways, or an answer in words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.types import Message

HELP = """Call a tool:    search place=cave        or  search cave
                search {"place": "cave"}  or  {"name": "search", "arguments": {"place": "cave"}}
Answer:         any other line; "say WORDS" where the first word is the name of a tool
? shows this and the tools. End the input (Ctrl-D) to stop; the episode is scored as it is then."""


def read_turn(line: str, tools: Mapping[str, Mapping[str, Any]]) -> Message:
    """The assistant message that a line means.

    Args:
        line: As in `HELP`.
        tools: JSON schema "function" parts by name.

    Raises:
        ConfigurationError: It looks like a call, but is none.

    >>> place = {"type": "string"}
    >>> search = {"name": "search", "parameters": {"properties": {"place": place}}}
    >>> read_turn('search place="dark cave"', {"search": search})["tool_calls"][0]["function"]["arguments"]
    {'place': 'dark cave'}
    >>> read_turn("say search me", {"search": search})["content"]
    'search me'
    """
    text = line.strip()
    if text.startswith("{"):
        return _from_json(text)
    word, _, rest = text.partition(" ")
    if word == "say":
        return {"role": "assistant", "content": rest.strip()}
    if word not in tools:
        return {"role": "assistant", "content": text}
    parameters = tools[word].get("parameters") or {}
    rest = rest.strip()
    arguments = _json_object(rest) if rest.startswith("{") else _from_words(word, rest, parameters)
    return _call(word, arguments)


def _call(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _from_json(text: str) -> Message:
    value = _json_object(text)
    if "role" in value or "tool_calls" in value or "content" in value:
        return {"role": "assistant", "content": "", **value}
    if not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), dict):
        raise ConfigurationError('A call in JSON is {"name": ..., "arguments": {...}}.')
    return _call(value["name"], value.get("arguments", {}))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"This is not JSON: {error.msg} at character {error.pos + 1}.") from None
    if not isinstance(value, dict):
        raise ConfigurationError("Arguments in JSON are an object: {...}.")
    return value


def _from_words(tool: str, rest: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """name=value words, or plain values in the order of the arguments; the last one takes what is left."""
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    try:
        words = shlex.split(rest)
    except ValueError:
        words = rest.split()
    named = [word.partition("=") for word in words]
    if words and all(sign and key.isidentifier() for key, sign, _ in named):
        return {key: _value(value, properties.get(key, {})) for key, _, value in named}
    if len(words) > len(properties):
        if len(properties) != 1:
            wanted = " ".join(f"{name}=..." for name in properties)
            raise ConfigurationError(f"To call {tool}, write: {tool} {wanted}".rstrip() + ". To answer, write: say ...")
        words = [rest]
    return {name: _value(word, properties[name]) for name, word in zip(properties, words, strict=False)}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """The text as the schema's type; what does not fit stays text, and the tool says what is wrong with it."""
    if schema.get("type") == "string" or all(isinstance(choice, str) for choice in schema.get("enum") or [0]):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
