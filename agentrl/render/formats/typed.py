"""Text of parameter values to Python values, as the tool's JSON schema says: for formats whose values carry no quotes.

The templates of these families write a string as it is and everything else as JSON (some write Python's True and None).
A value's text alone does not say which: "7" may be a string. The schema decides; text that does not fit it stays text,
and the tool's own validation tells the model.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.render.formats.base import read_json

_ANYTHING = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"""\\(?:[\\'"abfnrtv0-7xNuU\n]|(.))""", re.DOTALL)
_DEPTH = 20  # of references followed inside a schema: it may refer to itself


def typed_arguments(pairs: Iterable[tuple[str, str]], parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments that pairs of name and text mean for a tool with this schema of parameters (None: not known).

    >>> schema = {"properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    >>> typed_arguments([("zip", "00501"), ("n", "3")], schema)
    {'zip': '00501', 'n': 3}
    """
    root = parameters or {}
    properties, extra = root.get("properties"), root.get("additionalProperties")
    known = properties if isinstance(properties, Mapping) else {}
    return {key: typed_value(text, known.get(key, extra), root) for key, text in pairs}


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a text means for this schema; `root` holds the "$defs" that it may refer to.

    Without a schema a text that is JSON is decoded, but for words (true, null) and quoted strings.

    >>> [typed_value("7", {"type": t}, {}) for t in ("string", "integer", ["integer", "null"])]
    ['7', 7, 7]
    >>> typed_value("None", {"type": "string", "nullable": True}, {}) is None
    True
    >>> typed_value("seven", {"type": "integer"}, {})
    'seven'
    """
    kinds = _kinds(schema, root)
    if kinds == {"string"} or (isinstance(schema, Mapping) and text in _listed(schema)):
        return text
    # Where a string is possible too, spaces around a number make it one: no template writes them.
    body = text if "string" in kinds else text.strip()
    read = read_json(body, 0)
    if read.error is None and read.end == len(body):
        value = read.value
    elif kinds == _ANYTHING:
        return text
    elif body in _WORDS:
        value = _WORDS[body]
    else:
        value = _literal_or_none(body)
        if value is None:
            return text
    if kinds == _ANYTHING:
        return text if value is None or isinstance(value, bool | str) else value
    return value if _fits(value, kinds) else text


def _literal_or_none(text: str) -> Any:
    """A list or an object in Python's spelling ({'a': True})."""
    if text[:1] not in ("[", "{"):
        return None
    try:
        return python_literal(text)
    except ValueError:
        return None


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, str):  # a quoted string: templates write strings without quotes
        return False
    if isinstance(value, float):
        whole = value.is_integer() and "integer" in kinds and "string" not in kinds
        return math.isfinite(value) and ("number" in kinds or whole)
    return _kind(value) in kinds


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    choices = schema.get("enum")
    return choices if isinstance(choices, list) else [schema["const"]] if "const" in schema else []


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return _ANYTHING
    kinds = _named(schema)
    reference = schema.get("$ref")
    parts = [_resolve(reference, root)] if isinstance(reference, str) else []
    for part in [*parts, *_subschemas(schema, "allOf")]:
        kinds = kinds & _kinds(part, root, depth + 1) or kinds
    for word in ("anyOf", "oneOf"):
        options = _subschemas(schema, word)
        if options:
            union = frozenset[str]().union(*(_kinds(option, root, depth + 1) for option in options))
            kinds = kinds & union or kinds
    return kinds | {"null"} if schema.get("nullable") is True else kinds


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    """What "type", "enum" and "const" say, or the keywords that only one type has."""
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    kinds = frozenset(kind for kind in listed if isinstance(kind, str)) & _ANYTHING
    if "number" in kinds:
        kinds |= {"integer"}
    choices = frozenset(_kind(choice) for choice in _listed(schema))
    if kinds or choices:
        return kinds & choices or kinds or choices
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else _ANYTHING


def _subschemas(schema: Mapping[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    name = reference.rpartition("/")[2]
    for place in ("$defs", "definitions"):
        held = root.get(place)
        if isinstance(held, Mapping) and name in held:
            return held[name]
    return None


def python_literal(text: str) -> Any:
    """The JSON value that a Python literal writes; true, false and null count too.

    >>> python_literal("{'a': (1, True, null), 2: -1.5}")
    {'a': [1, True, None], '2': -1.5}

    Raises:
        ValueError: saying what is wrong. Nothing is ever evaluated.
    """
    try:
        return _convert(ast.parse(_plain_escapes(text), mode="eval").body)
    except SyntaxError as e:
        raise ValueError(e.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def _plain_escapes(text: str) -> str:
    # Python warns about escapes that it does not know, such as \d in a pattern, and keeps the backslash; it refuses
    # text that holds a NUL.
    if "\\" in text and "r'" not in text and 'r"' not in text:
        text = _ESCAPE.sub(lambda match: match.group() if match[1] is None else "\\" + match.group(), text)
    return text.replace("\0", "\\x00")


def _convert(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("a number is too large")
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_convert(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _convert(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name):
            raise ValueError(f"{name} is a bare word, and strings need quotes")
    raise ValueError("only literal values can be written here, nothing that must be computed")


def _key(node: ast.expr | None) -> str:
    key = _convert(node) if node is not None else None
    if isinstance(key, str):
        return key
    if isinstance(key, int | float) and not isinstance(key, bool):
        return str(key)
    raise ValueError("the keys of an object must be strings")
