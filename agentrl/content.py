"""What a tool returned becomes what the model reads."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentrl.errors import EnvironmentFailed
from agentrl.types import Content

_PAYLOAD = {"text": "text", "image": "image"}  # block type -> the key that it must have
_FOREIGN = frozenset({"audio", "video", "file", "image_url", "input_image", "input_text", "input_audio"})


def to_content(value: Any) -> Content:
    """What the model reads of a tool's return value.

    Text and lists of content blocks stay as they are, an image becomes a block, containers become JSON, anything else
    is `str(value)`. Half a surrogate pair, which no tokenizer accepts, becomes "?".

    Raises:
        EnvironmentFailed: a list of content blocks holds a block of unknown type or without its payload.

    Example:
        >>> to_content({"found": ["é"]})
        '{"found": ["é"]}'
        >>> to_content(None)
        'None'
        >>> to_content([{"type": "text", "text": "a map"}])
        [{'type': 'text', 'text': 'a map'}]
    """
    if type(value) is str:
        return clean_text(value)
    if isinstance(value, enum.Enum):
        return to_content(value.value)
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list) and any(_is_block(item) for item in value):
        return [_checked(block) for block in value]
    if type(value).__module__.partition(".")[0] == "PIL":
        return [{"type": "image", "image": value}]
    if isinstance(value, (Mapping, list, tuple, set, frozenset, BaseModel)) or _is_record(value):
        try:
            return clean_text(json.dumps(value, ensure_ascii=False, default=_jsonable))
        except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, or a cycle
            return clean_text(str(value))
    return clean_text(str(value))


def clean_text(text: str) -> str:
    """The text as a plain `str` that UTF-8 can write."""
    text = str.__str__(text)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_block(item: Any) -> bool:
    """True for what was meant as a content block; rows of data that happen to have a "type" are not."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    if not isinstance(kind, str):
        return False
    return kind in _FOREIGN or (kind in _PAYLOAD and (_PAYLOAD[kind] in item or len(item) == 1))


def _checked(block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _PAYLOAD:
        raise EnvironmentFailed(
            f"A tool returned a content block of type {kind!r}. The known types are: {', '.join(_PAYLOAD)}."
        )
    payload = block.get(_PAYLOAD[kind])
    if payload is None or (kind == "text" and not isinstance(payload, str)):
        raise EnvironmentFailed(f"A tool returned a {kind} block without '{_PAYLOAD[kind]}'. Put its payload there.")
    return {**block, "text": clean_text(payload)} if kind == "text" else dict(block)


def _jsonable(value: Any) -> Any:
    """One level of a value that the JSON encoder does not know."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if _is_record(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):  # in a fixed order: hash order differs between runs
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "tolist"):  # numpy and torch, without importing them
        return value.tolist()
    return str(value)
