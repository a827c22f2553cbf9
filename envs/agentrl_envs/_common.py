"""What several ready environments share: difficulty read from rows, a model's own words in a message, gold calls."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

Range = tuple[int, int] | tuple[float, float] | tuple[str, ...]


def settle(ranges: Mapping[str, Range], defaults: Mapping[str, Any], /, **given: Any) -> dict[str, Any]:
    """Every knob has a value inside its range: the one given or, where that is None, the default.

    Args:
        ranges: (least, most) of each knob, whole numbers or floats, or the words to choose from.
        defaults: The values that the constructor settled; empty in the constructor itself.
        **given: Of the constructor, or the columns of a task row.

    Raises:
        ValueError: naming the knob, its range and what was given.

    Example:
        >>> settle({"tries": (1, 9), "share": (0.0, 1.0)}, {"share": 0.5}, tries=3, share=None)
        {'tries': 3, 'share': 0.5}
        >>> settle({"tries": (1, 9)}, {}, tries=10)
        Traceback (most recent call last):
        ValueError: tries must be a whole number from 1 to 9, not 10.
    """
    return {name: _inside(name, ranges[name], defaults.get(name) if v is None else v) for name, v in given.items()}


def _inside(name: str, allowed: Range, value: Any) -> Any:
    least: Any = allowed[0]
    most: Any = allowed[-1]
    if isinstance(least, str):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r:.60}.")
        return value
    if isinstance(least, float):
        if not _is_number(value) or not least <= value <= most:
            raise ValueError(f"{name} must be a number from {least:g} to {most:g}, not {value!r:.60}.")
        return float(value)
    # a column with gaps comes back from a data frame as floats, so 3.0 is 3
    if not _is_number(value) or not least <= value <= most or value != int(value):
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r:.60}.")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def quoted(text: str, most: int = 40) -> str:
    """The text on one line, in quotes, shortened: what a model wrote can be repeated to it.

    >>> quoted("a" * 50, most=5), quoted("two\\nlines")
    ("'aaaaa...'", "'two lines'")
    """
    line = " ".join(text[: most + 1].split())
    return f"'{line[:most]}...'" if len(text) > most else f"'{line}'"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant message with one tool call, as a gold policy gives it.

    >>> call("guess", number=5)
    {'tool_calls': [{'name': 'guess', 'arguments': {'number': 5}}]}
    """
    return {"tool_calls": [{"name": name, "arguments": arguments}]}
