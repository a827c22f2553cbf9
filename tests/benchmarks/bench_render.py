"""What prompts cost: run as `python tests/benchmarks/bench_render.py`, with a tokenizer's folder for a real vocabulary.

An episode of tool calls is played twice with the same messages: bridged (`Renderer.next`, as the engine does), and as
one would without: `apply_chat_template(tokenize=True)` of the whole conversation before each turn. Characters are
counted where they reach the tokenizer; seconds are process CPU, the best of several episodes that share no result.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_tokenizers import qwen

from agentrl.render import Renderer
from agentrl.types import Message

NOTES = itertools.count(1)  # no two texts are the same: caches of texts must not help
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"name": "search", "description": "Search a place.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


class Counting:
    """A `tokenizers.Tokenizer` that counts the characters that it is given."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.characters = inner, 0

    def encode(self, text: str, *args: Any, **kwargs: Any) -> Any:
        self.characters += len(text)
        return self._inner.encode(text, *args, **kwargs)

    def encode_batch(self, texts: list[Any], *args: Any, **kwargs: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._inner.encode_batch(texts, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def qwen3_template() -> str:
    """Qwen3's own template, as the dev extra ships it."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None, "install the dev extra"
    return (Path(found.origin).parent / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")


def steps(turns: int) -> list[tuple[Message, Message]]:
    """(assistant turn, tool result) for each turn; about 300 and 500 characters."""
    made = []
    for i in range(turns):
        note = next(NOTES)
        call = {"name": "search", "arguments": {"place": f"cave {note}"}}
        turn: Message = {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"The note number {note} says that the answer is in a place that I have not seen. "
            * 2,
            "tool_calls": [{"id": f"call_{i}", "type": "function", "function": call}],
        }
        content = f"In the cave number {note} a note says: the mill knows the answer to question {i}.\n" * 6
        made.append((turn, {"role": "tool", "name": "search", "tool_call_id": f"call_{i}", "content": content}))
    return made


def opening() -> list[Message]:
    return [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": f"Find it, {next(NOTES)}."}]


Episode = tuple[list[Message], list[tuple[Message, Message]]]
Play = Callable[[], list[int]]


def episode(turns: int) -> Episode:
    start = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": f"Find it, {next(NOTES)}."}]
    return start, steps(turns)


def bridged(renderer: Renderer, tokenizer: Any, one: Episode) -> Play:
    """Plays an episode whose prompts continue what is held, and gives the last; sampled ids are made before."""
    start, talk = one
    texts = [renderer.write_turn(turn, TOOLS) or "" for turn, _ in talk]
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def play() -> list[int]:
        messages = list(start)
        ids = renderer.first(messages, TOOLS)
        for (turn, result), output in zip(talk, outputs, strict=True):
            messages += [turn, result]
            prompt = renderer.next([*ids, *output], messages, len(messages) - 1, TOOLS)
            assert prompt.drift is None
            ids = prompt.ids
        return ids

    return play


def whole(_: Renderer, tokenizer: Any, one: Episode) -> Play:
    """Plays the same, each prompt rendered and tokenised from the first message on."""
    start, talk = one

    def play() -> list[int]:
        messages = list(start)
        ids: list[int] = []
        for new in [(), *talk]:
            messages += new
            ids = tokenizer.apply_chat_template(
                messages, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        return ids

    return play


def measure(build: Any, renderer: Renderer, tokenizer: Any, turns: int, repeats: int) -> tuple[int, float]:
    """(characters tokenised, CPU seconds) of one episode, after one to warm up."""
    plain, backend = renderer._codec._plain, tokenizer._tokenizer
    best, characters = float("inf"), 0
    for n in range(repeats + 1):
        play = build(renderer, tokenizer, episode(turns))
        counters = Counting(plain), Counting(backend)
        renderer._codec._plain, tokenizer._tokenizer = counters  # type: ignore[assignment]
        try:
            started = time.process_time()
            play()
            seconds = time.process_time() - started
        finally:
            renderer._codec._plain, tokenizer._tokenizer = plain, backend
        characters = sum(counter.characters for counter in counters)
        best = min(best, seconds) if n else best
    return characters, best


def report(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template = qwen3_template()
    tokenizer.model_max_length = 1 << 30  # or transformers warns
    started = time.process_time()
    renderer = Renderer(tokenizer)
    print(f"{name}: {len(tokenizer)} tokens, renderer made in {time.process_time() - started:.2f} s of CPU")
    one = episode(64)
    same = bridged(renderer, tokenizer, one)()
    assert same == whole(renderer, tokenizer, one)(), "the two ways must give the same ids"
    few, short = measure(bridged, renderer, tokenizer, 8, 15)
    characters, seconds = measure(bridged, renderer, tokenizer, 64, 7)
    most, longest = measure(whole, renderer, tokenizer, 64, 2)
    print(f"  64 turns, {len(same)} ids: bridged {characters:,} characters tokenised, {1000 * seconds:.1f} ms")
    print(f"  the same, whole each turn: {most:,} characters tokenised, {1000 * longest:.1f} ms")
    times = f"{most / characters:.1f} times the characters, {longest / seconds:.1f} times the CPU"
    print(f"  whole / bridged: {times} (target >= 20 each)")
    print(f"  bridged: t(64) / t(8) = {seconds / short:.2f} (target <= 9), characters {characters / few:.2f}")


def main() -> None:
    report("tiny Qwen3", qwen())
    for folder in sys.argv[1:]:
        from transformers import AutoTokenizer

        report(folder, AutoTokenizer.from_pretrained(folder))


if __name__ == "__main__":
    main()
