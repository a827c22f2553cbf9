"""Guessed tokens and shared feeding: fewer forwards, and never another id."""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given

from agentrl.sampler.drafts import Drafts, worthwhile
from agentrl.sampler.transformers import TransformersSampler
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

V = 61
STOP = 3
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
PLAIN = SamplingParams()
TOP_K = SamplingParams(temperature=0.05, top_k=3)
COLD = SamplingParams(temperature=0.05)  # turns repeat each other, and some differ
Outputs = dict[tuple[int, int], SampleOutput]


def tiny(**more: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SHAPE, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def without_guesses(sampler: TransformersSampler) -> TransformersSampler:
    sampler._drafts.learn = lambda ids: None  # type: ignore[method-assign]
    return sampler


def play(sampler: TransformersSampler, params: SamplingParams = PLAIN, turns: int = 4, members: int = 8) -> Outputs:
    """Conversations with one prompt, whose tool results are the same wherever what was said is the same."""
    outputs: Outputs = {}

    async def converse(member: int) -> None:
        ids = [7, 8, 9, 10]
        for turn in range(turns):
            request = SampleRequest([], [], ids, 9 + member % 2, params, (5, member, turn), str(member), (STOP,),
                                    num_sampler_logprobs=2 if member == 1 else 0)  # fmt: skip
            output = outputs[member, turn] = await sampler.sample(request)
            assert output.ids is not None
            ids = [*ids, *output.ids, 20 + output.ids[0] % 30, 21, 22]
        sampler.release(str(member))

    async def run() -> None:
        await asyncio.gather(*[converse(member) for member in range(members)])

    asyncio.run(run())
    return outputs


def same(one: Outputs, other: Outputs) -> None:
    assert one.keys() == other.keys()
    for name, output in one.items():
        twin = other[name]
        assert (output.ids, output.finish_reason) == (twin.ids, twin.finish_reason)
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(twin.log_probs), atol=1e-4, rtol=1e-4)
        if output.sampling_mask is not None:
            assert list(map(list, output.sampling_mask)) == list(map(list, twin.sampling_mask or ()))
        if output.sampler_logprobs is not None:
            assert [list(top) for top in output.sampler_logprobs] == [list(top) for top in twin.sampler_logprobs or ()]


@pytest.mark.parametrize("more", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize(
    "params",
    [PLAIN, COLD, TOP_K, SamplingParams(0.4, repetition_penalty=1.3)],
    ids=["plain", "cold", "top_k", "penalty"],
)
def test_f161_guessing_changes_no_id(params: SamplingParams, more: dict[str, Any]) -> None:
    model = tiny(**more)
    wanted = play(without_guesses(TransformersSampler(model)), params)
    sampler = TransformersSampler(model)
    fed: list[int] = []
    guess = sampler._drafts.guess
    sampler._drafts.guess = lambda node, most: fed.extend(got := guess(node, most)) or got  # type: ignore[method-assign]
    same(play(sampler, params), wanted)
    assert bool(fed) == (params in (COLD, TOP_K))


@pytest.mark.parametrize("guess", [[5], [STOP], [11, 12, 13, 14, 15, 16, 17]])
def test_f161_wrong_guesses_change_no_id(guess: list[int]) -> None:
    model = tiny()
    wanted = play(without_guesses(TransformersSampler(model)))
    sampler = TransformersSampler(model)
    sampler._drafts.guess = lambda node, most: guess[:most]  # type: ignore[method-assign]
    same(play(sampler), wanted)


def test_f161_right_guesses_change_no_id_and_save_forwards() -> None:
    model = tiny()
    wanted = play(without_guesses(TransformersSampler(model)), turns=1, members=1)[0, 0]
    sampler = TransformersSampler(model)
    for _ in range(4):
        sampler._drafts.learn(wanted.ids or ())
    same(play(sampler, turns=1, members=1), {(0, 0): wanted})
    assert len(wanted.ids or ()) > 4
    assert sampler.forwards == 1  # the prompt and the whole turn


def test_conversations_that_came_to_the_same_tokens_are_fed_once() -> None:
    model = tiny()
    greedy = SamplingParams(temperature=0.0)
    sampler = without_guesses(TransformersSampler(model))
    outputs = play(sampler, greedy, turns=2, members=5)
    lengths = {member: len(outputs[member, 0].ids or ()) for member in range(5)}
    kinds = set(lengths.values())  # the members say the same, cut at 9 or at 10 tokens
    assert sampler.prefilled_tokens == 4 + len(kinds) * (1 + 3)
    assert sampler.shared_tokens == 4 * 4 + (5 - len(kinds)) * (1 + 3)
    alone = [play(without_guesses(TransformersSampler(model)), greedy, turns=2, members=n) for n in (1, 2)]
    same({key: outputs[key] for key in alone[1]}, alone[1])
    same({key: outputs[key] for key in alone[0]}, alone[0])


def test_guesses_do_not_outlive_the_weights() -> None:
    sampler = TransformersSampler(tiny())
    first = play(sampler, COLD)
    forwards = sampler.forwards
    assert sampler._drafts.root.count
    sampler.publish(1)
    again = play(sampler, COLD)
    assert sampler.forwards == 2 * forwards
    for name, output in first.items():  # to the last bit: a resumed run draws what the run before it drew
        assert (output.ids, output.log_probs) == (again[name].ids, again[name].log_probs)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=40), st.lists(st.integers(0, 3), max_size=3))
def test_property_a_guess_was_said_by_most_turns_that_began_so(turns: list[list[int]], begin: list[int]) -> None:
    drafts = Drafts()
    for turn in turns:
        drafts.learn(turn)
    node: Any = drafts.root
    for token in begin:
        node = node and node.next.get(token)
    guess = drafts.guess(node, 5)
    assert len(guess) <= 5
    if guess:
        began = [turn for turn in turns if turn[: len(begin)] == begin]
        right = [turn for turn in began if turn[: len(begin + guess)] == begin + guess]
        assert len(right) >= 4
        assert len(right) >= 0.75 * len(began)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=80))
def test_property_the_width_of_a_forward_is_one_of_its_guesses(lengths: list[int]) -> None:
    assert worthwhile(lengths) in {0, *lengths}
    assert worthwhile([max(lengths)] * len(lengths)) == max(lengths)
