"""Type hints and docstrings become JSON schemas and validators. The parts that `tool_schema` puts together."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union

import typing_extensions
from pydantic import ConfigDict, TypeAdapter

# --- docstrings ------------------------------------------------------------------------
_ARGUMENT_SECTIONS = frozenset({"args", "arguments", "parameters", "params", "keyword args", "keyword arguments"})
_OTHER_SECTIONS = {"returns", "return", "yields", "yield", "raises", "example", "examples", "note", "notes"}
_SECTIONS = _ARGUMENT_SECTIONS | _OTHER_SECTIONS | {"warning", "warnings", "see also", "references"}
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:\s*(.*)$")
_CHOICES = re.compile(r"\s*\(choices:\s*(\[.*\])\s*\)\.?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ParsedDoc:
    """A Google-style docstring, taken apart."""

    description: str
    arguments: dict[str, str] = field(default_factory=dict)
    choices: dict[str, list[Any]] = field(default_factory=dict)  # from "(choices: [...])" at the end of a line


def parse_docstring(doc: str) -> ParsedDoc:
    """The text before the first section, and one line for each argument, continuation lines joined.

    Example:
        >>> doc = parse_docstring('''Search a place.
        ...
        ... Args:
        ...     place (str): Where to look,
        ...         by name.
        ... ''')
        >>> doc.description, doc.arguments
        ('Search a place.', {'place': 'Where to look, by name.'})
    """
    lines = inspect.cleandoc(doc).expandtabs().splitlines()
    starts = [i for i, line in enumerate(lines) if _heading(line)] + [len(lines)]
    arguments: dict[str, str] = {}
    for start, end in itertools.pairwise(starts):
        if _heading(lines[start]) in _ARGUMENT_SECTIONS:
            arguments.update(_entries(lines[start + 1 : end]))
    choices = {}
    for name, text in arguments.items():
        match = _CHOICES.search(text)
        if match is None:
            continue
        try:
            listed = json.loads(match[1])
        except json.JSONDecodeError:
            continue
        if listed and all(isinstance(choice, (str, int, bool)) for choice in listed):
            choices[name] = listed
            arguments[name] = text[: match.start()]
    return ParsedDoc("\n".join(lines[: starts[0]]).strip(), arguments, choices)


def _heading(line: str) -> str | None:
    if line[:1].isspace() or not line.rstrip().endswith(":"):
        return "returns" if line.lower().startswith(("returns:", "yields:", "raises:")) else None
    name = line.rstrip()[:-1].strip().lower()
    return name if name in _SECTIONS else None


def _entries(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    base: int | None = None
    current: list[str] | None = None
    for line in lines:
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if indent == 0:  # prose at the margin: the section is over
            break
        base = indent if base is None else base
        match = _ARGUMENT.match(line.strip()) if indent <= base else None
        if match:
            current = found.setdefault(match[1], [])
            current.append(match[2])
        elif current is not None:
            current.append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}


# --- types to JSON schema --------------------------------------------------------------
_FIRST = ("type", "items", "prefixItems", "additionalProperties", "properties", "required", "enum", "anyOf")
_NAMED = ("properties", "$defs", "patternProperties")  # their keys are the author's names, not keywords


def fields_type(fields: Mapping[str, Any]) -> Any:
    """A TypedDict of these argument types that refuses unknown names.

    Dataclasses and TypedDicts inside inherit that (pydantic models follow their own config): a model must hear of its
    typos.
    """
    return _typed_dict("Arguments", {name: portable(hint) for name, hint in fields.items()}, "forbid")


def properties_of(adapter: TypeAdapter[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(name -> JSON schema, {"$defs": ...} where a type contains itself): without pydantic's titles."""
    raw = adapter.json_schema()
    defs = raw.get("$defs", {})
    recursive = {name for name in defs if name in _reachable(defs, defs[name])}
    properties = {name: _simplify(sub, defs, recursive) for name, sub in raw.get("properties", {}).items()}
    kept = {name: _simplify(defs[name], defs, recursive) for name in sorted(recursive)}
    return properties, {"$defs": kept} if kept else {}


def described(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """The schema with its keywords in a fixed order and the description last."""
    rest = {key: value for key, value in schema.items() if key not in (*_FIRST, "description")}
    return {**{key: schema[key] for key in _FIRST if key in schema}, **rest, "description": description}


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(value) for value in node)) if node else set()
    return set()


def _reachable(defs: dict[str, Any], node: Any) -> set[str]:
    seen: set[str] = set()
    waiting = _references(node)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= _references(defs[name]) - seen
    return seen


def _simplify(node: Any, defs: dict[str, Any], recursive: set[str]) -> Any:
    if isinstance(node, list):
        return [_simplify(item, defs, recursive) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.rpartition("/")[2] not in recursive:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        node = {**defs[reference.rpartition("/")[2]], **rest}
        return _simplify(node, defs, recursive)
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            out[key] = {name: _simplify(sub, defs, recursive) for name, sub in value.items()}
        elif key in ("enum", "default", "examples", "const"):
            out[key] = value
        elif key != "title":
            out[key] = _simplify(value, defs, recursive)
    if "const" in out:
        out["enum"] = [out.pop("const")]
    if out.get("additionalProperties") is True:
        del out["additionalProperties"]
    if out.get("items") == {}:
        del out["items"]
    return _merge_union(out)


def _merge_union(schema: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` of plain types becomes a list of types, and "or null" becomes `nullable`, as chat templates expect."""
    options = schema.get("anyOf")
    if not isinstance(options, list):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    kept = [option for option in options if option != {"type": "null"}]
    nullable = {"nullable": True} if len(kept) < len(options) else {}
    if len(kept) == 1:
        return {**kept[0], **nullable, **rest}
    if all(set(option) == {"type"} and isinstance(option["type"], str) for option in kept):
        return {"type": sorted(option["type"] for option in kept), **nullable, **rest}
    return {"anyOf": kept, **nullable, **rest}


# --- types to validators ---------------------------------------------------------------
def portable(hint: Any) -> Any:
    """The hint with every `typing.TypedDict` rebuilt so that pydantic takes it on any Python, unknown keys refused."""
    if typing_extensions.is_typeddict(hint):
        if hasattr(hint, "__pydantic_config__"):
            return hint
        return _rebuilt(hint)
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if not arguments or origin is Literal or origin is None:
        return hint
    if origin is Annotated:
        return Annotated[(portable(arguments[0]), *arguments[1:])]  # type: ignore[return-value]
    if origin in (typing.Required, typing.NotRequired, typing_extensions.NotRequired):
        return origin[portable(arguments[0])]
    changed = tuple(portable(argument) for argument in arguments)
    if all(new is old for new, old in zip(changed, arguments, strict=True)):
        return hint
    if isinstance(hint, type(int | None)) or origin is Union:
        return Union[changed]  # noqa: UP007
    return origin[changed]


def _rebuilt(hint: Any) -> Any:
    known = _REBUILDING.get(hint)
    if known is not None:  # it contains itself
        return known
    _REBUILDING[hint] = hint
    try:
        found = typing.get_type_hints(hint, include_extras=True)
        fields = {}
        for name, inner in found.items():
            while typing.get_origin(inner) in (typing.Required, typing.NotRequired):
                inner = typing.get_args(inner)[0]
            inner = portable(inner)
            fields[name] = inner if name in hint.__required_keys__ else typing_extensions.NotRequired[inner]
    finally:
        del _REBUILDING[hint]
    made = _typed_dict(hint.__name__, fields, "forbid")
    made.__doc__ = hint.__doc__
    return made


def _typed_dict(name: str, fields: dict[str, Any], extra: Literal["forbid", "allow"]) -> Any:
    made: Any = typing_extensions.TypedDict(name, fields)  # type: ignore[operator]
    made.__pydantic_config__ = ConfigDict(extra=extra)
    return made


_REBUILDING: dict[Any, Any] = {}
_PLAIN: dict[str, Any] = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": None}


def python_type(schema: Any, defs: Mapping[str, Any], depth: int = 0) -> Any:
    """The type that a JSON schema describes, as far as types can say it; `Any` where they cannot.

    Example:
        >>> python_type({"type": "array", "items": {"enum": ["a", "b"]}}, {})
        list[typing.Literal['a', 'b']]
    """
    if not isinstance(schema, Mapping) or depth > 20:
        return Any
    if isinstance(schema.get("$ref"), str):
        return python_type(defs.get(schema["$ref"].rpartition("/")[2]), defs, depth + 1)
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if listed and all(choice is None or isinstance(choice, (str, int, bool)) for choice in listed):
        return Literal[tuple(listed)]
    if schema.get("nullable") is True:
        return python_type({k: v for k, v in schema.items() if k != "nullable"}, defs, depth + 1) | None
    kind = schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kind, list):
        options = [{**schema, "type": one} for one in kind]
    if isinstance(options, list) and options:
        return Union[tuple(python_type(option, defs, depth + 1) for option in options)]  # noqa: UP007
    if kind == "array":
        return list[python_type(schema.get("items"), defs, depth + 1)]
    if kind == "object":
        return _object_type(schema, defs, depth)
    return _PLAIN.get(kind, Any) if isinstance(kind, str) else Any


def _object_type(schema: Mapping[str, Any], defs: Mapping[str, Any], depth: int) -> Any:
    extra = schema.get("additionalProperties")
    if not schema.get("properties"):
        return dict[str, python_type(extra, defs, depth + 1) if isinstance(extra, Mapping) else Any]
    required = set(schema.get("required", ()))
    fields = {}
    for name, sub in schema["properties"].items():
        inner = python_type(sub, defs, depth + 1)
        fields[name] = inner if name in required else typing_extensions.NotRequired[inner]
    return _typed_dict("Object", fields, "forbid" if extra is False else "allow")
