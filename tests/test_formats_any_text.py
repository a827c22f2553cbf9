"""Any text is read, in time linear in it, and what transformers ships reads the turns that nobody here knows."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.render.formats.actions import COMMAND_R, COMMAND_R7B, MISTRAL
from agentrl.render.formats.bare_json import BareJson
from agentrl.render.formats.base import CallFormat, Think
from agentrl.render.formats.deepseek import DeepSeek
from agentrl.render.formats.gemma4 import Gemma4
from agentrl.render.formats.harmony import Harmony
from agentrl.render.formats.hermes import Hermes
from agentrl.render.formats.shipped_parser import ShippedParser
from agentrl.render.formats.turn import Tagged
from agentrl.types import ParsedTurn

THINK = Think("<think>", "</think>")
HARMONY = Harmony()
FORMS: list[CallFormat] = [BareJson(), DeepSeek(), Gemma4(), COMMAND_R7B, COMMAND_R, MISTRAL]
OPENINGS = [
    "<|python_tag|>",
    "<｜tool▁call▁begin｜>",
    "<|tool_call>",
    "<|START_ACTION|>",
    "Action: ```json\n[",
    "[TOOL_CALLS]",
]
TAILS = [
    "",
    "{",
    "[",
    '["',
    '{"name": "a"}',
    'call:a{b:<|"|>',
    "call:a{b:[",
    "a<｜tool▁sep｜>{",
    "function<｜tool▁sep｜>",
]
PIECES = [
    *sorted(set().union(*(f.markers for f in FORMS), HARMONY.markers)),
    *TAILS,
    "</think>",
    "<think>",
    "```",
    *"{}[]:,;\n ",
    "<|return|>",
]
PIECES += [
    "Action: ```json\n",
    '{"name": "a", "parameters": {}}',
    '[{"tool_name": "a"}]',
    "call:a{",
    " to=a",
    "analysis",
]
GARBAGE = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


def walk(form: CallFormat, text: str) -> int:
    """How many calls stand in the text; reading always goes on."""
    at = count = 0
    while (start := form.find(text, at)) >= 0:
        block = form.read(text, start, {})
        assert at <= start < block.end <= len(text) and block.calls
        at, count = block.end, count + len(block.calls)
    return count


@settings(max_examples=400, deadline=None)
@given(text=GARBAGE)
def test_any_text_is_read(text: str) -> None:
    for form in FORMS:
        walk(form, text)
        assert Tagged(THINK, form).read(text, None, opened=False, start=0).calls == ()
    for opened in (True, False):
        assert HARMONY.read(text, None, opened=opened, start=0).calls == ()
        for call in HARMONY.read(text, {}, opened=opened, start=0).calls:
            assert call.error is None or call.arguments == {}


@pytest.mark.parametrize("form", [*FORMS, HARMONY], ids=lambda form: form.name)
def test_reading_is_linear_in_the_text(form: Any) -> None:
    if form is HARMONY:
        units = ["<|channel|>commentary to=a<|message|>" + tail for tail in TAILS] + [
            "<|message|>",
            "<|start|>",
            "to= ",
        ]
    else:
        opening = OPENINGS[FORMS.index(form)]
        units = [opening + tail for tail in TAILS] + ["</think>{" + tail for tail in ("", '"name": "')] + ["{", " "]
    for unit in units:
        text = unit * (300_000 // len(unit))
        began = time.process_time()
        _ = HARMONY.read(text, {}, opened=False, start=0) if form is HARMONY else walk(form, text)
        assert time.process_time() - began < 1, unit  # a quadratic reader takes ten seconds and more


# --- GPT-OSS ----------------------------------------------------------------------------
def harmony(text: str, tools: bool = True) -> ParsedTurn:
    return HARMONY.read(text, {} if tools else None, opened=False, start=0)


@pytest.mark.parametrize("tools", [True, False])
def test_harmony_channels(tools: bool) -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>é 4"
    )
    want = {"role": "assistant", "content": "I look.\né 4", "reasoning_content": "One.\nTwo."}
    for end in ("", "<|return|>", "<|end|>"):
        assert harmony(text + end, tools).message == want
    call = '<|start|>assistant to=browser.search<|channel|>analysis json<|message|>{"q": 1}<|call|>'
    turn = HARMONY.read(text + "<|end|>" + call, {} if tools else None, opened=False, start=7)
    assert turn.message["reasoning_content"] == want["reasoning_content"]
    if tools:  # of a tool that nobody has: the engine says so by its name
        assert [(c.id, c.name) for c in turn.calls] == [("call_7", "browser.search")]
    else:
        assert turn.calls == () and turn.message["content"] == 'I look.\né 4\n{"q": 1}'


def test_harmony_without_its_form_is_text() -> None:
    assert harmony("let me go to=3").message == {"role": "assistant", "content": "let me go to=3"}
    assert harmony("Hm.<|channel|>final<|message|>So.").message["content"] == "Hm.\nSo."
    assert harmony("<|message|>So.").message["content"] == "So."
    opened = HARMONY.read("why<|end|><|start|>assistant<|channel|>final<|message|>so", {}, opened=True, start=0).message
    assert (opened["reasoning_content"], opened["content"]) == ("why", "so")


# --- the parsing of transformers -----------------------------------------------------------
SCHEMAS = {"go": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
MARKERS = ("<do>", "</do>", "<mull>", "</mull>", "<other>")


def response_template(calls: tuple[str, str], thought: tuple[str, str]) -> dict[str, Any]:
    function = {"type": "function", "function": "{content}"}
    fields = {
        "reasoning": {"open": thought[0], "close": thought[1]},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open_pattern": calls[0] + r"\s*",
            "close": calls[1],
            "content": "json",
            "repeats": True,
            "transform": function,
        },
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


@pytest.fixture
def shipped(tiny: ModuleType) -> ShippedParser:
    """For a form that no reader here knows."""
    tokenizer = tiny.make(markers=MARKERS)
    tokenizer.response_template = response_template(("<do>", "</do>"), ("<mull>", "</mull>"))
    return ShippedParser(tokenizer)


def test_the_shipped_parser_reads_a_form_that_is_unknown_here_F071_F077(
    shipped: ShippedParser, tiny: ModuleType
) -> None:
    assert shipped.markers == frozenset(MARKERS[:4])
    ended = tiny.make(markers=MARKERS)
    ended.response_template = response_template(("<do>", "<|im_end|>"), ("<mull>", "</mull>"))
    assert ShippedParser(ended).markers == {"<do>", "<mull>", "</mull>"}  # the end of the turn is no marker
    call = '<do>{"name": "go", "arguments": {"n": 1}}</do>'
    text = f'<mull>why {call}</mull>Now.{call}<do>{{"name": "go", "arguments": "{{\\"s\\": \\"é}}{{\\"}}"}}</do>'
    turn = shipped.read(text, SCHEMAS, opened=False, start=3)
    assert [(c.id, c.name, c.arguments, c.error) for c in turn.calls] == [
        ("call_3", "go", {"n": 1}, None),
        ("call_4", "go", {"s": "é}{"}, None),
    ]
    assert (turn.message["reasoning_content"], turn.message["content"]) == (f"why {call}", "Now.")
    bare = shipped.read(text, None, opened=False, start=0)
    assert bare.calls == () and "tool_calls" not in bare.message
    assert bare.message["reasoning_content"] == f"why {call}"
    assert bare.message["content"] == text.partition("</mull>")[2]
    opened = shipped.read("why</mull>so", SCHEMAS, opened=True, start=0).message
    assert (opened["reasoning_content"], opened["content"]) == ("why", "so")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "go", "arguments": {"n" 1}}', "delimiter at character 33 of its body"),
        ('{"name": "go", "arguments": [1]}', '"arguments" must be a JSON object, not a list'),
        ('{"name": "go", "arguments": {"n": NaN}}', "NaN and Infinity are not JSON"),
        ('{"arguments": {}}', 'no "name"'),
        ("[]", "must be a JSON object, not a list"),
    ],
)
def test_what_the_shipped_parser_cannot_read_is_an_error_for_the_model_F073_F079(
    shipped: ShippedParser, body: str, words: str
) -> None:
    turn = shipped.read(f"Now.<do>{body}</do>", SCHEMAS, opened=False, start=0)
    (bad,) = turn.calls
    assert bad.error is not None and words in bad.error, bad.error
    assert (bad.arguments, turn.message["content"]) == ({}, f"Now.<do>{body}</do>")


def test_a_template_that_raises_over_a_text_leaves_the_text(shipped: ShippedParser, tiny: ModuleType) -> None:
    tokenizer = tiny.make(markers=MARKERS)
    template = response_template(("<do>", "</do>"), ("<mull>", "</mull>"))
    template["fields"]["score"] = {"open": "<other>", "close": "!", "content": "int", "optional": False}
    tokenizer.response_template = template
    turn = ShippedParser(tokenizer).read("no score", SCHEMAS, opened=False, start=0)
    assert turn.message["content"] == "no score"
    assert [c.error is not None and "Required response_template fields missing" in c.error for c in turn.calls] == [
        True
    ]


PIECES_SHIPPED = st.sampled_from(
    ["<do>", "</do>", "<mull>", "</mull>", "{", "}", '{"name": "go"}', "[]", '"', "x", "\n"]
)


@settings(max_examples=100, deadline=None)
@given(text=st.lists(PIECES_SHIPPED, max_size=8).map("".join))
def test_the_shipped_parser_never_raises(text: str, tiny: ModuleType) -> None:
    tokenizer = tiny.make(markers=MARKERS)
    tokenizer.response_template = response_template(("<do>", "</do>"), ("<mull>", "</mull>"))
    for opened in (True, False):
        assert ShippedParser(tokenizer).read(text, None, opened=opened, start=0).calls == ()
        for call in ShippedParser(tokenizer).read(text, SCHEMAS, opened=opened, start=0).calls:
            assert call.error is None or call.arguments == {}


# Why transformers' parsing is only the last resort: the same turns, read by it and by the reader of this form here.
ONE, TWO = '{"name": "go", "arguments": {"s": "x"}}', '{"name": "go", "arguments": {"s": "y"}}'


@pytest.mark.parametrize(
    ("text", "theirs", "ours"),
    [
        # Right in both.
        (f"A<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>", ("A", [{"s": "x"}, {"s": "y"}]), "same"),
        (f"<think>{ONE}</think>A<tool_call>{ONE}", ("A", [{"s": "x"}]), "same"),
        # A closing tag in a string ends the call.
        (
            '<tool_call>{"name": "go", "arguments": {"s": "</tool_call>"}}</tool_call>',
            "raises",
            ("", [{"s": "</tool_call>"}]),
        ),
        # One broken call takes the others of its turn with it.
        (
            f"<tool_call>{{</tool_call><tool_call>{ONE}</tool_call>",
            "raises",
            ("<tool_call>{</tool_call>", [{"s": "x"}]),
        ),
        # A string for an integer parameter becomes a number, though the model wrote JSON and could be told.
        (
            '<tool_call>{"name": "go", "arguments": {"n": "7"}}</tool_call>',
            ("", [{"n": 7}]),
            ("", [{"n": "7"}]),
        ),
        # A closing tag whose opening tag stood in the prompt, or was lost, is not seen.
        ("why</think>so", ("why</think>so", []), ("so", [])),
        # Text is stripped, and what stands between two calls is kept only where it stands last.
        ("  a\n", ("a", []), ("  a\n", [])),
        (f"A<tool_call>{ONE}</tool_call>B", ("B", [{"s": "x"}]), ("A\nB", [{"s": "x"}])),
    ],
)
def test_where_transformers_reads_otherwise_F055_F071_F075(tiny: ModuleType, text: str, theirs: Any, ours: Any) -> None:
    tokenizer = tiny.make()
    tokenizer.response_template = response_template(("<tool_call>", "</tool_call>"), ("<think>", "</think>"))
    tools = [{"type": "function", "function": {"name": "go", "parameters": SCHEMAS["go"]}}]
    if theirs == "raises":
        with pytest.raises(ValueError, match="could not parse region as JSON"):
            tokenizer.parse_response(text, prefix="", tools=tools)
        shipped = ShippedParser(tokenizer).read(text, SCHEMAS, opened=False, start=0)
        assert [c.error is not None and c.error.startswith("No tool call") for c in shipped.calls] == [True]
    else:
        assert summary(ShippedParser(tokenizer).read(text, SCHEMAS, opened=False, start=0)) == theirs
    turn = Tagged(THINK, Hermes()).read(text, SCHEMAS, opened=False, start=0)
    assert summary(turn) == (theirs if ours == "same" else ours)


def summary(turn: ParsedTurn) -> tuple[str, list[dict[str, Any]]]:
    return turn.message["content"], [call.arguments for call in turn.calls if call.error is None]
