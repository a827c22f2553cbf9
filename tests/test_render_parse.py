"""Reading turns: reasoning, text, calls, and errors that a model can act on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.render import Renderer
from agentrl.render.formats import Hermes, Tagged, Think
from agentrl.types import ParsedTurn

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}]
FORM = Tagged(Think("<think>", "</think>"), Hermes())


def read(text: str, **kwargs: Any) -> ParsedTurn:
    return FORM.read(text, {}, **{"opened": False, "start": 0, **kwargs})


def call(arguments: str, name: str = "bash") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_two_parallel_calls_are_two_calls_in_order_F071() -> None:
    turn = read("First.\n" + call('{"a": 1}') + "\n" + call('{"a": 2}') + "\nLast.")
    assert [(c.id, c.name, c.arguments) for c in turn.calls] == [
        ("call_0", "bash", {"a": 1}),
        ("call_1", "bash", {"a": 2}),
    ]
    assert turn.message["content"] == "First.\nLast."
    assert [c["id"] for c in turn.message["tool_calls"]] == ["call_0", "call_1"]
    assert turn.message["tool_calls"][1] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "bash", "arguments": {"a": 2}},
    }
    assert [c.id for c in read(call("{}"), start=7).calls] == ["call_7"]


@pytest.mark.parametrize("arguments", ["null", '""', '" "', "{}"])
def test_absent_arguments_are_none_at_all_F073(arguments: str) -> None:
    (one,) = read(call(arguments)).calls
    assert (one.arguments, one.error) == ({}, None)
    (two,) = read('<tool_call>{"name": "bash"}</tool_call>').calls
    assert (two.arguments, two.error) == ({}, None)


@pytest.mark.parametrize(
    ("arguments", "kind"), [("[1, 2]", "a list"), ("3", "a number"), ('"x"', "a string"), ("true", "a boolean")]
)
def test_arguments_that_are_no_object_are_an_error_F073(arguments: str, kind: str) -> None:
    turn = read(call(arguments))
    (one,) = turn.calls
    assert one.error is not None and "must be a JSON object" in one.error and kind in one.error and "bash" in one.error
    assert one.name == "bash" and one.arguments == {} and "tool_calls" not in turn.message


@pytest.mark.parametrize(
    "value", ["echo '}{' > x", "mkdir -p test/{a,b", "x </tool_call> y", "<tool_call>", "</think><think>"]
)
def test_braces_and_tags_in_a_string_are_text_F075(value: str) -> None:
    turn = read(call(json.dumps({"cmd": value})) + "after")
    (one,) = turn.calls
    assert (one.arguments, one.error) == ({"cmd": value}, None)
    assert turn.message["content"] == "after" and "reasoning_content" not in turn.message


def test_a_call_in_a_closed_think_block_is_reasoning_F077() -> None:
    turn = read("<think> maybe " + call("{}") + "</think> final")
    assert turn.calls == ()
    assert turn.message["content"] == " final"
    assert turn.message["reasoning_content"].startswith(" maybe <tool_call>")


def test_reasoning_then_call() -> None:
    turn = read("<think>\nI look.\n</think>\n\n" + call('{"a": 1}'))
    assert turn.message["reasoning_content"] == "I look." and turn.message["content"] == ""
    assert turn.calls[0].arguments == {"a": 1}


def test_an_open_think_block_is_all_reasoning() -> None:
    turn = read("<think>\nwell " + call("{}"))
    assert turn.calls == () and turn.message["content"] == ""
    assert turn.message["reasoning_content"].startswith("well <tool_call>")


def test_a_lone_closing_tag_ends_reasoning_F055() -> None:
    for thinking in (True, False):
        turn = read("2+2 is 4.\n</think>\n\n4", opened=thinking)
        assert turn.message == {"role": "assistant", "content": "4", "reasoning_content": "2+2 is 4."}
    assert read("no end", opened=True).message == {"role": "assistant", "content": "", "reasoning_content": "no end"}
    assert read(call("{}") + "</think>").calls[0].error is None  # after a call it is only text


def test_a_call_without_its_closing_tag_counts() -> None:
    text = call('{"a": 1}').removesuffix("</tool_call>")
    assert read(text).calls[0].arguments == {"a": 1}
    two = read(text + call('{"a": 2}'))
    assert [c.arguments for c in two.calls] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "bash", "arguments": {"a": 1}', "too early, at character 39"),
        ('{"name": "bash" "arguments": {}}', "delimiter at character 16"),
        ("{'name': 'bash'}", "character 1"),
        ('{{"name": "bash", "arguments": {}}}', "character 1"),
        ('{"name": "bash", "arguments": {}}}', "after the JSON value, at character 33"),
        ('{"name": "bash", "arguments": {"a": NaN}}', "NaN"),
        ("[]", "not a list"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3}', '"name"'),
        ("", "character 0"),
        ("[" * 20000, "deep"),
        ('{"name": "bash", "arguments": {"a": ' + "9" * 5000 + "}}", "4300 digits"),
    ],
)
def test_a_malformed_call_names_its_cause_and_stays_in_the_text_F079(body: str, words: str) -> None:
    text = f"Now:\n<tool_call>\n{body}\n</tool_call>\n" + call('{"a": 1}')
    turn = read(text)
    bad, good = turn.calls
    assert bad.error is not None and words in bad.error, bad.error
    assert good.error is None and good.arguments == {"a": 1}
    assert turn.message["content"] == f"Now:\n<tool_call>\n{body}\n</tool_call>"
    assert [c["id"] for c in turn.message["tool_calls"]] == ["call_1"]


def test_a_call_that_was_cut_says_that_it_ends_too_early_F079() -> None:
    (one,) = read('<tool_call>\n{"name": "bash", "argum').calls
    assert one.error is not None and "unterminated string" in one.error and "character 17" in one.error
    (two,) = read('<tool_call>\n{"name": "bash",').calls
    assert two.error is not None and "ends too early" in two.error


def test_a_prompt_that_opened_the_block_and_a_turn_that_opens_it_again_F055() -> None:
    turn = read("\n<think>\nwhy\n</think>\n\nso", opened=True)
    assert (turn.message["reasoning_content"], turn.message["content"]) == ("why", "so")


def test_a_tool_that_changes_its_arguments_does_not_change_the_message() -> None:
    turn = read(call('{"a": [1]}'))
    turn.calls[0].arguments["a"].append(2)
    assert turn.message["tool_calls"][0]["function"]["arguments"] == {"a": [1]}


def test_added_tags_that_are_not_special_stay_in_the_message(tiny: Any) -> None:
    tokenizer = tiny.make(markers=(*tiny.QWEN_MARKERS, "<answer>", "</answer>"))
    renderer = Renderer(tokenizer)
    turn = renderer.parse(renderer.text_prompt("<answer>4</answer><|im_end|>"), TOOLS)
    assert turn.message["content"] == "<answer>4</answer>"
    ids = renderer.first(
        [{"role": "user", "content": "x"}, turn.message, {"role": "user", "content": "<answer>"}], None
    )
    assert ids.count(tokenizer.convert_tokens_to_ids("<answer>")) == 1  # the policy's own, not the user's


def test_lone_surrogates_are_replaced() -> None:
    (one,) = read(call('{"\\ud800": ["\\udc00 \\ud83d\\ude42"]}')).calls
    assert one.arguments == {"\ufffd": ["\ufffd 🙂"]}


def test_without_tools_nothing_is_a_call(tiny: Any) -> None:
    renderer = Renderer(tiny.qwen())
    ids = renderer.text_prompt(call("{}") + "<|im_end|>")
    assert renderer.parse(ids, None).message["content"] == call("{}")
    assert len(renderer.parse(ids, TOOLS).calls) == 1


def test_control_tokens_are_not_in_the_message(tiny: Any) -> None:
    for special in (False, True):
        names = tiny.QWEN_MARKERS
        tokenizer = tiny.make((*tiny.QWEN_SPECIAL, *names), ()) if special else tiny.qwen()
        renderer = Renderer(tokenizer)
        turn = renderer.parse(renderer.text_prompt("<think>a</think>b<|im_start|>c" + call("{}") + "<|im_end|>"), TOOLS)
        assert turn.message["content"] == "bc" and turn.message["reasoning_content"] == "a"
        assert turn.calls[0].name == "bash"
        assert renderer.plain_text(renderer.text_prompt("<think>a<|im_start|>b<|im_end|>")) == "<think>ab"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=3), st.booleans())
def test_what_is_written_is_read_back_F059(arguments: list[dict[str, Any]], ascii_only: bool) -> None:
    turn = read("\n".join(call(json.dumps(a, ensure_ascii=ascii_only)) for a in arguments))
    assert [c.arguments for c in turn.calls] == arguments
    assert all(c.error is None for c in turn.calls)


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "a"',
    "}",
    '"',
    "\n",
    "x",
    '{"name": "a"}',
    ", ",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.booleans())
def test_any_text_is_read_and_every_call_is_run_or_explained(text: str, thinking: bool) -> None:
    turn = read(text, opened=thinking)
    good = [c.id for c in turn.calls if c.error is None]
    assert good == [c["id"] for c in turn.message.get("tool_calls", [])]
    assert all(c.name for c in turn.calls if c.error is None)
    assert len(turn.calls) <= text.count("<tool_call>")
    assert len({c.id for c in turn.calls}) == len(turn.calls)
