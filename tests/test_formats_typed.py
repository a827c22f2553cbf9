"""Calls with values that carry no quotes, calls in Python, and Muse Glimmer's turns: read back what templates write."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.render.formats.atem import Atem
from agentrl.render.formats.base import CallFormat, Think
from agentrl.render.formats.glm import Glm
from agentrl.render.formats.pythonic import Pythonic
from agentrl.render.formats.turn import Tagged
from agentrl.render.formats.typed import python_literal, typed_arguments, typed_value
from agentrl.render.formats.xml_parameters import XmlParameters
from agentrl.render.jinja_env import compile_template
from agentrl.types import ParsedTurn

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"

XML, GLM, ATEM = XmlParameters(), Glm(), Atem()
LFM = Pythonic("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
BARE = Pythonic("pythonic", "", "")
FORMATS: list[CallFormat] = [XML, GLM, LFM, BARE]
THINK = Think("<think>", "</think>")
START, END = "<|tool_call_start|>", "<|tool_call_end|>"

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "t": {"type": "string"},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "z": {"type": "integer", "nullable": True},
        "l": {"type": "array"},
        "o": {"type": "object"},
    },
}
SCHEMAS = {"act": PARAMETERS, "ns.look": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "D.", "parameters": p}} for n, p in SCHEMAS.items()
]

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
HEADS = {"glm4moe": "<|assistant|>", "muse_glimmer": "<|start|>assistant"}
TAILS = {"glm4moe": "", "muse_glimmer": "<|eot|>"}


def written(family: str, calls: list[tuple[str, dict[str, Any]]], content: str = "", **more: Any) -> str:
    """An assistant turn with these calls as the family's original template writes it, without its end-of-turn token."""
    render = compile_template((TEMPLATES / f"{family}.jinja").read_text())
    made = [{"id": "c", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
    common = {"tools": TOOLS, "bos_token": "", "eos_token": "", "add_generation_prompt": False}
    before = render(messages=talk, **common)
    talk.append({"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more})
    text = render(messages=talk, **common)
    head = HEADS.get(family, "<|im_start|>assistant\n")
    assert text.startswith(before + head)
    turn = text[len(before + head) :]
    tail = TAILS.get(family, "<|im_end|>")
    return turn[: turn.rindex(tail)] if tail else turn


def read(form: CallFormat | Atem, text: str, schemas: Any = SCHEMAS) -> ParsedTurn:
    return (form if isinstance(form, Atem) else Tagged(THINK, form)).read(text, schemas, opened=False, start=0)


def calls_of(form: CallFormat | Atem, text: str, schemas: Any = SCHEMAS) -> list[tuple[str, dict[str, Any]]]:
    turn = read(form, text, schemas)
    assert [call.error for call in turn.calls] == [None] * len(turn.calls)
    return [(call.name, call.arguments) for call in turn.calls]


def error_of(form: CallFormat | Atem, text: str) -> str:
    (call,) = read(form, text).calls
    assert call.error is not None and call.arguments == {}
    return call.error


# --- types -----------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["7", "true", "null", "None", "{}", "[1]", "", " 1 ", '"q"', "1e5", "\n"])
def test_text_for_a_string_stays_the_text(text: str) -> None:
    for schema in ({"type": "string"}, {"type": ["string"]}, {"enum": ["a", "b"]}, {"anyOf": [{"type": "string"}]}):
        assert typed_value(text, schema, {}) == text


OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
EITHER = {"type": ["integer", "string"]}


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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TAGS = [
    "\n", "</parameter>", "\n</parameter>\n", "<parameter=s>", "</function>", "<function=act>", "</tool_call>",
    "<tool_call>", "</arg_value>", "<arg_key>", "</arg_key>", "<arg_value>", "</atem:parameter>", "</atem:invoke>",
    '<atem:parameter name="', "'", '"', "\\", "\\n", ", s=", ")", "]", "[", "(", "{", "}", " ", "x", "é",
    "#", "\r", "\0",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(TAGS), max_size=8).map("".join) | st.text(max_size=20)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": TEXTS,
        "t": TEXTS,
        "i": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "z": st.none() | st.integers(),
        "l": st.lists(VALUES, max_size=3),
        "o": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.just("act"), ARGUMENTS), min_size=1, max_size=3)
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


# --- several calls, none, reasoning ----------------------------------------------------
ONE = {
    "xml_parameters": "<tool_call>\n<function=act>\n<parameter=i>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>act\n<arg_key>i</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "lfm2": START + "[act(i={})]" + END,
}
TAGGED: list[CallFormat] = [XML, GLM, LFM]


@pytest.mark.parametrize("form", TAGGED, ids=lambda f: f.name)
def test_two_parallel_calls_are_two_calls_in_order_F071(form: CallFormat) -> None:
    one = ONE[form.name]
    turn = read(form, f"First.\n{one.format(1)}\n{one.format(2)}\nLast.")
    assert [(c.id, c.name, c.arguments) for c in turn.calls] == [
        ("call_0", "act", {"i": 1}),
        ("call_1", "act", {"i": 2}),
    ]
    assert turn.message["content"] == "First.\nLast." and len(turn.message["tool_calls"]) == 2


@pytest.mark.parametrize("form", TAGGED, ids=lambda f: f.name)
def test_a_call_in_a_closed_think_block_is_reasoning_F077(form: CallFormat) -> None:
    one = ONE[form.name]
    turn = read(form, f"<think> maybe {one.format(1)}</think>\n\n{one.format(2)}")
    assert [c.arguments for c in turn.calls] == [{"i": 2}] and turn.message["content"] == ""
    assert turn.message["reasoning_content"] == f" maybe {one.format(1)}"
    assert read(form, f"<think>{one.format(1)}").calls == ()
    assert Tagged(THINK, form).read(one.format(1), None, opened=False, start=0).calls == ()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (XML, "<tool_call>\n<function=act>\n</function>\n</tool_call>"),
        (XML, "<tool_call><function=act></function></tool_call>"),
        (GLM, "<tool_call>act\n</tool_call>"),
        (GLM, "<tool_call>act</tool_call>"),
        (LFM, START + "[act()]" + END),
        (LFM, START + '{"name": "act", "arguments": ""}' + END),
        (LFM, START + '{"name": "act", "arguments": null}' + END),
        (LFM, START + '[{"name": "act"}]' + END),
        (BARE, "[act()]"),
    ],
)
def test_absent_arguments_are_none_at_all_F073(form: CallFormat, text: str) -> None:
    assert calls_of(form, text) == [("act", {})]


@pytest.mark.parametrize(("arguments", "kind"), [("[1]", "a list"), ("3", "a number"), ('"x"', "a string")])
def test_arguments_that_are_no_object_are_an_error_F073(arguments: str, kind: str) -> None:
    got = error_of(LFM, f'{START}{{"name": "act", "arguments": {arguments}}}{END}')
    assert got == f'This call of act was not run: "arguments" must be a JSON object, not {kind}.'


# --- XML parameters --------------------------------------------------------------------
def xml(body: str) -> str:
    return f"<tool_call>\n<function=act>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        xml("<parameter=s>\na\n</parameter>\n"),
        xml("<parameter=s>\na\n</parameter>\n").removesuffix("\n</tool_call>"),
        xml("<parameter=s>\na\n</parameter>\n").removeprefix("<tool_call>\n"),
        xml("<parameter=s>a</parameter>"),
        "<tool_call><function=act><parameter=s>a</parameter></function></tool_call>",
        "  " + xml("\n<parameter=s>\na</parameter>\n\n"),
    ],
)
def test_xml_calls_with_other_line_breaks_or_without_tags_that_lose_nothing(text: str) -> None:
    turn = read(XML, text + "\nafter")
    assert [(c.name, c.arguments, c.error) for c in turn.calls] == [("act", {"s": "a"}, None)]
    assert turn.message["content"].strip() == "after"


def test_an_xml_value_may_show_a_whole_closing_tag_F075() -> None:
    value = "Write </parameter> after it,\n</parameter>\nthen </function></tool_call> and <function=f>"
    assert calls_of(XML, xml(f"<parameter=s>\n{value}\n</parameter>\n<parameter=i>\n1\n</parameter>\n")) == [
        ("act", {"s": value, "i": 1})
    ]


def test_a_call_that_was_left_open_does_not_swallow_the_next() -> None:
    open_xml = "<tool_call>\n<function=act>\n<parameter=s>\na\n</function>\n</tool_call>\n"
    bad, good = read(XML, open_xml + ONE["xml_parameters"].format(1)).calls
    assert bad.error is not None and "'s' of act has no closing </parameter>" in bad.error
    assert good.arguments == {"i": 1} and good.error is None
    unended = "<tool_call>\n<function=act>\n<parameter=s>\na\n</parameter>\n</tool_call>\n"
    assert calls_of(XML, unended + ONE["xml_parameters"].format(1)) == [("act", {"s": "a"}), ("act", {"i": 1})]
    open_glm = "<tool_call>act\n<arg_key>s</arg_key>\n<arg_value>a\n</tool_call>\n"
    bad, good = read(GLM, open_glm + ONE["glm"].format(1)).calls
    assert bad.error is not None and "'s' of act has no closing </arg_value>" in bad.error
    assert good.arguments == {"i": 1} and good.error is None


def reason(form: CallFormat, why: str) -> str:
    return f"This tool call was not run: {why}. {form.hint}"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "act"}', "<function=NAME> must come first, not '{\"name\": \"act\"}'"),
        ("<function=>", "<function=> names no tool"),
        ("<function=act", "<function=NAME> must come first, not '<function=act'"),
        ("<function=act>\nhello\n</function>", "in the call of act, <parameter=KEY> or </function> must follow, not "
         "'hello'"),
        ("<function=act>\n<parameter=s>\na\n</function>", "the parameter 's' of act has no closing </parameter>"),
        ("<function=act>\n<parameter=s>\na\n</parameter>\n<parameter=s>\nb\n</parameter>\n</function>",
         "the parameter 's' of act is given twice"),
        ("<function=act>\n<parameter=>\na\n</parameter>\n</function>", "a parameter of act has no name"),
        ("<function=act>\n<parameter=s>\na\n</parameter> and\n</function>",
         "the parameter 's' of act has no closing </parameter>"),
    ],
)  # fmt: skip
def test_a_malformed_xml_call_names_its_cause_and_stays_in_the_text_F079(body: str, why: str) -> None:
    text = f"Now:\n<tool_call>\n{body}\n</tool_call>"
    turn = read(XML, f"{text}\n{ONE['xml_parameters'].format(1)}")
    if "no closing" not in why:
        assert turn.calls[1].arguments == {"i": 1} and turn.message["content"] == text
    else:  # the end of the next call closes the value
        turn = read(XML, text)
        assert turn.message["content"] == text
    assert turn.calls[0].error == reason(XML, why)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>", "<function=NAME> must come first, not the end of the turn"),
        ("<tool_call>\n<function=act>\n", "in the call of act, <parameter=KEY> or </function> must follow, not the end "
         "of the turn"),
        ("<function=act>\n<parameter=s>\nab", "the parameter 's' of act has no closing </parameter>"),
        ("<function=act>\n<parameter=s>\nab\n</parameter>\n", "in the call of act, <parameter=KEY> or </function> must "
         "follow, not the end of the turn"),
    ],
)  # fmt: skip
def test_an_xml_call_that_was_cut_is_not_run_F079(text: str, why: str) -> None:
    assert error_of(XML, text) == reason(XML, why)


# --- GLM -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>act<arg_key>s</arg_key><arg_value>a</arg_value></tool_call>",
        "<tool_call>act\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        "<tool_call>\nact\n<arg_key> s </arg_key>\n\n<arg_value>a</arg_value>\n\n</tool_call>",
        "<tool_call> act <arg_key>s</arg_key> <arg_value>a</arg_value> </tool_call>",
    ],
)
def test_glm_calls_with_other_line_breaks(text: str) -> None:
    assert calls_of(GLM, text) == [("act", {"s": "a"})]


def test_glm_values_are_exact_and_may_show_tags_F075() -> None:
    for value in ("\n a \n", "x</arg_value>y", "</tool_call>", "<arg_key>k</arg_key>", "</arg_value> <arg_value>"):
        text = f"<tool_call>act<arg_key>s</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert calls_of(GLM, text) == [("act", {"s": value})]
    unended = "<tool_call>act\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n"
    assert calls_of(GLM, unended + ONE["glm"].format(1)) == [("act", {"s": "a"}), ("act", {"i": 1})]


PAIR = "in the call of act, <arg_key>KEY</arg_key><arg_value> or </tool_call> must follow, not "


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call></tool_call>", "no name of a tool follows <tool_call>"),
        ('<tool_call>{"name": 1}</tool_call>', "'{\"name\": 1}' is not the name of a tool"),
        ("<tool_call>act now\n</tool_call>", "'act now' is not the name of a tool"),
        ("<tool_call>act\nnow</tool_call>", PAIR + "'now</tool_call>'"),
        ("<tool_call>act", PAIR + "the end of the turn"),
        ("<tool_call>act<arg_key>s</arg_key><arg_value>a</arg_value>", PAIR + "the end of the turn"),
        ("<tool_call>act<arg_key>s</arg_key></tool_call>", PAIR + "'<arg_key>s</arg_key></tool_call>'"),
        ("<tool_call>act<arg_key>s</arg_key><arg_value>ab", "the value of 's' of act has no closing </arg_value>"),
        ("<tool_call>act<arg_key> </arg_key><arg_value>a</arg_value></tool_call>", "an argument of act has no key"),
        ("<tool_call>act" + "<arg_key>s</arg_key><arg_value>a</arg_value>" * 2 + "</tool_call>",
         "the argument 's' of act is given twice"),
    ],
)  # fmt: skip
def test_a_malformed_glm_call_names_its_cause_F079(text: str, why: str) -> None:
    assert error_of(GLM, text) == reason(GLM, why)
    assert read(GLM, text).message["content"] == text


# --- Python ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[act(s='a'), ns.look()]", [("act", {"s": "a"}), ("ns.look", {})]),
        ("[act(s='a',),]", [("act", {"s": "a"})]),
        ("[ act ( s = 'a' , i = 1 ) ]", [("act", {"s": "a", "i": 1})]),
        ("act(s='a')", [("act", {"s": "a"})]),
        ("[act(s='a')", [("act", {"s": "a"})]),
        ("[act(b=true, z=null, o={'a': None, \"b\": [false]})]",
         [("act", {"b": True, "z": None, "o": {"a": None, "b": [False]}})]),
        ("[act(i=-1, x=+1.5, l=(1, 2), o={1: 2})]", [("act", {"i": -1, "x": 1.5, "l": [1, 2], "o": {"1": 2}})]),
        ('[act(s="""two\nlines "x" """)]', [("act", {"s": 'two\nlines "x" '})]),
        (r"[act(s=r'\d', t='\d\n')]", [("act", {"s": r"\d", "t": "\\d\n"})]),
        ("[get-it(from='x', class=1)]", [("get-it", {"from": "x", "class": 1})]),
        ("[act(s='x" + END + "]" + END + "')]", [("act", {"s": "x" + END + "]" + END})]),
        (r"[act(s='C:\users')]", [("act", {"s": r"C:\users"})]),
        ("[act(s='it's', t='a\nb', i=1), act(t='say 'hi'')]",
         [("act", {"s": "it's", "t": "a\nb", "i": 1}), ("act", {"t": "say 'hi'"})]),
        ("[act(s='print('a', end='')')]", [("act", {"s": "print('a', end='')"})]),
        ("[act(s='f('a'), g('b') it's')]", [("act", {"s": "f('a'), g('b') it's"})]),
        ('{"name": "act", "arguments": {"s": "}]"}}', [("act", {"s": "}]"})]),
        ('[{"name": "act", "parameters": {"i": 1}}, {"name": "ns.look"}]', [("act", {"i": 1}), ("ns.look", {})]),
    ],
)  # fmt: skip
def test_lists_in_python_and_near_it(text: str, want: Any) -> None:
    for closing in (END, ""):
        turn = read(LFM, f"Now.{START}{text}{closing}")
        assert [(c.name, c.arguments, c.error) for c in turn.calls] == [(n, a, None) for n, a in want]
        assert turn.message["content"] == "Now."


def test_a_list_without_its_closing_tag_leaves_the_text_after_it() -> None:
    turn = read(LFM, f"{START}[act(i=1)]\nDone.")
    assert turn.calls[0].arguments == {"i": 1} and turn.message["content"] == "Done."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "the list holds no call, at its end"),
        ("", "it is not a list of calls: NAME( must follow, at its end"),
        ("hello", "it is not a list of calls: NAME( must follow, near 'hello'"),
        ("[act(i=1) act()]", "a comma or ] must follow here, near 'act()]'"),
        ("[act(i=1]", "a bracket is never closed, near '1]'"),
        ("[act(i=1 s='a')]", "the value of 'i' is no value: invalid syntax, near \"1 s='a')]\""),
        ("[act(s=word)]", "the value of 's' is no value: word is a bare word, and strings need quotes, near "
         "'word)]'"),
        ("[act(s=open('x').read())]", "the value of 's' is no value: only literal values can be written here, nothing "
         "that must be computed, near \"open('x').read())]\""),
        ("[act(s='a)]", "the value of 's' is a string without a closing quote, or with a quote or line break inside, "
         "near \"'a)]\""),
        ("[act(i=1)] more", "after the list there is more, near 'more'"),
        ('{"name": "act"', "it is not valid JSON: it ends too early, at character 14 (expecting ',' delimiter), at its "
         "end"),
    ],
)  # fmt: skip
def test_a_malformed_list_names_its_cause_and_stays_in_the_text_F079(text: str, why: str) -> None:
    bad = START + text + END
    turn = read(LFM, f"Now:\n{bad}\n{ONE['lfm2'].format(1)}")
    assert turn.calls[0].error == reason(LFM, why)
    assert turn.calls[1].arguments == {"i": 1} and turn.message["content"] == f"Now:\n{bad}"


def test_arguments_without_a_name_or_given_twice_are_errors_of_that_call_only() -> None:
    turn = read(LFM, f"{START}[act('x', i=1), act(i=2), act(i=1, i=2)]{END}")
    assert [c.error for c in turn.calls] == [
        "This call of act was not run: its arguments must be given by name, as KEY=VALUE, and 'x' is not.",
        None,
        "This call of act was not run: the argument 'i' is given twice.",
    ]
    assert turn.calls[1].arguments == {"i": 2}
    assert error_of(LFM, START + "[act(i=1), act(i=").startswith("This tool call was not run: ")


@pytest.mark.parametrize("text", ["Hi [act(i=1)]", "[act(i=1)] so", "[1, 2]", "[a](b)", "act(i=1)", "[act", "", "[]"])
def test_a_bare_list_is_the_whole_text_or_no_call(text: str) -> None:
    turn = read(BARE, text)
    assert turn.calls == () and turn.message["content"] == text


def test_a_bare_list_after_reasoning() -> None:
    turn = read(BARE, "<think>hm</think>\n\n[act(i=1), ns.look()]\n")
    assert [c.name for c in turn.calls] == ["act", "ns.look"] and turn.message["content"] == ""


# --- Muse Glimmer ----------------------------------------------------------------------
def test_a_turn_of_muse_glimmer_has_reasoning_text_or_calls() -> None:
    text = written("muse_glimmer", [], content="Hello.\n", reasoning_content="I think\n\nso.")
    assert text == " to=self<|message|>I think\n\nso.<|eom|><|start|>assistant to=user<|message|>Hello.\n"
    turn = read(ATEM, text)
    assert turn.message == {"role": "assistant", "content": "Hello.\n", "reasoning_content": "I think\n\nso."}
    called = written("muse_glimmer", [("act", {"s": "a"}), ("ns.look", {})], reasoning_content="Hm.")
    turn = read(ATEM, called)
    assert [(c.id, c.name, c.arguments) for c in turn.calls] == [
        ("call_0", "act", {"s": "a"}),
        ("call_1", "ns.look", {}),
    ]
    assert turn.message["reasoning_content"] == "Hm." and turn.message["content"] == ""


INVOKED = '<atem:function_calls>\n<atem:invoke name="act">\n{}</atem:invoke>\n</atem:function_calls>'


def test_only_blocks_to_tools_hold_calls_F077() -> None:
    call = INVOKED.format("")
    for to in ("self", "user"):
        assert read(ATEM, f" to={to}<|message|>{call}").calls == ()
    without_tools = ATEM.read(f" to=act<|message|>{call}", None, opened=False, start=0)
    assert without_tools.calls == () and without_tools.message["content"] == call
    two = INVOKED.replace("</atem:function_calls>", '<atem:invoke name="ns.look"></atem:invoke></atem:function_calls>')
    assert calls_of(ATEM, " to=act<|message|>" + two.format("")) == [("act", {}), ("ns.look", {})]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("just text", False, None, "just text"),
        ("", False, None, ""),
        ("<|message|>Hi", False, None, "Hi"),
        (" to=user<|message|>", False, None, ""),
        ("<|start|>assistant to=user<|message|>Hi", False, None, "Hi"),
        ("so<|eom|><|start|>assistant to=user<|message|>Hi", True, "so", "Hi"),
        ("", True, "", ""),
        (" to=self<|message|>a<|start|>assistant to=self<|message|>b<|start|>assistant to=user<|message|>c", False,
         "a\nb", "c"),
        (" to=user<|message|>Hi<|eom|><|start|>user<|message|>me", False, None, "Hi\nuser<|message|>me"),
        (" to=se", False, None, " to=se"),
    ],
)  # fmt: skip
def test_blocks_of_a_turn(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    message = ATEM.read(text, SCHEMAS, opened=opened, start=0).message
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("hello", "the block to=act must begin with <atem:function_calls>, not 'hello'"),
        ("<atem:function_calls>\n</atem:function_calls>", "<atem:function_calls> is followed by no <atem:invoke>"),
        ("<atem:function_calls>\nx", "<atem:invoke name=\"NAME\"> must follow, not 'x'"),
        ('<atem:function_calls><atem:invoke name="">', "<atem:invoke> names no tool"),
        ('<atem:function_calls><atem:invoke name="act">', 'in the call of act, <atem:parameter name="KEY"> or '
         "</atem:invoke> must follow, not the end of the block"),
        (INVOKED.format('<atem:parameter name="s">a'), "the parameter 's' of act has no closing </atem:parameter>, or "
         "</atem:invoke> is missing"),
        (INVOKED.format('<atem:parameter name="s">a</atem:parameter>' * 2), "the parameter 's' of act is given twice"),
    ],
)  # fmt: skip
def test_a_malformed_atem_call_names_its_cause_F079(body: str, why: str) -> None:
    good = INVOKED.format('<atem:parameter name="i">1</atem:parameter>\n')
    bad, other = read(ATEM, f" to=act<|message|>{body}<|eom|><|start|>assistant to=act<|message|>{good}").calls
    assert bad.error is not None and bad.error.startswith(
        f"This tool call was not run: {why}. Write <atem:function_calls>"
    )
    assert other.arguments == {"i": 1} and other.error is None
    assert read(ATEM, f" to=act<|message|>{body}").message["content"] == body


# --- arbitrary text --------------------------------------------------------------------
PIECES = [
    *TAGS, START, END, "[act(", "act", "s=", "i=1", "'a'", ",", '"name": "act"', "<tool_call>act", "<parameter=i>\n1\n",
    "<arg_key>s</arg_key>", "<|start|>", "<|message|>", "<|eom|>", "assistant", " to=act", " to=self",
    "<atem:function_calls>", '<atem:invoke name="act">', '<atem:parameter name="s">', "<think>", "</think>", "r'",
    "'''",
]  # fmt: skip
GARBAGE = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60)


@settings(max_examples=250, deadline=None)
@given(GARBAGE)
def test_no_text_raises_and_reading_goes_on(text: str) -> None:
    for form in FORMATS:
        at, found = 0, 0
        while (start := form.find(text, at)) >= 0:
            assert at <= start < len(text)
            block = form.read(text, start, SCHEMAS)
            assert start < block.end <= len(text) and block.calls
            at, found = block.end, found + len(block.calls)
        assert len(read(form, text).calls) == found or "think>" in text
    for opened in (False, True):
        ATEM.read(text, SCHEMAS, opened=opened, start=0)


PARTS: list[tuple[CallFormat, str]] = [
    (XML, "<tool_call>"),
    (XML, "<tool_call>\n<function=f>\n<parameter=a>\n"),
    (XML, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>\n"),
    (XML, "<function=f><parameter=a>x</parameter>y"),
    (XML, "</parameter>" + " " * 40),
    (GLM, "<tool_call>"),
    (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>y"),
    (LFM, START),
    (LFM, START + "[f(a='x"),
    (LFM, START + "[f(a='x" + START + '[f(a="y'),
    (LFM, START + "[f(a=["),
    (LFM, START + "{"),
    (LFM, "'),f("),
    (LFM, "'\\'"),
    (LFM, "[{"),
    (BARE, "[f("),
]


@pytest.mark.parametrize(("form", "part"), PARTS, ids=lambda p: p if isinstance(p, str) else p.name)
def test_reading_takes_time_linear_in_the_text(form: CallFormat, part: str) -> None:
    opening = {"lfm2": START + "[f(a='", "pythonic": "[f(a="}.get(form.name, "<tool_call>")
    for closing in ("</parameter></function></arg_value></tool_call>" + END + "]", ""):
        text, at, started = opening + part * (120_000 // len(part)) + closing, 0, time.process_time()
        while (start := form.find(text, at)) >= 0:
            at = form.read(text, start, {}).end
        assert time.process_time() - started < 1.0  # a quadratic reader takes minutes for a million characters


def test_a_long_turn_of_blocks_is_read_in_linear_time() -> None:
    for part in ("<|start|>", " to=", " ", "<|message|>", ' to=f<|message|><atem:invoke name="f"><|start|>'):
        started = time.process_time()
        ATEM.read(part * (500_000 // len(part)), {}, opened=False, start=0)
        assert time.process_time() - started < 1.0
