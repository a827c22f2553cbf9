"""Every family through the renderer: the choice of template, whole episodes, and revisions that no file here holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from families import tokenizer
from oracles import TOOLS, Mix, conversations, turns
from test_families_tools import LLAMA, LOOK, TWO, call, calling, result, user

from agentrl.render import Renderer
from agentrl.types import Message

RENDERED = {  # family, original: template in use, format of calls, tokens that end a turn
    ("llama3", "llama3"): ("hermes", "hermes", {"<|eot_id|>"}),
    ("llama3_1", "llama3_1"): ("llama3_1", "bare_json", {"<|eot_id|>"}),
    ("llama3_2", "llama3_2"): ("llama3_1", "bare_json", {"<|eot_id|>"}),
    ("deepseek_v3", "deepseekv3"): ("deepseek", "deepseek", {"<｜end▁of▁sentence｜>"}),
    ("deepseek_r1_distill", "deepseek_r1_distill"): ("deepseek", "deepseek", {"<｜end▁of▁sentence｜>"}),
    ("gemma", "gemma"): ("hermes_user", "hermes", {"<end_of_turn>", "<eos>"}),
    ("gemma3", "gemma3"): ("hermes", "hermes", {"<end_of_turn>", "<eos>"}),
    ("gemma4", "gemma4_v2"): ("original", "gemma4", {"<turn|>", "<eos>"}),
    ("gemma4", "gemma4_v3"): ("gemma4", "gemma4", {"<turn|>", "<|tool_response>", "<eos>"}),
    ("gemma4", "gemma4"): ("gemma4", "gemma4", {"<turn|>", "<|tool_response>", "<eos>"}),
    ("gemma4", "gemma4_v4"): ("gemma4", "gemma4", {"<turn|>", "<|tool_response>", "<eos>"}),
    ("gemma4", "gemma4_v5"): ("gemma4", "gemma4", {"<turn|>", "<|tool_response>", "<eos>"}),
    ("diffusion_gemma", "diffusion_gemma"): ("gemma4", "gemma4", {"<turn|>", "<|tool_response>", "<eos>"}),
    ("glm4moe", "glm4moe"): ("glm4moe", "glm", {"<|user|>", "<|observation|>", "<|endoftext|>"}),
    ("gptoss", "gptoss"): ("gptoss", "harmony", {"<|return|>", "<|call|>"}),
    ("phi3", "phi3"): ("hermes", "hermes", {"<|end|>", "<|endoftext|>"}),
    ("phi3_5", "phi3_5"): ("hermes", "hermes", {"<|end|>", "<|endoftext|>"}),
    ("cohere", "cohere"): ("hermes", "hermes", {"<|END_OF_TURN_TOKEN|>"}),
    ("cohere2", "cohere2"): ("hermes", "hermes", {"<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"}),
    ("muse_glimmer", "muse_glimmer"): ("original", "atem", {"<|eot|>"}),
}


@pytest.mark.parametrize(("family", "original"), RENDERED, ids=[name for _, name in RENDERED])
def test_F045_every_family_plays_whole_episodes_without_drift(family: str, original: str) -> None:
    """Verdict and ends of turns; then turns as a perfect policy would sample them, and the reading of them."""
    renderer = Renderer(tokenizer(family, original))
    name, calls, ends = RENDERED[family, original]
    assert (renderer.verdict.template, renderer.verdict.preserving) == (name, True), renderer.verdict.why
    assert renderer.describe()["calls"] == calls
    assert {renderer.decode([i]) for i in renderer.stop_ids} == ends
    for talk, _ in conversations(3, _mix(family, original)):
        # Text beside a call: Llama's and Muse's templates leave it out.
        dropped = calls in ("bare_json", "atem")
        _play(renderer, [m | {"content": ""} if dropped and "tool_calls" in m else m for m in talk], TOOLS)


def _mix(family: str, original: str) -> Mix:
    """Conversations that can be read back as they are."""
    reasoning = "some"
    if family.startswith("deepseek"):
        reasoning = "all"  # every prompt opens a thought
    elif original == "gemma4_v2":
        reasoning = "none"  # it is never written
    arguments: tuple[dict[str, Any], ...] = ({}, {"query": 'a <b> & "c" é漢'}, {"code": "if x < 3:\n    y = '}'"})
    return Mix(reasoning, most_calls=1 if family == "gptoss" else 3, arguments=arguments)


def _play(renderer: Renderer, talk: list[Message], tools: Any) -> None:
    start = next(turns(talk))[0]
    held = renderer.first(talk[:start], tools)
    for k, end in turns(talk):
        text = renderer.write_turn(talk[k], tools)
        assert text is not None
        if talk[k - 1]["role"] == "tool" and renderer.verdict.template == "deepseek":
            text = "<think>\n" + text  # after results the prompt does not open the thought
        sampled = renderer._codec.encode(text)  # pyright: ignore[reportPrivateUsage]
        assert sampled[-1] in renderer.stop_ids
        assert _said(renderer.parse(sampled, tools).message) == _said(talk[k])
        if end == len(talk):
            break
        prompt = renderer.next([*held, *sampled], talk[:end], k + 1, tools)
        assert prompt.drift is None, prompt.drift
        assert renderer.decode(prompt.ids) == renderer.decode(renderer.first(talk[:end], tools))
        held = prompt.ids


def _said(message: Message) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return message["content"].strip(), message.get("reasoning_content") or None, calls


def test_a_turn_that_calls_twice_does_not_end_the_rollout_of_llama_3_1() -> None:
    renderer = Renderer(tokenizer("llama3_1"))
    held = renderer.first([user()], [LOOK])
    prompt = renderer.next(held, TWO, 2, [LOOK])
    assert prompt.drift is None
    assert renderer.decode(prompt.ids).endswith('"a mill"<|eot_id|>' + LLAMA)


# GLM-4.7 behaves so: no line breaks, the prompt opens a thought, reasoning before the last user message is dropped.
GLM_4_7 = """[gMASK]<sop>{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' ~ ('<think>' ~ m.reasoning_content if loop.index0 > ns.last and m.reasoning_content) }}
        {{- '</think>' ~ m.content.strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' ~ call.function.name }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' }}
        {{- '<tool_response>' ~ m.content ~ '</tool_response>' }}
    {%- else %}
        {{- '<|' ~ m.role ~ '|>' ~ m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' ~ ('<think>' if enable_thinking | default(true) else '</think>') }}
{%- endif %}"""


@pytest.mark.parametrize("thinks", [True, False])
def test_glm_4_7_is_recognised_by_what_it_writes(thinks: bool) -> None:
    made: Any = tokenizer("glm4moe")
    made.chat_template = GLM_4_7
    renderer = Renderer(made, chat_template_kwargs={"enable_thinking": thinks})
    if thinks:
        assert (renderer.verdict.template, renderer.verdict.preserving) == ("glm4moe", True)
        for talk, _ in conversations(3, replace(_mix("glm4moe", "glm4moe"), reasoning="all")):
            _play(renderer, talk, TOOLS)
    opened = {"reasoning_content": "Hm."} if thinks else {"reasoning_content": ""}
    talk = [user(), calling(call(0, to="é<", n=2), **opened), result(0, "a"), result(1, "b")]
    answer: Message = {"role": "assistant", "content": "So."}
    got = renderer.decode(renderer.first([*talk, answer | opened, user(), answer, user()], None))
    think = "<think>Hm.</think>" if thinks else "</think>"
    assert got == (
        f"[gMASK]<sop><|user|>Go.<|assistant|>{think}<tool_call>look<arg_key>to</arg_key><arg_value>é<</arg_value>"
        "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call><|observation|><tool_response>a</tool_response>"
        f"<tool_response>b</tool_response><|assistant|>{think}So.<|user|>Go.<|assistant|></think>So.<|user|>Go."
        "<|assistant|>" + ("<think>" if thinks else "</think>")
    )


# DeepSeek-V3.1 behaves so: another form of call, no tags around results, reasoning dropped, </think> before answers.
DEEPSEEK_3_1 = """{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- set ns = namespace(asked=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<｜User｜>' ~ m.content }}
    {%- elif m.role == 'assistant' %}
        {{- ('<｜Assistant｜></think>' if ns.asked) ~ (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' ~ ('<｜tool▁calls▁end｜>' if loop.last) }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}
    {%- endif %}
    {%- set ns.asked = m.role == 'user' %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}{{ '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}"""


@pytest.mark.parametrize("thinks", [True, False])
def test_deepseek_3_1_is_recognised_by_what_it_writes(thinks: bool) -> None:
    made: Any = tokenizer("deepseek_v3")
    made.chat_template = DEEPSEEK_3_1
    renderer = Renderer(made, chat_template_kwargs={"thinking": thinks})
    assert (renderer.verdict.template, renderer.verdict.preserving) == ("deepseek", True)
    opened = {"reasoning_content": "Hm."} if thinks else {"reasoning_content": ""}
    talk = [user(), calling(call(0, to="é<"), call(1), **opened), result(0, "a"), result(1, "b")]
    answer = {"role": "assistant", "content": "So."}
    got = renderer.decode(renderer.first([*talk, answer, user(), answer | opened, user()], None))
    think, prompt = ("<think>Hm.</think>", "<think>") if thinks else ("</think>", "</think>")
    assert got == (
        f"<｜begin▁of▁sentence｜><｜User｜>Go.<｜Assistant｜>{think}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look"
        '<｜tool▁sep｜>{"to": "é<"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>a<｜tool▁output▁end｜><｜tool▁output▁begin｜>b"
        "<｜tool▁output▁end｜>So.<｜end▁of▁sentence｜><｜User｜>Go.<｜Assistant｜>"
        f"{think}So.<｜end▁of▁sentence｜><｜User｜>Go.<｜Assistant｜>{prompt}"
    )
