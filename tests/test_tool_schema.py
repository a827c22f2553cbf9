"""Functions to schemas, arguments to keyword arguments, results to content."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import typing
from typing import Any, Literal, Optional

import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import EnvironmentFailed, ToolArgumentError, ToolDefinitionError
from agentrl.tool_schema import build_tool, describe_unknown, to_content, tool


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(typing.TypedDict):
    x: int
    y: typing.NotRequired[float]


class Corner(typing_extensions.TypedDict):
    x: int
    y: typing_extensions.NotRequired[float]


@dataclasses.dataclass
class Box:
    width: int
    corner: Corner
    tags: list[str] = dataclasses.field(default_factory=list)


class Config(pydantic.BaseModel):
    depth: int = pydantic.Field(description="How deep.")
    title: str = "none"


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


def simple(
    a: int,
    b: float,
    c: str,
    d: bool,
    e: list[str],
    f: dict[str, int],
    g: int | None = None,
    h: Literal["x", "y"] = "x",
    i: int | str = 1,
    k: list[list[int]] = [],  # noqa: B006
    m: dict = {},  # noqa: B006
    n: list = [],  # noqa: B006
) -> int:
    """Does it
    all.

    Args:
        a: First,
          continued.
        b (float): Second.
        c (`str`, *optional*): Third.
        d: Fourth.
        e: Fifth.
        f: Sixth.
        g: Seventh.
        h: Eighth: with a colon.
        i: Ninth.
        k: Tenth.
        m: Eleventh.
        n: Twelfth.

    Returns:
        A number: never read.
    """
    return a


def documented(argument: str) -> str:
    return f"Does.\n\nArgs:\n    {argument}: It."


def made(hint: Any, **extra: Any):
    def f(x):
        return x

    f.__annotations__ = {"x": hint}
    f.__doc__ = documented("x")
    return build_tool(f, **extra)


def test_simple_types_have_the_schema_that_chat_templates_expect():
    function = build_tool(simple).schema["function"]
    assert function["name"] == "simple"
    assert function["description"] == "Does it\nall."
    assert function["parameters"]["required"] == ["a", "b", "c", "d", "e", "f"]
    assert function["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "First, continued."},
        "b": {"type": "number", "description": "Second."},
        "c": {"type": "string", "description": "Third."},
        "d": {"type": "boolean", "description": "Fourth."},
        "e": {"type": "array", "items": {"type": "string"}, "description": "Fifth."},
        "f": {"type": "object", "additionalProperties": {"type": "integer"}, "description": "Sixth."},
        "g": {"type": "integer", "nullable": True, "description": "Seventh."},
        "h": {"type": "string", "enum": ["x", "y"], "description": "Eighth: with a colon."},
        "i": {"type": ["integer", "string"], "description": "Ninth."},
        "k": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "description": "Tenth."},
        "m": {"type": "object", "description": "Eleventh."},
        "n": {"type": "array", "description": "Twelfth."},
    }


def test_schema_equals_that_of_transformers():
    """The other implementation, where it can read the docstring (no types in parentheses)."""
    utils = pytest.importorskip("transformers.utils")

    def f(a: int, b: list[float], c: Literal["p", "q"], d: Optional[str] = None):  # noqa: UP045
        """One.

        Two.

        Args:
            a: A.
            b: B
                more.
            c: C.
            d: D.
        """

    assert json.dumps(build_tool(f).schema) == json.dumps(utils.get_json_schema(f))


@pytest.mark.parametrize("hint", [Point, Box, Config])
def test_F083_nested_types_have_their_properties(hint):
    schema = made(hint).schema["function"]["parameters"]["properties"]["x"]
    assert schema["type"] == "object"
    names = {Point: ["x", "y"], Box: ["width", "corner", "tags"], Config: ["depth", "title"]}[hint]
    assert list(schema["properties"]) == names
    assert "$ref" not in json.dumps(schema)
    if hint is Box:
        assert schema["properties"]["corner"]["properties"]["y"] == {"type": "number"}
    if hint is Config:  # "title" is a property of theirs, not pydantic's noise
        assert schema["properties"]["title"] == {"type": "string", "default": "none"}


def test_F083_a_type_that_contains_itself_keeps_a_reference():
    t = made(Tree)
    assert t.schema["function"]["parameters"]["$defs"]["Tree"]["properties"]["value"] == {"type": "integer"}
    assert t.bind({"x": {"value": 1, "children": [{"value": 2}]}})["x"].children[0].value == 2


@pytest.mark.parametrize(
    ("hint", "bad", "path"),
    [
        (Point, {"x": 1, "z": 2}, "x.z"),
        (list[Point], [{"x": 1}, {"x": 1, "z": 2}], "x[1].z"),
        (Box, {"width": 1, "corner": {"x": 1}, "heigth": 3}, "x.heigth"),
        (Box, {"width": 1, "corner": {}}, "x.corner.x"),
        (Box, {"width": 1, "corner": {"x": 1, "z": 1}}, "x.corner.z"),
        (dict[str, int], {"a": 1, "b": "no"}, "x.b"),
    ],
)
def test_F083_invented_and_wrong_nested_keys_are_named(hint, bad, path):
    with pytest.raises(ToolArgumentError) as caught:
        made(hint).bind({"x": bad})
    assert f"'{path}'" in str(caught.value)


def no_type(a):
    """D.

    Args:
        a: A.
    """


def no_doc(a: int): ...


def no_argument_doc(a: int, b: int):
    """D.

    Args:
        a: A.

    Returns:
        b: not an argument description.
    """


def stars(*values: int):
    """D."""


def double_stars(**values: int):
    """D."""


def positional(a: int, /):
    """D.

    Args:
        a: A.
    """


def generator(a: int):
    """D.

    Args:
        a: A.
    """
    yield a


def no_description(a: int):
    """
    Args:
        a: A.
    """


def unknown_type(a: Nowhere):  # noqa: F821  # type: ignore[name-defined]
    """D.

    Args:
        a: A.
    """


def odd_type(a: int, b: typing.Callable):
    """D.

    Args:
        a: A.
        b: B.
    """


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_type, "argument 'a' has no type"),
        (no_doc, "no docstring"),
        (no_argument_doc, "argument 'b' is not described"),
        (stars, "*values"),
        (double_stars, "**values"),
        (positional, "'a' is positional-only"),
        (generator, "generator"),
        (no_description, "no description"),
        (unknown_type, "argument 'a' cannot be resolved"),
        (odd_type, "argument 'b' has no JSON schema"),
        (lambda a: a, "<lambda>"),
        (3, "not callable"),
    ],
)
def test_F083_definition_errors_name_function_and_argument(function, says):
    with pytest.raises(ToolDefinitionError) as caught:
        build_tool(function, owner="Env")
    assert says in str(caught.value)
    assert function == 3 or "Env." in str(caught.value)


def test_F083_explicit_schema_is_used_and_enforced():
    def anything(path, mode="r"):
        return path, mode

    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "P."}, "mode": {"enum": ["r", "w"]}},
        "required": ["path"],
    }
    for schema in (
        {"name": "open_file", "description": "Opens.", "parameters": parameters},
        {"type": "function", "function": {"name": "open_file", "description": "Opens.", "parameters": parameters}},
    ):
        t = build_tool(anything, schema=schema)
        assert (t.name, t.schema["function"]["parameters"]) == ("open_file", parameters)
        assert t.bind({"path": "a", "mode": "w"}) == {"path": "a", "mode": "w"}
        for bad in ({"path": 3}, {"path": "a", "mode": "x"}, {}, {"path": "a", "other": 1}):
            with pytest.raises(ToolArgumentError):
                t.bind(bad)
    with pytest.raises(ToolDefinitionError, match="'nope'"):
        build_tool(anything, schema={"description": "D.", "parameters": {"properties": {"nope": {}}}})
    with pytest.raises(ToolDefinitionError, match="'path' has no default"):
        build_tool(anything, schema={"description": "D.", "parameters": {"properties": {"path": {}}}})
    with pytest.raises(ToolDefinitionError, match="no description"):
        build_tool(anything, schema={"parameters": parameters})
    assert build_tool(tool(schema={"name": "f", "description": "D.", "parameters": parameters})(anything)).name == "f"


@pytest.mark.parametrize(
    ("hint", "given_value", "expected"),
    [
        (int, "3", 3),
        (int, 3.0, 3),
        (float, 3, 3.0),
        (bool, "true", True),
        (Literal["a", "b"], "b", "b"),
        (Color, "red", Color.RED),
        (tuple[int, str], [1, "a"], (1, "a")),
        (int | None, None, None),
    ],
)
def test_bind_converts_what_pydantic_takes(hint, given_value, expected):
    value = made(hint).bind({"x": given_value})["x"]
    assert value == expected
    assert type(value) is type(expected)


def test_bind_names_the_valid_choices():
    def search(place: Literal["cave", "mill"], depth: int = 1):
        """S.

        Args:
            place: P.
            depth: D.
        """

    t = build_tool(search)
    assert t.bind({"place": "cave"}) == {"place": "cave"}  # the default stays the function's
    for bad, says in [
        ({"place": "moon"}, "'place' should be 'cave' or 'mill', not 'moon'"),
        ({"plase": "cave"}, "did you mean 'place'?"),
        ({}, "'place' (one of 'cave', 'mill') is missing"),
        ({"place": "cave", "depth": "deep"}, "'depth' should be a valid integer"),
        ({"place": "cave", "depth": 1.5}, "'depth' should be a valid integer"),
        ({"place": "cave", "depth": "deep" * 500}, "..."),
    ]:
        with pytest.raises(ToolArgumentError) as caught:
            t.bind(bad)
        assert says in str(caught.value)
        assert str(caught.value).startswith("search was not called: ")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("empty", [None, "", {}])
def test_F073_empty_arguments_are_no_arguments(empty):
    def ping():
        """Pings."""

    assert build_tool(ping).bind(empty) == {}


@pytest.mark.parametrize("bad", [[1, 2], 3, "x", True, [["a", 1]]])
def test_F073_arguments_that_are_no_object_are_refused(bad):
    with pytest.raises(ToolArgumentError, match="must be a JSON object"):
        made(int).bind(bad)


def test_bind_survives_hostile_arguments():
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for bad in ({"x": deep}, {1: 2}, {"x": "\ud800"}, {"": 1}, {"x" * 100000: 1}):
        with pytest.raises(ToolArgumentError) as caught:
            made(int).bind(bad)  # type: ignore[arg-type]
        str(caught.value).encode()


texts = st.text('a1 é漢😀"\\\n\ud800', max_size=5)  # all of Unicode takes hypothesis seconds to tabulate
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "z"]), json_values, max_size=9))
def test_bind_gives_arguments_or_a_text(arguments):
    try:
        bound = _SIMPLE.bind(arguments)
    except ToolArgumentError as error:
        assert 0 < len(str(error)) < 2000
    else:
        assert set(bound) == set(arguments)
        assert type(bound["a"]) is int
        assert type(bound["b"]) is float


_SIMPLE = build_tool(simple)


def test_partials_async_and_callables():
    def scale(x: float, factor: float = 1.0):
        """Scales.

        Args:
            x: X.
        """
        return x * factor

    t = build_tool(functools.partial(scale, factor=3.0))
    assert t.name == "scale"
    assert list(t.schema["function"]["parameters"]["properties"]) == ["x"]
    assert t.function(**t.bind({"x": 2})) == 6.0

    async def fetch(x: int):
        """F.

        Args:
            x: X.
        """

    assert build_tool(fetch).is_async
    assert build_tool(functools.partial(fetch)).is_async
    assert not t.is_async


def test_choices_in_the_docstring_are_an_enum():
    def move(to: str):
        """M.

        Args:
            to: Where. (choices: ["up", "down"])
        """

    t = build_tool(move)
    assert t.schema["function"]["parameters"]["properties"]["to"]["enum"] == ["up", "down"]
    with pytest.raises(ToolArgumentError, match="'up' or 'down'"):
        t.bind({"to": "left"})


def test_types_of_the_enclosing_function_resolve():
    class Inner(pydantic.BaseModel):
        n: int

    def f(x: Inner):
        """F.

        Args:
            x: X.
        """
        return Inner, x

    assert build_tool(f).bind({"x": {"n": 1}})["x"] == Inner(n=1)


def test_F079_unknown_tools_list_the_valid_ones():
    tools = {"search": _SIMPLE, "deliver": _SIMPLE}
    text = describe_unknown("serch", tools)
    assert "'serch'" in text
    assert "Did you mean 'search'?" in text
    assert "search, deliver" in text
    assert "No tools" in describe_unknown("x", {})
    assert len(describe_unknown("y" * 10000, tools)) < 300


class Word(str):
    pass


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("é", "é"),
        (None, "None"),
        (True, "True"),
        (3, "3"),
        (2.5, "2.5"),
        ({"a": [1, "漢"]}, '{"a": [1, "漢"]}'),
        ([], "[]"),
        ((1, 2), "[1, 2]"),
        (set("hgfedcba"), '["a", "b", "c", "d", "e", "f", "g", "h"]'),
        (Box(1, {"x": 1}), '{"width": 1, "corner": {"x": 1}, "tags": []}'),
        (Config(depth=1), '{"depth": 1, "title": "none"}'),
        (Color.RED, "red"),
        (Word("w"), "w"),
        (b"ok\xff", "ok\ufffd"),
        ("\ud800a", "?a"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ([{"type": "bug", "id": 3}], '[{"type": "bug", "id": 3}]'),
    ],
)
def test_to_content(value, content):
    assert to_content(value) == content
    assert type(to_content(value)) is str


def test_content_blocks_are_checked():
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "image": object()}]
    assert to_content(blocks) == blocks
    for bad in (
        [{"type": "text", "text": "a"}, {"type": "audio", "audio": b""}],
        [{"type": "image_url", "image_url": "x"}],
        [{"type": "text", "text": "a"}, "b"],
        [{"type": "text", "text": 3}],
        [{"type": "image"}],
    ):
        with pytest.raises(EnvironmentFailed):
            to_content(bad)
