"""Templates: which one is taken and why, and the families' own files as oracles."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

from agentrl.errors import ConfigurationError
from agentrl.render import Renderer

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search a place é <b>.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
USER = {"role": "user", "content": "find it"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = '<tool_call>\n{"name": "search", "arguments": {"place": "cave"}}\n</tool_call><|im_end|>'


def oracle(name: str) -> str:
    """A family's own template, from the trl package (a development extra)."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("the package trl holds the original templates")
    return (pathlib.Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def assistant(text: str = "", calls: int = 0, **extra: Any) -> dict[str, Any]:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": "search", "arguments": {"place": f"<p{i}> & é"}}}
        for i in range(calls)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if calls else {}), **extra}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "content": text, "tool_call_id": "c0"}


CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "few-shot": [USER, assistant("An answer."), USER],
    "call": [SYSTEM, USER, assistant(calls=1), result("a note")],
    "two results": [USER, assistant("I look.", calls=2), result("a"), result("b"), assistant(calls=1), result("c\n")],
    "answered": [USER, assistant(calls=1), result("a"), assistant("Done."), {"role": "user", "content": "\nmore "}],
    "thought": [USER, assistant(calls=1, reasoning_content="Hm."), result("a")],
}


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]], ids=["no tools", "one tool", "two tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
def test_prompts_are_those_of_the_family(tiny: Any, family: str, name: str, tools: Any, kwargs: dict[str, Any]) -> None:
    tokenizer = tiny.qwen(oracle(family))
    renderer = Renderer(tokenizer, chat_template_kwargs=kwargs)
    assert renderer.verdict.preserving
    assert renderer.verdict.template == ("qwen3" if family == "qwen3" else "original")
    want = tokenizer.apply_chat_template(
        CONVERSATIONS[name], tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
    )
    ids = renderer.first(CONVERSATIONS[name], tools)
    assert renderer.decode(ids) == want
    assert ids == tokenizer.encode(want, add_special_tokens=False)


def test_the_users_template_is_kept_for_checkpoints(tiny: Any) -> None:
    tokenizer = tiny.qwen(oracle("qwen3"))
    renderer = Renderer(tokenizer)
    assert renderer.original_template == tokenizer.chat_template == oracle("qwen3")
    assert Renderer(tiny.qwen()).original_template is None
    several = tiny.qwen()
    several.chat_template = {"default": "d", "tool_use": oracle("qwen2_5")}
    assert Renderer(several).original_template == oracle("qwen2_5")


def play(renderer: Renderer, tokenizer: Any, turns: list[tuple[str, list[dict[str, Any]]]]) -> list[Any]:
    """The prompts after each sampled text and the messages that follow it."""
    messages: list[dict[str, Any]] = [USER]
    held, prompts = renderer.first(messages, [TOOL]), []
    for text, new in turns:
        held = held + tokenizer.encode(text, add_special_tokens=False)
        messages = [*messages, renderer.parse(held[-len(tokenizer.encode(text)) :], [TOOL]).message, *new]
        prompts.append(renderer.next(held, messages, len(messages) - len(new), [TOOL]))
        held = prompts[-1].ids
    return prompts


THOUGHT = "<think>\nIn the cave?\n</think>\n\n"


def test_the_training_template_keeps_reasoning_where_the_original_drops_it_F049(tiny: Any) -> None:
    tokenizer = tiny.qwen(oracle("qwen3"))
    turns = [(THOUGHT + CALL, [result("no")]), (THOUGHT + "Not there.<|im_end|>", [USER]), (CALL, [result("yes")])]
    ours = Renderer(tokenizer)
    assert ours.verdict.template == "qwen3" and "once the conversation goes on" in ours.verdict.why
    prompts = play(ours, tokenizer, turns)
    assert [p.drift for p in prompts] == [None] * 3
    assert ours.decode(prompts[-1].ids).count("In the cave?") == 2

    own = Renderer(tokenizer, chat_template="original")
    assert own.verdict.template == "original" and not own.verdict.preserving
    prompts = play(own, tokenizer, turns)
    # Within one query the original keeps reasoning, so held ids stay; the next question makes it rewrite.
    assert [p.drift is None for p in prompts] == [True, False, True]
    drift = prompts[1].drift
    assert drift is not None and "rewrites history" in drift.why and "In the cave?" in drift.held_text
    assert "In the cave?" not in own.decode(prompts[1].ids)


def test_a_kept_template_continues_ids_that_no_encoder_would_choose_F039(tiny: Any) -> None:
    tokenizer = tiny.qwen(oracle("qwen3"))
    own = Renderer(tokenizer, chat_template="original")
    body, end = CALL[: -len("<|im_end|>")], "<|im_end|>"
    ids = [
        i
        for part in (*body.partition("cave"), end)
        for c in ([*part] if part == "cave" else [part])
        for i in tokenizer.encode(c, add_special_tokens=False)
    ]
    held = own.first([USER], [TOOL]) + ids
    prompt = own.next(held, [USER, own.parse(ids, [TOOL]).message, result("x")], 2, [TOOL])
    assert prompt.drift is None and prompt.ids[: len(held)] == held
    assert tokenizer.encode(CALL, add_special_tokens=False) != ids


# --- templates made to be wrong --------------------------------------------------------
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_marks_the_last_turn_is_found_out_F049(tiny: Any) -> None:
    renderer = Renderer(tiny.qwen(PLAIN), with_tools=False)
    # The same prompts without the block are what our templates write, so one of them steps in.
    assert renderer.verdict.preserving and renderer.verdict.template == "qwen3"
    kept = Renderer(tiny.qwen(PLAIN), chat_template="original", with_tools=False)
    assert not kept.verdict.preserving and "assistant turn" in kept.verdict.why
    strange = PLAIN.replace("<|im_start|>{{ m.role }}", "<|im_start|>role:{{ m.role }}")
    unknown = Renderer(tiny.qwen(strange), with_tools=False)
    assert not unknown.verdict.preserving and unknown.verdict.template == "original"


OPEN = PLAIN.replace(
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}",
).replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def test_a_prompt_that_opens_the_think_block_F055(tiny: Any) -> None:
    tokenizer = tiny.qwen(OPEN)
    renderer = Renderer(tokenizer, with_tools=False)
    assert renderer.verdict.preserving, renderer.verdict
    prompt = renderer.first([USER], None)
    output = tokenizer.encode("2+2 is 4.\n</think>\n\n4<|im_end|>", add_special_tokens=False)
    message = renderer.parse(output, None).message
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "2+2 is 4."}
    again = renderer.first([USER, message, USER], None)
    assert again[: len(prompt) + len(output)] == prompt + output
    assert renderer.next(prompt + output, [USER, message, USER], 2, None).ids == again


def test_a_prompt_that_closes_an_empty_think_block_renders_the_same_again_F055(tiny: Any) -> None:
    tokenizer = tiny.qwen(oracle("qwen3"))
    renderer = Renderer(tokenizer, chat_template_kwargs={"enable_thinking": False})
    prompt = renderer.first([USER], [TOOL])
    output = tokenizer.encode(CALL, add_special_tokens=False)
    messages = [USER, renderer.parse(output, [TOOL]).message, result("x")]
    assert messages[1]["reasoning_content"] == ""
    whole = renderer.first(messages, [TOOL])
    assert whole[: len(prompt) + len(output)] == prompt + output
    assert renderer.next(prompt + output, messages, 2, [TOOL]).ids == whole


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("{{ m.content }}", "{{ m.content | trim }}"),
        ("{{ m.content }}", "{{ m.content | tojson }}"),
        ("{{ m.content }}", "{{ m.content if m.content else '(nothing)' }}"),
        ("{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}"),
        ("{{ m.content }}", "{{ m.name }}: {{ m.content }}"),
    ],
)
def test_what_a_template_does_to_contents_is_found_out(tiny: Any, was: str, now: str) -> None:
    tokenizer = tiny.qwen(
        PLAIN.replace("{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}", "").replace(
            was, now
        )
    )
    renderer = Renderer(tokenizer, with_tools=False)
    assert renderer.verdict.template == "original"
    for content in ("a", " b\n", "", "\n", 'c "q" {x}', "<|im_end|>"):
        found = {"role": "tool", "content": content, "name": "n", "tool_call_id": "id7"}
        messages = [USER, assistant("Hello.", 1), found]
        whole = renderer.first(messages, None)
        start = len(renderer.first([USER], None))
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        held = whole[: start + whole[start:].index(end) + 1]
        assert renderer.next(held, messages, 2, None).ids == whole


def test_a_template_without_tools_is_replaced_and_says_so(tiny: Any) -> None:
    plain = PLAIN.replace(" and loop.last", " and false")
    renderer = Renderer(tiny.chatml(plain))
    assert renderer.verdict.template == "chatml" and "does not write tools" in renderer.verdict.why
    assert '"search"' in renderer.decode(renderer.first([USER], [TOOL]))
    assert Renderer(tiny.chatml(plain), with_tools=False).verdict.template == "original"


def test_a_template_whose_calls_cannot_be_read_is_refused_when_tools_come(tiny: Any) -> None:
    names = tiny.make(special=("<eos>",), markers=("<user>",), eos="<eos>")
    names.chat_template = "{% for m in messages %}<user>{{ m.content }}<eos>{% endfor %}"
    names.name_or_path = "some/model"
    with pytest.raises(ConfigurationError, match=r"some/model writes tool calls in no form.*Pass a chat_template"):
        Renderer(names)
    assert Renderer(names, with_tools=False).first([USER], None)


def test_a_given_template_is_used_as_it_is(tiny: Any) -> None:
    renderer = Renderer(tiny.qwen(oracle("qwen3")), chat_template=oracle("qwen2_5"))
    assert renderer.verdict.template == "custom" and renderer.verdict.preserving
    assert "You are Qwen" in renderer.decode(renderer.first([USER], [TOOL]))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "does not parse"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ x.y }}", "'x' is undefined"),
    ],
)
def test_broken_templates_say_what_is_wrong(tiny: Any, template: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Renderer(tiny.qwen(), chat_template=template).first([USER], None)


def test_reserved_variables_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigurationError, match="'tools'"):
        Renderer(tiny.qwen(), chat_template_kwargs={"tools": []})


def test_templates_cannot_reach_python(tiny: Any) -> None:
    template = "{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"
    with pytest.raises(ConfigurationError, match="unsafe"):
        Renderer(tiny.qwen(), chat_template=template).first([USER], None)


def test_generation_blocks_dates_and_loop_controls_render(tiny: Any) -> None:
    text = "{% generation %}a{% endgeneration %}{{ strftime_now('%Y') | length }}"
    text += "{% for i in [1, 2] %}b{% break %}{% endfor %}"
    renderer = Renderer(tiny.qwen(), chat_template=text, with_tools=False)
    assert renderer.decode(renderer.first([USER], None)) == "a4b"
