"""Between a sampler and vLLM's engine in the same process: what is handed over, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from agentrl.sampler.vllm.wire import RawTurn
from agentrl.types import SampleOutput, SampleRequest, VersionSpan

Command = tuple[Any, ...]
"""``("add", id, prompt ids, fields of SamplingParams)`` or ``("abort", ids)``: can be sent to other ranks."""


@dataclass(eq=False, slots=True)
class Turn:
    """A turn between `sample` and its answer."""

    id: str
    request: SampleRequest
    fields: dict[str, Any]  # of vLLM's SamplingParams
    future: asyncio.Future[SampleOutput]
    cancelled: bool = False  # answered, or nobody waits for it any more


@dataclass(slots=True)
class Counts:
    """What an engine has done so far."""

    prefix_queries: int = 0  # prompt tokens
    prefix_hits: int = 0  # of them, those found in the cache
    decoded: int = 0  # ids drawn
    steps: int = 0
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that vLLM's own checks turned away."""

    request_id: str
    error: Exception


def hand_over(engine: Any, commands: Iterable[Command]) -> list[Refusal]:
    """vLLM's `LLMEngine` heard the commands. Answers the requests that it refused."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
        RequestOutputKind,
        StructuredOutputsParams,
    )

    refused = []
    for kind, *rest in commands:
        if kind == "abort":
            engine.abort_request(rest[0])
            continue
        id, prompt, fields = rest
        try:
            if (outputs := fields.get("structured_outputs")) is not None:
                fields = {**fields, "structured_outputs": StructuredOutputsParams(**outputs)}
            params = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)
            engine.add_request(id, {"prompt_token_ids": prompt}, params)
        except Exception as error:  # vLLM has many kinds, and whichever it is, it is this request's alone
            engine.abort_request([id])
            refused.append(Refusal(id, error))
    return refused


def abort_all(engine: Any) -> None:
    """vLLM's `LLMEngine` has nothing to do."""
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


def raw_turn(completion: Any) -> RawTurn:
    """A turn in plain lists, from vLLM's `CompletionOutput` with flat log-probs."""
    ids, flat = list(completion.token_ids), completion.logprobs
    if flat is None:
        return RawTurn(ids, None, completion.finish_reason)
    rows = list(zip(flat.start_indices, flat.end_indices, strict=True))
    return RawTurn(
        ids,
        [flat.logprobs[start] for start, _ in rows],  # the drawn id comes first
        completion.finish_reason,
        [flat.token_ids[start:end] for start, end in rows],
        [flat.logprobs[start:end] for start, end in rows],
        getattr(completion, "sampling_mask", None),
        tuple(VersionSpan(int(span.version), span.start, span.end) for span in completion.weight_versions or ()),
    )


def on_its_loop(future: asyncio.Future[Any], call: Callable[..., Any], *args: Any) -> None:
    """`call` settles the future on the loop that waits for it, from whatever thread this is."""
    loop = future.get_loop()
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        call(*args)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(lambda: future.done() or call(*args))
