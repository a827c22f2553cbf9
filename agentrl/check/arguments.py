"""Arguments that an environment should survive: such as fit the schema of a tool, and such as do not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = ("", "a", "left", "7", "hello world", "é漢😀", "x" * 200, "<|im_end|>")


def random_arguments(
    schema: Mapping[str, Any], rng: random.Random, depth: int = 0, root: Mapping[str, Any] | None = None
) -> Any:
    """A value that fits a JSON schema, as far as types, enums, bounds and local references go."""
    root = schema if root is None else root
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    if "const" in schema:
        return schema["const"]
    if "$ref" in schema:
        found = (root.get("$defs") or {}).get(str(schema["$ref"]).rpartition("/")[2], {})
        return random_arguments(found, rng, depth + 1, root)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return random_arguments(rng.choice(list(options)), rng, depth + 1, root)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    low, high = schema.get("minimum", -3), schema.get("maximum", 12)
    if kind == "integer":
        return rng.randint(int(low), max(int(high), int(low)))
    if kind == "number":
        return rng.uniform(low, max(high, low))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        if "prefixItems" in schema:
            return [random_arguments(item, rng, depth + 1, root) for item in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        size = least if depth > 3 else rng.randint(least, max(schema.get("maxItems", least + 3), least))
        return [random_arguments(schema.get("items", {}), rng, depth + 1, root) for _ in range(size)]
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: random_arguments(sub, rng, depth + 1, root)
            for name, sub in schema.get("properties", {}).items()
            if name in required or (depth <= 3 and rng.random() < 0.7)
        }
    return rng.choice(WORDS)


def _nested(depth: int) -> Any:
    value: Any = "deep"
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


ODD: tuple[Any, ...] = (
    None, True, -1, 0.5, 10**40, float("nan"), float("inf"), float("-inf"), "", "no such choice", "7; rm -rf /",
    "\x00\ud800\u202e\ufeff<|im_end|>{{7*7}}", "x" * 100_000, [], ["a", 1, None], {"no": "such"}, _nested(500),
)  # fmt: skip


def bad_arguments(schema: Mapping[str, Any], rng: random.Random) -> Iterator[Any]:
    """What a model may write for a tool of this schema although it should not: wrong, missing, too much, too deep.

    Args:
        schema: Of the tool's arguments, an object.
        rng: For the arguments beside the bad one, which fit.

    >>> made = list(bad_arguments({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, random.Random(0)))
    >>> {} in made, [1, 2] in made, {"n": "no such choice"} in made
    (True, True, True)
    """
    schema = {**schema, "type": "object"}
    yield from ([1, 2], "text", 7, _nested(500))
    names = list(schema.get("properties") or {})
    good = {**{name: None for name in names}, **random_arguments({**schema, "required": names}, rng)}
    yield {**good, "no_such_argument": 1}
    for name in schema.get("required") or ():
        yield {key: value for key, value in good.items() if key != name}
    for odd in ODD:
        for name in names:
            yield {**good, name: odd}


def is_free(schema: Mapping[str, Any]) -> bool:
    """True where the arguments hold text that the schema does not list: random words say little about it.

    >>> is_free({"properties": {"place": {"type": "string"}}}), is_free({"properties": {"to": {"enum": ["a"]}}})
    (True, False)
    """
    if schema.get("enum") or "const" in schema:
        return False
    inner = [*(schema.get("properties") or {}).values(), *(schema.get("$defs") or {}).values()]
    inner += [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ()), *(schema.get("prefixItems") or ())]
    inner += [schema["items"]] if isinstance(schema.get("items"), Mapping) else []
    if inner:
        return any(is_free(sub) for sub in inner)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return "string" in (kind if isinstance(kind, list) else [kind])
