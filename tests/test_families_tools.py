"""What our templates write where no original can be asked: texts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from families import template_text
from jinja2 import TemplateNotFound

from agentrl.render.jinja_env import compile_template
from agentrl.render.template import shipped
from agentrl.types import Message

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
LOOK_JSON = (
    '{"type": "function", "function": {"name": "look", "description": "Looks.", '
    '"parameters": {"type": "object", "properties": {}}}}'
)
HERMES = f"""You can call these functions:
<tools>
{LOOK_JSON}
</tools>

To call a function, write its name and arguments as JSON between tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""
IMAGE: dict[str, Any] = {"type": "image"}


def call(number: int, name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any = "Go.") -> Message:
    return {"role": "user", "content": content}


def result(number: int, content: Any, name: str = "look") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"c{number}", "content": content}


def calling(*calls: dict[str, Any], content: str = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


TWO = [user(), calling(call(0, way="é<"), call(1), content="Both."), result(0, "a cave"), result(1, "a mill")]
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def write(ours: str, original: str, generation: str, messages: list[Message], tools: Any = None, **more: Any) -> str:
    """The text of a template of ours, with nothing but the two templates in between."""
    own = compile_template(template_text(original))
    special = {"bos_token": "<BOS>", "eos_token": "<EOS>"} | more

    def render_own(talk: list[Message], offered: Any = None) -> str:
        text = own(messages=talk, tools=offered, add_generation_prompt=True, **special)
        assert text.endswith(generation)
        return text[: -len(generation)]

    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return compile_template(shipped(ours))(
        messages=messages,
        tools=tools,
        before=messages[:first],
        rest=messages[first:],
        own=render_own,
        generation=generation,
        add_generation_prompt=True,
        **special,
    )


# --- Hermes tags in the text of families that know no tools ----------------------------
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def llama(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


def test_F071_hermes_writes_tools_calls_and_results_into_llama_3() -> None:
    first = '<tool_call>\n{"name": "look", "arguments": {"way": "é<"}}\n</tool_call>'
    calls = first + '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    results = "<tool_response>\na cave\n</tool_response>\n<tool_response>\na mill\n</tool_response>"
    turn = llama("assistant", f"Both.\n{calls}")
    got = write("hermes", "llama3", LLAMA, [SYSTEM, *TWO], [LOOK])
    assert (
        got
        == "<BOS>"
        + llama("system", f"Be brief.\n\n{HERMES}")
        + llama("user", "Go.")
        + turn
        + llama("user", results)
        + LLAMA
    )


def test_hermes_puts_tools_into_a_system_message_of_their_own_and_reasoning_into_the_turn() -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    got = write("hermes", "llama3", LLAMA, [user(), thought, user()], [LOOK])
    turn = llama("assistant", "<think>\nHm.\n</think>\n\nYes.")
    assert got == "<BOS>" + llama("system", HERMES) + llama("user", "Go.") + turn + llama("user", "Go.") + LLAMA


@pytest.mark.parametrize("original", ["phi3", "phi3_5"])
def test_hermes_never_writes_the_eos_that_phi_3_puts_at_the_end(original: str) -> None:
    got = write("hermes", original, "<|assistant|>\n", [*TWO, user("Well?")], [LOOK])
    assert "<EOS>" not in got
    assert got.startswith(f"<|system|>\n{HERMES}<|end|>\n<|user|>\nGo.<|end|>\n<|assistant|>\nBoth.\n<tool_call>")
    assert got.endswith("a mill\n</tool_response>\nWell?<|end|>\n<|assistant|>\n")


@pytest.mark.parametrize("original", ["gemma", "gemma3", "cohere", "cohere2"])
def test_hermes_keeps_roles_alternating(original: str) -> None:
    """Results, and a user message after them, are one user turn; these originals refuse anything else."""
    name = "hermes_user" if original == "gemma" else "hermes"
    generation = {
        "cohere": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "cohere2": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
    }.get(original, "<start_of_turn>model\n")
    talk = [*TWO, user("Well?"), calling(call(2)), result(2, "x"), {"role": "assistant", "content": "So."}, user()]
    got = write(name, original, generation, talk, [LOOK])
    assert got.count(generation) == 4
    merged = "a cave\n</tool_response>\n<tool_response>\na mill\n</tool_response>\nWell?"
    assert merged in got


def test_hermes_user_folds_system_text_and_tools_into_the_first_user_turn() -> None:
    got = write("hermes_user", "gemma", "<start_of_turn>model\n", [SYSTEM, user()], [LOOK])
    assert got == f"<BOS><start_of_turn>user\nBe brief.\n\n{HERMES}\n\nGo.<end_of_turn>\n<start_of_turn>model\n"
    got = write("hermes_user", "gemma", "<start_of_turn>model\n", [SYSTEM, user()])
    assert got == "<BOS><start_of_turn>user\nBe brief.\n\nGo.<end_of_turn>\n<start_of_turn>model\n"


def test_F141_gemma_3_shows_images_of_users_and_of_results() -> None:
    picture = [{"type": "text", "text": "see "}, IMAGE]
    talk = [user([IMAGE, {"type": "text", "text": "Go."}]), calling(call(0)), result(0, picture), result(1, "b")]
    got = write("hermes", "gemma3", "<start_of_turn>model\n", talk, [LOOK])
    assert "user\n" + HERMES + "\n\n<start_of_image>Go.<end_of_turn>" in got
    # Gemma 3 strips every text block, so the line breaks beside the image are gone.
    tail = "<tool_response>see<start_of_image></tool_response><tool_response>\nb\n</tool_response>"
    assert got.endswith(f"<start_of_turn>user\n{tail}<end_of_turn>\n<start_of_turn>model\n")


# --- DeepSeek --------------------------------------------------------------------------
def deepseek_call(arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(("original", "between"), [("deepseekv3", ""), ("deepseek_r1_distill", "\n")])
def test_F071_deepseek_writes_every_call_turn_whole(original: str, between: str) -> None:
    generation = "<｜Assistant｜><think>\n"
    second = calling(call(2), reasoning_content="Hm.")
    talk = [SYSTEM, *TWO, second, result(2, "x"), {"role": "assistant", "content": "So."}, user("And?")]
    got = write("deepseek", original, generation, talk, [LOOK])
    lead = (
        f"<BOS>Be brief.\n\nYou can call these functions:\n{LOOK_JSON}\n\nTo call one, end your turn with its name and "
        "its arguments as JSON in this form:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        'function name\n```json\n{"argument name": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜User｜>Go.'
    )
    both = deepseek_call('{"way": "é<"}') + "\n" + deepseek_call("{}")
    calls = f"<｜tool▁calls▁begin｜>{both}<｜tool▁calls▁end｜>"
    end, begin = "<｜end▁of▁sentence｜>", "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"
    results = f"{begin}a cave<｜tool▁output▁end｜>{between}<｜tool▁output▁begin｜>a mill<｜tool▁output▁end｜>"
    again = f"<think>\nHm.\n</think>\n\n<｜tool▁calls▁begin｜>{deepseek_call('{}')}<｜tool▁calls▁end｜>{end}"
    assert got == (
        f"{lead}<｜Assistant｜>Both.{calls}{end}{results}<｜tool▁outputs▁end｜>{again}"
        f"{begin}x<｜tool▁output▁end｜><｜tool▁outputs▁end｜>So.{end}<｜User｜>And?{generation}"
    )


def test_deepseek_refuses_a_system_message_in_the_middle() -> None:
    with pytest.raises(Exception, match="at the beginning of a conversation only"):
        write("deepseek", "deepseekv3", "<｜Assistant｜><think>\n", [*TWO, SYSTEM])


# --- harmony, Gemma 4, Llama 3.1 -------------------------------------------------------
def test_F071_gpt_oss_writes_all_calls_of_a_turn_and_names_their_results() -> None:
    talk = [user(), calling(call(0), call(1, "go", to="é<"), content="Both.", reasoning_content="Hm.")]
    talk += [{"role": "tool", "tool_call_id": "c0", "content": "a"}, result(1, 'b "c"', "go")]
    got = write("gptoss", "gptoss", "<|start|>assistant", [*talk, {"role": "assistant", "content": "So."}, user()])
    turn = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Both.<|end|>"
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>assistant to=functions.go<|channel|>commentary json<|message|>{"to": "é<"}<|call|>'
    )
    results = (
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"a"<|end|>'
        '<|start|>functions.go to=assistant<|channel|>commentary<|message|>"b \\"c\\""<|end|>'
    )
    answer = "<|start|>assistant<|channel|>final<|message|>So.<|return|>"
    user_turn = "<|start|>user<|message|>Go.<|end|>"
    assert got.endswith(f"{user_turn}{turn}{results}{answer}{user_turn}<|start|>assistant")


@pytest.mark.parametrize("original", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"])
def test_F141_gemma_4_writes_text_before_calls_and_images_in_results(original: str) -> None:
    talk = [user(), calling(call(0, way="é<", n=None), call(1), content="Both.", reasoning_content="Hm.")]
    talk += [result(0, [{"type": "text", "text": "see"}, IMAGE]), result(1, "b"), user([IMAGE])]
    got = write("gemma4", original, "<|turn>model\n", talk)
    closed = "<turn|>\n" if original in ("gemma4_v5", "diffusion_gemma") else ""
    assert got == (
        "<BOS><|turn>user\nGo.<turn|>\n<|turn>model\n<|channel>thought\nHm.\n<channel|>Both."
        '<|tool_call>call:look{n:null,way:<|"|>é<<|"|>}<tool_call|><|tool_call>call:look{}<tool_call|>'
        '<|tool_response>response:look{value:<|"|>see<|"|>}<tool_response|><|image|>'
        '<|tool_response>response:look{value:<|"|>b<|"|>}<tool_response|>'
        f"{closed}<|turn>user\n<|image|><turn|>\n<|turn>model\n"
    )


@pytest.mark.parametrize(
    ("ours", "original", "end"),
    [
        ("gemma4", "gemma4_v5", "<|tool_response>response:look{value:"),
        ("gptoss", "gptoss", "<|call|><|start|>functions.look to=assistant<|channel|>commentary<|message|>"),
    ],
)
def test_F079_the_error_of_a_call_that_could_not_be_read_is_written(ours: str, original: str, end: str) -> None:
    """These originals drop or refuse results without a call. The turn ends as the model ended it."""
    generation = "<|turn>model\n" if ours == "gemma4" else "<|start|>assistant"
    talk = [user(), {"role": "assistant", "content": "zqbroken"}, result(0, "not JSON")]
    got = write(ours, original, generation, talk)
    assert got.partition("zqbroken")[2].startswith(end)
    assert "not JSON" in got


def test_F071_llama_3_1_writes_several_calls() -> None:
    got = write("llama3_1", "llama3_1", LLAMA, TWO, [LOOK])
    calls = '{"name": "look", "parameters": {"way": "é<"}}; {"name": "look", "parameters": {}}'
    results = llama("ipython", '"a cave"') + llama("ipython", '"a mill"')
    assert got.endswith(llama("assistant", calls) + results + LLAMA)


@pytest.mark.parametrize("name", ["../renderer.py", "/etc/passwd", "../templates/hermes.jinja", "nothing.jinja"])
def test_a_template_can_import_ours_and_no_other_file(name: str) -> None:
    with pytest.raises(TemplateNotFound):
        compile_template(f"{{% include '{name}' %}}")()
    tools = compile_template("{% from 'hermes_tools.jinja' import describe %}{{ describe(tools) }}")
    assert tools(tools=[LOOK]) == HERMES
