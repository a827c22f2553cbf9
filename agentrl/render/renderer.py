"""Messages to tokens and back: the only place that knows about chat templates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.render import probe
from agentrl.render.bridge import Bridge
from agentrl.render.choose import Verdict, choose
from agentrl.render.codec import Codec, Segment, copy_json
from agentrl.render.drift import drift_between
from agentrl.render.formats import THINKS, Schemas, Tagged, TurnFormat
from agentrl.render.heads import Heads
from agentrl.render.images import Images, Media, tokenizer_and_processor
from agentrl.render.learn import Behaviour
from agentrl.render.messages import check_order, check_schemas, check_shown
from agentrl.render.probe import Style
from agentrl.render.spelled import Markers
from agentrl.render.template import ChatTemplate, Tools
from agentrl.render.usable import Complaints
from agentrl.types import Message, ParsedCall, ParsedTurn, Prompt

_CACHED = 1024
_TAIL = 24  # tokens at the end of a prompt that can hold a tag of reasoning
_SHORT = 64  # tokens of a turn that is worth remembering once it is read: policies call tools with the same words


class Renderer:
    """Writes prompts for one tokenizer and template, and reads the turns sampled from them.

    `chat_template`: None takes the tokenizer's own template if its prompts continue what is held and it can write
    tools, else a training template of ours that writes the same prompts; "original" takes the tokenizer's own in any
    case; other text is a template. `chat_template_kwargs` are variables for it. `verdict` says what was chosen and why.

    Text of users and tools never becomes control tokens, whatever it spells.

    Raises:
        ConfigurationError: The template does not parse; or `with_tools` and it cannot write tools or calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        with_tools: bool = True,
    ) -> None:
        tokenizer, processor = tokenizer_and_processor(tokenizer)
        says = Complaints(tokenizer, chat_template)
        says.of_arguments(chat_template, chat_template_kwargs, getattr(tokenizer, "chat_template", None))
        self._codec = codec = Codec(tokenizer)
        self._latest: tuple[list[Message], Tools, Media, list[int]] | None = None  # the last first prompt
        kwargs = dict(chat_template_kwargs or {})
        choice, self.original_template = says.around(
            lambda: choose(tokenizer, codec, kwargs, chat_template, with_tools=with_tools, processor=processor)
        )
        self._choice = choice
        self._images = Images(
            processor,
            codec,
            lambda talk: self._ready()[0].render(talk, generate=False),
            says.model or "the tokenizer",
        )
        self.verdict = choice.verdict if choice else Verdict(False, "the tokenizer has no chat template", "none")
        if with_tools:
            says.of_tools(choice)
        self._bridge = self._heads = None
        if choice is not None:
            choice.template.trusted -= self._images.tokens
            self._bridge = Bridge(choice.template, codec, choice.behaviour)
            self._heads = Heads(choice.template, codec, choice.behaviour, self._with_bos)
        self._faults: dict[str, str | None] = {}  # per set of tools: why its prompts cannot be bridged
        self._schemas: tuple[Tools, Schemas] = (None, {})
        self._turns: dict[tuple[object, ...], ParsedTurn] = {}  # as they were read
        self._ends: dict[int, str] = {}  # by token: its last character
        eos = getattr(tokenizer, "eos_token_id", None)
        ends = sorted(choice.behaviour.ends) if choice else []
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (*ends, eos) if i is not None))
        markers = choice.behaviour.form.markers if choice else frozenset[str]()
        self._markers = Markers(codec, markers)
        self._hidden_ids = codec.control_ids - {codec.control.get(token) for token in codec.tags | markers}
        self._hidden_ids |= frozenset(ends)

    # --- construction ------------------------------------------------------------------
    def _ready(self) -> tuple[ChatTemplate, Behaviour]:
        if self._choice is None:
            raise ConfigurationError(
                "The tokenizer has no chat template, and conversations and tools need one. Set tokenizer.chat_template "
                "or pass chat_template, or use plain string prompts without tools."
            )
        return self._choice.template, self._choice.behaviour

    def describe(self) -> dict[str, str | None]:
        """What was learned about the template: "calls" (the format of calls), "thinking" (the tag that opens
        reasoning), "generation" (the generation prompt); None where it has none."""
        if self._choice is None:
            return {"calls": None, "thinking": None, "generation": None}
        like = self._choice.behaviour
        return {
            "calls": like.form.name if like.calls else None,
            "thinking": (like.think.open if isinstance(like.form, Tagged) else like.form.name) if like.thinks else None,
            "generation": like.generation or None,
        }

    def writer(self, tools: Tools, prompt_ids: Sequence[int]) -> Callable[[Message], str | None] | None:
        """`write_turn` for turns after this prompt; None where they are plainly Hermes."""
        if self._choice is None:
            return None
        like = self._choice.behaviour
        if like.style is Style.PLAIN and like.form.name == "hermes":
            return None
        return lambda message: self.write_turn(message, tools, prompt_ids=prompt_ids)

    def write_turn(
        self, message: Message, tools: Tools = None, *, prompt_ids: Sequence[int] | None = None
    ) -> str | None:
        """The text of an assistant turn as the template writes it, the end of the turn included: what a policy would
        have to sample for `parse` to read `message`. None where the template does not write turns after its own
        generation prompt. `prompt_ids`: what it would be sampled from."""
        _, like = self._ready()
        text = self._turn(message, tools)
        if text is None and "reasoning_content" not in message and like.style is not Style.PLAIN:
            # The prompt has opened a thought: an empty one, or where the template cannot write that, a short one.
            thoughts = (self._turn(message | {"reasoning_content": thought}, tools) for thought in ("", "Hm."))
            text = next((found for found in thoughts if found is not None), None)
        if text is None or prompt_ids is None or like.style is not Style.OPEN:
            return text
        # After some prompts (a tool result, with DeepSeek) no thought is open, so that none has to be closed.
        opened = self._style_after(prompt_ids, like) is Style.OPEN
        return text if opened else text.partition(like.think.close)[2].lstrip("\n") or text

    def _turn(self, message: Message, tools: Tools) -> str | None:
        template, like = self._ready()
        calls = [probe.shaped(call, i) for i, call in enumerate(message.get("tool_calls") or ())]
        message = {"role": "assistant"} | message | ({"tool_calls": calls} if calls else {})
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        after = [probe.tool("found", i) | {"name": name} for i, name in enumerate(names)] or [probe.user("y")]
        try:
            prompt = template.render([probe.user("x")], tools)
            whole = template.render([probe.user("x"), message, *after], tools)
        except ConfigurationError:
            return None
        begin = len(prompt)
        if not whole.startswith(prompt):
            # Some write an empty thought into the prompt and none into the turn.
            begin = prompt.rfind(like.think.open.strip()) if like.style is Style.EMPTY else -1
            if begin < 0 or not whole.startswith(prompt[:begin]):
                return None
        for at, name in self._codec.controls(whole, begin):
            if name not in like.form.markers:
                segments = self._codec.segments(whole[begin:at])
                return self._codec.text_of([*segments, self._codec.control[name]])
        return None

    # --- prompts -----------------------------------------------------------------------
    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of a first prompt, generation prompt included, with exactly one BOS where the tokenizer uses one.

        Raises:
            ConfigurationError: A tool result without a call before it, or the template refuses the messages.
        """
        template, like = self._ready()
        messages, media = self._images.take(messages)
        if self._latest is None or self._latest[:3] != (messages, tools, media):  # a group's members begin alike
            check_order(messages, lambda text: bool(like.form.read(text, {}, opened=False, start=0).calls))
            rendered = template.render(messages, tools)
            check_shown(messages, rendered, lambda content: self._codec.guard(content))
            text = self._images.fill(rendered, messages, media)
            ids = self._with_bos(self._codec.encode(text))
            self._latest = (copy.deepcopy(list(messages)), tools, media, ids)
        return list(self._latest[3])

    def media(self, messages: Sequence[Message]) -> Media:
        """The images of the messages, in order, as a model's forward needs them."""
        return self._images.take(messages)[1]

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

    def next(
        self, held_ids: list[int], messages: Sequence[Message], new_from: int, tools: Tools, media: Media = ()
    ) -> Prompt:
        """The prompt after a sampled turn. `held_ids` are its prompt and what was sampled; ``messages[new_from:]`` came
        after it, and ``messages[new_from - 1]`` is the turn. Without drift the ids start with `held_ids`. `media` are
        the images of the held prompt."""
        template, _ = self._ready()
        turn = messages[new_from - 1] if new_from > 0 else {}
        if turn.get("role") != "assistant":
            raise ValueError(f"messages[{new_from - 1}] must be the assistant turn that was sampled last.")
        messages, shown = self._images.take(messages, media)
        assert self._bridge is not None and self._heads is not None
        if not self.verdict.preserving:
            return self._whole(held_ids, messages, new_from, tools, None, shown)
        fault = self._fault(tools, template)
        head = self._heads.of(messages, tools)
        if fault is None and not self._heads.fits(head, held_ids, messages):
            fault = "the tools of this conversation changed: the held prompt does not begin as one with these tools"
        if fault is None and head.usual:
            new, images = messages[new_from:], shown[len(media) :]
            fill = (lambda text: self._images.fill(text, new, images)) if images else None
            suffix = self._bridge.ids(turn, new, tools, fill)
            if suffix is not None:
                # A turn that was cut, or stopped by another token, lacks the template's end; appended here, it is no
                # sampled token and is not trained.
                at = 1 if held_ids and held_ids[-1] == suffix[0] else 0
                return Prompt([*held_ids, *(suffix[at:] if at else suffix)], media=shown)
        return self._whole(held_ids, messages, new_from, tools, fault, shown)

    def _fault(self, tools: Tools, template: ChatTemplate) -> str | None:
        """None where prompts with these very tools continue what is held; the verdict was found with other ones."""
        key = template.tools_key(tools)
        if key not in self._faults:
            if len(self._faults) >= _CACHED:
                self._faults.clear()
            _, like = self._ready()
            found = probe.rewriting(template, tools or None, like.style, several=like.several)
            self._faults[key] = found and f"with these tools the chat template rewrites history ({found})"
        return self._faults[key]

    def _whole(
        self,
        held: list[int],
        messages: Sequence[Message],
        new_from: int,
        tools: Tools,
        why: str | None,
        media: Media,
    ) -> Prompt:
        """The conversation rendered as a whole; continues the held ids where its text continues theirs."""
        try:
            rendered = self._images.fill(self._ready()[0].render(messages, tools), messages, media)
        except ConfigurationError as e:
            return self._anyhow(held, messages, new_from, tools, media, e)
        segments = self._codec.segments(rendered)
        text, before = self._codec.text_of(segments), self._codec.decode(held)
        bos = self._codec.bos_id
        if bos is not None and held[:1] == [bos] and segments[:1] != [bos]:
            before = self._codec.decode(held[1:])
        rest = _after(segments, len(before), self._codec) if text.startswith(before) else None
        if rest is not None:
            return Prompt([*held, *self._codec.encode_segments(rest)], media=media)
        ids = self._with_bos(self._codec.encode(rendered))
        return Prompt(ids, drift_between(held, ids, why or self._why_rewritten(), self.decode), media)

    def _anyhow(
        self,
        held: list[int],
        messages: Sequence[Message],
        new_from: int,
        tools: Tools,
        media: Media,
        refused: ConfigurationError,
    ) -> Prompt:
        """The held ids and what follows a turn like the sampled one, where the template refuses that turn itself.

        Policies write turns that a template's author did not think of; that is no reason to stop a run.
        """
        assert self._bridge is not None
        turn, new = messages[new_from - 1], messages[new_from:]
        call = {"role": "assistant", "content": "", "tool_calls": [{}]}
        bare = {key: value for key, value in turn.items() if key not in ("reasoning_content", "content")}
        for like in (turn, bare, call | {"reasoning_content": "Hm."}, call):
            suffix = None if media else self._bridge.ids(like, new, tools)
            if suffix is not None:
                return Prompt([*held, *suffix[held[-1:] == suffix[:1] :]], media=media)
        raise SamplerError(f"The conversation cannot go on after this turn: {refused}") from refused

    def _why_rewritten(self) -> str:
        if self.verdict.preserving:
            return "the template writes these messages in a way that no check covers"
        return f"the chat template rewrites history (seen at construction: {self.verdict.why})"

    # --- turns -------------------------------------------------------------------------
    def parse(
        self, output_ids: list[int], tools: Tools, *, start: int = 0, prompt_ids: Sequence[int] | None = None
    ) -> ParsedTurn:
        """The turn that sampled ids say. Calls are named ``call_<n>`` from `start`; without tools nothing is a call.

        `prompt_ids`: what the turn was sampled from; its end says whether reasoning was open already, which families
        do differently after a question and after a tool result. Default: as after a question.
        """
        style = self._choice.behaviour.style if self._choice else Style.PLAIN
        if prompt_ids is not None and self._choice is not None:
            style = self._style_after(prompt_ids, self._choice.behaviour)
        if self._choice is None or len(output_ids) > _SHORT:
            return self._read(output_ids, tools, start, style)
        key = (*output_ids, start, style, self._choice.template.tools_key(tools))
        turn = self._turns.get(key)
        if turn is None:
            if len(self._turns) >= _CACHED:
                self._turns.clear()
            turn = self._turns[key] = self._read(output_ids, tools, start, style)
        return _copied(turn)

    def _read(self, output_ids: list[int], tools: Tools, start: int, style: Style) -> ParsedTurn:
        form: TurnFormat = self._choice.behaviour.form if self._choice else Tagged(THINKS[0], None)
        opened = style is Style.OPEN
        schemas, text = self._names(tools), self.plain_text(output_ids)
        if self._markers.spelled(text, output_ids):
            shown = [i for i in output_ids if i not in self._hidden_ids]
            turn = self._markers.read(shown, lambda text: form.read(text, schemas, opened=opened, start=start))
        else:
            turn = form.read(text, schemas, opened=opened, start=start)
        if self._choice is not None and self._choice.behaviour.calls and not self._choice.behaviour.several:
            turn = _first_call_only(turn)
        # The prompt closed an empty think block: the turn says so, so that it renders the same.
        if style is Style.EMPTY and "reasoning_content" not in turn.message:
            turn.message["reasoning_content"] = ""
        return turn

    def _style_after(self, prompt_ids: Sequence[int], like: Behaviour) -> Style:
        if self._ends_in_a_word(prompt_ids):
            return Style.PLAIN
        end = self._codec.decode(list(prompt_ids[-_TAIL:])).rstrip()
        if end.endswith(like.think.open.strip()):
            return Style.OPEN
        return Style.EMPTY if end.endswith(like.think.close.strip()) else Style.PLAIN

    def _ends_in_a_word(self, ids: Sequence[int]) -> bool:
        """True where the text of the ids surely ends in a letter or digit and white space: in no tag of reasoning."""
        for token in reversed(ids[-_TAIL:]):
            last = self._ends.get(token)
            if last is None:
                last = self._ends[token] = self._codec.decode([token]).rstrip()[-1:]
            if last:
                return last.isalnum()
        return False

    def _names(self, tools: Tools) -> Schemas | None:
        if not tools:
            return None
        if self._schemas[0] is not tools:
            check_schemas(tools)
            functions = [tool.get("function", tool) for tool in tools]
            self._schemas = (tools, {f["name"]: f.get("parameters") or {} for f in functions})
        return self._schemas[1]

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


def _copied(turn: ParsedTurn) -> ParsedTurn:
    """The turn without a dict or list in common: its readers may change what they are given."""
    calls = [ParsedCall(call.id, call.name, copy_json(call.arguments), call.error) for call in turn.calls]
    return ParsedTurn(copy_json(turn.message), tuple(calls))


def _first_call_only(turn: ParsedTurn) -> ParsedTurn:
    """The turn with every good call after the first refused: its template cannot write them."""
    good = [call for call in turn.calls if call.error is None]
    if len(good) < 2:
        return turn
    why = "This tool call was not run: only one call per turn is possible here. Call it in your next turn."
    calls = tuple(replace(c, error=why) if c.error is None and c is not good[0] else c for c in turn.calls)
    return ParsedTurn(turn.message | {"tool_calls": turn.message["tool_calls"][:1]}, calls)


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
