"""A policy that calls random tools with random arguments: for smoke tests, baselines and warm-up data."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.sampler.scripted import as_output, encode_turn, write_made_up
from agentrl.types import Message, SampleOutput, SampleRequest

_DEPTH = 4  # of nested objects and arrays drawn
_INT_RANGE = (0, 10)  # where the schema gives no bounds


class RandomPolicy:
    """Calls a uniformly drawn tool each turn with arguments drawn from its JSON schema, or ends the episode.

    Strings without an enum are words of the conversation. The same request (by its `seed`) gives the same turn. Its
    log-probs are a filler (-1.0), so its turns may start a model off but carry no importance ratio.

    Args:
        seed: Another seed is another policy.
        stop_p: Probability that a turn answers in plain text instead of calling a tool.
        tokenizer: Encodes the turn; only needed when the engine plays in ids.
        write: Turns a message into text; by default as the conversation's template writes turns.

    >>> import asyncio
    >>> from agentrl.types import SampleRequest, SamplingParams
    >>> place = {"type": "string", "enum": ["cave", "mill"]}
    >>> tool = {"function": {"name": "search", "parameters": {"properties": {"place": place}, "required": ["place"]}}}
    >>> request = SampleRequest([], [tool], None, 16, SamplingParams(), (0, 1), "a")
    >>> call = asyncio.run(RandomPolicy(stop_p=0.0).sample(request)).message["tool_calls"][0]["function"]
    >>> call["name"], call["arguments"]["place"] in ("cave", "mill")
    ('search', True)
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        stop_p: float = 0.1,
        tokenizer: Any = None,
        write: Callable[[Message], str] | None = None,
    ) -> None:
        if not 0.0 <= stop_p <= 1.0:
            raise ConfigurationError(f"stop_p is a probability, between 0 and 1; got {stop_p}.")
        self.seed = seed
        self.stop_p = stop_p
        self.tokenizer = tokenizer
        self.write = write

    async def sample(self, request: SampleRequest) -> SampleOutput:
        """A random turn: one tool call, or a word where no tool is offered or the policy stops."""
        rng = random.Random(repr((self.seed, *request.seed)))
        words = _words(request.messages)
        if not request.tools or rng.random() < self.stop_p:
            message: Message = {"role": "assistant", "content": rng.choice(words)}
        else:
            message = {"role": "assistant", "content": "", "tool_calls": [self._call(request, words, rng)]}
        if request.prompt_ids is None:
            return SampleOutput(None, None, "stop", 0, message)
        return as_output(
            encode_turn(write_made_up(message, request, self.write), self.tokenizer, request), None, request
        )

    def release(self, conversation_id: str) -> None:
        """Nothing was held."""

    def _call(self, request: SampleRequest, words: list[str], rng: random.Random) -> dict[str, Any]:
        tool = rng.choice(request.tools)
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        arguments = draw_value({"type": "object", **schema}, words, rng)
        number = sum(message.get("role") == "tool" for message in request.messages)
        return {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }


def draw_value(
    schema: Mapping[str, Any],
    words: list[str],
    rng: random.Random,
    *,
    root: Mapping[str, Any] | None = None,
    depth: int = 0,
) -> Any:
    """A value that fits the JSON schema: enums, bounds, objects, arrays, unions and local references are followed.

    >>> draw_value({"type": "integer", "minimum": 3, "maximum": 3}, ["a"], random.Random(0))
    3
    """
    root = schema if root is None else root
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    if "$ref" in schema:
        return draw_value(_resolve(schema["$ref"], root), words, rng, root=root, depth=depth)
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return draw_value(rng.choice(list(schema[union])), words, rng, root=root, depth=depth)
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind in ("integer", "number"):
        return _draw_number(schema, kind == "integer", rng)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind == "object":
        return _draw_object(schema, words, rng, root, depth)
    if kind == "array":
        least = int(schema.get("minItems", 0))
        most = int(schema.get("maxItems", max(least, 3)))
        count = least if depth >= _DEPTH else rng.randint(least, max(least, most))
        items = schema.get("items") or {}
        return [draw_value(items, words, rng, root=root, depth=depth + 1) for _ in range(count)]
    return rng.choice(words)


def _draw_object(
    schema: Mapping[str, Any], words: list[str], rng: random.Random, root: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    """Every required property, and each optional one half of the time."""
    required = set(schema.get("required", ()))
    drawn = {}
    for name, inner in (schema.get("properties") or {}).items():
        if name in required or (depth < _DEPTH and rng.random() < 0.5):
            drawn[name] = draw_value(inner, words, rng, root=root, depth=depth + 1)
    return drawn


def _draw_number(schema: Mapping[str, Any], whole: bool, rng: random.Random) -> int | float:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    span = _INT_RANGE[1] - _INT_RANGE[0]
    if low is None:
        low = _INT_RANGE[0] if high is None else min(_INT_RANGE[0], high - span)
    if high is None:
        high = max(_INT_RANGE[1], low + span)
    if not whole:
        return rng.uniform(low, high)
    first, last = int(-(-low // 1)), int(high // 1)  # ceil and floor: bounds may be fractions
    first += "exclusiveMinimum" in schema and first == schema["exclusiveMinimum"]
    last -= "exclusiveMaximum" in schema and last == schema["exclusiveMaximum"]
    return rng.randint(first, max(first, last))


def _resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found


def _words(messages: list[Message]) -> list[str]:
    """The words of the conversation, in order, each once."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        texts += [content] if isinstance(content, str) else [block.get("text", "") for block in content]
    return list(dict.fromkeys(re.findall(r"\w+", " ".join(texts)))) or ["nothing"]
