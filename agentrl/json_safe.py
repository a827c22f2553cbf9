"""Any value as JSON types. Never raises: what JSON cannot hold becomes a small dict that says what it was."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import sys
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 40  # of nested values; deeper (a cycle, most likely) is written as a note


def json_safe(value: Any, depth: int = 0) -> Any:
    """The value as JSON types; what JSON cannot hold becomes a small dict that says what it was.

    >>> json_safe({"score": float("nan"), 3: (1, {"b"})})
    {'score': None, '3': [1, ['b']]}
    >>> json_safe(b"abc")["size"]
    3
    """
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return safe_float(value)
    if depth >= _MAX_DEPTH:
        return {"type": "object", "class": kind.__name__, "repr": f"<nested more than {_MAX_DEPTH} deep>"}
    if kind is list or kind is tuple:
        return [json_safe(item, depth + 1) for item in value]
    if kind is dict or isinstance(value, Mapping):
        safe = {key if type(key) is str else str(key): json_safe(item, depth + 1) for key, item in value.items()}
        # An image block and its image are one thing: {"type": "image", "image": <picture>} needs one dict, not two.
        picture = safe.get("image")
        if safe.get("type") == "image" and isinstance(picture, dict) and "sha256" in picture:
            del safe["image"]
            return {**safe, **picture}
        return safe
    if isinstance(value, (list, tuple)):
        return [json_safe(item, depth + 1) for item in value]
    return _object(value, depth)


def safe_float(value: float) -> float | str | None:
    """The number; None for not-a-number; "Infinity" or "-Infinity" for the infinities."""
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _object(value: Any, depth: int) -> Any:
    """The rarer kinds: enums, subclasses of plain types, bytes, pictures, arrays, dataclasses, models."""
    if isinstance(value, enum.Enum):
        return json_safe(value.value, depth + 1)
    for plain in (str, int, float):  # subclasses, such as numpy's float64
        if isinstance(value, plain):
            return json_safe(plain(value), depth + 1)
    if isinstance(value, (set, frozenset)):
        return sorted((json_safe(item, depth + 1) for item in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return {"type": "bytes", "sha256": hashlib.sha256(value).hexdigest(), "size": len(value)}
    images = sys.modules.get("PIL.Image")  # a picture exists only where Pillow is already imported
    if images is not None and isinstance(value, images.Image):
        digest = hashlib.sha256(f"{value.mode}{value.size}".encode() + value.tobytes()).hexdigest()
        return {"type": "image", "sha256": digest, "size": list(value.size)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_safe(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    for method in ("model_dump", "tolist", "isoformat"):  # pydantic models; arrays, tensors, their scalars; dates
        convert = getattr(value, method, None)
        if callable(convert) and not isinstance(value, type):
            return json_safe(convert(), depth + 1)
    return {"type": "object", "class": type(value).__name__, "repr": repr(value)[:500]}
