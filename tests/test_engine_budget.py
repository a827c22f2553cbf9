"""The completion budget, and what becomes of turns: every sampled id is trained once, with its own log-prob."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.environment import Environment
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.sequences import completion_ids, to_sequences
from agentrl.sampler import ScriptedSampler
from agentrl.types import Drift, Outcome, ParsedCall, ParsedTurn, Prompt, Rollout, Task, TrainingSequence, TurnRecord

ASK = [{"role": "user", "content": "what is in the cave"}]


class Reader(Environment):
    run_inline = True

    def __init__(self) -> None:
        self.read_so_far = 0

    def reset(self) -> None:
        self.read_so_far = 0

    def get_reward(self) -> float:
        return float(self.read_so_far)

    def read(self, text: str) -> str:
        """
        Read a text.

        Args:
            text: What.
        """
        self.read_so_far += 1
        return text * 1000 if text == "huge" else text


def play(sampler: ScriptedSampler, renderer: Any, **options: Any) -> Rollout:
    engine = RolloutEngine(sampler, renderer, {None: EnvironmentPool(Reader)}, settings=RolloutSettings(**options))
    rollout, _ = asyncio.run(engine.play(Task(0, 0, 0, {"prompt": ASK}), rollout_id="r", group_id="g"))
    assert not rollout.outcome.failed, rollout.error
    return rollout


def reads(*texts: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "read", "arguments": {"text": text}} for text in texts]}


def sampled(turns: Any) -> list[tuple[int, float]]:
    return [pair for t in turns for pair in zip(t.output_ids, t.output_log_probs, strict=True)]


def trained(sequences: Any) -> list[tuple[int, float]]:
    rows = [zip(s.input_ids, s.old_log_probs, s.completion_mask, strict=True) for s in sequences]
    return [(token, lp) for row in rows for token, lp, mask in row if mask]


# --- the budget ------------------------------------------------------------------------
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_result_that_leaves_no_room_is_rolled_back_whole(tiny, left):
    """With no token left after the results they are rolled back, all of the turn; with 1 or 2 the turn is played."""
    tokenizer = tiny.qwen()
    script = [reads("hello", "hello world"), "the answer is hello"]
    free = play(ScriptedSampler(script, tokenizer=tokenizer), Renderer(tokenizer), max_completion_length=None)
    prompt, second = free.turns[0].prompt_ids, free.turns[1].prompt_ids
    assert prompt is not None and second is not None
    sampler = ScriptedSampler(script, tokenizer=tokenizer)
    rollout = play(sampler, Renderer(tokenizer), max_completion_length=len(second) - len(prompt) + left)
    roles = [message["role"] for message in rollout.messages]
    assert rollout.truncated and rollout.outcome is Outcome.TRUNCATED and rollout.rewards == {"Reader": 2.0}
    if left == 0:
        assert roles == ["user", "assistant"] and len(sampler.requests) == 1
        assert len(rollout.tool_calls) == 2  # they did run, and the record says so
        assert rollout.sequences[0].input_ids == prompt + (rollout.turns[0].output_ids or [])
    else:
        assert roles == ["user", "assistant", "tool", "tool", "assistant"]
        assert sampler.requests[1].max_tokens == left and len(rollout.turns[1].output_ids or ()) == left
        assert len(rollout.completion_ids) == len(second) - len(prompt) + left
    assert rollout.completion == rollout.messages[1:]


@pytest.mark.parametrize("limit", ["completion", "context"])
def test_f041_a_huge_result_is_rolled_back_whole(tiny, limit):
    """F041: neither the short nor the huge result of the turn stays; what the reward sees is what is trained."""
    tokenizer = tiny.qwen()
    options = (
        {"max_completion_length": 120} if limit == "completion" else {"max_completion_length": None, "max_context": 320}
    )
    rollout = play(ScriptedSampler([reads("hello", "huge")], tokenizer=tokenizer), Renderer(tokenizer), **options)
    assert rollout.truncated and [m["role"] for m in rollout.messages] == ["user", "assistant"]
    assert trained(rollout.sequences) == sampled(rollout.turns)
    assert rollout.completion_ids == rollout.turns[0].output_ids


def test_a_turn_budget_bounds_each_turn(tiny):
    tokenizer = tiny.qwen()
    sampler = ScriptedSampler([reads("huge"), "the answer is hello world hello"], tokenizer=tokenizer)
    rollout = play(sampler, Renderer(tokenizer), max_completion_length=60, turn_budget=True)
    assert [request.max_tokens for request in sampler.requests] == [60, 60]
    assert not rollout.truncated and len(rollout.completion_ids) > 200


def test_a_turn_cut_by_the_budget_is_truncated_and_its_calls_do_not_run(tiny):
    tokenizer = tiny.qwen()
    whole = len(tokenizer.encode('<tool_call>\n{"name": "read", "arguments": {"text": "hello"}}\n</tool_call>'))
    rollout = play(
        ScriptedSampler([reads("hello")], tokenizer=tokenizer), Renderer(tokenizer), max_completion_length=whole
    )
    assert rollout.truncated and not rollout.tool_calls and len(trained(rollout.sequences)) == whole


# --- every sampled id once -------------------------------------------------------------
class Paper:
    """A renderer of made-up ids: prompts and results below 1000, and where the script says so it rewrites history."""

    stop_ids = (999,)

    def __init__(self, steps: list[tuple[int, int, bool]]) -> None:
        self.steps, self.turn, self.marks = steps, 0, iter(range(1, 1000))

    def _context(self, count: int) -> list[int]:
        return [next(self.marks) % 998 + 1 for _ in range(count)]

    def first(self, messages: Any, tools: Any) -> list[int]:
        return self._context(3)

    def next(self, held: list[int], messages: Any, new_from: int, tools: Any) -> Prompt:
        _, context, drifts = self.steps[self.turn]
        self.turn += 1
        if not drifts:
            return Prompt([*held, *self._context(context)])
        kept = held[: len(held) // 2]
        return Prompt([*kept, 0, *self._context(context)], Drift(len(kept), "scripted"))

    def writer(self, tools: Any, prompt_ids: Any) -> None:
        return None

    def parse(self, ids: list[int], tools: Any, *, start: int = 0, prompt_ids: Any = None) -> ParsedTurn:
        last = self.turn == len(self.steps) - 1
        made = () if last else (ParsedCall(f"call_{start}", "read", {"text": "x"}),)
        return ParsedTurn({"role": "assistant", "content": ""}, made)

    def max_token_chars(self) -> int:
        return 1 << 30


STEP = st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans())  # ids sampled, ids of the result, drift


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=8))
def test_every_sampled_id_is_trained_exactly_once_with_its_log_prob(steps):
    """F067, F069, F185: a drift forks, and loses or repeats nothing; a trained id saw the prompt it was drawn for."""
    names = iter(range(1000, 10_000))
    script = []
    for count, _, _ in steps:
        ids = [next(names) for _ in range(count)]
        script.append((ids, [-float(i) for i in ids]))
    rollout = play(ScriptedSampler(script), Paper(steps), max_completion_length=None)
    everything = [(i, lp) for ids, lps in script for i, lp in zip(ids, lps, strict=True)]
    assert trained(rollout.sequences) == everything  # unique ids: this is "exactly once", in order
    for sequence in rollout.sequences:
        assert all(
            math.isnan(lp) != mask for lp, mask in zip(sequence.old_log_probs, sequence.completion_mask, strict=True)
        )
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        if turn.output_ids:
            (home,) = [s for s in rollout.sequences if _trained_at(s, turn.output_ids[0]) is not None]
            at = _trained_at(home, turn.output_ids[0])
            assert home.input_ids[:at] == turn.prompt_ids
    forks = sum(drift for _, _, drift in steps[: len(rollout.turns) - 1])
    assert len(rollout.sequences) <= 1 + forks
    assert [t.drift is not None for t in rollout.turns[1:]] == [drift for _, _, drift in steps[:-1]]


def _trained_at(sequence: TrainingSequence, token: int) -> int | None:
    places = [i for i, t in enumerate(sequence.input_ids) if t == token and sequence.completion_mask[i]]
    assert len(places) <= 1
    return places[0] if places else None


PIECES = ["hello", "<|im_end|>", "<tool_call>", "<|im_start|>assistant\n", "\n\n", "é 🙂", "a" * 40, " "]
THOUGHTS = st.lists(st.sampled_from(PIECES), max_size=3).map("".join)
RESULTS = st.lists(st.sampled_from([*PIECES, "</think>", "</tool_response>"]), max_size=3).map("".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(THOUGHTS, RESULTS), min_size=1, max_size=4), st.sampled_from(["own", "original"]))
def test_the_same_with_real_templates_and_hostile_texts(tiny, steps, kind):
    """The Qwen3-like template keeps or rewrites history (it drops earlier reasoning); ids and log-probs stay exact."""
    tokenizer = tiny.qwen(_FORGETFUL if kind == "original" else None)
    stop = tokenizer.eos_token_id
    numbers = iter(range(1, 100_000))
    script = []
    for thought, result in steps:
        text = f"<think>\n{thought}\n</think>\n\n" + _call(result)
        ids = [*(i for i in tokenizer.encode(text) if i != stop), stop]
        script.append((ids, [-next(numbers) / 1024 for _ in ids]))
    script.append(([*tokenizer.encode("hello"), stop], [-1.0] * (len(tokenizer.encode("hello")) + 1)))
    renderer = Renderer(tokenizer, chat_template="original" if kind == "original" else None)
    rollout = play(ScriptedSampler(script), renderer, max_completion_length=None)
    assert trained(rollout.sequences) == sampled(rollout.turns)
    # No text of a tool became a control token: one header for each message, and one for what the policy is to say.
    begin, last = tokenizer.convert_tokens_to_ids("<|im_start|>"), rollout.sequences[-1]
    pairs = zip(last.input_ids, last.completion_mask, strict=True)
    system = kind == "own"  # shows the tools
    assert sum(i == begin and not mask for i, mask in pairs) == system + 2 * len(rollout.turns)
    assert len(rollout.tool_calls) == len(steps)


def _call(text: str) -> str:
    body = json.dumps({"name": "read", "arguments": {"text": text}}).replace("<", "\\u003c")  # or the policy would stop
    return f"<tool_call>\n{body}\n</tool_call>"


_FORGETFUL = (
    "{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{%- if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- by hand ---------------------------------------------------------------------------
def test_f067_clean_wobble_and_rewrite_by_hand():
    """F067: a turn that continues joins, a re-encoded last token (a wobble) and a rewrite fork like any difference."""
    turns = [
        TurnRecord([1, 2], [3, 4], [-0.1, -0.2], {}, "stop", version=7),
        TurnRecord([1, 2, 3, 4, 9], [5, 6], [-0.3, -0.4], {}, "stop", version=5),
        TurnRecord([1, 2, 3, 4, 9, 5, 66, 9], [7], [-0.5], {}, "stop", version=8),
        TurnRecord([1, 2, 9], [8], [-0.6], {}, "stop", version=9),
    ]
    first, wobble, rewrite = to_sequences(turns)
    assert first.input_ids == [1, 2, 3, 4, 9, 5, 6] and first.version == 5
    assert first.completion_mask == [False, False, True, True, False, True, True]
    assert wobble.input_ids == [1, 2, 3, 4, 9, 5, 66, 9, 7] and wobble.completion_mask == [False] * 8 + [True]
    assert rewrite.input_ids == [1, 2, 9, 8] and rewrite.old_log_probs[3] == -0.6 and rewrite.version == 9
    assert completion_ids(to_sequences(turns)) == [3, 4, 9, 5, 6, 7, 8]
    assert trained([first, wobble, rewrite]) == sampled(turns)


def test_turns_without_ids_train_nothing():
    with_ids = TurnRecord([1], [2], [-0.1], {}, "stop")
    for bad in (TurnRecord(None, None, None, {}, "stop"), TurnRecord([1, 2], [3], None, {}, "stop")):
        assert to_sequences([with_ids, bad]) == []
    assert to_sequences([]) == [] and completion_ids([]) == []
    assert to_sequences([TurnRecord([1], [], [], {}, "length")]) == []
