"""Forks: every sampled token is trained once, whatever a template rewrites, and a fork changes no weight."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import pathlib
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.environment import Environment
from agentrl.objective import LossConfig, policy_loss
from agentrl.pool import EnvironmentPool
from agentrl.record import episode_to_dict, rollout_from_dict
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer, name_sources
from agentrl.rollout.sequences import rendered_again, to_sequences
from agentrl.sampler import ScriptedSampler
from agentrl.train.generation import AdvantageSettings, play_cycle
from agentrl.train.rows import TrainItem, make_row
from agentrl.train.step import StepBatch, step_weights
from agentrl.types import (
    Outcome,
    Rollout,
    RolloutGroup,
    SampleOutput,
    SampleRequest,
    Task,
    TurnRecord,
)

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


# --- templates and the engine ----------------------------------------------------------
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{%- endif %}
{%- if 'count' in flags %}{{- '<|im_start|>system\n' ~ messages | length ~ ' messages<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(turn=-1, tool=-1) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{%- set last.turn = loop.index0 %}{%- endif %}
    {%- if message.role == 'tool' %}{%- set last.tool = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = (message.content | trim) if 'trim' in flags else message.content %}
    {%- if 'hide' in flags and message.role == 'tool' and loop.index0 < last.tool %}{%- set text = '...' %}{%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.reasoning_content is string and ('forget' not in flags or loop.index0 == last.turn) %}
        {{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}
    {%- endif %}
    {{- text }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n' if text or not loop.first or 'wobble' in flags }}
        {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson(indent=1 if 'indent' in flags else none) }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
REWRITES = ("count", "forget", "hide")  # history changes
WOBBLES = ("trim", "indent", "wobble")  # a turn is written otherwise than it was sampled


@functools.lru_cache
def qwen3_template() -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None, "the dev extra brings trl"
    return (pathlib.Path(found.origin).parent / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")


@functools.lru_cache
def tokenizer() -> Any:
    import tiny_tokenizers

    return tiny_tokenizers.qwen(qwen3_template())


@functools.lru_cache
def renderer(kind: str | frozenset[str]) -> Renderer:
    """Of Qwen3's own template ("own": replaced, "original": kept), or of `TEMPLATE` with these flags."""
    if isinstance(kind, str):
        return Renderer(tokenizer(), chat_template="original" if kind == "original" else None)
    text = "{%- set flags = " + json.dumps(sorted(kind)) + " %}" + TEMPLATE
    return Renderer(tokenizer(), chat_template=text)


def test_the_templates_rewrite_what_they_should() -> None:
    assert renderer("own").verdict.preserving and not renderer("original").verdict.preserving
    assert renderer(frozenset(WOBBLES)).verdict.preserving
    for flag in REWRITES:
        assert not renderer(frozenset({flag})).verdict.preserving, flag


class Places(Environment):
    run_inline = True

    def reset(self, answers: list[str], seed: int = 0) -> None:
        self.answers = answers
        self.asked = 0

    def search(self, place: str) -> str:
        """
        Search a place.

        Args:
            place: Where to search.
        """
        self.asked += 1
        return self.answers[(self.asked - 1) % len(self.answers)]


ASK = [{"role": "user", "content": "find it"}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"place": "cave"}}\n</tool_call>'


def play(
    kind: str | frozenset[str], script: Any, answers: tuple[str, ...] = ("a note",), prompt: Any = ASK, size: int = 1,
    reward: Any = None, **limits: Any,
) -> list[Rollout]:  # fmt: skip
    """Rollouts of one group through the real engine; `script` gives each request ids and a finish reason."""
    number = iter(range(1 << 30))

    def sample(request: SampleRequest) -> SampleOutput:
        ids, reason = script(request)
        ids = ids[: request.max_tokens]
        log_probs = [-1.0 - next(number) / 1024 for _ in ids]  # no two are alike
        return SampleOutput(ids, log_probs, reason)

    limits = {"max_completion_length": 1 << 16, "max_attempts": 1} | limits
    engine = RolloutEngine(
        ScriptedSampler(sample), renderer(kind), {None: EnvironmentPool(Places)}, settings=RolloutSettings(**limits)
    )
    row = {"prompt": prompt, "answers": list(answers)}
    plan = GroupPlan("g", Task(0, 0, 0, row), size)
    scorer = Scorer(name_sources([reward] if reward else []))
    return list(play_and_close(engine, scorer, [plan])[0].rollouts)


def said(*texts: str) -> Any:
    """A script of whole turns, the end-of-turn token added."""

    def script(request: SampleRequest) -> tuple[list[int], str]:
        text = texts[min(request.seed[-1], len(texts) - 1)]
        return tokenizer().encode(text + "<|im_end|>", add_special_tokens=False), "stop"

    return script


def think(text: str, thought: str = "hello") -> str:
    return f"<think>\n{thought}\n</think>\n\n{text}"


def check_exactly_once(played: Rollout) -> None:
    """Each sampled token, with its log-prob, is trained once, after exactly the tokens that the sampler saw."""
    turns, sequences = played.turns, played.sequences
    outputs = [(i, lp) for t in turns for i, lp in zip(t.output_ids or (), t.output_log_probs or (), strict=True)]
    trained: list[tuple[int, float]] = []
    contexts: list[list[int]] = []
    for s in sequences:
        assert len(s.input_ids) == len(s.completion_mask) == len(s.old_log_probs)
        assert not s.completion_mask[0] and any(s.completion_mask)
        for t, mask in enumerate(s.completion_mask):
            assert mask is not math.isnan(s.old_log_probs[t])
            if mask:
                trained.append((s.input_ids[t], s.old_log_probs[t]))
                contexts.append(s.input_ids[:t])
    assert trained == outputs  # log-probs are unique: once each, in order, nothing else
    want = [[*(t.prompt_ids or ()), *(t.output_ids or ())[:n]] for t in turns for n in range(len(t.output_ids or ()))]
    assert contexts == want


def check_transitions(played: Rollout) -> None:
    """A prompt continues the held ids, or its drift says exactly where it does not."""
    forks = 0
    assert played.turns[0].drift is None
    for before, after in zip(played.turns, played.turns[1:], strict=False):
        held = [*(before.prompt_ids or ()), *(before.output_ids or ())]
        ids = after.prompt_ids or []
        continues = ids[: len(held)] == held
        assert (after.drift is None) == continues
        if after.drift is not None:
            at, forks = after.drift.at, forks + 1
            assert after.drift.held == len(held) and held[:at] == ids[:at] and held[at : at + 1] != ids[at : at + 1]
            assert after.drift.why and (after.drift.held_text or after.drift.new_text)
    assert sum(count > 0 for count in rendered_again(played.turns)) == forks
    filled = [t for t in played.turns if t.output_ids]
    assert len(played.sequences) <= 1 + forks and bool(played.sequences) == bool(filled)


TEXTS = ["", "hello", " the answer is \n", "é漢🙂 ", "a\n\n", "<tool_response>", "{}", "</think>", "\ufeff 12"]
MALFORMED = [
    "<tool_call>\n{}\n</tool_call>",
    '<tool_call>\n{"name": "search", "argum',
    "<tool_call>nothing</tool_call>",
]
UNKNOWN = '<tool_call>\n{"name": "fly", "arguments": {"ü": [1, {"a": null}]}}\n</tool_call>'
SPACED = '<tool_call>{"arguments":{"place":"cave"},"name":"search"}</tool_call>'
calls = st.sampled_from([CALL, SPACED, UNKNOWN, f"{CALL}\n{CALL}", f"{CALL}\n{MALFORMED[0]}", *MALFORMED])
thoughts = st.sampled_from(["", "<think>\n\n</think>\n\n", think(""), think("", "é?\n\nso"), "<think>\nnever closed "])
ends = st.sampled_from(["<|im_end|>"] * 6 + ["", "<|endoftext|>"])


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[list[int], str]]:
    """Turns as ids, most of them with calls, some cut, some of ids that no encoder would choose."""
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(thoughts) + draw(st.sampled_from(TEXTS)) + draw(calls) + draw(st.sampled_from(["", "\n", " ok"]))
        ids = tokenizer().encode(text, add_special_tokens=False)
        if draw(st.integers(0, 3)) == 0:
            ids = draw(st.lists(st.integers(0, len(tokenizer()) - 1), max_size=6)) + ids
        reason = "length" if draw(st.integers(0, 11)) == 0 else "stop"
        end = "" if reason == "length" else draw(ends)
        turns.append((ids + tokenizer().encode(end, add_special_tokens=False), reason))
    final = draw(thoughts) + draw(st.sampled_from(TEXTS)) + draw(ends)
    return [*turns, (tokenizer().encode(final, add_special_tokens=False), "stop")]


kinds = st.sampled_from(["own", "original"]) | st.frozensets(st.sampled_from([*REWRITES, *WOBBLES]))
answers = st.lists(st.sampled_from(["a note", "", " é漢 \n", "<|im_end|>", "x" * 40]), min_size=1, max_size=3)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kinds, scripts(), answers, st.sampled_from([1 << 16, 200]))
def test_every_sampled_token_is_trained_exactly_once_F185(
    kind: Any, turns: list[tuple[list[int], str]], results: list[str], budget: int
) -> None:
    def script(request: SampleRequest) -> tuple[list[int], str]:
        return turns[min(request.seed[-1], len(turns) - 1)]

    (played,) = play(kind, script, tuple(results), max_completion_length=budget, max_tool_calling_iterations=5)
    assert not played.outcome.failed, played.error
    check_exactly_once(played)
    check_transitions(played)
    back = rollout_from_dict(json.loads(json.dumps(episode_to_dict(played))))
    assert [t.drift for t in back.turns] == [t.drift for t in played.turns]
    assert back.sequences == played.sequences or any(s.old_log_probs for s in back.sequences)


def test_a_template_that_drops_reasoning_forks_and_says_where_F185() -> None:
    (played,) = play(frozenset({"forget"}), said(think(f"So.\n{CALL}"), think(CALL), "the answer is hello"))
    check_exactly_once(played)
    check_transitions(played)
    # Turn 0 keeps its reasoning while it is the newest one, and loses it once turn 1 stands.
    assert [t.drift is not None for t in played.turns] == [False, False, True]
    drift = played.turns[2].drift
    assert drift is not None and drift.held_text.startswith("<think>") and drift.new_text.startswith("So.")
    assert drift.before.endswith("<|im_start|>assistant\n")
    assert len(played.sequences) == 2


def test_reasoning_is_kept_where_the_training_template_replaces_the_original_F067() -> None:
    script = said(think(CALL, ""), CALL, "hello")
    (ours,), (theirs,) = play("own", script), play("original", script)
    assert [t.drift for t in ours.turns] == [None] * 3 and len(ours.sequences) == 1
    # Qwen3's own template leaves out a block that is empty.
    assert [t.drift is not None for t in theirs.turns] == [False, True, False] and len(theirs.sequences) == 2
    check_exactly_once(theirs)


def test_a_wobble_forks_only_where_a_whole_rendering_is_compared_F067() -> None:
    """The template writes a line break before the call that the policy did not sample."""
    script = said(CALL, "hello")
    (bridged,), (whole,) = (play(frozenset(flags), script) for flags in (["wobble"], ["wobble", "hide"]))
    assert bridged.turns[1].drift is None and len(bridged.sequences) == 1
    drift = whole.turns[1].drift
    assert drift is not None and drift.before.endswith("<|im_start|>assistant")
    assert drift.held_text.startswith("\n<tool_call>") and drift.new_text.startswith("\n\n<tool_call>")
    assert [len(r.sequences) for r in (bridged, whole)] == [1, 2]
    check_exactly_once(whole)


def test_each_turns_ids_hold_the_generation_prompt_F047() -> None:
    for kind in ("own", "original", frozenset({"count"}), frozenset[str]()):
        (played,) = play(kind, said(CALL, CALL, "hello"))
        assert len(played.turns) == 3
        for t in played.turns:
            assert renderer(kind).decode(t.prompt_ids or []).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_assistant_messages_of_the_prompt_are_never_trained_F051() -> None:
    shot = [*ASK, {"role": "assistant", "content": think("in the mill")}, {"role": "user", "content": "and now?"}]
    for kind in ("own", "original", frozenset({"forget", "count"})):
        (played,) = play(kind, said(think(CALL), "in the cave"), prompt=shot)
        check_exactly_once(played)
        trained = [i for s in played.sequences for i, m in zip(s.input_ids, s.completion_mask, strict=True) if m]
        text = renderer(kind).decode(trained)
        assert "mill" not in text and text.count("<|im_end|>") == 2
        assert played.group_id == "g"  # named by the plan, not by any text
        assert "in the mill" in renderer(kind).decode(played.turns[0].prompt_ids or [])


# --- groups, advantages, weights -------------------------------------------------------
def forking(request: SampleRequest) -> tuple[list[int], str]:
    """Member 0 calls twice and then answers, the others answer at once."""
    first = request.conversation_id.startswith("g.0/")
    return said(*([CALL, CALL, "hello"] if first else ["hello"]))(request)


def test_a_group_with_a_forked_rollout_completes_F069() -> None:
    played = play(frozenset({"count"}), forking, size=3)
    assert [len(r.sequences) for r in played] == [3, 1, 1]
    assert [r.outcome for r in played] == [Outcome.FINISHED] * 3


def test_a_rollout_counts_once_in_the_baseline_however_often_it_forked_F109() -> None:
    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(messages) > 1) for messages in completions]

    played = play(frozenset({"count"}), forking, size=2, reward=reward)
    assert [(len(r.sequences), r.reward) for r in played] == [(3, 1.0), (1, 0.0)]
    source = AdvantageSettings("none", "sum_then_normalize", {"reward": 1.0}, False)
    plan = GroupPlan("g", Task(0, 0, 0), 2)
    cycle = play_cycle([plan], lambda plans: [RolloutGroup("g", plan.task, tuple(played))], source, 0, 1)
    assert [item.advantage for item in cycle.items] == [0.5, -0.5]  # mean 0.5, not 0.75
    assert [len(item.sequences) for item in cycle.items] == [3, 1]
    row = make_row(cycle.items, torch.device("cpu"))
    advantages = row.per_token([item.advantage for item in cycle.items])
    sampled = [sum(len(t.output_ids or ()) for t in r.turns) for r in played]
    assert advantages.tolist() == [0.5] * sampled[0] + [-0.5] * sampled[1]
    assert row.lengths == tuple(len(s.input_ids) for item in cycle.items for s in item.sequences)


def as_items(lengths: list[list[int]], cuts: list[list[bool]], advantages: list[float]) -> list[TrainItem]:
    """A rollout per entry with so many sampled tokens per turn, forked before the turns that `cuts` names."""
    items = []
    for i, turns in enumerate(lengths):
        made: list[TurnRecord] = []
        held: list[int] = []
        for n, size in enumerate(turns):
            prompt = [*held, 1, 2]
            if n and cuts[i][n % len(cuts[i])]:
                prompt = [100 + n, *held[1:], 1, 2]
            output = list(range(10, 10 + size))
            made.append(TurnRecord(prompt, output, [-1.0] * size, {}, "stop"))
            held = prompt + output
        items.append(TrainItem(i, tuple(to_sequences(made)), advantages[i], True))
    return items


def loss_of(items: list[TrainItem], microbatch: tuple[int, ...], config: LossConfig) -> tuple[Any, ...]:
    """Weights, the sum of each rollout's weights in the row, the loss, and what is trained."""
    weights = step_weights(StepBatch(tuple(items), microbatch, 2, len(items) // 2), config, 64, 1)
    row = make_row(items, torch.device("cpu"))
    weights_N = row.per_token(weights)
    log_probs_N = torch.linspace(-2.0, -0.1, len(weights_N))  # the same for the same token, forked or not
    advantages_N = row.per_token([item.advantage for item in items])
    terms = policy_loss(
        log_probs_N, log_probs_N.flip(0), advantages_N, row.rollout_N, config, num_rollouts=len(items)
    )  # fmt: skip
    sums_R = torch.zeros(len(items)).index_add(0, row.rollout_N, weights_N)
    return weights, sums_R.tolist(), (weights_N * terms.loss_T).sum().item(), row.targets_N.tolist()


@pytest.mark.filterwarnings("ignore:loss_type='luspo'")
@pytest.mark.parametrize("loss_type", LOSSES)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_fork_changes_no_weight_and_no_loss_F067(loss_type: Any, data: st.DataObject) -> None:
    count = 2 * data.draw(st.integers(1, 3))
    some = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    lengths = [data.draw(some) for _ in range(count)]
    cuts = [data.draw(st.lists(st.booleans(), min_size=1, max_size=4)) for _ in lengths]
    advantages = [data.draw(st.sampled_from([-1.0, 0.5, 2.0])) for _ in lengths]
    microbatch = tuple(i * 2 // count for i in range(count))
    config = LossConfig(loss_type)
    forked = as_items(lengths, cuts, advantages)
    joined = as_items(lengths, [[False]] * count, advantages)
    assert all(len(item.sequences) == 1 for item in joined)
    assert loss_of(forked, microbatch, config) == loss_of(joined, microbatch, config)


def test_weights_of_a_forked_rollout_by_hand_F067() -> None:
    """Rollout 0 has 3 + 1 sampled tokens in two sequences, rollout 1 has 4 in one."""
    items = as_items([[3, 1], [4]], [[True], [False]], [1.0, -1.0])
    assert [len(item.sequences) for item in items] == [2, 1]
    want = {"dapo": 1 / 8, "grpo": 1 / 8, "bnpo": 1 / 8, "dr_grpo": 1 / 128, "cispo": 1 / 8, "luspo": 1 / 2}
    for loss_type, weight in want.items():
        batch = StepBatch(tuple(items), (0, 0), 1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LossConfig(loss_type)  # type: ignore[arg-type]
        assert step_weights(batch, config, 64, 1) == [weight, weight], loss_type
