"""Functions become tools: a JSON schema for the model, a validator for what the model sends back.

One validator per tool is built once, by pydantic, from the function's type hints; the schema that the model reads comes
from the same hints, so the two cannot disagree.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import typing_extensions
from pydantic import TypeAdapter, ValidationError

from agentrl.content import clean_text, to_content
from agentrl.errors import ConfigurationError, ToolArgumentError, ToolDefinitionError
from agentrl.tool_errors import explain, short
from agentrl.tool_types import described, fields_type, parse_docstring, properties_of, python_type

__all__ = ["Tool", "build_tool", "clean_text", "describe_unknown", "is_async_callable", "to_content", "tool"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    schema: dict[str, Any]  # OpenAI's shape: {"type": "function", "function": {name, description, parameters}}
    function: Callable[..., Any]
    is_async: bool
    on_instance: bool  # the first argument is the environment
    inline: bool = False  # the author marked it cheap: no thread
    _validate: Callable[[Any], dict[str, Any]] = field(default=dict, repr=False, compare=False)

    def bind(self, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
        """Keyword arguments for `function`, checked and converted.

        Conversion is pydantic's lax mode: ``"3"`` passes for an int and ``3`` for a float; names that the tool does
        not have are refused. Arguments that were left out are left to the function's defaults.

        Raises:
            ToolArgumentError: with a text for the model.
        """
        if not isinstance(arguments, Mapping):
            if arguments is not None and arguments != "":
                kind = type(arguments).__name__
                raise ToolArgumentError(f"The arguments of {self.name} must be a JSON object, not a {kind}.")
            arguments = {}
        try:
            return self._validate(arguments)
        except ValidationError as error:
            properties = self.schema["function"]["parameters"].get("properties", {})
            raise ToolArgumentError(explain(self.name, properties, arguments, error)) from None
        except RecursionError:
            raise ToolArgumentError(f"The arguments of {self.name} are nested too deeply.") from None


def tool(
    *, schema: Mapping[str, Any] | None = None, run_inline: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function is a tool with this explicit JSON schema, or one that needs no thread.

    Example:
        >>> @tool(run_inline=True)
        ... def double(x: int) -> int:
        ...     '''Double a number.
        ...
        ...     Args:
        ...         x: The number.
        ...     '''
        ...     return 2 * x
        >>> build_tool(double).inline
        True
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.tool_schema = schema  # type: ignore[attr-defined]
        function.run_inline = run_inline  # type: ignore[attr-defined]
        return function

    return mark


def build_tool(
    function: Callable[..., Any],
    *,
    owner: str = "",
    schema: Mapping[str, Any] | None = None,
    on_instance: bool = False,
    doc: str | None = None,
    namespace: Mapping[str, Any] | None = None,
) -> Tool:
    """A tool made from a typed, documented function, or from a function and an explicit JSON schema.

    Args:
        function: Sync or async. Every argument needs a type hint and a line in a Google-style docstring.
        owner: Class name, for error messages.
        schema: Used instead of hints and docstring: a whole OpenAI entry, its "function" part, or the JSON schema of
            the arguments. A decorated function (see `tool`) carries its own.
        on_instance: The first argument is the environment, not the model's business.
        doc: Docstring to read instead of the function's own (an inherited one).
        namespace: Extra names that string annotations may use.

    Raises:
        ToolDefinitionError: naming the function and the argument.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: The first number.
        ...         b: The second number.
        ...     '''
        ...     return a + b
        >>> made = build_tool(add)
        >>> made.schema["function"]["parameters"]["properties"]["a"]
        {'type': 'integer', 'description': 'The first number.'}
        >>> made.bind({"a": "3"})
        {'a': 3}
    """
    schema = schema if schema is not None else getattr(function, "tool_schema", None)
    doc = doc or _doc_of(function)
    name = _name_of(function, schema)
    label = f"{owner}.{name}" if owner else name
    _check_callable(function, name, label)
    parameters = _parameters_of(function, label, on_instance, explicit=schema is not None)
    hints = _hints_of(function, parameters, label, namespace)
    if schema is None:
        entry, adapter = _from_hints(name, label, parameters, hints, doc)
    else:
        entry, adapter = _from_schema(schema, name, label, parameters, hints, doc)
    if not isinstance(entry["description"], str) or not entry["description"].strip():
        raise ToolDefinitionError(f"{label} has no description. Say in its docstring what it does.")
    return Tool(
        name=name,
        schema={"type": "function", "function": entry},
        function=function,
        is_async=is_async_callable(function),
        on_instance=on_instance,
        inline=getattr(function, "run_inline", False) is True,
        _validate=adapter.validator.validate_python,
    )


def build_tools(functions: Iterable[Callable[..., Any]] | None) -> dict[str, Tool]:
    """Standalone tools by name; None is none.

    Raises:
        ConfigurationError: Two have the same name.
    """
    named: dict[str, Tool] = {}
    for one in map(build_tool, functions or ()):
        if one.name in named:
            raise ConfigurationError(f"Two tools are named '{one.name}'; rename one.")
        named[one.name] = one
    return named


def describe_unknown(name: str, tools: Mapping[str, Tool]) -> str:
    """What the model reads after it called a tool that does not exist.

    Example:
        >>> describe_unknown("serch", {})
        "There is no tool named 'serch'. No tools are available here."
    """
    shown = short(name)
    if not tools:
        return f"There is no tool named {shown}. No tools are available here."
    close = difflib.get_close_matches(str(name), tools, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"There is no tool named {shown}.{hint} The available tools are: {', '.join(tools)}."


def is_async_callable(function: Callable[..., Any]) -> bool:
    """True for async functions, partials of them, and objects with an async ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    plain = isinstance(function, (types.FunctionType, types.MethodType))
    return not plain and inspect.iscoroutinefunction(type(function).__call__)


# --- reading a function ----------------------------------------------------------------
def _name_of(function: Callable[..., Any], schema: Mapping[str, Any] | None) -> str:
    inner: Any = schema.get("function", schema) if schema is not None else {}
    if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
        return inner["name"]
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _doc_of(function: Callable[..., Any]) -> str | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__doc__", None)


def _check_callable(function: Callable[..., Any], name: str, label: str) -> None:
    if not callable(function):
        raise ToolDefinitionError(f"{function!r} is not callable. A tool is a function or a method.")
    if not name.replace("-", "_").replace(".", "_").isidentifier():
        raise ToolDefinitionError(f"A tool needs a name that the model can call, and {label!r} is none. Use a def.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolDefinitionError(f"{label} is a generator. A tool returns its result: collect it and return it.")


def _parameters_of(
    function: Callable[..., Any], label: str, on_instance: bool, explicit: bool
) -> dict[str, inspect.Parameter]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ToolDefinitionError(
            f"{label} has a signature that Python cannot read. Wrap it in a def with type hints."
        ) from error
    if on_instance:
        if not found:
            raise ToolDefinitionError(f"{label} takes no argument. Give it `self`, or make it a staticmethod.")
        found = found[1:]
    bound = function.keywords if isinstance(function, functools.partial) else {}
    kept = {}
    for parameter in found:
        if parameter.name in bound:  # set by the author, so not the model's to choose
            continue
        if parameter.kind is parameter.VAR_POSITIONAL or (parameter.kind is parameter.VAR_KEYWORD and not explicit):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ToolDefinitionError(
                f"{label} takes {stars}{parameter.name}, which the model cannot know. Name its arguments one by one."
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolDefinitionError(
                f"{label}: '{parameter.name}' is positional-only, but tools are called by name. Drop the '/'."
            )
        kept[parameter.name] = parameter
    return kept


def _hints_of(
    function: Callable[..., Any],
    parameters: dict[str, inspect.Parameter],
    label: str,
    namespace: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The resolved type of each annotated argument; the return type may name what only a type checker imports."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if not hasattr(inner, "__globals__"):
        inner = getattr(inner, "__func__", None) or type(inner).__call__
    scope = dict(getattr(inner, "__globals__", {}))
    free = getattr(getattr(inner, "__code__", None), "co_freevars", ())
    for variable, cell in zip(free, getattr(inner, "__closure__", None) or (), strict=False):
        try:
            scope[variable] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    hints = {}
    for name, parameter in parameters.items():
        if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:
            hint = typing.get_type_hints(holder, scope, dict(namespace or {}), include_extras=True)[name]
        except Exception as error:
            raise ToolDefinitionError(
                f"{label}: the type of argument '{name}' cannot be resolved ({error}). Define it at module level."
            ) from error
        hints[name] = hint | None if parameter.default is None and hint is not Any else hint
    return hints


def _from_hints(
    name: str,
    label: str,
    parameters: dict[str, inspect.Parameter],
    hints: dict[str, Any],
    doc: str | None,
) -> tuple[dict[str, Any], TypeAdapter[Any]]:
    if not doc or not doc.strip():
        raise ToolDefinitionError(
            f"{label} has no docstring. Describe it and its arguments (Google style), "
            "or start its name with an underscore if it is not a tool."
        )
    parsed = parse_docstring(doc)
    fields: dict[str, Any] = {}
    for argument, parameter in parameters.items():
        if argument not in hints:
            raise ToolDefinitionError(
                f"{label}: the argument '{argument}' has no type. Annotate it, as in `{argument}: str`."
            )
        if not parsed.arguments.get(argument):
            raise ToolDefinitionError(
                f"{label}: the argument '{argument}' is not described. "
                f"Add `{argument}: ...` under `Args:` in its docstring."
            )
        hint = hints[argument]
        choices = parsed.choices.get(argument)
        if choices and hint in (str, int, bool):
            hint = Literal[tuple(choices)]  # type: ignore[valid-type]
        fields[argument] = hint if parameter.default is parameter.empty else typing_extensions.NotRequired[hint]
    adapter = _adapter(fields, label, needs_schema=True)
    properties, defs = properties_of(adapter)
    for argument, found in properties.items():
        properties[argument] = described(found, parsed.arguments[argument])
    required = [argument for argument, p in parameters.items() if p.default is p.empty]
    arguments = {"type": "object", "properties": properties, **({"required": required} if required else {}), **defs}
    return {"name": name, "description": parsed.description, "parameters": arguments}, adapter


def _from_schema(
    schema: Mapping[str, Any],
    name: str,
    label: str,
    parameters: dict[str, inspect.Parameter],
    hints: dict[str, Any],
    doc: str | None,
) -> tuple[dict[str, Any], TypeAdapter[Any]]:
    inner: Any = schema.get("function", schema)
    arguments = inner.get("parameters", inner if inner.get("type") == "object" else {"type": "object"})
    properties = arguments.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ToolDefinitionError(f"{label}: 'properties' of its schema must be an object, name to JSON schema.")
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if open_ended else [key for key in properties if key not in parameters]
    if unknown:
        raise ToolDefinitionError(f"{label}: its schema names the argument '{unknown[0]}', which it does not take.")
    required = set(arguments.get("required", ()))
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD and key not in required:
            raise ToolDefinitionError(
                f"{label}: the argument '{key}' has no default, so its schema must list it under 'required'."
            )
    fields = {}
    for key, sub in properties.items():
        hint = hints[key] if key in hints else python_type(sub, arguments.get("$defs", {}))
        fields[key] = hint if key in required else typing_extensions.NotRequired[hint]
    adapter = _adapter(fields, label, needs_schema=False)
    description = inner.get("description") or (parse_docstring(doc).description if doc else "")
    return {"name": name, "description": description, "parameters": dict(arguments)}, adapter


def _adapter(fields: dict[str, Any], label: str, *, needs_schema: bool) -> TypeAdapter[Any]:
    def attempt(some: dict[str, Any]) -> TypeAdapter[Any]:
        adapter = TypeAdapter(fields_type(some))
        if needs_schema:
            adapter.json_schema()
        return adapter

    try:
        return attempt(fields)
    except Exception as error:
        for name, hint in fields.items():  # which one is it?
            try:
                attempt({name: hint})
            except Exception as cause:
                reason = str(cause).splitlines()[0]
                raise ToolDefinitionError(
                    f"{label}: the type of argument '{name}' has no JSON schema ({reason}) "
                    "Use JSON types, Literal, Enum, TypedDict, a dataclass or a pydantic model."
                ) from cause
        raise ToolDefinitionError(f"{label}: its argument types have no JSON schema ({error}).") from error
