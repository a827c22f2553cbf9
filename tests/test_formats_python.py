"""Calls in Python, turns of Muse Glimmer, and any text at all: read in linear time, or refused with the reason."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typed_kit import (
    ATEM,
    BARE,
    END,
    FORMATS,
    GLM,
    LFM,
    ONE,
    SCHEMAS,
    START,
    TAGS,
    XML,
    calls_of,
    error_of,
    read,
    reason,
    written,
)

from agentrl.render.formats.base import CallFormat


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
