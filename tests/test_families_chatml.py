"""Qwen, Nemotron, SmolLM and LFM2: what is written equals the families' originals, text for text and id for id.

Run as a program, this prints a table: family, comparisons made, comparisons that found equal texts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from families import tokenizer
from oracles import (
    ARGUMENTS,
    MARK,
    Message,
    Mix,
    Original,
    Pair,
    Tools,
    by_hand,
    conversations,
    turns,
    with_mark,
)

from agentrl.render import Renderer
from agentrl.render.codec import Codec

CONVERSATIONS = 12
EASY = ({"query": "cave"}, {}, {"query": "東京 “mill” <b>", "limit": 3, "exact": True, "near": None})
DATE = {"strftime_now": lambda _: "01 January 2026"}  # no test may fail at midnight


@dataclass(frozen=True)
class Case:
    """A family's original, and the template that a Renderer takes for it.

    `thinks`: "free" (turns may have reasoning), "always" (the prompt opens a block), "never" (it closes an empty one),
    "drops" (the original writes no reasoning). `arguments`: those that both write alike.
    """

    family: str
    name: str
    ours: str | None
    thinks: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    thought: str = "reasoning_content"
    arguments: tuple[dict[str, Any], ...] = ARGUMENTS
    calls: bool = True  # the original writes calls
    keeps_one: bool = True  # the original rewrites nothing while one question is worked on

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.kwargs.items() if k != "strftime_now")])

    def original(self) -> Original:
        return Original(self.family, self.name, self.kwargs, self.thought)

    def conversations(self, count: int, **mix: Any) -> list[tuple[list[Message], Tools]]:
        """Conversations as this family's policy holds them: every turn has reasoning, no turn has, or some have."""
        reasoning = {"always": "all", "never": "none", "drops": "none"}.get(self.thinks, "some")
        made = conversations(count, Mix(**({"reasoning": reasoning, "arguments": self.arguments} | mix)))
        for number, turn in enumerate(messages[k] for messages, _ in made for k, _ in turns(messages)):
            if self.thinks == "never":
                turn["reasoning_content"] = ""
            elif "reasoning_content" in turn and number % 3 == 0:
                turn["reasoning_content"] = f"\n{turn['reasoning_content']}\n"
        return made


CASES = [
    Case("qwen2_5", "qwen2_5", None, "drops"),
    Case("qwen3_instruct_2507", "qwen3_instruct_2507", None, "drops"),
    Case("qwen3_vl", "qwen3_vl", None, "drops"),
    Case("qwen3", "qwen3", "qwen3", "free"),
    Case("qwen3", "qwen3", "qwen3", "never", {"enable_thinking": False}, keeps_one=False),
    Case("qwen3_5", "qwen3_5_think", "qwen3_5", "always"),
    Case("qwen3_5", "qwen3_5_think", "qwen3_5", "never", {"enable_thinking": False}),
    Case("qwen3_5", "qwen3_5_nothink", "qwen3_5", "never"),
    Case("qwen3_5", "qwen3_5_nothink", "qwen3_5", "always", {"enable_thinking": True}),
    Case("qwen3_6", "qwen3_6", "qwen3_5", "always"),
    Case("qwen3_6", "qwen3_6", None, "always", {"preserve_thinking": True}),
    Case("qwen3_8", "qwen3_8", None, "always"),
    Case("qwen3_8", "qwen3_8", "qwen3_5", "always", {"preserve_thinking": False, "reasoning_effort": "low"}),
    Case("nemotron3", "nemotron_3_nano", "nemotron3", "always"),
    Case("nemotron3", "nemotron_3_nano", None, "never", {"enable_thinking": False}),
    Case("nemotron3", "nemotron_3_super", "nemotron3", "always", {"low_effort": True}),
    Case("nemotron3", "nemotron_3_ultra", "nemotron3", "always", {"medium_effort": True}),
    Case("nemotron3", "nemotron_3_5_lightning", "nemotron3", "always"),
    Case("nemotron3", "nemotron_3_5_lightning", None, "always", {"truncate_history_thinking": False}),
    Case("smollm3", "smollm3", "smollm3", "free", DATE, calls=False),
    Case("smollm3", "smollm3", "smollm3", "never", DATE | {"enable_thinking": False}, calls=False),
    Case("lfm2", "lfm2", "lfm2", "drops", calls=False),
    Case("lfm2", "lfm2_v2", None, "drops"),
    Case("lfm2_5", "lfm2_2_5", "lfm2", "free", thought="thinking", arguments=EASY),
    Case("lfm2_5", "lfm2_2_5_v2", "lfm2", "free", thought="thinking", arguments=EASY),
    Case("lfm2_5", "lfm2_2_5_vl", "lfm2", "free", thought="thinking"),
    Case("lfm2_5", "lfm2_2_5_vl", None, "free", {"preserve_thinking": True}, thought="thinking"),
]


def compared(case: Case, count: int, *, alone: bool = False) -> Pair:
    """Every comparison of `count` conversations that can be made for this family."""
    pair = Pair(case.original(), case.ours, alone=alone)
    # An absent reasoning is an empty block in the newest turn alone of some originals: ours writes what was sampled.
    thought = case.thinks in ("always", "free") and case.ours is not None
    for messages, tools in case.conversations(count, doubled=True):
        pair.check_prompt(messages, tools)
        pair.check_suffixes(messages, tools)
        if case.calls:
            pair.check_turns(messages, tools, when=lambda m: "reasoning_content" in m or not thought)
    # Where the original rewrites history, it does so at the next question; and it is no matter where there is nothing
    # to rewrite: earlier turns without reasoning, as the examples in a dataset's prompts are.
    asked_once = case.conversations(count, queries=1, reasoning="all" if thought else "none", calls=case.calls)
    for messages, tools in asked_once if case.keeps_one and (case.calls or not thought) else ():
        pair.check_whole(messages, tools)
    if not {"low_effort", "medium_effort"} & case.kwargs.keys():
        for messages, tools in conversations(count, Mix("none", calls=case.calls, arguments=case.arguments)):
            pair.check_whole([*messages, {"role": "user", "content": "And now?"}], tools)
    return pair


@pytest.mark.parametrize("case", CASES, ids=str)
def test_f047_f059_prompts_suffixes_and_turns_are_those_of_the_original(case: Case) -> None:
    pair = compared(case, CONVERSATIONS)
    assert pair.faults == []
    assert {"prompt", "suffix", "whole"} | ({"turn"} if case.calls else set()) == pair.counts.keys()


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "qwen3"], ids=str)
def test_the_qwen3_template_alone_writes_the_same(case: Case) -> None:
    """Tokenizers without a template of their own are given this one (`agentrl.train.tiny`)."""
    assert compared(case, CONVERSATIONS, alone=True).faults == []


def test_smollm3_turns_are_written_as_its_models_write_them() -> None:
    """The original writes neither calls nor reasoning, so there is no text to compare these with."""
    call = {"id": "call_0", "type": "function", "function": {"name": "wait", "arguments": {"a": "é<"}}}
    lines = '<tool_call>\n{"name": "wait", "arguments": {"a": "é<"}}\n</tool_call>'
    messages: list[Message] = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "name": "wait", "tool_call_id": "call_0", "content": "done"},
        {"role": "assistant", "content": "\nI wait.", "reasoning_content": "", "tool_calls": [call]},
        {"role": "tool", "name": "wait", "tool_call_id": "call_0", "content": "done"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "\nOh.\n"},
    ]
    text = Pair(Original("smollm3", "smollm3", DATE), "smollm3").write(messages, None, generate=False)
    assert text[text.index("<|im_start|>user") :] == (
        "<|im_start|>user\nHi.<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nHm.\n</think>\n{lines}\n{lines}<|im_end|>\n"
        "<|im_start|>user\ndone<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\nI wait.\n{lines}<|im_end|>\n"
        "<|im_start|>user\ndone<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nOh.\n</think>\nYes.<|im_end|>\n"
    )


def vl_pair(count: int) -> Pair:
    """Qwen2.5-VL's own template writes no tools; with tools its prompts are those of Qwen2.5."""
    with_tools = Original("qwen2_5", "qwen2_5")

    def against(messages: Sequence[Message], tools: Tools = None, *, generate: bool = True) -> str:
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        return with_tools(messages, tools, generate=generate)

    pair = Pair(Original("qwen2_5_vl", "qwen2_5_vl"), "qwen2_5_vl", against=against)
    for messages, tools in conversations(count, Mix("none")):
        pair.check_prompt(messages, tools)
        pair.check_suffixes(messages, tools)
        pair.check_turns(messages, tools)
        pair.check_whole(messages, tools)
    return pair


def talk_pair(family: str, ours: str | None, count: int) -> Pair:
    """Conversations without tools, for originals that know none."""
    pair = Pair(Original(family, family), ours)
    for messages, tools in conversations(count, Mix("none", calls=False)):
        pair.check_prompt(messages, tools)
        pair.check_suffixes(messages, tools)
        pair.check_whole(messages, tools)
    return pair


def test_qwen2_5_vl_with_tools_is_written_as_qwen2_5_and_without_tools_as_itself() -> None:
    assert vl_pair(CONVERSATIONS).faults == []
    for ours in (None, "qwen2_5_vl"):
        assert talk_pair("qwen2_5_vl", ours, CONVERSATIONS).faults == []


def test_smollm2_without_tools_is_its_original() -> None:
    assert talk_pair("smollm2", None, CONVERSATIONS).faults == []


@pytest.mark.parametrize(
    ("family", "name", "ours", "kwargs"),
    [
        ("qwen2_5_vl", "qwen2_5_vl", "qwen2_5_vl", {}),
        ("qwen2_5_vl", "qwen2_5_vl", "qwen2_5_vl", {"add_vision_id": True}),
        ("qwen3_5", "qwen3_5_think", "qwen3_5", {"add_vision_id": True}),
        ("qwen3_6", "qwen3_6", "qwen3_5", {}),
        ("lfm2_5", "lfm2_2_5_vl", "lfm2", {}),
    ],
)
def test_images_in_any_message_are_written_as_the_original_does(
    family: str, name: str, ours: str, kwargs: dict[str, Any]
) -> None:
    original = Original(family, name, kwargs)
    look: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}, {"type": "image"}]
    messages: list[Message] = [
        {"role": "user", "content": [*look, {"type": "text", "text": "and"}, {"type": "image"}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [*look, {"type": "text", "text": " now?"}]},
    ]
    assert by_hand(ours, original, messages) == original(messages)
    if family != "qwen2_5_vl":  # whose original writes tool results under a role that no Qwen was trained with
        call = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {}}}
        turn = {"role": "assistant", "content": "Yes.", "tool_calls": [call], "reasoning_content": "Hm."}
        seen = {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": look}
        shaped = turn | {"thinking": "Hm."}
        assert by_hand(ours, original, [*messages[:1], turn, seen]) == original([*messages[:1], shaped, seen])


def test_f049_reasoning_that_the_original_takes_away_stays() -> None:
    """What is written for a turn never changes when messages follow, for every training template."""
    for case in CASES:
        if case.ours is None:
            continue
        pair = Pair(case.original(), case.ours)
        for messages, tools in case.conversations(5):
            texts = [pair.write(messages[:end], tools, generate=False) for _, end in turns(messages)]
            assert all(b.startswith(a) for a, b in itertools.pairwise(texts)), str(case)
            for k, _ in turns(messages):
                assert messages[k].get("reasoning_content", "").strip() in texts[-1]


def test_a_conversation_that_the_assistant_begins_is_written() -> None:
    begun: list[Message] = [{"role": "assistant", "content": "Ask me."}, {"role": "user", "content": "Where?"}]
    system: Message = {"role": "system", "content": "Be brief."}
    for case in (case for case, _ in VERDICTS if case.ours is not None):
        pair = Pair(case.original(), case.ours)
        for messages in (begun, [system, *begun]):
            assert pair.write(messages, None) == case.original()(messages), str(case)


# --- through the Renderer --------------------------------------------------------------------------------------------
VERDICTS = [(case, case.ours or "original") for case in CASES] + [
    (Case("qwen2_5_vl", "qwen2_5_vl", "qwen2_5_vl", "drops"), "qwen2_5_vl"),
    (Case("smollm2", "smollm2", None, "drops"), "hermes"),
]


@pytest.mark.parametrize(("case", "template"), VERDICTS, ids=lambda value: str(value))
def test_the_renderer_recognises_the_family_and_bridges_it(case: Case, template: str) -> None:
    renderer = Renderer(tokenizer(case.family, case.name), chat_template_kwargs=case.kwargs)
    assert (renderer.verdict.template, renderer.verdict.preserving) == (template, True)
    without = Renderer(tokenizer(case.family, case.name), chat_template_kwargs=case.kwargs, with_tools=False)
    rewrites = case.ours is not None and case.thinks != "drops" and case.calls
    assert without.verdict.template == (case.ours if rewrites else "original")


TAGS = re.compile(r"(</?think>|</?tool_call>|<\|tool_call_(?:start|end)\|>|<\|im_end\|>)")


def sampled(renderer: Renderer, case: Case, messages: Sequence[Message], tools: Tools) -> list[int]:
    """Ids that a policy which writes the last turn as the template does would sample, the end of the turn included."""
    text = renderer.write_turn(messages[-1], tools)
    assert text is not None and text.endswith("<|im_end|>"), str(case)
    codec = Codec(tokenizer(case.family, case.name))
    pieces = TAGS.split(text)  # only the tags are control tokens: words that spell one were sampled as plain text
    return codec.encode_segments([codec.control.get(p, p) if TAGS.fullmatch(p) else p for p in pieces if p])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_f055_held_ids_go_on_as_the_original_does_and_turns_read_back(case: Case) -> None:
    renderer = Renderer(tokenizer(case.family, case.name), chat_template_kwargs=case.kwargs)
    original = case.original()
    for messages, tools in case.conversations(3):
        talk: list[Message] = []
        held: list[int] = []
        for k, end in turns(messages):
            if k == next(iter(turns(messages)))[0]:
                talk = list(messages[:k])
                held = renderer.first(talk, tools)
                assert renderer.decode(held) == original(talk, tools)
            out = sampled(renderer, case, messages[: k + 1], tools)
            read = renderer.parse(out, tools)
            assert_same_turn(read.message, messages[k], tools)
            following = list(messages[k + 1 : end]) or [{"role": "user", "content": "Go on."}]
            talk += [read.message, *following]
            prompt = renderer.next([*held, *out], talk, len(talk) - len(following), tools)
            assert prompt.drift is None and prompt.ids[: len(held) + len(out)] == [*held, *out]
            expected = original([*messages[:k], with_mark(messages[k]), *following], tools)
            after = expected[expected.index("<|im_end|>", expected.index(MARK)) :]
            assert "<|im_end|>" + renderer.decode(prompt.ids[len(held) + len(out) :]) == after
            held = prompt.ids


def assert_same_turn(read: Message, written: Message, tools: Tools) -> None:
    """The turn read back is the turn written, but for space at the ends."""
    assert read["content"].strip() == written["content"].strip()
    assert read.get("reasoning_content", "").strip() == written.get("reasoning_content", "").strip()
    calls = [call["function"] for call in written.get("tool_calls", ())]
    assert [call["function"] for call in read.get("tool_calls", ())] == calls


def main() -> None:
    """Prints the table for a few hundred conversations per family."""
    pairs = [(case.family, str(case), compared(case, 100)) for case in CASES]
    pairs += [("qwen2_5_vl", "with tools (as Qwen2.5)", vl_pair(300))]
    pairs += [(name, "without tools", talk_pair(name, None, 300)) for name in ("qwen2_5_vl", "smollm2")]
    print("family | original | rendered | equal")
    for family, name, pair in pairs:
        print(family, name, *pair.totals(), sep=" | ")


if __name__ == "__main__":
    main()
