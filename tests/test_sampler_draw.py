"""Distributions against transformers' own warpers, and drawing against counting."""

from __future__ import annotations

import hashlib
import math
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from agentrl.sampler.draw import draw, log_probs, pick, uniforms
from agentrl.types import SamplingParams


def by_transformers(logits: torch.Tensor, params: SamplingParams, ids: torch.Tensor) -> torch.Tensor:
    steps: list[hf.LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        steps.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(hf.MinPLogitsWarper(params.min_p))
    for step in steps:
        logits = step(ids, logits)
    return logits.log_softmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([None, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_the_distribution_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float | None, penalty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 50, generator=generator)
    ids = torch.randint(0, 50, (4, 7), generator=generator)
    params = SamplingParams(temperature, top_p, top_k, min_p, penalty)
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, ids, True)
    got, wanted = log_probs(logits, params, seen), by_transformers(logits, params, ids)
    assert torch.equal(got.isinf(), wanted.isinf())
    assert torch.allclose(got.exp(), wanted.exp(), atol=1e-6)


def test_log_probs_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    # Temperature 0.5: exp(2), exp(4), exp(0) over their sum.
    total = math.exp(2) + math.exp(4) + 1
    got = log_probs(logits, SamplingParams(temperature=0.5))[0].tolist()
    assert got == pytest.approx([2 - math.log(total), 4 - math.log(total), -math.log(total)], abs=1e-6)
    top = log_probs(logits, SamplingParams(top_k=2))[0].tolist()
    assert top == pytest.approx([-math.log(1 + math.e), 1 - math.log(1 + math.e), -math.inf], abs=1e-6)


def test_greedy_takes_the_best_and_gives_its_unscaled_log_prob() -> None:
    greedy = SamplingParams(temperature=0.0)
    ids, log_prob = pick(log_probs(torch.tensor([[1.0, 2.0, 0.0]]), greedy), greedy, torch.tensor([0.0]))
    assert ids.tolist() == [1]
    assert log_prob.item() == pytest.approx(2 - math.log(math.e + math.e**2 + 1), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 5.0]), min_size=1, max_size=12).filter(
        lambda w: sum(w) > 0.05
    ),
    uniform=st.one_of(st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.0, 1.0 - 2**-53])),
)
def test_an_id_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    scores = torch.tensor([weights]).log().log_softmax(-1)
    token = draw(scores, torch.tensor([uniform], dtype=torch.float64)).item()
    assert scores[0, int(token)].exp().item() > 0


def test_a_uniform_number_that_rounds_to_one_draws_the_last_possible_id() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert draw(scores, torch.tensor([1.0])).tolist() == [1]


def test_frequencies_are_the_probabilities() -> None:
    wanted = torch.tensor([0.5, 0.2, 0.0, 0.3])
    numbers = torch.tensor(list(islice(uniforms((3, 1)), 20_000)), dtype=torch.float64)
    counts = torch.bincount(draw(wanted.log().expand(20_000, -1), numbers), minlength=4) / 20_000
    assert torch.allclose(counts, wanted, atol=0.012)  # about 3.5 standard deviations
    assert counts[2] == 0


def test_f125_f161_a_stream_is_its_seed() -> None:
    take = lambda *seed: list(islice(uniforms(seed), 100))  # noqa: E731
    blocks = [hashlib.blake2b(f"1,2,3/{i}".encode()).digest() for i in range(13)]
    words = [int.from_bytes(block[at : at + 8], "little") for block in blocks for at in range(0, 64, 8)]
    assert take(1, 2, 3) == [(word >> 11) / 2**53 for word in words][:100]
    assert len({tuple(take(*seed)) for seed in [(1, 2, 3), (1, 2, 4), (1, 3, 2), (2, 2, 3), (-1, 2, 3)]}) == 5
