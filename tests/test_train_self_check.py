"""The self-check lets rounding pass and stops a run whose sampler holds other weights than the trainer's."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from weights_kit import adapted, qwen3

from agentrl.errors import RunStopped, SamplerError
from agentrl.sampler.transformers import TransformersSampler
from agentrl.train.self_check import TOKENS, check_agreement, probe, trainer_log_probs
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

VOCABULARY = 97


def sampler_of(model: Any, **changes: Any) -> Any:
    """Samples with `model`; `changes` are fields of the request, or `edit`, which changes the output."""
    edit = changes.pop("edit", lambda output: output)

    def sample(request: SampleRequest) -> SampleOutput:
        sampler = TransformersSampler(model, max_context=64)
        try:
            return edit(asyncio.run(sampler.sample(replace(request, **changes))))
        finally:
            sampler.close()

    return sample


def spread() -> Any:
    """A model whose distributions are neither flat nor certain, as those of trained ones."""
    model = qwen3(tied=False)
    with torch.no_grad():
        model.model.norm.weight.mul_(20.0)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_same_weights_pass_and_the_model_keeps_its_mode(temperature: float) -> None:
    model = spread().train()
    assert (
        check_agreement(
            sampler_of(model), trainer_log_probs(model, temperature), half=False, vocabulary=VOCABULARY,
            temperature=temperature,
        )
        < 1e-5
    )  # fmt: skip
    assert model.training
    lora = adapted("lora")
    check_agreement(sampler_of(lora), trainer_log_probs(lora, 1.0), half=False, vocabulary=VOCABULARY)


def test_other_weights_are_caught() -> None:
    model, other = spread(), spread()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.abs().mean())
    with pytest.raises(RunStopped, match=r"differ from the trainer's by .* over 32 tokens .*other weights"):
        check_agreement(sampler_of(other), trainer_log_probs(model, 1.0), half=False, vocabulary=VOCABULARY)


def test_an_output_layer_that_stayed_behind_is_caught() -> None:
    model, stale = spread(), spread()
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight) * 0.05 * model.lm_head.weight.abs().mean())
    with pytest.raises(RunStopped, match="an output layer that did not follow"):
        check_agreement(sampler_of(stale), trainer_log_probs(model, 1.0), half=False, vocabulary=VOCABULARY)


@pytest.mark.parametrize("half", [False, True])
def test_log_probs_before_the_temperature_are_caught(half: bool) -> None:
    model = spread()
    raw = sampler_of(model, params=SamplingParams(temperature=1.0))
    with pytest.raises(RunStopped, match="processed_logprobs"):
        check_agreement(raw, trainer_log_probs(model, 0.7), half=half, vocabulary=VOCABULARY, temperature=0.7)


def test_half_precision_passes_where_it_is_said_and_not_where_it_is_not() -> None:
    model, half = spread(), spread().to(torch.bfloat16)
    ours = trainer_log_probs(model, 1.0)
    largest = check_agreement(sampler_of(half), ours, half=True, vocabulary=VOCABULARY)
    assert largest > 1e-3
    with pytest.raises(RunStopped, match="--dtype float32"):
        check_agreement(sampler_of(half), ours, half=False, vocabulary=VOCABULARY)


def test_log_probs_that_are_no_numbers_are_caught() -> None:
    model = qwen3()
    nan = sampler_of(model, edit=lambda output: replace(output, log_probs=[math.nan] * len(output.ids)))
    with pytest.raises(RunStopped, match="differ from the trainer's by nan"):
        check_agreement(nan, trainer_log_probs(model, 1.0), half=True, vocabulary=VOCABULARY)
    none = sampler_of(model, edit=lambda output: replace(output, log_probs=None))
    with pytest.raises(SamplerError, match="no log-probs"):
        check_agreement(none, trainer_log_probs(model, 1.0), half=True, vocabulary=VOCABULARY)


def test_the_probe_is_drawn_without_truncation_and_never_ends_early() -> None:
    request = probe(5, 0.0, seed=3)
    assert request.params == SamplingParams(temperature=1.0) and request.stop_ids == ()
    assert request.max_tokens == TOKENS == 32 and request.prompt_ids is not None and max(request.prompt_ids) < 5
