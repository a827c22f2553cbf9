"""Messages to tokens and back: the only place that knows about chat templates."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render import probe
from agentrl.render.bridge import Bridge
from agentrl.render.calls import CallFormat, read_turn
from agentrl.render.codec import Codec, Segment
from agentrl.render.probe import FORMATS, Verdict
from agentrl.render.template import ChatTemplate, Tools, shipped
from agentrl.types import Drift, Message, ParsedTurn, Prompt

_MARKERS = frozenset[str]().union(*(form.markers for form in FORMATS))
_HEADS = 1024


class Renderer:
    """Writes prompts for one tokenizer and template, and reads the turns sampled from them.

    `chat_template`: None takes the tokenizer's own template if its prompts continue what is held, else a training
    template of ours that writes the same prompts; "original" takes the tokenizer's own in any case; other text is a
    template. `chat_template_kwargs` are variables for it. `verdict` says what was chosen and why.

    Text of users and tools never becomes control tokens, whatever it spells.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        with_tools: bool = True,
    ) -> None:
        self._codec = Codec(tokenizer)
        self._latest: tuple[list[Message], Tools, list[int]] | None = None  # the last first prompt
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._with_tools = with_tools
        self._asked = chat_template is not None
        self.original_template: str | None = _own_template(tokenizer, with_tools)
        self._template, self.verdict = self._choose(chat_template)
        self._eot: int | None = None
        self._format: CallFormat | None = None
        self._style = probe.Style.PLAIN
        self._bridge: Bridge | None = None
        self._reads_tools = False
        self._heads: dict[tuple[str, str | None], tuple[list[int], str]] = {}
        if self._template is not None:
            self._learn(self._template)
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (self._eot, eos) if i is not None))
        visible = _MARKERS | {"<think>", "</think>"} | self._codec.tags
        self._hidden_ids = self._codec.control_ids - {self._codec.control.get(token) for token in visible}

    # --- construction ------------------------------------------------------------------
    def _compile(self, text: str) -> ChatTemplate:
        return ChatTemplate(text, self._codec, self._tokenizer, self._kwargs, _MARKERS)

    def _judge(self, template: ChatTemplate) -> str | None:
        """None where prompts of this template may be bridged, else why not."""
        style = probe.style_of(probe.generation_text(template))
        fault = probe.rewriting(template, with_tools=self._with_tools, style=style)
        if fault is None and probe.end_of_turn(template, self._codec, style)[0] is None:
            return "it writes no end-of-turn token after an assistant turn"
        return fault

    def _choose(self, asked: str | None) -> tuple[ChatTemplate | None, Verdict]:
        speaks_chatml = {"<|im_start|>", "<|im_end|>"} <= self._codec.control.keys()
        if asked is not None and asked != "original":
            template = self._compile(asked)
            fault = self._judge(template)
            return template, Verdict(fault is None, fault or "it continues what is held", "custom")
        if self.original_template is None:
            if not speaks_chatml:
                return None, Verdict(False, "the tokenizer has no chat template and no ChatML tokens", "none")
            return self._compile(shipped("chatml")), Verdict(True, "the tokenizer has no chat template", "chatml")
        own = self._compile(self.original_template)
        if asked is None and self._with_tools and speaks_chatml and probe.ignores_tools(own):
            why = "the tokenizer's own template does not write tools"
            return self._compile(shipped("chatml")), Verdict(True, why, "chatml")
        fault = self._judge(own)
        if fault is None or asked == "original":
            return own, Verdict(fault is None, fault or "it continues what is held", "original")
        for name in ("qwen3", "chatml"):
            ours = self._compile(shipped(name))
            if probe.same_prompts(own, ours, with_tools=self._with_tools) and self._judge(ours) is None:
                return ours, Verdict(True, f"the tokenizer's own template was replaced: {fault}", name)
        return own, Verdict(False, fault, "original")

    def _learn(self, template: ChatTemplate) -> None:
        style = self._style = probe.style_of(probe.generation_text(template))
        self._eot, border = probe.end_of_turn(template, self._codec, style)
        self._format = probe.call_format(template)
        self._reads_tools = not probe.ignores_tools(template)
        if self.verdict.preserving:
            self._bridge = Bridge(template, self._codec, border, style)

    def _ready(self, tools: Tools) -> ChatTemplate:
        if self._template is None:
            raise ConfigurationError(
                "The tokenizer has no chat template, and conversations and tools need one. Set tokenizer.chat_template "
                "or pass chat_template, or use plain string prompts without tools."
            )
        if tools and (self._format is None or not (self._reads_tools or self._asked)):
            fault = (
                "leaves tools out of the prompt" if self._format else "writes tool calls in a form unknown to agentrl"
            )
            raise ConfigurationError(
                f"The tokenizer's chat template {fault}. Pass a chat_template that writes tools, and calls as "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
            )
        return self._template

    # --- prompts -----------------------------------------------------------------------
    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of a first prompt, generation prompt included, with exactly one BOS where the tokenizer uses one."""
        template = self._ready(tools)
        if self._latest is None or self._latest[:2] != (messages, tools):  # a group's members begin alike, one by one
            ids = self._with_bos(self._codec.encode(template.render(messages, tools)))
            self._latest = (copy.deepcopy(list(messages)), tools, ids)
        return list(self._latest[2])

    def text_prompt(self, text: str, untrusted: str = "") -> list[int]:
        """Ids of a plain string, without a template. Control tokens that it spells are control tokens: the author of
        a plain prompt writes its whole format. `untrusted` text (an observation) is appended and cannot become any."""
        return self._with_bos(self._codec.encode(text + self._codec.guard(untrusted)))

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._codec.bos_id
        if bos is None:
            return ids
        start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        return [bos, *ids[start:]]

    def next(self, held_ids: list[int], messages: Sequence[Message], new_from: int, tools: Tools) -> Prompt:
        """The prompt after a sampled turn. `held_ids` are its prompt and what was sampled; ``messages[new_from:]`` came
        after it, and ``messages[new_from - 1]`` is the turn. Without drift the ids start with `held_ids`."""
        template = self._ready(tools)
        turn = messages[new_from - 1] if new_from > 0 else {}
        if turn.get("role") != "assistant":
            raise ValueError(f"messages[{new_from - 1}] must be the assistant turn that was sampled last.")
        if self._bridge is not None and self._eot is not None:
            if not self._same_tools(held_ids, messages, tools, template):
                return self._whole(held_ids, messages, tools, template, "the tools of this conversation changed")
            suffix = self._bridge.ids(turn, messages[new_from:], tools)
            if suffix is not None:
                # A turn that was cut, or stopped by another token, lacks the template's end; appended here, it is no
                # sampled token and is not trained.
                border = [] if held_ids and held_ids[-1] == self._eot else [self._eot]
                return Prompt([*held_ids, *border, *suffix])
        return self._whole(held_ids, messages, tools, template, None)

    def _same_tools(self, held: list[int], messages: Sequence[Message], tools: Tools, template: ChatTemplate) -> bool:
        """True where the held prompt begins as a prompt with these tools does."""
        if not self._reads_tools:
            return True
        lead = messages[0] if messages[0]["role"] == "system" else None
        content = None if lead is None else lead.get("content")
        key = (template.tools_key(tools), content if content is None or isinstance(content, str) else repr(content))
        known = self._heads.get(key)
        if known is None:
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            known = self._heads[key] = self._head([lead] if lead else [], tools, template)
        head, tail = known
        if held[: len(head)] != head:
            return False
        if tools or messages[0 if lead is None else 1]["role"] != "user":
            return True
        # Without tools the head may be one token that every prompt begins with, so the words after it count too.
        return self._codec.decode(held[len(head) : len(head) + len(tail)]).startswith(tail)

    def _head(self, lead: list[Message], tools: Tools, template: ChatTemplate) -> tuple[list[int], str]:
        """How a prompt with these tools begins: ids up to its last control token, and the text after that."""
        mark = "zqheadqz"
        text = template.render([*lead, probe.user(mark)], tools)
        segments = self._codec.segments(text[: text.index(mark)]) if mark in text else []
        tail = ""
        # What follows the last control token is encoded together with the user's text.
        if segments and isinstance(segments[-1], str):
            tail = str(segments.pop())
        return self._with_bos(self._codec.encode_segments(segments)), tail

    def _whole(
        self, held: list[int], messages: Sequence[Message], tools: Tools, template: ChatTemplate, why: str | None
    ) -> Prompt:
        """The conversation rendered as a whole; continues the held ids where its text continues theirs."""
        segments = self._codec.segments(template.render(messages, tools))
        text, before = self._codec.text_of(segments), self._codec.decode(held)
        bos = self._codec.bos_id
        if bos is not None and held[:1] == [bos] and segments[:1] != [bos]:
            before = self._codec.decode(held[1:])
        rest = _after(segments, len(before), self._codec) if text.startswith(before) else None
        if rest is not None:
            return Prompt([*held, *self._codec.encode_segments(rest)])
        ids = self._with_bos(self._codec.encode_segments(segments))
        at = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        shown = f"held {self.decode(held[at : at + 8])!r}, the template writes {self.decode(ids[at : at + 8])!r}"
        return Prompt(ids, Drift(at, f"{why or self._why_rewritten()}: {shown}"))

    def _why_rewritten(self) -> str:
        if self.verdict.preserving:
            return "the template writes these messages in a way that no check covers"
        return f"the chat template rewrites history ({self.verdict.why})"

    # --- turns -------------------------------------------------------------------------
    def parse(self, output_ids: list[int], tools: Tools, *, start: int = 0) -> ParsedTurn:
        """The turn that sampled ids say. Calls are named ``call_<n>`` from `start`; without tools nothing is a call."""
        form = self._format if tools else None
        thinking = self._style is probe.Style.OPEN
        turn = read_turn(self.plain_text(output_ids), form, thinking=thinking, start=start)
        # The prompt closed an empty think block: the turn says so, so that it renders the same.
        if self._style is probe.Style.EMPTY and "reasoning_content" not in turn.message:
            turn.message["reasoning_content"] = ""
        return turn

    def plain_text(self, ids: list[int]) -> str:
        """The text of ids without special tokens; think tags, call tags and added tokens that are not special stay."""
        if not self._hidden_ids.isdisjoint(ids):
            ids = [i for i in ids if i not in self._hidden_ids]
        return self._codec.decode(ids)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, control tokens written out."""
        return self._codec.decode(ids)

    def max_token_chars(self) -> int:
        """A text of n characters has at least n / max_token_chars() tokens; sys.maxsize where that cannot be known."""
        return self._codec.longest_token


def _own_template(tokenizer: Any, with_tools: bool) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = (own.get("tool_use") if with_tools else None) or own.get("default")
    return own or None


def _after(segments: list[Segment], at: int, codec: Codec) -> list[Segment] | None:
    """The segments after the first `at` characters; None where that would cut a control token."""
    for i, segment in enumerate(segments):
        if at == 0:
            return segments[i:]
        size = len(segment) if isinstance(segment, str) else len(codec.text_of([segment]))
        if at < size:
            return [segment[at:], *segments[i + 1 :]] if isinstance(segment, str) else None
        at -= size
    return [] if at == 0 else None
