"""Calls between tags whose values carry no quotes (Qwen3.5, Nemotron, GLM): line breaks, tags in values, bad calls."""

from __future__ import annotations

import pytest
from typed_kit import BARE, END, GLM, LFM, ONE, START, THINK, XML, calls_of, error_of, read, reason

from agentrl.render.formats.base import CallFormat
from agentrl.render.formats.turn import Tagged

# --- several calls, none, reasoning ----------------------------------------------------
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
