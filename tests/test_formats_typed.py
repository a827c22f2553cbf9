"""Text becomes the value that a schema means; calls are read back as the original templates write them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typed_kit import (
    ATEM,
    BARE,
    CALLS,
    EITHER,
    END,
    GLM,
    LFM,
    OPTIONAL,
    PARAMETERS,
    START,
    XML,
    calls_of,
    read,
    written,
)

from agentrl.render.formats.atem import Atem
from agentrl.render.formats.base import CallFormat
from agentrl.render.formats.typed import python_literal, typed_arguments, typed_value


# --- types -----------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["7", "true", "null", "None", "{}", "[1]", "", " 1 ", '"q"', "1e5", "\n"])
def test_text_for_a_string_stays_the_text(text: str) -> None:
    for schema in ({"type": "string"}, {"type": ["string"]}, {"enum": ["a", "b"]}, {"anyOf": [{"type": "string"}]}):
        assert typed_value(text, schema, {}) == text


@pytest.mark.parametrize(
    ("text", "schema", "want"),
    [
        ("7", {"type": "integer"}, 7),
        (" 7\n", {"type": "integer"}, 7),
        ("-0.5", {"type": "number"}, -0.5),
        ("7", {"type": "number"}, 7),
        ("3.0", {"type": "integer"}, 3.0),
        ("3.5", {"type": "integer"}, "3.5"),
        ("true", {"type": "integer"}, "true"),
        ("seven", {"type": "integer"}, "seven"),
        ('"7"', {"type": "integer"}, '"7"'),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": "null"}, None),
        ('[1, "a", {"b": null}]', {"type": "array"}, [1, "a", {"b": None}]),
        ("['a', True]", {"type": "array"}, ["a", True]),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ("{}", {"type": "array"}, "{}"),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[" * 100000, {"type": "array"}, "[" * 100000),
        ("{f()}", {"type": "object"}, "{f()}"),
        ("7", OPTIONAL, 7),
        ("None", OPTIONAL, None),
        ("null", OPTIONAL, None),
        ("x", OPTIONAL, "x"),
        ("null", {"type": "string", "nullable": True}, None),
        ("7", {"type": "string", "nullable": True}, "7"),
        ("7", EITHER, 7),
        ("007", EITHER, "007"),
        (" 7", EITHER, " 7"),
        ("7.0", EITHER, "7.0"),
        ("7", {"oneOf": [{"type": "string"}, {"type": "number"}]}, 7),
        ("{}", {"anyOf": [{"type": "string"}, {"type": "object"}]}, {}),
        ("2", {"enum": [1, 2]}, 2),
        ("2.5", {"enum": [1, 2.5]}, 2.5),
        ("1", {"enum": ["1", 2]}, "1"),
        ("2", {"enum": ["1", 2]}, 2),
        ("1", {"const": 1}, 1),
        ("2", {"type": "string", "enum": ["2"]}, "2"),
        ("5", {"$ref": "#/$defs/N"}, 5),
        ("5", {"allOf": [{"$ref": "#/$defs/N"}], "description": "d"}, 5),
        ("5", {"$ref": "#/$defs/Loop"}, 5),
        ("{}", {"properties": {}}, {}),
        ("[]", {"items": {}}, []),
        ("7", {}, 7),
        ("7", None, 7),
        ("[1]", None, [1]),
        ("true", None, "true"),
        ("null", {"description": "anything"}, "null"),
        ('"q"', None, '"q"'),
        ("word", None, "word"),
        ("['a']", None, "['a']"),
        ("7", {"type": 3, "enum": 4, "anyOf": "x", "$ref": 5}, 7),
    ],
)
def test_text_becomes_the_value_that_the_schema_means(text: str, schema: Any, want: Any) -> None:
    root = {"$defs": {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    got = typed_value(text, schema, root)
    assert (got, type(got)) == (want, type(want))


def test_unknown_parameters_and_tools_have_no_schema() -> None:
    assert typed_arguments([("s", "7"), ("new", "7")], PARAMETERS) == {"s": "7", "new": 7}
    assert typed_arguments([("s", "7")], None) == {"s": 7}
    assert typed_arguments([("k", "7")], {"additionalProperties": {"type": "string"}}) == {"k": "7"}


@given(st.text(max_size=40), st.sampled_from([None, *PARAMETERS["properties"].values(), EITHER, OPTIONAL]))
def test_any_text_has_a_value(text: str, schema: Any) -> None:
    typed_value(text, schema, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__import__('os')", "nothing that must be computed"),
        ("a", "a is a bare word"),
        ("{**x}", "keys of an object must be strings"),
        ("b'x'", "nothing that must be computed"),
        ("f'{x}'", "nothing that must be computed"),
        ("1e999", "too large"),
        ("[" * 1000, "too many nested"),
        ("-" * 100000 + "1", "nested too deeply"),
        ("9" * 5000, "limit"),
        ("[1", "never closed"),
    ],
)
def test_a_literal_that_is_none_is_refused_never_evaluated(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        python_literal(text)


# --- what original templates write -----------------------------------------------------
XML_TEMPLATES = [
    "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8",
    "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning",
]  # fmt: skip
ESCAPING, RAW = ["lfm2_v2", "lfm2_2_5_vl"], ["lfm2_2_5", "lfm2_2_5_v2"]
FAMILIES: dict[str, CallFormat | Atem] = {
    **dict.fromkeys(XML_TEMPLATES, XML),
    "glm4moe": GLM,
    **dict.fromkeys(ESCAPING + RAW, LFM),
    "muse_glimmer": ATEM,
}
STRINGS = [
    "plain", "", " ", "\n", "two\nlines\n", "\n\n lead", "é漢🎉", "it's \"quoted\" 'x'", "<b> & </b> &amp; &#34;", "{}",
    "[1]", "7", "true", "None", "echo '}{' > x", "mkdir -p test/{a,b", "</tool_call>", "<tool_call>", "<function=act>",
    "</function>", "x </parameter> y", "</parameter>", "<parameter=s>\n", "</arg_value>", "<arg_key>i</arg_key>",
    "</atem:parameter>", '<atem:invoke name="x">', "a', 'b", "f('a')", "[f(x='y')]", "tab\there", "\r\n",
    "'", '"', "'''",
]  # fmt: skip
TYPED: dict[str, Any] = {
    "i": -7, "x": 1.5e-7, "b": True, "z": None, "l": [1, "it's", None, [True, {"k": 'é"'}]], "o": {"a": {"b": [False]}},
}  # fmt: skip
OTHER: dict[str, Any] = {"i": 10**20, "x": 1e22, "b": False, "z": 3, "l": [], "o": {}, "s": "last"}


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_as_the_original_template_wrote_them_F059(family: str) -> None:
    form = FAMILIES[family]
    for string in STRINGS:
        # What a template without escapes writes for these is Python for something else; no reader can tell.
        if family in RAW and string in ("a', 'b", "'"):
            continue
        want: list[tuple[str, dict[str, Any]]] = [
            ("act", {"s": string, **TYPED}),
            ("ns.look", {}),
            ("act", {"t": string}),
        ]
        for n in (1, 2, 3):
            text = written(family, want[:n])
            assert "&#34;" not in text or "&#34;" in string
            assert calls_of(form, text) == want[:n], (string, text)
    assert calls_of(form, written(family, [("act", OTHER)])) == [("act", OTHER)]
    assert calls_of(form, written(family, [("ns.look", {})])) == [("ns.look", {})]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "muse_glimmer"])
def test_text_before_calls_is_the_content(family: str) -> None:
    turn = read(FAMILIES[family], written(family, [("act", {"s": "a"})], content="I look."))
    assert turn.message["content"] == "I look." and turn.calls[0].arguments == {"s": "a"}


def test_backslashes_follow_python_where_a_template_escapes() -> None:
    for value in ("C:\\new\\users", "\\d+\\'", "a\\", "\\\\", "\\x41", "\\N{BULLET}"):
        for family in ESCAPING:
            assert calls_of(LFM, written(family, [("act", {"s": value, "t": "x"})])) == [
                ("act", {"s": value, "t": "x"})
            ]


AMBIGUOUS = {  # text that is itself the end of a value and what follows it: no reader of unquoted values can tell
    "qwen3_6": r"</parameter>\s*(<parameter=|</function>|(</tool_call>\s*)?<tool_call>\s*<function=)"
    r"|</function>\s*</tool_call>\s*<tool_call>\s*<function=",
    "glm4moe": r"</arg_value>\s*(<arg_key>|</tool_call>|<tool_call>)|</tool_call>\s*<tool_call>",
    "muse_glimmer": r'</atem:parameter>\s*(<atem:parameter name="|</atem:invoke>)',
}


@pytest.mark.parametrize("family", ["qwen3_6", "nemotron_3_nano", "glm4moe", "muse_glimmer", "lfm2_v2"])
@settings(max_examples=50, deadline=None)
@given(calls=CALLS)
@example(calls=[("act", {"s": "\\\0'"})])
def test_every_call_that_a_template_writes_is_read_back_F059_F075(family: str, calls: list[Any]) -> None:
    unclear = AMBIGUOUS.get("qwen3_6" if family.startswith("nemotron") else family)
    strings = [arguments.get(key, "") for _, arguments in calls for key in "st"]
    nested = [json.dumps(arguments.get(key, "")) for _, arguments in calls for key in "lo"]
    if unclear and any(re.search(unclear, string) for string in strings + nested):
        return
    assert calls_of(FAMILIES[family], written(family, calls)) == calls


def as_python(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A list of calls in Python's own spelling."""
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_python_is_read_as_python(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = as_python(calls)
    assert calls_of(LFM, f"Now.{START}{text}{END}") == calls
    assert calls_of(BARE, f" {text}\n") == calls
