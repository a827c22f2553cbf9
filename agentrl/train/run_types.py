"""Values from files against type hints: what fits, and how a person calls what was expected."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from agentrl.errors import ConfigurationError
from agentrl.train.run_objects import did_you_mean

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a table",
    type(None): "none",
}


def fits(value: Any, hint: Any) -> bool:
    """True where a value read from TOML or YAML can stand for this type.

    >>> fits(1, float), fits(True, int), fits([1, 2], list[float]), fits("steps", str | None), fits("1", int)
    (True, False, True, True, False)
    """
    if hint is Any:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple) or hint in (list, tuple):
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value if arguments)
    if origin in (dict, Mapping) or hint is dict:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values() if arguments)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool or isinstance(value, bool):
        return isinstance(value, bool) and hint is bool
    if hint is float:
        return isinstance(value, (int, float))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    return isinstance(value, hint) if isinstance(hint, type) else True


def words_for(hint: Any) -> str:
    """What a person calls the type.

    >>> words_for(float | None), words_for(list[str]), words_for(Literal["a", "b"])
    ('a number or none', 'a list of text', "'a' or 'b'")
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(words_for(one) for one in arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is list:
        plural = {"a whole number": "whole numbers", "a number": "numbers", "a table": "tables"}
        inner = words_for(arguments[0])
        return f"a list of {plural.get(inner, inner)}"
    if origin in (dict, Mapping):
        return "a table"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(repr(member.value) for member in hint)
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def check_keys(table: Mapping[str, Any], known: typing.Iterable[str], where: str, elsewhere: Mapping[str, str]) -> None:
    """Every key of the table is known.

    Args:
        table: What the file says.
        known: The keys that it may have.
        where: The table's dotted name, "" for the top.
        elsewhere: Keys of other tables -> the table that they belong to.

    Raises:
        ConfigurationError: Names the key and a close one, or the table that it belongs in.
    """
    known = list(known)
    for key in table:
        if key in known:
            continue
        name = f"{where}.{key}" if where else key
        hint = " The model's folder or hub id is called 'name'." if name == "model.path" else did_you_mean(key, known)
        if not hint and key in elsewhere:
            hint = f" It belongs in [{elsewhere[key]}]."
        if not hint and len(known) <= 16:
            hint = f" Known here: {', '.join(known)}."
        raise ConfigurationError(f"Unknown key '{name}'.{hint}")


def check_value(value: Any, hint: Any, name: str) -> Any:
    """The value, as its type; the text "none" where the type has None and no text.

    Raises:
        ConfigurationError: Names the key, what was expected and what is there.
    """
    if value == "none" and fits(None, hint) and not fits("none", hint):
        return None
    if not fits(value, hint):
        shown = repr(value) if not isinstance(value, bool) else str(value).lower()
        got = _WORDS.get(type(value), type(value).__name__)
        raise ConfigurationError(f"'{name}' must be {words_for(hint)}; it is {got}: {shown:.60}.")
    return value


def read_section(cls: Any, table: Any, where: str, elsewhere: Mapping[str, str] | None = None) -> Any:
    """A dataclass made from a table of the file; fields that are dataclasses are tables in it."""
    if not isinstance(table, dict):
        raise ConfigurationError(f"'{where}' must be a table; it is {_WORDS.get(type(table), 'something else')}.")
    hints = typing.get_type_hints(cls)
    check_keys(table, hints, where, elsewhere or {})
    values = {}
    for key, value in table.items():
        inner = [one for one in (hints[key], *get_args(hints[key])) if dataclasses.is_dataclass(one)]
        if inner and isinstance(value, dict):
            values[key] = read_section(inner[0], value, f"{where}.{key}")
        elif inner and value is not None:
            raise ConfigurationError(
                f"'{where}.{key}' must be a table; it is {_WORDS.get(type(value), 'another type')}."
            )
        else:
            values[key] = check_value(value, hints[key], f"{where}.{key}")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _needed(f)]
    if missing:
        raise ConfigurationError(f"'{where}' lacks the key '{missing[0]}'.")
    return cls(**values)


def _needed(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
