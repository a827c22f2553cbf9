"""Tables as TOML text, so that what a command prints can be a run file again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(table: Mapping[str, Any], prefix: str = "") -> str:
    """The table in TOML; keys without a value are left out.

    >>> print(toml_text({"version": 1, "model": {"tiny": True, "peft": {"r": 8}, "dtype": None}}))
    version = 1
    <BLANKLINE>
    [model]
    tiny = true
    <BLANKLINE>
    [model.peft]
    r = 8
    """
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, Mapping)]
    for key, inner in table.items():
        if isinstance(inner, Mapping):
            name = f"{prefix}{_key(key)}"
            text = toml_text(inner, f"{name}.")
            plain = any(not isinstance(value, Mapping) and value is not None for value in inner.values())
            lines += ["", f"[{name}]", text] if plain or not inner else [text]
    return "\n".join(lines).rstrip()


def _key(key: Any) -> str:
    return str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else json.dumps(str(key), ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{{inside}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool)) else str(value)
