"""An action space as the argument of a tool: a JSON schema, and from what the model wrote to the space's value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from agentrl.errors import ConfigurationError, ToolArgumentError
from agentrl.tool_errors import short

_NAMED = 64  # more discrete actions than this are numbers, not a list of names


@dataclass(frozen=True, slots=True)
class Action:
    """How one action space is written by a model."""

    schema: dict[str, Any]  # JSON schema, with a description
    decode: Callable[[Any], Any]  # JSON value -> value of the space; ToolArgumentError is written for the model
    summary: str  # what to write, in a few words


def action_of(space: spaces.Space[Any], names: Sequence[str] | None = None, path: str = "action") -> Action:
    """The JSON form of an action space. `names` are those of a Discrete space's values; without them they are numbers.

    Raises:
        ConfigurationError: the space has no text form, or the names do not fit it.

    Example:
        >>> moves = action_of(spaces.Discrete(2), ["left", "right"])
        >>> moves.schema["enum"], int(moves.decode("right"))
        (['left', 'right'], 1)
        >>> action_of(spaces.Box(-2.0, 2.0, (1,))).decode(0.5)
        array([0.5], dtype=float32)
    """
    if isinstance(space, spaces.Discrete):
        return _named(space, list(names), path) if names is not None else _integer(space, path)
    if names is not None:
        raise ConfigurationError(f"action_names needs a Discrete action space, and this one is {space}.")
    if isinstance(space, spaces.Box):
        return _box(space, path)
    if isinstance(space, spaces.MultiBinary):
        return _array(space, path, np.zeros(space.shape), np.ones(space.shape), whole=True)
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start)
        return _array(space, path, start, start + space.nvec - 1, whole=True)
    if isinstance(space, spaces.Text):
        return _text(space, path)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _parts(space, path)
    if isinstance(space, spaces.Sequence):
        return _sequence(space, path)
    raise ConfigurationError(
        f"The action space {space} ('{path}') has no text form. "
        "Wrap the environment so that its actions are Discrete, Box, MultiDiscrete, MultiBinary, Text, Tuple or Dict."
    )


def wants_names(space: spaces.Space[Any]) -> bool:
    """True where a model should choose by name."""
    return isinstance(space, spaces.Discrete) and int(space.n) <= _NAMED


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _wrong(path: str, expected: str, value: Any) -> ToolArgumentError:
    return ToolArgumentError(f"No step was taken: '{path}' should be {expected}, not {short(value)}.")


def _named(space: spaces.Discrete, names: list[str], path: str) -> Action:
    if len(names) != space.n or len(set(names)) != len(names) or not all(isinstance(n, str) and n for n in names):
        raise ConfigurationError(f"action_names must be {space.n} different names for {space}, not {names!r:.200}.")
    values = {name: space.dtype.type(int(space.start) + index) for index, name in enumerate(names)}
    choices = f"one of: {', '.join(names)}"

    def decode(value: Any) -> Any:
        if not isinstance(value, str) or value not in values:
            raise _wrong(path, choices, value)
        return values[value]

    schema = {"type": "string", "enum": names, "description": f"The action, {choices}."}
    return Action(schema, decode, choices)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _integer(space: spaces.Discrete, path: str) -> Action:
    low, high = int(space.start), int(space.start) + int(space.n) - 1
    expected = f"a whole number from {low} to {high}"

    def decode(value: Any) -> Any:
        if not _is_whole(value) or not low <= value <= high:
            raise _wrong(path, expected, value)
        return space.dtype.type(value)

    schema = {"type": "integer", "minimum": low, "maximum": high, "description": _sentence(expected)}
    return Action(schema, decode, expected)


def _box(space: spaces.Box, path: str) -> Action:
    return _array(space, path, space.low, space.high, whole=np.issubdtype(space.dtype, np.integer))


def _array(space: spaces.Space[Any], path: str, low: Any, high: Any, *, whole: bool) -> Action:
    """Numbers in nested lists of the space's shape; a single number where there is only one.

    Bounds that differ between elements stand in the description: a JSON schema has one for all items of a list.
    """
    shape = tuple(space.shape or ())
    if 0 in shape:
        raise ConfigurationError(f"The action space {space} ('{path}') is empty: there is nothing to choose.")
    low, high = np.asarray(low).reshape(shape), np.asarray(high).reshape(shape)
    scalar = low.size == 1
    same = bool((low == low.flat[0]).all() and (high == high.flat[0]).all())
    noun = "whole number" if whole else "number"
    if same or scalar:
        each = f"{noun}{{s}}{_range(low.flat[0], high.flat[0], whole)}"
    else:
        bounds = "; ".join(
            f"{i}:{_range(a, b, whole) or ' any'}" for i, (a, b) in enumerate(zip(low.flat, high.flat, strict=True))
        )
        each = f"{noun}{{s}} ({bounds})"
    size = " x ".join(str(n) for n in shape)
    nested = "a list of " if len(shape) < 2 else "nested lists of "
    expected = f"a {each.format(s='')}" if scalar else f"{nested}{size} {each.format(s='s')}"
    item: dict[str, Any] = {"type": "integer" if whole else "number"}
    for key, edge, pick in (("minimum", low, np.min), ("maximum", high, np.max)):
        if np.isfinite(edge).all():
            item[key] = int(pick(edge)) if whole else float(pick(edge))
    schema = item
    for length in () if scalar else reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": length, "maxItems": length}

    def decode(value: Any) -> Any:
        listed = value
        if scalar and isinstance(value, (int, float)):
            for _ in shape:
                listed = [listed]
        array = _numbers(listed, shape, whole)
        if array is not None:
            with np.errstate(over="ignore"):  # becomes infinite, which is refused
                cast = array if whole else array.astype(space.dtype)  # 0.7 is more than a bound of 0.7 in float32
            if bool(((cast >= low) & (cast <= high)).all()) and np.isfinite(cast).all():
                return cast.astype(space.dtype)
        raise _wrong(path, expected, value)

    return Action({**schema, "description": _sentence(expected)}, decode, expected)


def _range(low: Any, high: Any, whole: bool) -> str:
    show = (lambda x: str(int(x))) if whole else (lambda x: f"{float(x):g}")
    if math.isfinite(low) and math.isfinite(high):
        return f" from {show(low)} to {show(high)}"
    if math.isfinite(low):
        return f" of at least {show(low)}"
    return f" of at most {show(high)}" if math.isfinite(high) else ""


def _numbers(value: Any, shape: tuple[int, ...], whole: bool) -> np.ndarray | None:
    """The value as an array of exactly this shape, None where it is none. Booleans and strings are no numbers."""
    flat: list[Any] = [value]
    for length in shape:
        if not all(isinstance(part, (list, tuple)) and len(part) == length for part in flat):
            return None
        flat = [item for part in flat for item in part]
    for item in flat:
        fits = isinstance(item, (int, float, np.number)) and not isinstance(item, bool) and math.isfinite(item)
        if not fits or (whole and item != int(item)):
            return None
    try:
        return np.array([int(item) for item in flat] if whole else flat).reshape(shape)
    except OverflowError:
        return None


def _text(space: spaces.Text, path: str) -> Action:
    expected = f"text of {space.min_length} to {space.max_length} characters"

    def decode(value: Any) -> Any:
        if not isinstance(value, str) or not space.min_length <= len(value) <= space.max_length:
            raise _wrong(path, expected, value)
        if not space.contains(value):
            raise _wrong(path, f"{expected}, made of these: {space.characters!r:.300}", value)
        return value

    schema = {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
    return Action({**schema, "description": _sentence(expected)}, decode, expected)


def _parts(space: spaces.Dict | spaces.Tuple, path: str) -> Action:
    """A Dict is an object. So is a Tuple, with the keys part_0, part_1, ...: models and schemas mix up mixed lists."""
    named = isinstance(space, spaces.Dict)
    inner = dict(space.spaces) if named else {f"part_{i}": sub for i, sub in enumerate(space.spaces)}
    if not inner or not all(isinstance(key, str) for key in inner):
        raise ConfigurationError(f"The action space {space} ('{path}') has no text form: its keys must be strings.")
    parts = {key: action_of(sub, None, f"{path}.{key}") for key, sub in inner.items()}
    expected = "an object with " + ", ".join(f"{key} ({part.summary})" for key, part in parts.items())

    def decode(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != parts.keys():
            raise _wrong(path, f"an object with exactly the keys {', '.join(parts)}", value)
        decoded = {key: part.decode(value[key]) for key, part in parts.items()}
        return decoded if named else tuple(decoded.values())

    properties = {key: part.schema for key, part in parts.items()}
    schema = {"type": "object", "properties": properties, "required": list(parts), "additionalProperties": False}
    return Action({**schema, "description": _sentence(expected)}, decode, expected)


def _sequence(space: spaces.Sequence, path: str) -> Action:
    item = action_of(space.feature_space, None, f"{path}[]")
    if getattr(space, "stack", False):
        raise ConfigurationError(f"The action space {space} ('{path}') has no text form: it is a stacked Sequence.")
    expected = f"a list of any length, each item {item.summary}"

    def decode(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, expected, value)
        return tuple(item.decode(one) for one in value)

    return Action({"type": "array", "items": item.schema, "description": _sentence(expected)}, decode, expected)
