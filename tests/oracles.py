"""A second opinion on chat templates: the families' originals, rendered by transformers, and conversations to compare.

agentrl renders with an environment of its own and, for some families, with templates of its own. Here the same
conversations go through the original template in transformers' environment; `Pair` counts where the texts agree.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from families import template_text, tokenizer

from agentrl.render.codec import Codec
from agentrl.render.jinja_env import compile_template
from agentrl.render.learn import learn
from agentrl.render.template import ChatTemplate, shipped

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

MARK = "zqdonezq"


def _function(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    _function(
        "search",
        "Looks a place up: <b>caves</b>, “höhlen” & 洞窟.",
        ["query"],
        query={"type": "string", "description": "What to look for. "},
        limit={"type": "integer", "description": "How many.", "default": 3},
        exact={"type": "boolean"},
        ratio={"type": "number"},
        near={"type": ["string", "null"], "enum": ["mill", "cave", None]},
    ),
    _function("run", "Runs code.", ["code"], code={"type": "string"}, env={"type": "object"}, files={"type": "array"}),
    _function("wait", "Does nothing.", []),
]
PARAMETERS = {tool["function"]["name"]: set(tool["function"]["parameters"]["properties"]) for tool in TOOLS}
LONG = " ".join(f"Line {i} of a long note: the answer is {i * 37 % 101}, don't forget it." for i in range(60))
TEXTS = (
    "Where is the cave?",
    "Say hello to Zoë — naïve façade, 東京, мир, 😀👩‍👩‍👧.",
    'def f(x):\n    return {"a": [x, "\\n"], \'b\': x < 3 & x > 1}\n',
    "  spaces around, and a tab\there \n\n",
    'A list:\n\n* one\n* two\n\n```json\n{"a": {"b": [1, 2.5, null, true]}}\n```',
    'He said "it\'s {{ 7 * 7 }} {% raw %}" \\ and left.',
    "<b>bold</b> &amp; [INST] <|not_a_token|> </s >",
    LONG,
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"query": "cave"},
    {},
    {"query": 'Zoë\'s “mill” <b> & "more" 東京', "limit": 3, "exact": True, "near": None},
    {
        "code": "print('a')\nif x < 3:\n\tprint(\"b\\n\")",
        "env": {"HOME": "/é", "n": [1, {"k": None}]},
        "files": ["a", "b"],
    },
    {"limit": -2, "exact": False, "ratio": 0.25, "near": "mill"},
    {"code": "pass", "env": {}, "files": []},
)


@dataclass(frozen=True)
class Mix:
    """Which conversations to write. `reasoning`: no turn has any ("none"), every one ("all"), or some ("some").

    `calls`: turns may call tools. `most_calls`: in one turn. `words_with_calls`: a turn may say something and call.
    `queries`: at most so many user turns. `doubled`: a user may speak twice in a row, and right after tool results.
    """

    reasoning: str = "some"
    calls: bool = True
    most_calls: int = 3
    words_with_calls: bool = True
    queries: int = 3
    doubled: bool = False
    arguments: tuple[dict[str, Any], ...] = ARGUMENTS


def conversations(count: int, mix: Mix, seed: int = 0) -> list[tuple[list[Message], Tools]]:
    """`count` conversations with their tools, the same for the same seed; each ends with an assistant turn."""
    return [_conversation(random.Random(f"{seed}/{i}"), mix) for i in range(count)]


def _conversation(draw: random.Random, mix: Mix) -> tuple[list[Message], Tools]:
    messages: list[Message] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": draw.choice(TEXTS)})
    for _ in range(draw.randint(1, mix.queries)):
        messages += _says(draw, 1 + (mix.doubled and draw.random() < 0.3))
        for _ in range(draw.randint(0, 2) if mix.calls else 0):
            turn, results = _calls(draw, mix, sum(m["role"] == "tool" for m in messages))
            messages += [turn, *results, *_says(draw, mix.doubled and draw.random() < 0.2)]
        messages.append(_turn(draw, mix, draw.choice(TEXTS)))
    if any("tool_calls" in message for message in messages):
        return messages, TOOLS
    return messages, draw.choice((None, [], TOOLS[:1], TOOLS[:2])) if mix.calls else None


def _says(draw: random.Random, times: int) -> list[Message]:
    return [{"role": "user", "content": draw.choice(TEXTS)} for _ in range(times)]


def _turn(draw: random.Random, mix: Mix, content: str) -> Message:
    turn: Message = {"role": "assistant", "content": content.strip()}
    if mix.reasoning == "all" or (mix.reasoning == "some" and draw.random() < 0.6):
        turn["reasoning_content"] = draw.choice(TEXTS).strip()
    return turn


def _calls(draw: random.Random, mix: Mix, number: int) -> tuple[Message, list[Message]]:
    turn = _turn(draw, mix, draw.choice(TEXTS) if mix.words_with_calls and draw.random() < 0.4 else "")
    turn["tool_calls"], results = [], []
    for i in range(number, number + draw.randint(1, mix.most_calls)):
        arguments = dict(draw.choice(mix.arguments))
        name = draw.choice([n for n, known in PARAMETERS.items() if arguments.keys() <= known])
        function = {"name": name, "arguments": arguments}
        turn["tool_calls"].append({"id": f"call_{i}", "type": "function", "function": function})
        results.append({"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": draw.choice(TEXTS)})
    return turn, results


@dataclass(frozen=True)
class Original:
    """An original template, rendered by transformers. It gets messages in the shape that it reads: reasoning under
    `thought`, arguments as JSON text where `json_arguments` is set."""

    family: str
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    thought: str = "reasoning_content"
    json_arguments: bool = False

    def shaped(self, message: Message) -> Message:
        """The message as this template reads it."""
        out = {k: v for k, v in message.items() if k != "reasoning_content"}
        if "reasoning_content" in message:
            out[self.thought] = message["reasoning_content"]
        if self.json_arguments and "tool_calls" in message:
            out["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        return out

    def generation(self) -> str:
        """The generation prompt."""
        question = [{"role": "user", "content": "x"}]
        return self(question)[len(self(question, generate=False)) :]

    def __call__(self, messages: Sequence[Message], tools: Tools = None, *, generate: bool = True) -> str:
        shaped = [self.shaped(m) for m in messages]
        made: Any = _tokenizer(self.family, self.name)
        return made.apply_chat_template(
            shaped, tools=tools, tokenize=False, add_generation_prompt=generate, **self.kwargs
        )


_MADE: dict[tuple[str, str], Any] = {}


def _tokenizer(family: str, name: str) -> Any:
    key = (family, name)
    if key not in _MADE:
        _MADE[key] = tokenizer(family, name)
    return _MADE[key]


@dataclass
class Pair:
    """An original and what agentrl uses in its place: the template `ours`, or the original itself (None).

    `ends`: the texts that end an assistant turn; what precedes them is the turn, which the model samples. `against`: a
    text to compare with where the original cannot write it (one that leaves tools out). `alone`: `ours` is used as the
    tokenizer's own template, without the original.
    """

    original: Original
    ours: str | None = None
    ends: tuple[str, ...] = ("<|im_end|>",)
    against: Callable[..., str] | None = None
    alone: bool = False
    counts: dict[str, list[int]] = field(default_factory=dict)
    faults: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.oracle = self.against or self.original
        made = _tokenizer(self.original.family, self.original.name)
        self._codec = codec = Codec(made)
        kwargs = self.original.kwargs
        own = ChatTemplate(template_text(self.original.name), codec, made, kwargs)
        like = learn(own, codec)
        self.template = own
        if self.ours is not None:
            more: dict[str, Any] = {} if self.alone else {"own": own, "generation": like.generation}
            self.template = ChatTemplate(shipped(self.ours), codec, made, kwargs, **more)
            self.template.trusted = self.template.trusted | like.form.markers

    def write(self, messages: Sequence[Message], tools: Tools, *, generate: bool = True) -> str:
        """agentrl's text, with what stands for spelled control tokens undone."""
        text = self.template.render(messages, tools, generate=generate)
        return self._codec.text_of(self._codec.segments(text))

    def compare(self, kind: str, expected: str, got: str) -> None:
        """Counts one comparison."""
        count = self.counts.setdefault(kind, [0, 0])
        count[0] += 1
        count[1] += expected == got
        if expected != got:
            self.faults.append((kind, expected, got))

    def check_prompt(self, messages: Sequence[Message], tools: Tools) -> None:
        """The first prompt."""
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        self.compare("prompt", self.oracle(messages[:first], tools), self.write(messages[:first], tools))

    def check_suffixes(self, messages: Sequence[Message], tools: Tools) -> None:
        """What follows each turn: its end, the messages up to the next turn, the generation prompt."""
        for k, end in turns(messages):
            marked = [*messages[:k], with_mark(messages[k]), *messages[k + 1 : end]]
            if end == k + 1:
                marked.append({"role": "user", "content": "Go on."})
            self.compare(
                "suffix", self._after_mark(self.oracle(marked, tools)), self._after_mark(self.write(marked, tools))
            )

    def _after_mark(self, text: str) -> str:
        at = text.index(MARK) + len(MARK)
        return text[min(i for end in self.ends if (i := text.find(end, at)) >= 0) :]

    def check_turns(
        self, messages: Sequence[Message], tools: Tools, *, when: Callable[[Message], bool] = lambda _: True
    ) -> None:
        """Each turn as the newest one, from the text of its prompt on."""
        for k, _ in turns(messages):
            if when(messages[k]):
                prompt = self.write(messages[:k], tools, generate=False)
                whole = self.write(messages[: k + 1], tools, generate=False)
                kept = self.oracle(messages[:k], tools, generate=False)
                wanted = self.oracle(messages[: k + 1], tools, generate=False)
                assert whole.startswith(prompt) and wanted.startswith(kept)
                self.compare("turn", wanted[len(kept) :], whole[len(prompt) :])

    def check_whole(self, messages: Sequence[Message], tools: Tools) -> None:
        """The whole conversation."""
        self.compare("whole", self.oracle(messages, tools, generate=False), self.write(messages, tools, generate=False))

    def totals(self) -> tuple[int, int]:
        """Comparisons made, and how many found equal texts."""
        return sum(c[0] for c in self.counts.values()), sum(c[1] for c in self.counts.values())


def by_hand(ours: str, original: Original, messages: Sequence[Message]) -> str:
    """What our template writes for prepared messages, with its variables handed in by hand."""
    generation = original.generation()

    def own(some: list[Message], tools: Tools = None) -> str:
        return original(some, tools).removesuffix(generation)

    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    variables: dict[str, Any] = original.kwargs | {"messages": messages, "tools": None, "add_generation_prompt": True}
    variables |= {"before": list(messages[:first]), "rest": list(messages[first:]), "own": own}
    return compile_template(shipped(ours))(**variables, generation=generation)


def turns(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Each assistant turn: where it stands, and where the next one (or the end) stands."""
    at = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    yield from zip(at, [*at[1:], len(messages)], strict=True)


def with_mark(turn: Message) -> Message:
    """The turn with the mark in it: at the end of its words, also where calls follow them."""
    return turn | {"content": f"{turn['content']} {MARK}".strip()}
