"""What a template is like, learned by rendering with it: its turn format, the end of a turn, the shape it wants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render import probe
from agentrl.render.codec import Codec
from agentrl.render.formats import CALLS, THINKS, TURNS, Schemas, ShippedParser, Tagged, Think, TurnFormat
from agentrl.render.messages import Shape
from agentrl.render.probe import MARK, TOOL, Style, assistant, tool, user
from agentrl.render.template import ChatTemplate, Tools
from agentrl.types import Message

_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_RICH: dict[str, Any] = {"word": "a <b> & 'c' \"d\" é漢", "count": 3, "exact": True, "places": ["x", "y"]}
_PLAIN: dict[str, Any] = {"word": "cave", "count": 3}
_SCHEMAS: Schemas = {"probe_tool": TOOL["function"]["parameters"]}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one template writes turns."""

    generation: str  # the generation prompt
    think: Think
    thinks: bool  # the template knows reasoning: it writes some, or its generation prompt does
    style: Style
    form: TurnFormat
    calls: bool  # calls can be written and read back
    several: bool  # more than one call in a turn
    reads_tools: bool  # tools change the prompt
    ends: frozenset[int]  # ids that end a turn: an end-of-turn token, or the tag of the next role
    refusal: str | None = None  # why not even a short conversation with tools can be written


def learn(template: ChatTemplate, codec: Codec, tokenizer: Any = None) -> Behaviour:
    """What `template` is like; its shape and trusted markers are set on the way."""
    _learn_content(template)
    generation = generation_text(template, codec)
    think, writes_thoughts = _learn_thinking(template, codec, generation)
    turns = (ShippedParser(tokenizer),) if getattr(tokenizer, "response_template", None) else ()
    form, calls = _learn_calls(template, codec, think, generation, turns)
    template.trusted = _trusted(template, codec, form)
    style = probe.style_of(generation, think)
    found = [_end_id(template, codec, form, style, after) for after in (None, user("y"))]
    several = False
    if calls:
        found += [_end_id(template, codec, form, style, after, calls=1) for after in (None, tool("y"))]
        several = _writes_several(template, form)
    return Behaviour(
        generation=generation,
        think=think,
        thinks=writes_thoughts or style is not Style.PLAIN,
        style=style,
        form=form,
        calls=calls,
        several=several,
        reads_tools=not probe.ignores_tools(template),
        ends=frozenset(i for i in found if i is not None),
        refusal=None if calls else _refusal(template),
    )


def _learn_content(template: ChatTemplate) -> None:
    """Sets whether the template reads text only where it stands in a block."""
    for blocks in (False, True):
        shape = replace(template.shape, blocks=blocks)
        text = _text_with(template, shape)
        if MARK in text:
            template.shape = shape
            return


def _text_with(template: ChatTemplate, shape: Shape) -> str:
    before, template.shape = template.shape, shape
    try:
        return template.render([user(MARK)])
    except ConfigurationError:
        return ""
    finally:
        template.shape = before


def _trusted(template: ChatTemplate, codec: Codec, form: TurnFormat) -> frozenset[str]:
    """Tags that assistant messages may hold in their text: those of reasoning and calls, and those that people add.

    Tokens by which the template orders a conversation are none, whether they are special or not; where a whole turn
    has a form, all of its tags are such.
    """
    talk = [user("x"), assistant("Yes.", calls=1), tool("y"), assistant("No."), user("z")]
    structure = set[str]()
    for messages, tools in ((talk[:1], None), (talk, [TOOL]), ([{"role": "system", "content": "s"}, *talk[:1]], None)):
        try:
            structure |= {name for _, name in codec.controls(template.render(messages, tools))}
        except ConfigurationError:
            continue
    if not isinstance(form, Tagged):
        return codec.tags - structure - form.markers
    return (codec.tags - structure) | form.markers


def _refusal(template: ChatTemplate) -> str | None:
    for messages, tools in (([user("x")], None), ([user("x")], [TOOL])):
        try:
            template.render(messages, tools)
        except ConfigurationError as e:
            return str(e).removeprefix("The chat template cannot write this conversation: ").rstrip(".")
    return None


def generation_text(template: ChatTemplate, codec: Codec) -> str:
    """What the template appends for the assistant to go on from; "" where it cannot be told apart."""
    try:
        text, bare = template.render([user("x")]), template.render([user("x")], generate=False)
    except ConfigurationError:
        return ""
    if text.startswith(bare):
        return text[len(bare) :]
    # Some write another ending instead (Phi-3: the EOS token): what follows the beginning that both share, which does
    # not end inside a control token.
    shared = next((n for n, (a, b) in enumerate(zip(text, bare, strict=False)) if a != b), min(len(text), len(bare)))
    for one in (text, bare):
        shared = min([at for at, name in codec.controls(one) if at < shared < at + len(name)], default=shared)
    return text[shared:]


def _learn_thinking(template: ChatTemplate, codec: Codec, generation: str) -> tuple[Think, bool]:
    """The tags around reasoning, and whether the template writes reasoning at all; sets the key it reads it from."""
    for key in _THOUGHT_KEYS:
        template.shape = replace(template.shape, thought=key)
        try:
            text = template.render([user("x"), assistant("Yes.", reasoning=MARK)], generate=False)
        except ConfigurationError:
            continue
        at = text.find(MARK)
        for think in THINKS:
            if at >= 0 and think.open.strip() in text[:at] and think.close.strip() in text[at:]:
                return think, True
        if at >= 0:
            return THINKS[0], True  # in a format of the whole turn
    template.shape = replace(template.shape, thought=_THOUGHT_KEYS[0])
    said = (think for think in THINKS if think.open.strip() in generation)
    known = (think for think in THINKS if any(think.open.startswith(token) for token in codec.control))
    return next(itertools.chain(said, known), THINKS[0]), False


def _learn_calls(
    template: ChatTemplate, codec: Codec, think: Think, generation: str, more: tuple[TurnFormat, ...]
) -> tuple[TurnFormat, bool]:
    """The format in which a rendered call can be read back, and whether there is one; sets the shape it needs.

    `more` are tried last. A wrong shape is seen by the reading: arguments that come out as text, twice encoded, or not
    at all.
    """
    thought = Style.OPEN.value if probe.style_of(generation, think) is Style.OPEN else None
    started = template.shape
    for arguments in (_RICH, _PLAIN):  # some families cannot write quotes in strings, but can read what models write
        turn = assistant(calls=1, reasoning=thought, arguments=arguments)
        for short_ids, json_arguments, no_content in itertools.product((False, True), repeat=3):
            template.shape = replace(started, json_arguments=json_arguments, no_content=no_content, short_ids=short_ids)
            for form in (*TURNS, *(Tagged(think, calls) for calls in CALLS), *more):
                if _reads_back(template, codec, form, turn, arguments):
                    return form, True
    template.shape = started
    return next((form for form in TURNS if _says_it(template, form)), Tagged(think, None)), False


def _turn_text(template: ChatTemplate, messages: list[Message], tools: Tools) -> tuple[str | None, bool]:
    """The text of the last turn of `messages` to the end, and whether it begins at the end of its prompt (else
    somewhere before the turn); None where that cannot be told."""
    try:
        prompt, text = template.render(messages[:-1], tools), template.render(messages, tools, generate=False)
    except ConfigurationError:
        return None, False
    if text.startswith(prompt):
        return text[len(prompt) :], True
    # The generation prompt may differ from the beginning of a written turn (a think block that is not written back).
    at = text.find(MARK)
    return (text[at + len(MARK) :], False) if at >= 0 else (None, False)


def _reads_back(
    template: ChatTemplate, codec: Codec, form: TurnFormat, turn: Message, arguments: dict[str, Any]
) -> bool:
    """True where the call is read from the turn, and nothing is left of the turn but its reasoning."""
    text, alone = _turn_text(template, [user(MARK), turn], [TOOL])
    if text is None:
        return False
    if alone:
        text = text[: next((at for at, name in codec.controls(text) if name not in form.markers), len(text))]
    thought = "reasoning_content" in turn and turn["reasoning_content"] in text
    read = form.read(text, _SCHEMAS, opened=thought and _opened(form, text), start=0)
    if alone and read.message["content"].strip():
        return False
    return [(c.name, c.arguments, c.error) for c in read.calls] == [("probe_tool", arguments, None)]


def _opened(form: TurnFormat, text: str) -> bool:
    return isinstance(form, Tagged) and form.think.open.strip() not in text


def _says_it(template: ChatTemplate, form: TurnFormat) -> bool:
    """True where a whole-turn format finds exactly the words of an answer."""
    text, _ = _turn_text(template, [user(MARK), assistant("Yes, it is.")], None)
    if text is None or not any(marker in text for marker in form.markers):
        return False
    return form.read(text, None, opened=False, start=0).message["content"] == "Yes, it is."


def _writes_several(template: ChatTemplate, form: TurnFormat) -> bool:
    text, _ = _turn_text(template, [user(MARK), assistant(calls=2)], [TOOL])
    if text is None:
        return False
    read = form.read(text, _SCHEMAS, opened=False, start=0)
    return [c.arguments for c in read.calls if c.error is None] == [{"word": "w0"}, {"word": "w1"}]


def marked_turn(*, calls: int = 0, reasoning: str | None = None) -> Message:
    """An assistant message whose last words are the mark."""
    turn = assistant("" if calls else MARK, calls=calls, reasoning=reasoning)
    if calls:
        turn["tool_calls"][-1]["function"]["arguments"] = {"word": MARK}
    return turn


def ending(text: str, codec: Codec, form: TurnFormat) -> int | None:
    """Where in `text` the turn of the last mark ends: at the first control token that is no part of the format."""
    at = text.rfind(MARK)
    if at < 0:
        return None
    return next((start for start, name in codec.controls(text, at + len(MARK)) if name not in form.markers), None)


def _end_id(
    template: ChatTemplate, codec: Codec, form: TurnFormat, style: Style, after: Message | None, *, calls: int = 0
) -> int | None:
    talk = [user("x"), marked_turn(calls=calls, reasoning=style.value), *([after] if after else [])]
    try:
        text = template.render(talk, [TOOL] if calls else None, generate=False)
    except ConfigurationError:
        return None
    at = ending(text, codec, form)
    return None if at is None else codec.control[next(codec.controls(text, at))[1]]


def suffix(
    template: ChatTemplate,
    codec: Codec,
    form: TurnFormat,
    lead: Sequence[Message],
    new: Sequence[Message],
    tools: Tools,
) -> str | None:
    """What follows the body of the marked turn that ends `lead`: end of turn, new messages, generation prompt.

    None where the template cannot write it, or writes no control token at the end of a turn.
    """
    try:
        text = template.render([*lead, *new], tools)
    except ConfigurationError:
        return None
    at = ending(text, codec, form)
    return None if at is None else text[at:]
