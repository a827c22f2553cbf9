"""Does the sampler hold the weights that are trained? Asked once, when a run has sent its first ones.

Weights that never arrive, a part of them that stays behind, or log-probs of another distribution do not stop a run:
they make it learn badly. A turn of 32 tokens shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from agentrl.errors import RunStopped, SamplerError
from agentrl.sampler.draw import log_probs
from agentrl.train.setup import bare
from agentrl.train.weights import unwrapped
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

TOKENS = 32
BOUND = 1e-3
"""Largest mean difference in nats where both compute in fp32. SmolLM2-135M on CPUs: 1e-5; with every weight off by
1e-3 of its size: 1e-2."""
BOUND_HALF = 0.15
"""The same where one of them computes in half precision. SmolLM2-135M in bf16: 0.04 to 0.07; raw log-probs at
temperature 0.7: 0.28 and more."""
LogProbsOf = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""Prompt ids and drawn ids to the trainer's log-probs of the latter, at the temperature that they were drawn at."""


def probe(vocabulary: int, temperature: float, *, seed: int = 0) -> SampleRequest:
    """A turn whose answer shows what weights there are: ids from all over the vocabulary, drawn without truncation.

    >>> probe(100, 0.7).prompt_ids
    [0, 19, 38, 57, 76, 95, 14, 33]
    """
    prompt = [(i * 7919) % vocabulary for i in range(8)]
    params = SamplingParams(temperature=temperature or 1.0)
    return SampleRequest([], [], prompt, TOKENS, params, (seed, -1, 0), "self-check")


def check_agreement(
    sample: Callable[[SampleRequest], SampleOutput], log_probs_of: LogProbsOf, *, half: bool, vocabulary: int,
    temperature: float = 1.0,
) -> float:  # fmt: skip
    """The largest difference between the sampler's log-probs and the trainer's, over 32 tokens, in nats.

    Args:
        sample: Runs one request on the sampler.
        log_probs_of: The trainer's.
        half: One of the two computes in half precision: rounding then hides small differences.
        vocabulary: Ids that the model can read.
        temperature: Of the run. At 1 it does not show whether the sampler's log-probs are taken before it.

    Raises:
        RunStopped: They differ by more than rounding explains.
        SamplerError: The sampler drew nothing.
    """
    request = probe(vocabulary, temperature)
    output = sample(request)
    if not output.ids or output.log_probs is None or request.prompt_ids is None:
        raise SamplerError("The sampler returned no ids, or no log-probs, when it was asked for a turn to check.")
    theirs = torch.tensor(output.log_probs, dtype=torch.float64)
    ours = torch.tensor(list(log_probs_of(request.prompt_ids, output.ids)), dtype=torch.float64)
    differences = (theirs - ours).abs()
    mean, largest = float(differences.mean()), float(differences.max())
    bound = BOUND_HALF if half else BOUND
    if mean <= bound:  # not for NaN
        return largest
    raise RunStopped(
        f"The sampler's log-probs differ from the trainer's by {mean:.3g} nats on average over {len(output.ids)} tokens"
        f" (at most {largest:.3g}; {bound:g} is allowed): it holds other weights than those that are trained, in whole"
        " or in part (another checkpoint, an output layer that did not follow), returns log-probs of another"
        " distribution (vLLM needs --logprobs-mode processed_logprobs), or computes in another precision (--dtype"
        " float32)."
    )


def trainer_log_probs(model: nn.Module, temperature: float, accelerator: Any = None) -> LogProbsOf:
    """`log_probs_of` for `check_agreement`: one plain forward of the policy, as it is trained, without dropout.

    Where its weights are shards every rank calls it, with the same ids.
    """
    wrapped: Any = model
    params = SamplingParams(temperature=temperature or 1.0)
    device = next(bare(unwrapped(model, accelerator)).parameters()).device

    @torch.no_grad()
    def log_probs_of(prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        training = model.training
        model.eval()
        try:
            logits = wrapped(input_ids=torch.tensor([[*prompt, *ids]], device=device), use_cache=False).logits[0]
        finally:
            model.train(training)
        drawn = torch.tensor(list(ids), device=logits.device)[:, None]
        return log_probs(logits[len(prompt) - 1 : -1].float(), params).gather(1, drawn)[:, 0].tolist()

    return log_probs_of
