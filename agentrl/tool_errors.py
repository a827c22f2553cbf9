"""Why a model's arguments were refused, in words that the model can act on."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from agentrl.content import clean_text

_SHOWN = 80  # characters of a bad value that a message repeats
_LISTED = 5  # faults that a message lists


def explain(tool: str, properties: Mapping[str, Any], arguments: Mapping[str, Any], error: ValidationError) -> str:
    """Each refused argument with what was expected and what was given; valid names for unknown ones."""
    grouped: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=True):
        path, at_top = _path(item["loc"], arguments, item["type"])
        grouped.setdefault(path, []).append(_reason(item, properties, path, at_top))
    parts = [" or ".join(dict.fromkeys(reasons)) for reasons in grouped.values()]
    more = f" (and {len(parts) - _LISTED} more)" if len(parts) > _LISTED else ""
    return clean_text(f"{tool} was not called: {'; '.join(parts[:_LISTED])}{more}.")


def _path(location: tuple[Any, ...], arguments: Any, kind: str) -> tuple[str, bool]:
    """The argument's path in what the model wrote; pydantic's names of union branches are left out."""
    steps: list[Any] = []
    here: Any = arguments
    for index, step in enumerate(location):
        last = index == len(location) - 1
        in_list = isinstance(here, (list, tuple)) and isinstance(step, int) and step < len(here)
        if in_list or (isinstance(here, Mapping) and step in here):
            here = here[step]
        elif not (last and kind == "missing"):
            continue
        steps.append(step)
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    return text, len(steps) == 1


def _reason(item: Any, properties: Mapping[str, Any], path: str, at_top: bool) -> str:
    kind, message = item["type"], item["msg"]
    if kind == "missing":
        expected = _type_words(properties.get(path, {})) if at_top else ""
        return f"the argument '{path}'{expected} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        if not at_top:
            return f"'{path}' is not known"
        close = difflib.get_close_matches(path, properties, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        names = ", ".join(properties) or "none"
        return f"it has no argument {short(path)} (its arguments: {names}{hint})"
    if kind in ("literal_error", "enum"):
        expected = item.get("ctx", {}).get("expected", "")
        return f"the argument '{path}' should be {expected}, not {short(item.get('input'))}"
    if message.startswith("Input should "):
        message = message.removeprefix("Input ")
    elif message.startswith("Value error, "):
        message = "is not right: " + message.removeprefix("Value error, ")
    else:
        message = "is not right: " + message
    return f"the argument '{path}' {message}, not {short(item.get('input'))}"


def _type_words(schema: Mapping[str, Any]) -> str:
    if schema.get("enum"):
        return f" (one of {', '.join(repr(choice) for choice in schema['enum'])})"
    kind = schema.get("type")
    return f" ({kind})" if isinstance(kind, str) else ""


def short(value: Any) -> str:
    """The value's repr, cut to a length that a message bears."""
    text = _repr.repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


_repr = reprlib.Repr()  # does not walk a whole document, nor fall into a deep one
_repr.maxstring = _repr.maxlong = _repr.maxother = _SHOWN
