"""Which template a tokenizer is used with: its own, one of ours that writes the same prompts, or the one asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render import probe
from agentrl.render.codec import Codec
from agentrl.render.images import image_text
from agentrl.render.learn import Behaviour, learn, marked_turn, suffix
from agentrl.render.messages import Shape
from agentrl.render.probe import TOOL, Style
from agentrl.render.template import ChatTemplate, Tools, shipped
from agentrl.types import Message

FAMILIES = (
    "qwen3",
    "qwen3_5",
    "nemotron3",
    "smollm3",
    "lfm2",
    "glm4moe",
    "gptoss",
    "deepseek",
    "gemma4",
    "llama3_1",
    "qwen2_5_vl",
    "chatml",
    "hermes",
    "hermes_user",
)
"""Training templates of ours, in the order in which they are tried."""
GENERIC = frozenset({"chatml", "hermes", "hermes_user"})
"""Those that give tools to a template without them, in words that are nobody's own."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which template is used, whether its prompts continue what is held, and why."""

    preserving: bool
    why: str
    template: str  # "original", "custom", the name of one of ours, or "none"


@dataclass(frozen=True, slots=True)
class Choice:
    """A template, what it is like, and why it was taken."""

    template: ChatTemplate
    behaviour: Behaviour
    verdict: Verdict


def choose(
    tokenizer: Any, codec: Codec, kwargs: dict[str, Any], asked: str | None, *, with_tools: bool, processor: Any = None
) -> tuple[Choice | None, str | None]:
    """The template to use, and the tokenizer's own text; no template where the tokenizer has none and none fits.

    A verdict is found once for a template, its variables and the tokenizer's control tokens, and remembered.
    """
    original = _own_text(processor, with_tools) or _own_text(tokenizer, with_tools)

    shown = ""  # what the original writes for an image; a template of ours that knows no blocks gets it as text

    def make(text: str, **more: Any) -> tuple[ChatTemplate, Behaviour]:
        template = ChatTemplate(text, codec, tokenizer, kwargs, **more)
        if shown and _image_text(template) != shown:
            template.shape = Shape(image=shown)
        return template, learn(template, codec, tokenizer)

    if asked is not None and asked != "original":
        return _taken(*make(asked), "custom", with_tools), original
    if original is None:
        if not {"<|im_start|>", "<|im_end|>"} <= codec.control.keys():
            return None, None
        return _replaced(*make(shipped("chatml")), "chatml", "the tokenizer has no chat template"), original
    own, like = make(original)
    shown = _image_text(own) if processor is not None else ""
    key = (original, asked, with_tools, repr(kwargs), repr(codec.control), repr(own.variables), shown, repr(like))
    known = _VERDICTS.get(key)
    if known is not None:
        if known.template == "original":
            return Choice(own, like, known), original
        return Choice(*make(shipped(known.template), own=own, generation=like.generation), known), original
    choice = _search(own, like, codec, asked, with_tools, make)
    if len(_VERDICTS) >= _KEPT:
        _VERDICTS.clear()
    _VERDICTS[key] = choice.verdict
    return choice, original


_VERDICTS: dict[tuple[Any, ...], Verdict] = {}
_KEPT = 256


def _search(
    own: ChatTemplate,
    like: Behaviour,
    codec: Codec,
    asked: str | None,
    with_tools: bool,
    make: Callable[..., tuple[ChatTemplate, Behaviour]],
) -> Choice:
    """What to use in place of `own`, or `own`."""
    fault = judge(own, like, with_tools)
    if asked == "original" or (fault is None and not (with_tools and _lacks_tools(like))):
        return _taken(own, like, "original", with_tools)
    why = f"the tokenizer's own template was replaced: {fault}"
    if like.refusal and not like.reads_tools:
        why = f"the tokenizer's own template cannot be used: {like.refusal}"
    elif with_tools and _lacks_tools(like):
        why = "the tokenizer's own template does not write tools" + (" and calls" if like.reads_tools else "")
    found = _family(own, like, codec, with_tools, make)
    if found is not None:
        template, behaviour, name = found
        return _replaced(template, behaviour, name, why)
    if with_tools and {"<|im_start|>", "<|im_end|>"} <= codec.control.keys() and not like.reads_tools:
        return _replaced(*make(shipped("chatml"), own=own, generation=like.generation), "chatml", why)
    return _taken(own, like, "original", with_tools)


def _image_text(template: ChatTemplate) -> str:
    return image_text(lambda talk: template.render(talk, generate=False))


def _taken(template: ChatTemplate, like: Behaviour, name: str, with_tools: bool) -> Choice:
    # Where only one call can be written, the others of a turn are refused as it is read: no reason to fork.
    fault = judge(template, replace(like, several=True), with_tools, several=like.several)
    return Choice(template, like, Verdict(fault is None, fault or "it continues what is held", name))


def _replaced(template: ChatTemplate, like: Behaviour, name: str, why: str) -> Choice:
    return Choice(template, like, Verdict(True, why, name))


def _own_text(tokenizer: Any, with_tools: bool) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = (own.get("tool_use") if with_tools else None) or own.get("default")
    return own or None


def _lacks_tools(like: Behaviour) -> bool:
    return not (like.reads_tools and like.calls)


def judge(template: ChatTemplate, like: Behaviour, with_tools: bool, *, several: bool | None = None) -> str | None:
    """None where prompts of this template may be bridged, with and without tools, else why not. `several`: whether
    turns with more than one call are tried, by default where the template can write them."""
    for tools in (None, [TOOL]) if with_tools else (None,):
        if tools and not like.calls:
            continue  # it cannot write calls: nothing to check, and tools are refused
        fault = probe.rewriting(template, tools, like.style, several=like.several if several is None else several)
        if fault is not None:
            return fault
    if with_tools and like.calls and not like.several:
        return "it cannot write several calls in one turn"
    return None if like.ends else "it writes no end-of-turn token after an assistant turn"


def _family(
    own: ChatTemplate,
    like: Behaviour,
    codec: Codec,
    with_tools: bool,
    make: Callable[..., tuple[ChatTemplate, Behaviour]],
) -> tuple[ChatTemplate, Behaviour, str] | None:
    # A plain ChatML template says nothing about tools: then the plain words of ours are better than one family's.
    for name in (("chatml",) if with_tools and not like.reads_tools else ()) + FAMILIES:
        try:
            template, behaviour = make(shipped(name), own=own, generation=like.generation)
        except ConfigurationError:
            continue  # it cannot even begin with this tokenizer
        if with_tools and (_lacks_tools(behaviour) or not like.generation):
            continue  # without a generation prompt nobody can tell whose turn it is
        if not same_prompts((own, like), (template, behaviour), codec, with_tools=with_tools):
            continue
        if judge(template, behaviour, with_tools) is None:
            return template, behaviour, name
    return None


def same_prompts(
    one: tuple[ChatTemplate, Behaviour], other: tuple[ChatTemplate, Behaviour], codec: Codec, *, with_tools: bool
) -> bool:
    """True where `other` writes what `one` writes: first prompts, and what follows a turn (as far as `one` can)."""
    (own, like), (ours, _) = one, other
    system: Message = {"role": "system", "content": "Be brief."}
    second = json.loads(json.dumps(TOOL).replace("probe_tool", "second"))
    if with_tools and like.calls and like.form.name != other[1].form.name and not _lacks_tools(like):
        return False
    try:
        own.render([probe.user("Hi.")])
        for tools in (None, [TOOL], [TOOL, second]) if with_tools and like.reads_tools else (None,):
            for messages in ([probe.user("Hi.")], [system, probe.user("Hi.")]):
                if _text(own, messages, tools) not in (None, ours.render(messages, tools)):
                    return False
    except ConfigurationError:
        return False
    compared = [
        (text, _suffix(other, codec, after, calls))
        for after, calls in _FOLLOWERS[: 1 if _lacks_tools(like) else 3]
        if (text := _suffix(one, codec, after, calls)) is not None
    ]
    return bool(compared) and all(text == written for text, written in compared)


_FOLLOWERS = (
    ([probe.user("And?")], 0),
    ([probe.tool("found")], 1),
    ([probe.tool("found"), probe.tool("more", 1)], 2),
)


def _text(template: ChatTemplate, messages: list[Message], tools: Tools) -> str | None:
    """None where the original itself cannot write these (no system messages, say)."""
    try:
        return template.render(messages, tools)
    except ConfigurationError:
        return None


def _suffix(one: tuple[ChatTemplate, Behaviour], codec: Codec, after: list[Message], calls: int) -> str | None:
    template, like = one
    if calls > 1 and not like.several:
        return None
    reasoning = like.style.value if like.style is not Style.PLAIN else None
    lead = [probe.user("Hi."), marked_turn(calls=calls, reasoning=reasoning)]
    return suffix(template, codec, like.form, lead, after, [TOOL] if calls else None)
