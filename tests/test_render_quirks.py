"""What one family does differently in the middle of a conversation, through the renderer's door."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigurationError
from agentrl.render import Renderer
from tests.families import template_text, tokenizer
from tests.tiny_tokenizers import make

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
OTHER = {"type": "function", "function": {**SEARCH["function"], "name": "leave"}}
ASK = {"role": "user", "content": "Find it."}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": text}


def sampled(renderer: Renderer, tok: Any, message: dict[str, Any]) -> list[int]:
    text = renderer.write_turn(message, [SEARCH])
    assert text is not None
    return tok.encode(text, add_special_tokens=False)


def call(place: str, **more: Any) -> dict[str, Any]:
    made = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {"place": place}}}
    return {"role": "assistant", "content": "", "tool_calls": [made]} | more


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_r1_distill"])
def test_a_turn_after_a_tool_result_need_not_close_a_thought_that_its_prompt_did_not_open(family: str) -> None:
    tok = tokenizer(family)
    renderer = Renderer(tok)
    held = renderer.first([ASK], [SEARCH])
    ids = sampled(renderer, tok, call("cave", reasoning_content="Hm."))
    turn = renderer.parse(ids, [SEARCH], prompt_ids=held)
    assert turn.message["reasoning_content"] == "Hm." and len(turn.calls) == 1
    prompt = renderer.next([*held, *ids], [ASK, turn.message, result("no")], 2, [SEARCH])
    assert prompt.drift is None and not renderer.decode(prompt.ids[-8:]).endswith("<think>\n")
    bare = renderer.decode(ids).partition("</think>\n\n")[2]
    again = renderer.parse(tok.encode(bare, add_special_tokens=False), [SEARCH], start=1, prompt_ids=prompt.ids)
    assert [c.arguments for c in again.calls] == [{"place": "cave"}] and "reasoning_content" not in again.message


def test_a_model_may_think_without_tools_in_gpt_oss() -> None:
    renderer = Renderer(tokenizer("gptoss"), with_tools=False)
    assert (renderer.verdict.template, renderer.verdict.preserving) == ("gptoss", True)


def test_a_system_message_that_changes_the_generation_prompt_is_seen_in_every_turn() -> None:
    tok = tokenizer("smollm3")
    renderer = Renderer(tok)
    system = {"role": "system", "content": "Be brief. /no_think"}
    held = renderer.first([system, ASK], [SEARCH])
    assert renderer.decode(held).endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
    ids = tok.encode('<tool_call>{"name": "search", "arguments": {"place": "a"}}</tool_call><|im_end|>')
    turn = renderer.parse(ids, [SEARCH], prompt_ids=held)
    assert turn.message["reasoning_content"] == ""
    prompt = renderer.next([*held, *ids], [system, ASK, turn.message, result("no")], 3, [SEARCH])
    assert renderer.decode(prompt.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n")


def test_tools_that_stand_in_the_first_user_message_are_compared_F063() -> None:
    tok = tokenizer("llama3_1")
    renderer = Renderer(tok)
    held = renderer.first([ASK], [SEARCH])
    ids = sampled(renderer, tok, call("cave"))
    messages = [ASK, renderer.parse(ids, [SEARCH]).message, result("no")]
    assert renderer.next([*held, *ids], messages, 2, [SEARCH]).drift is None
    for tools in ([OTHER], [SEARCH, OTHER], None):
        drift = renderer.next([*held, *ids], messages, 2, tools).drift
        assert drift is not None and "tools of this conversation changed" in drift.why


def test_where_one_call_can_be_written_the_others_of_a_turn_are_refused() -> None:
    tok = tokenizer("llama3_1")
    renderer = Renderer(tok, chat_template="original")
    held = renderer.first([ASK], [SEARCH])
    text = (
        '{"name": "search", "parameters": {"place": "a"}}; {"name": "search", "parameters": {"place": "b"}}<|eot_id|>'
    )
    ids = tok.encode(text, add_special_tokens=False)
    turn = renderer.parse(ids, [SEARCH])
    assert [call.error for call in turn.calls] == [
        None,
        "This tool call was not run: only one call per turn is possible here. Call it in your next turn.",
    ]
    assert len(turn.message["tool_calls"]) == 1
    messages = [ASK, turn.message, result("no"), {**result("refused"), "tool_call_id": "call_1"}]
    prompt = renderer.next([*held, *ids], messages, 2, [SEARCH])
    assert prompt.drift is None and prompt.ids[: len(held) + len(ids)] == [*held, *ids]


@pytest.mark.parametrize("family", ["phi3", "phi3_5"])
def test_tokens_that_swallow_the_space_after_them_do_not_look_like_changed_tools(family: str) -> None:
    tok = tokenizer(family)
    renderer = Renderer(tok)
    for ask in (ASK, {"role": "user", "content": "Say <|end|> <|user|> to me."}):
        held = renderer.first([ask], [SEARCH])
        ids = sampled(renderer, tok, call("cave"))
        messages = [ask, renderer.parse(ids, [SEARCH]).message, result("no <|end|> here")]
        assert renderer.next([*held, *ids], messages, 2, [SEARCH]).drift is None


def test_a_template_that_tells_nobody_whose_turn_it_is_is_refused() -> None:
    tok = tokenizer("qwen3")
    tok.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tok.name_or_path = "some/model"
    tok.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    bare = tokenizer("llama3")
    bare.chat_template = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    bare.name_or_path = "some/model"
    with pytest.raises(ConfigurationError, match=r"some/model .*Pass a chat_template"):
        Renderer(bare)


def test_a_null_of_arrow_in_schemas_and_messages_is_an_absent_key() -> None:
    tok = tokenizer("qwen3")
    renderer = Renderer(tok)
    function = {**SEARCH["function"], "strict": None, "parameters": {
        "type": "object", "enum": None,
        "properties": {"place": {"type": "string", "enum": None, "items": None}, "other": None},
        "required": ["place"],
    }}  # fmt: skip
    filled = {"type": "function", "function": function}
    message = {"role": "user", "content": "Find it.", "tool_calls": None, "reasoning_content": None, "name": None}
    assert renderer.first([message], [filled]) == renderer.first([ASK], [SEARCH])


def test_a_tool_result_needs_a_call_before_it() -> None:
    renderer = Renderer(tokenizer("qwen3"))
    with pytest.raises(ConfigurationError, match=r"messages\[1\] of the prompt is a tool result"):
        renderer.first([ASK, result("x")], [SEARCH])
    with pytest.raises(ConfigurationError, match=r"messages\[2\] of the prompt is a tool result"):
        renderer.first([ASK, {"role": "assistant", "content": "Done."}, result("x")], [SEARCH])
    assert renderer.first([ASK, call("cave"), result("x")], [SEARCH])


def test_a_revised_template_is_recognised_by_what_it_does() -> None:
    text = template_text("qwen3_5_think").replace("Unexpected message role.", "What is this?")
    tok = tokenizer("qwen3_5")
    tok.chat_template = "{#- a revision -#}" + text
    assert Renderer(tok).verdict.template == "qwen3_5"


MISTRAL = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == 0 %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' ~ message.content ~ '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
{{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ (']' if loop.last else ', ') }}{%- endfor %}{{- eos_token }}
{%- elif message.role == 'assistant' %}{{- message.content ~ eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' ~ (message.content | tojson) ~ ', "call_id": "' ~ message.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""  # noqa: E501


def test_a_template_that_wants_short_ids_of_calls_gets_them() -> None:
    tags = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
    tok = make(
        ("<unk>", "</s>", *tags, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), (), eos="</s>", bos="<s>", chat_template=MISTRAL
    )
    renderer = Renderer(tok)
    assert renderer.verdict.preserving and renderer.describe()["calls"] == "mistral"
    held = renderer.first([ASK], [SEARCH])
    ids = tok.encode('[TOOL_CALLS][{"name": "search", "arguments": {"place": "a"}}]</s>', add_special_tokens=False)
    turn = renderer.parse(ids, [SEARCH], prompt_ids=held)
    assert [c.arguments for c in turn.calls] == [{"place": "a"}]
    prompt = renderer.next([*held, *ids], [ASK, turn.message, result("no")], 2, [SEARCH])
    assert prompt.drift is None
    assert renderer.decode(prompt.ids[len(held) + len(ids) :]).endswith('"no", "call_id": "0000call0"}[/TOOL_RESULTS]')


def test_the_original_may_leave_tools_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Renderer(tokenizer("deepseek_v3"), chat_template="original")
    assert "your prompts must describe them" in caplog.text and "turns that it rewrites fork" in caplog.text


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "phi3", "llama3_1", "qwen2_5"])
def test_a_verdict_is_remembered_for_a_tokenizer_and_its_variables(family: str) -> None:
    first, again = Renderer(tokenizer(family)), Renderer(tokenizer(family))
    assert again.verdict is first.verdict and again.stop_ids == first.stop_ids
    assert again.first([ASK], [SEARCH]) == first.first([ASK], [SEARCH])
    messages = [ASK, call("cave"), result("no")]
    ids = again.first(messages[:1], [SEARCH])
    assert again.next(ids, messages, 2, [SEARCH]) == first.next(ids, messages, 2, [SEARCH])


def test_a_verdict_is_not_that_of_other_variables_or_tokens() -> None:
    assert Renderer(tokenizer("qwen3_6")).verdict.template == "qwen3_5"
    assert (
        Renderer(tokenizer("qwen3_6"), chat_template_kwargs={"preserve_thinking": True}).verdict.template == "original"
    )
    assert Renderer(tokenizer("qwen3"), chat_template="original").verdict.template == "original"
    assert Renderer(tokenizer("qwen3")).verdict.template == "qwen3"
