"""A short episode played through a renderer without a model: what is held, what would be trained, where it forks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.errors import ConfigurationError
from agentrl.render import Renderer
from agentrl.render.formats import THINKS
from agentrl.types import Message, TurnRecord

Kind = Literal["prompt", "trained", "between"]

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where to search."}},
            "required": ["place"],
        },
    },
}
_OPENING: list[Message] = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "Find the treasure."},
]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the episode: a whole prompt, a sampled turn, or what a bridge put between two turns."""

    kind: Kind
    turn: int
    ids: list[int]


@dataclass(slots=True)
class SampleEpisode:
    """The turns of the episode, and what could not be shown."""

    turns: list[TurnRecord] = field(default_factory=list)
    after: list[str] = field(default_factory=list)  # per turn but the first, the role of what came before: tool or user
    left_out: list[str] = field(default_factory=list)  # sentences
    faults: list[str] = field(default_factory=list)  # sentences: the template cannot be trained with

    def forks(self, role: str) -> tuple[int, int]:
        """How many of the turns that follow messages of this role start a new sequence, and how many there are."""
        drifts = [t.drift for t, after in zip(self.turns[1:], self.after, strict=True) if after == role]
        return sum(drift is not None for drift in drifts), len(drifts)

    def pieces(self) -> Iterator[Piece]:
        """The episode as stretches of tokens, in order; a turn with a drift begins with its whole prompt."""
        held: list[int] = []
        for number, turn in enumerate(self.turns):
            prompt, output = turn.prompt_ids or [], turn.output_ids or []
            if number == 0 or turn.drift is not None:
                yield Piece("prompt", number, prompt)
            else:
                yield Piece("between", number, prompt[len(held) :])
            yield Piece("trained", number, output)
            held = [*prompt, *output]


def sample_value(schema: Mapping[str, Any]) -> Any:
    """A small value that fits a JSON schema.

    >>> sample_value({"type": "object", "properties": {"n": {"type": "integer"}, "to": {"enum": ["a", "b"]}}})
    {'n': 1, 'to': 'a'}
    """
    if schema.get("enum"):
        return schema["enum"][0]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return sample_value(options[0])
    kinds = schema.get("type", "string")
    kind = str(kinds[0] if isinstance(kinds, list) and kinds else kinds)
    if kind == "object":
        return {name: sample_value(sub or {}) for name, sub in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [sample_value(schema.get("items") or {})]
    least = schema.get("minimum", 1)
    return {"integer": least, "number": float(least), "boolean": True, "null": None}.get(kind, "cave")


def sample_turns(tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Assistant turns: a call, two calls, an answer, and an answer to a second question."""

    def call(i: int) -> dict[str, Any]:
        tool = tools[min(i, len(tools) - 1)].get("function", {})
        arguments = sample_value(tool.get("parameters") or {"type": "object"})
        return {"id": f"call_{i}", "type": "function", "function": {"name": tool["name"], "arguments": arguments}}

    def turn(thought: str, content: str, *calls: dict[str, Any]) -> Message:
        made: Message = {"role": "assistant", "content": content, "reasoning_content": thought}
        return made | ({"tool_calls": list(calls)} if calls else {})

    asked = [turn("Where could it be?", "", call(0)), turn("Two are left.", "", call(0), call(1))] if tools else []
    return [*asked, turn("That is it.", "It is in the cave."), turn("They ask again.", "Yes, it is.")]


def play_sample(renderer: Renderer, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> SampleEpisode:
    """The sample episode, as the rollout engine would hold it.

    Raises:
        ConfigurationError: The template cannot write the prompts.
    """
    schemas = list(tools) or None
    episode, drift = SampleEpisode(), None
    messages, ids = _begin(renderer, schemas, episode)
    for wanted in sample_turns(tools):
        output = _output(renderer, tokenizer, wanted, schemas, episode)
        if output is None:
            continue
        read = renderer.parse(output, schemas)
        episode.turns.append(TurnRecord(ids, output, [0.0] * len(output), read.message, "stop", drift=drift))
        new_from = len(messages) + 1
        messages += [read.message, *_answers(read.message)]
        following = renderer.next([*ids, *output], messages, new_from, schemas)
        episode.after.append(messages[-1]["role"])
        ids, drift = following.ids, following.drift
    del episode.after[-1:]  # nothing was sampled after the last one
    return episode


def _begin(
    renderer: Renderer, tools: list[dict[str, Any]] | None, episode: SampleEpisode
) -> tuple[list[Message], list[int]]:
    try:
        return list(_OPENING), renderer.first(_OPENING, tools)
    except ConfigurationError:  # some families have no system messages
        messages = _OPENING[1:]
        ids = renderer.first(messages, tools)
        episode.left_out.append("The template takes no system message; put such text into the user's.")
        return messages, ids


def _answers(turn: Message) -> list[Message]:
    calls = turn.get("tool_calls") or ()
    if not calls:
        return [{"role": "user", "content": "Is it?"}]
    return [
        {"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": "A note says: cave."}
        for c in calls
    ]


def _output(
    renderer: Renderer, tokenizer: Any, wanted: Message, tools: list[dict[str, Any]] | None, episode: SampleEpisode
) -> list[int] | None:
    """Ids that a policy would sample for this turn; None where the template has no way to write it."""
    calls = wanted.get("tool_calls", [])
    for shown in (calls, calls[:1]) if len(calls) > 1 else (calls,):
        text = _turn_text(renderer, wanted | ({"tool_calls": shown} if shown else {}), tools)
        if text is None:
            continue
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        read = [(call.name, call.arguments) for call in renderer.parse(ids, tools).calls if call.error is None]
        if read == [(call["function"]["name"], call["function"]["arguments"]) for call in shown]:
            if len(shown) < len(calls):
                episode.left_out.append("The template does not write two calls in one turn.")
            return ids
    what = {0: "an answer", 1: "a call"}.get(len(calls), "two calls")
    if len(calls) == 1:
        episode.faults.append("a call that the template writes cannot be read back")
    episode.left_out.append(f"The turn with {what} is left out: the template has no way to write it that can be read.")
    return None


def _written(renderer: Renderer, message: Message, tools: list[dict[str, Any]] | None) -> str | None:
    """The turn's text as the template writes it, its end included."""
    text, like = renderer.write_turn(message, tools), renderer.describe()
    begun = like["generation"] or ""
    if text is not None:
        return text
    # The template writes the beginning otherwise once there is a turn: look for the turn itself, also without the tag
    # that the generation prompt opens and an earlier turn may not have.
    try:
        whole = renderer.decode(renderer.first([*_OPENING[1:], message, *_answers(message)], tools))
    except ConfigurationError:
        return None
    stops = [renderer.decode([i]) for i in renderer.stop_ids]
    for head in (begun, begun.rstrip().removesuffix((like["thinking"] or "").strip())):
        start = whole.find(head) + len(head)
        ends = [at + len(stop) for stop in stops if (at := whole.find(stop, start)) >= 0]
        if head and head in whole and ends:
            return whole[start : min(ends)]
    return None


def _turn_text(renderer: Renderer, message: Message, tools: list[dict[str, Any]] | None) -> str | None:
    """The turn's text with its reasoning, also where the template would drop that from an earlier turn."""
    like, thought = renderer.describe(), message["reasoning_content"]
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    tags = next((think for think in THINKS if think.open == like["thinking"]), None)
    begun = like["generation"] or ""
    if like["thinking"] is None:
        return _written(renderer, bare, tools)
    if tags is not None and tags.close.strip() in begun:  # the prompt holds an empty block: no room for reasoning
        return _written(renderer, bare | {"reasoning_content": ""}, tools)
    text = _written(renderer, message, tools)
    if text is not None and thought in text:
        return text
    text = _written(renderer, bare, tools) if text is None else text
    if text is None or tags is None:
        return text
    opening = "" if begun.rstrip().endswith(tags.open.strip()) else f"{tags.open.strip()}\n"
    return f"{opening}{thought}\n{tags.close.strip()}\n\n{text}"
