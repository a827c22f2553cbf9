"""Turns of Llama, DeepSeek, Gemma 4, Cohere, Mistral and GPT-OSS are read back as their templates write them."""

from __future__ import annotations

import importlib.util
import json
import pathlib
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
from agentrl.render.formats.turn import Tagged
from agentrl.render.jinja_env import compile_template
from agentrl.types import ParsedTurn

THINK = Think("<think>", "</think>")
THINK_GEMMA = Think("<|channel>thought\n", "<channel|>")
LLAMA, DEEPSEEK, GEMMA, HARMONY = BareJson(), DeepSeek(), Gemma4(), Harmony()
QUOTE = '<|"|>'


def read(form: CallFormat, text: str, *, tools: bool = True, think: Think = THINK) -> ParsedTurn:
    return Tagged(think, form).read(text, {} if tools else None, opened=False, start=0)


def harmony(text: str, *, tools: bool = True, opened: bool = False, start: int = 0) -> ParsedTurn:
    return HARMONY.read(text, {} if tools else None, opened=opened, start=start)


def said(turn: ParsedTurn) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a turn in which all are well formed."""
    assert [call.error for call in turn.calls] == [None] * len(turn.calls)
    return [(call.name, call.arguments) for call in turn.calls]


# --- writers, by hand from the formats --------------------------------------------------
Calls = list[tuple[str, dict[str, Any]]]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    return "[" + ",".join(map(gemma_value, value)) + "]" if isinstance(value, list) else dump(value)


def deepseek_v3(calls: Calls) -> str:
    one = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dump(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(one) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    one = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dump(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{one}<｜tool▁calls▁end｜>"


def json_list(calls: Calls, name: str, arguments: str) -> str:
    return dump([{"tool_call_id": str(i), name: n, arguments: a} for i, (n, a) in enumerate(calls)])


WRITERS: dict[str, tuple[CallFormat, Any]] = {
    "llama;": (LLAMA, lambda calls: "; ".join(dump({"name": n, "parameters": a}) for n, a in calls)),
    "llama tag": (
        LLAMA,
        lambda calls: "<|python_tag|>" + "\n".join(dump({"name": n, "parameters": a}) for n, a in calls),
    ),
    "deepseek v3": (DEEPSEEK, deepseek_v3),
    "deepseek v3.1": (DEEPSEEK, deepseek_v31),
    "gemma4": (GEMMA, lambda calls: "".join(f"<|tool_call>call:{n}{gemma_value(a)}<tool_call|>" for n, a in calls)),
    "command r7b": (
        COMMAND_R7B,
        lambda calls: f"<|START_ACTION|>{json_list(calls, 'tool_name', 'parameters')}<|END_ACTION|>",
    ),
    "command r": (COMMAND_R, lambda calls: f"Action: ```json\n{json_list(calls, 'tool_name', 'parameters')}\n```"),
    "mistral": (MISTRAL, lambda calls: f"[TOOL_CALLS]{json_list(calls, 'name', 'arguments')}"),
}
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
TAGS = (
    "</think>",
    "<think>",
    "<|tool_call>",
    "<tool_call|>",
    "<｜tool▁call▁end｜>",
    "```",
    "<|END_ACTION|>",
    "<|call|>",
)
STRINGS = st.text(max_size=12) | st.sampled_from(["", *TAGS, "}{", "]", '"', "\\", "\n", "a<b>&amp;'é漢😀", "; {"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)
CALLS = st.lists(st.tuples(KEYS, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("which", WRITERS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_what_is_written_is_read_back_F059_F071_F075(which: str, calls: Calls) -> None:
    form, write = WRITERS[which]
    text = write(calls)
    turn = read(form, text)
    assert said(turn) == calls and turn.message["content"] == ""
    assert read(form, text, tools=False).calls == ()


@settings(max_examples=60, deadline=None)
@given(call=CALLS.map(lambda calls: calls[0]), after=st.booleans(), end=st.sampled_from(["<|call|>", ""]))
def test_harmony_reads_back_what_is_written_F059_F075(call: Any, after: bool, end: str) -> None:
    name, arguments = call
    thought = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    if not after:
        header = f" to=functions.{name}<|channel|>commentary json"
    turn = harmony(f"{thought}{header}<|message|>{dump(arguments)}{end}")
    assert said(turn) == [call]
    assert (turn.message["content"], turn.message["reasoning_content"]) == ("", "I look.")


# --- the oracle: what the families' own templates write -----------------------------------
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"a": ""},
    {"a": "é漢😀  \t", "b": "l1\nl2\n"},
    {"a": "say \"hi\" 'x' \\ back", "b": "<b>&amp; </think> <tool_call|>"},
    {"a": "}{ [ ], echo '}{' > x", "b": "``` <｜tool▁call▁end｜> <|call|> <|end|> <|eot_id|>"},
    {"e": 1e-7, "f": 1.5, "m": -3, "n": 0, "t": True, "u": False},
    {"l": [], "o": {"k": {"l": [1, [2, {"x": "y"}]]}}, "z": None},
]


def template(name: str) -> Any:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    path = pathlib.Path(next(iter(spec.submodule_search_locations)), "chat_templates", f"{name}.jinja")
    return compile_template(path.read_text(encoding="utf-8"))


def written(name: str, message: dict[str, Any], begins: str, end: str) -> str:
    """The assistant turn as the original template writes it, between its header and its end-of-turn token."""
    text = template(name)(
        messages=[{"role": "user", "content": "u"}, {"role": "assistant", **message}],
        tools=None,
        add_generation_prompt=False,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    return text[text.index(begins) + len(begins) : text.rindex(end)]


def calls_of(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"c{i}", "type": "function", "function": {"name": f"go_{i}", "arguments": a}}
        for i, a in enumerate(arguments)
    ]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
@pytest.mark.parametrize("encode", [dict, dump])
def test_llama_templates_are_read_back_F059(name: str, arguments: dict[str, Any], encode: Any) -> None:
    message = {"content": "", "tool_calls": calls_of(encode(arguments))}
    text = written(name, message, "assistant<|end_header_id|>\n\n", "<|eot_id|>")
    turn = read(LLAMA, text)  # arguments that a template encodes twice are a JSON string, and still these arguments
    assert said(turn) == [("go_0", arguments)] and turn.message["content"] == ""


@pytest.mark.parametrize("content", [None, "I look."])
def test_the_deepseek_template_is_read_back_F059_F071(content: str | None) -> None:
    message = {"content": content, "tool_calls": calls_of(*map(dump, ARGUMENTS))}
    turn = read(DEEPSEEK, written("deepseekv3", message, "<｜Assistant｜>", "<｜end▁of▁sentence｜>"))
    assert said(turn) == [(f"go_{i}", a) for i, a in enumerate(ARGUMENTS)]
    assert len(DEEPSEEK.read(deepseek_v3([("a", {}), ("b", {})]), 0, {}).calls) == 2  # one block, all calls
    assert turn.message["content"] == (content or "")


def test_a_second_deepseek_turn_that_its_template_writes_without_the_opening_tag() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": calls_of('{"a": 1}')}
    user = {"role": "user", "content": "u"}
    text = template("deepseekv3")(messages=[user, call, user, call], bos_token="", add_generation_prompt=False)
    second = text.rpartition("<｜User｜>u")[2].removesuffix("<｜end▁of▁sentence｜>")
    assert "<｜tool▁calls▁begin｜>" not in second
    assert said(read(DEEPSEEK, second)) == [("go_0", {"a": 1})]


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
def test_gemma_templates_are_read_back_F059_F071(name: str) -> None:
    message = {"content": "Now.", "reasoning_content": "I think.", "tool_calls": calls_of(*ARGUMENTS[:3], ARGUMENTS[5])}
    # The content may not hold a closing tag of a thought: the template cuts it out. Arguments may.
    message["tool_calls"] += calls_of(*ARGUMENTS)[3:5] + calls_of(*ARGUMENTS)[6:]
    end = "<turn|>\n" if name == "gemma4_v2" else "<|tool_response>"
    turn = read(GEMMA, written(name, message, "<|turn>model\n", end), think=THINK_GEMMA)
    order = [0, 1, 2, 5, 3, 4, 6]
    assert [a for _, a in said(turn)] == [ARGUMENTS[i] for i in order]
    assert turn.message["content"] == "Now."
    assert turn.message.get("reasoning_content") == (None if name == "gemma4_v2" else "I think.")


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("encode", [dict, dump])
def test_the_gpt_oss_template_is_read_back_F059(arguments: dict[str, Any], encode: Any) -> None:
    message = {"content": "", "thinking": "I think.", "tool_calls": calls_of(encode(arguments))}
    turn = harmony(written("gptoss", message, "<|start|>assistant", "<|call|>"))
    assert said(turn) == [("go_0", arguments)]
    assert (turn.message["content"], turn.message["reasoning_content"]) == ("", "I think.")
    text = written("gptoss", {"content": "é <b>", "thinking": "Why."}, "<|start|>assistant", "<|return|>")
    assert harmony(text).message == {"role": "assistant", "content": "é <b>", "reasoning_content": "Why."}


# --- bad input --------------------------------------------------------------------------
DS, DE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
V3 = "<｜tool▁calls▁begin｜>" + DS + "function<｜tool▁sep｜>go\n```json\n"
R7B, R7B_END = "<|START_ACTION|>", "<|END_ACTION|>"


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        (LLAMA, '{"name": "go", "parameters": {"a": 1}', "too early, at character 37"),
        (LLAMA, '  {"name": "go", "parameters": {"a" 1}}', "delimiter at character 34, near"),
        (LLAMA, "{'name': 'go', 'parameters': {}}", "character 1"),
        (LLAMA, '{"name": "go", "parameters": [1]}', '"parameters" must be a JSON object, not a list'),
        (LLAMA, '{"name": "", "parameters": {}}', 'no "name"'),
        (LLAMA, '<|python_tag|>print("x")', "expecting value at character 0, near 'print"),
        (LLAMA, '<|python_tag|>{"a": 1}', 'must be a JSON object with "name" and "parameters"'),
        (DEEPSEEK, V3 + '{"a" 1}\n```' + DE, "delimiter at character 5, near"),
        (DEEPSEEK, V3 + '{"a": 1\n```' + DE, "too early, at character 8"),
        (DEEPSEEK, V3 + '{"a": 1}} x```' + DE, "after the JSON value, at character 8, there is more: '} x"),
        (DEEPSEEK, V3 + "[1]\n```" + DE, "must be a JSON object, not a list"),
        (DEEPSEEK, DS + 'go {"a": 1}' + DE, "there is no <｜tool▁sep｜> in it"),
        (DEEPSEEK, DS + "<｜tool▁sep｜>{}" + DE, 'no "name"'),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>go()<｜tool▁calls▁end｜>", "there is no <｜tool▁call▁begin｜>"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "there is no <｜tool▁call▁begin｜>"),
        (
            GEMMA,
            "<|tool_call>go{}<tool_call|>",
            "'call:' and the name of a tool are expected at character 0, near 'go{}",
        ),
        (GEMMA, "<|tool_call>call:{}<tool_call|>", "the name of a tool is expected at character 5"),
        (GEMMA, "<|tool_call>call:go(a=1)<tool_call|>", "'{' is expected after the name"),
        (GEMMA, "<|tool_call>call:go{a:x}<tool_call|>", 'strings stand between <|"|> and <|"|> at character 10, near'),
        (GEMMA, '<|tool_call>call:go{"a":1}<tool_call|>', "a key and a colon are expected at character 8"),
        (GEMMA, "<|tool_call>call:go{a:1<tool_call|>", "a comma or '}' is expected at character 11, where it ends"),
        (GEMMA, f"<|tool_call>call:go{{a:{QUOTE}x}}<tool_call|>", f"no second {QUOTE} ends at character 10"),
        (GEMMA, "<|tool_call>call:go{a:[1 2]}<tool_call|>", "a comma or ']' is expected at character 13"),
        (GEMMA, "<|tool_call>call:go{} go<tool_call|>", "more after the closing brace at character 10, near 'go<"),
        (GEMMA, "<|tool_call>call:go{a:" + "[" * 5000 + "<tool_call|>", "nested too deeply"),
        (GEMMA, "<|tool_call>call:go{a:1e999}<tool_call|>", "number is too large"),
        (GEMMA, "<|tool_call>call:go{a:" + "9" * 5000 + "}<tool_call|>", "4300 digits"),
        (COMMAND_R7B, R7B + '[{"tool_name": "go"' + R7B_END, "too early, at character 19"),
        (COMMAND_R7B, R7B + "[]" + R7B_END, "must be a JSON list of calls, not an empty list"),
        (COMMAND_R7B, R7B + "3" + R7B_END, "must be a JSON list of calls, not a number"),
        (COMMAND_R7B, R7B + "[3]" + R7B_END, "must be a JSON object, not a number"),
        (COMMAND_R7B, R7B + '[{"name": "go"}]' + R7B_END, 'no "tool_name"'),
        (COMMAND_R7B, R7B + '[{"tool_name": "go", "parameters": "x"}]' + R7B_END, '"parameters" must be a JSON object'),
        (COMMAND_R7B, R7B + '[{"tool_name": "go"}] x' + R7B_END, "after the JSON list, at character 22, there is more"),
        (COMMAND_R, "Action: ```json\n[{'tool_name': 'go'}]\n```", "at character 2, near"),
        (MISTRAL, '[TOOL_CALLS]go({"a": 1})', "expecting value at character 0, near 'go("),
        (MISTRAL, '[TOOL_CALLS][{"name": "go", "arguments": [1]}]', '"arguments" must be a JSON object, not a list'),
    ],
)
def test_a_malformed_call_names_its_cause_and_stays_in_the_text_F073_F079(form: Any, text: str, words: str) -> None:
    turn = read(form, text)
    (bad,) = turn.calls
    assert bad.error is not None and words in bad.error, bad.error
    assert len(bad.error) < 400 and "was not run" in bad.error
    assert (bad.arguments, turn.message["content"]) == ({}, text) and "tool_calls" not in turn.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('commentary to=functions.go <|constrain|>json<|message|>{"a" 1}<|call|>', "delimiter at character 5, near"),
        ('commentary to=functions.go <|constrain|>json<|message|>{"a": 1<|call|>', "too early, at character 7"),
        (
            'commentary to=functions.go json<|message|>{"a": "x<|call|>',
            "unterminated string",
        ),
        (
            "commentary to=functions.go json<|message|>{} {}<|call|>",
            "after the JSON value, at character 3, there is more",
        ),
        ("commentary to=functions.go json<|message|>[1]<|call|>", "must be a JSON object, not a list"),
        ("analysis to=python code<|message|>print(1)<|call|>", "This call of python was not run: it is not valid JSON"),
        ("commentary to=functions. json<|message|>{}<|call|>", "no name of a tool stands after to=functions."),
        ("commentary to=functions.go <|constrain|>json", "there is no <|message|> before its arguments"),
    ],
)
def test_a_malformed_harmony_call_names_its_cause_F073_F079(text: str, words: str) -> None:
    turn = harmony("<|channel|>" + text)
    (bad,) = turn.calls
    assert bad.error is not None and words in bad.error, bad.error
    assert "functions.NAME" in bad.error or "not a list" in bad.error
    assert bad.arguments == {} and "tool_calls" not in turn.message
    body = text.partition("<|message|>")[2].removesuffix("<|call|>")
    assert turn.message["content"] == (body or "<|channel|>" + text)


@pytest.mark.parametrize("empty", ["null", '""', "{}"])
def test_no_arguments_in_any_spelling_F073(empty: str) -> None:
    assert said(read(LLAMA, f'{{"name": "go", "parameters": {empty}}}')) == [("go", {})]
    assert said(read(DEEPSEEK, f"{V3}{empty}\n```{DE}")) == [("go", {})]
    assert said(read(COMMAND_R7B, f'{R7B}[{{"tool_name": "go", "parameters": {empty}}}]{R7B_END}')) == [("go", {})]
    assert said(harmony(f"<|channel|>commentary to=functions.go json<|message|>{empty}<|call|>")) == [("go", {})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (DEEPSEEK, V3 + "\n```" + DE),
        (DEEPSEEK, f"{DS}go<｜tool▁sep｜>{DE}"),
        (DEEPSEEK, f"{DS}function<｜tool▁sep｜>go{DE}"),
        (DEEPSEEK, V3 + "{}"),  # cut off after its last brace
        (LLAMA, '<|python_tag|>{"name": "go"}'),
        (LLAMA, '<think>x</think>\n\n{"type": "function", "name": "go", "parameters": {}}'),
        (GEMMA, "<|tool_call>call:go{}"),
        (GEMMA, "<|tool_call> call: go { } <tool_call|>"),
        (COMMAND_R7B, R7B + '{"tool_name": "go"}' + R7B_END),
        (COMMAND_R7B, R7B + '[{"tool_name": "directly_answer"}, {"tool_name": "go", "parameters": null}]'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "go", "arguments": "{}", "id": "123456789"}]'),
    ],
)
def test_what_is_clear_counts_though_a_part_is_missing(form: CallFormat, text: str) -> None:
    turn = read(form, text)
    assert said(turn) == [("go", {})] and turn.message["content"] == ""


def test_gemma_reads_what_python_wrote_and_quoted_keys() -> None:
    text = f"<|tool_call>call:go{{a:None,b:True, o:{{{QUOTE}x:y{QUOTE}:-2.5e3}}}}<tool_call|>"
    assert said(read(GEMMA, text)) == [("go", {"a": None, "b": True, "o": {"x:y": -2500.0}})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (LLAMA, 'I call {"name": "go", "parameters": {}}'),
        (LLAMA, '{"a": {"name": "go", "parameters": {}}}'),
        (LLAMA, '{"name": "Bob"}'),
        (LLAMA, '{"name": 3, "parameters": {}}'),
        (LLAMA, '{"name": "Bob", "age": 3,}'),
        (LLAMA, '{"parameters": {}, '),
        (LLAMA, '[{"name": "go", "parameters": {}}]'),
        (LLAMA, "{x} is a set"),
        (COMMAND_R, 'Action: [{"tool_name": "go"}]'),
        (COMMAND_R, "Action: ```json\n{}\n```"),
        (COMMAND_R, 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```\nHello.'),
        (COMMAND_R7B, R7B + '[{"tool_name": "directly_answer", "parameters": {}}]' + R7B_END + "Hello."),
    ],
)
def test_ordinary_text_is_no_call(form: CallFormat, text: str) -> None:
    assert read(form, text).message == {"role": "assistant", "content": text}


def test_a_broken_call_does_not_take_the_next_one_with_it_F071() -> None:
    gemma = read(
        GEMMA, f"<|tool_call>call:a{{x:{QUOTE}y}}<tool_call|><|tool_call>call:b{{x:{QUOTE}y{QUOTE}}}<tool_call|>"
    )
    deepseek = read(DEEPSEEK, deepseek_v3([("a", {}), ("b", {"x": "y"})]).replace("{}", '{"x": "'))
    llama = read(LLAMA, '{"name": "b", "parameters": {"x": "y"}}\n{"name": "a", "parameters": {')
    action = read(
        COMMAND_R7B, R7B + '[{"tool_name": ' + R7B_END + R7B + '[{"tool_name": "b", "parameters": {"x": "y"}}]'
    )
    call = '<|channel|>commentary to=functions.a json<|message|>{"x": "<|call|><|start|>assistant'
    oss = harmony(call + '<|channel|>commentary to=functions.b json<|message|>{"x": "y"}<|call|>')
    unclosed = read(GEMMA, f"<|tool_call>call:a{{<|tool_call>call:b{{x:{QUOTE}y{QUOTE}}}<tool_call|>")
    for turn in (gemma, unclosed, deepseek, llama, action, oss):
        assert [call.error is None for call in turn.calls] in ([False, True], [True, False])
        assert [(c.name, c.arguments) for c in turn.calls if c.error is None] == [("b", {"x": "y"})]


def test_a_call_in_a_closed_block_of_reasoning_is_reasoning_F077() -> None:
    for form, write in WRITERS.values():
        think = THINK_GEMMA if form is GEMMA else THINK
        turn = read(form, f"{think.open}maybe\n{write([('go', {})])}\n{think.close}no", think=think)
        assert turn.calls == () and turn.message["content"] == "no"
        assert turn.message["reasoning_content"] == f"maybe\n{write([('go', {})])}"
    turn = harmony('<|channel|>analysis<|message|>commentary to=functions.go json {"a": 1}<|end|>')
    assert (turn.calls, turn.message["content"]) == ((), "")
    assert turn.message["reasoning_content"] == 'commentary to=functions.go json {"a": 1}'
