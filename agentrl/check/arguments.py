"""Arguments that an environment should survive."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


def random_arguments(schema: Mapping[str, Any], rng: random.Random, depth: int = 0) -> Any:
    """A value that fits a JSON schema, as far as types, enums and bounds go."""
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return random_arguments(rng.choice(list(options)), rng, depth + 1)
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
            return [random_arguments(item, rng, depth + 1) for item in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        size = least if depth > 3 else rng.randint(least, max(schema.get("maxItems", least + 3), least))
        return [random_arguments(schema.get("items", {}), rng, depth + 1) for _ in range(size)]
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: random_arguments(sub, rng, depth + 1)
            for name, sub in schema.get("properties", {}).items()
            if name in required or (depth <= 3 and rng.random() < 0.7)
        }
    return rng.choice(["", "a", "left", "7", "hello world", "é漢😀", "x" * 200, "<|im_end|>"])
