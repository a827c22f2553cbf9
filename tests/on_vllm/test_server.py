"""The sampler of a vLLM server against a real one: what it returns is what transformers says of the same model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_kit
from vllm_kit import CONTEXT, TOLERANCE, Reference, Server, request

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.draw import candidates, most_likely
from agentrl.sampler.vllm import Drawing, ServerOptions, VLLMServerSampler
from agentrl.sampler.vllm.facts import check_facts, read_facts
from agentrl.types import SampleOutput, SamplingParams

PROMPT = [(7 * i) % 250 for i in range(40)]


@asynccontextmanager
async def started(server: Server, **options: Any) -> AsyncIterator[VLLMServerSampler]:
    sampler = VLLMServerSampler(ServerOptions(server.base_url, timeout_s=60.0, **options))
    await sampler.start(weights=False)
    try:
        yield sampler
    finally:
        await sampler.close()


def drawn(server: Server, *requests: Any, **options: Any) -> list[SampleOutput]:
    """The outputs of requests that are in flight together."""

    async def main() -> list[SampleOutput]:
        async with started(server, **options) as sampler:
            return await asyncio.gather(*(sampler.sample(r) for r in requests))

    return asyncio.run(main())


async def until(what: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


# --- the server ---
def test_the_facts_are_those_of_the_server(server: Server, folder: Path, reference: Reference) -> None:
    async def main() -> None:
        async with started(server) as sampler:
            facts = sampler.facts
            assert (facts.version, facts.model, facts.root) == ("0.32.0", "policy", str(folder))
            assert facts.vocabulary == reference.model.config.vocab_size and facts.max_model_len == CONTEXT
            assert (facts.dtype, facts.logprobs_mode, facts.max_logprobs) == ("float32", "processed_logprobs", -1)
            assert facts.dev_mode and facts.scale_out and facts.lora is None and facts.lora_updates
            assert facts.block_size == 32 and facts.world_size == 1 and not facts.return_sampling_mask
            with pytest.raises(ConfigurationError, match="ids, and the model that is trained has"):
                await sampler.start((facts.vocabulary or 0) + 1, weights=False)
            assert (await sampler.sample(request(PROMPT))).ids  # the question did not end the engine

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_without_its_flags_is_refused_with_their_names(folder: Path, tmp_path: Path) -> None:
    drop = ("VLLM_SERVER_DEV_MODE", "--enable-scale-out", "--weight-transfer-config")
    server = vllm_kit.start(folder, tmp_path / "server.log", drop=drop)

    async def main() -> None:
        sampler = VLLMServerSampler(ServerOptions(server.base_url, timeout_s=60))
        with pytest.raises(ConfigurationError, match="--enable-scale-out"):
            await sampler.start()
        facts = await read_facts(sampler.client)
        assert not facts.dev_mode and not facts.scale_out
        with pytest.raises(ConfigurationError, match="VLLM_SERVER_DEV_MODE=1"):
            await sampler.client.post("/pause", mode="keep")
        with pytest.raises(ConfigurationError, match="scale-out"):
            check_facts(facts, weights=False)
        await sampler.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


# --- what is drawn ---
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),  # F029: log-probs are those of the distribution at this temperature
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.5, repetition_penalty=1.3),
        SamplingParams(top_k=5),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=50, min_p=0.3),
    ],
)
def test_log_probs_and_candidates_are_those_of_transformers(
    server: Server, reference: Reference, params: SamplingParams
) -> None:
    fields = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    prompts = [PROMPT[: 10 + 3 * i] for i in range(8)]
    requests = [request(p, max_tokens=48, seed=(1, i, 0), **fields) for i, p in enumerate(prompts)]
    for prompt, output in zip(prompts, drawn(server, *requests), strict=True):
        assert output.ids is not None and len(output.ids) == 48
        assert reference.difference(prompt, output, params) <= TOLERANCE
        if not params.truncates:
            assert output.sampling_mask is None
            continue
        theirs = candidates(reference.distribution(prompt, output.ids, params))
        assert output.sampling_mask is not None
        same = [list(a) == list(b) for a, b in zip(output.sampling_mask, theirs, strict=True)]
        # A candidate at the edge of top-p or min-p may fall to either side of it by rounding.
        assert same.count(False) <= (0 if params.top_p == 1.0 and not params.min_p else 1)


def test_the_most_likely_ids_are_those_of_transformers(server: Server, reference: Reference) -> None:
    params = SamplingParams(temperature=0.8)
    (output,) = drawn(server, request(PROMPT, max_tokens=60, temperature=0.8, num_sampler_logprobs=4))
    assert output.ids is not None and output.sampler_logprobs is not None
    theirs = most_likely(reference.distribution(PROMPT, output.ids, params), 4)
    for ours, other in zip(output.sampler_logprobs, theirs, strict=True):
        assert list(ours) == list(other)
        assert list(ours.values()) == pytest.approx(list(other.values()), abs=TOLERANCE)
    assert any(i not in row for i, row in zip(output.ids, output.sampler_logprobs, strict=True))


def test_f125_ids_follow_the_seed_of_the_request(server: Server) -> None:
    """A group of one prompt: no two alike; the same run seed again: the same; another one: others."""
    group = [request(PROMPT, seed=(1, i, 0)) for i in range(8)]
    first = [output.ids for output in drawn(server, *group)]
    assert len({tuple(ids or ()) for ids in first}) == 8
    assert [output.ids for output in drawn(server, *reversed(group))][::-1] == first
    other = drawn(server, *(request(PROMPT, seed=(2, i, 0)) for i in range(8)))
    assert not {tuple(output.ids or ()) for output in other} & {tuple(ids or ()) for ids in first}


def test_a_turn_ends_at_our_stop_ids_and_at_no_other(server: Server, reference: Reference) -> None:
    """The tokenizer's end token is an id like any other unless it is among the stop ids."""
    end = reference.model.config.eos_token_id
    (free,) = drawn(server, request(PROMPT, max_tokens=1500), drawing=Drawing(extra={"logit_bias": {str(end): 5.0}}))
    assert free.ids is not None and free.finish_reason == "length" and end in free.ids and len(free.ids) == 1500
    (whole,) = drawn(server, request(PROMPT))
    assert whole.ids is not None and whole.log_probs is not None
    stop = whole.ids[5]
    (ended,) = drawn(server, request(PROMPT, stop_ids=(stop,)))
    at = whole.ids.index(stop) + 1
    assert ended.ids == whole.ids[:at] and ended.finish_reason == "stop"
    assert ended.log_probs == pytest.approx(whole.log_probs[:at], abs=TOLERANCE)


def test_generation_kwargs_and_a_regex_reach_the_engine(server: Server, reference: Reference) -> None:
    (few,) = drawn(server, request(PROMPT), drawing=Drawing(extra={"allowed_token_ids": [40, 41, 42]}))
    assert set(few.ids or ()) == {40, 41, 42}
    (greedy, again) = drawn(
        server, request(PROMPT, seed=(1,)), request(PROMPT, seed=(2,)), drawing=Drawing(extra={"temperature": 0})
    )
    assert greedy.ids == again.ids
    tokens = _spelled(reference)
    for stop_ids in ((), (reference.model.config.eos_token_id,)):
        (output,) = drawn(server, request(PROMPT, stop_ids=stop_ids), drawing=Drawing(regex="[ab]{3}c"))
        text = "".join(tokens[i] for i in output.ids or ())
        assert output.finish_reason == "stop" and text[:3].strip("ab") == "" and text[3:] == "c<|im_end|>"


def _spelled(reference: Reference) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference.model.config._name_or_path)
    return [tokenizer.decode([i]) for i in range(len(tokenizer))]


def test_a_prompt_that_fills_the_context(server: Server) -> None:
    (output,) = drawn(server, request([1] * (CONTEXT - 3), max_tokens=50))
    assert output.finish_reason == "length" and len(output.ids or ()) == 3
    with pytest.raises(SamplerError, match="no room for an answer"):
        drawn(server, request([1] * CONTEXT))


def test_a_turn_prefills_its_new_tokens_and_at_most_one_block(server: Server) -> None:
    async def main() -> None:
        async with started(server) as sampler:
            prompt = [(11 * i + 3) % 240 for i in range(100)]
            for turn in range(4):
                before = await sampler.load()
                output = await sampler.sample(request(prompt, max_tokens=30, seed=(5, 0, turn)))
                after = await sampler.load()
                fed = (after.prefix_queries - before.prefix_queries) - (after.prefix_hits - before.prefix_hits)
                assert after.prefix_queries - before.prefix_queries == len(prompt)
                if turn:
                    # Drawn tokens are cached with the prompt, but for the last one: it was never fed.
                    assert fed <= 10 + 1 + (sampler.facts.block_size or 0)
                prompt = [*prompt, *(output.ids or ()), *range(10)]

    asyncio.run(main())


def test_cancelling_turns_frees_the_engine(server: Server) -> None:
    async def main() -> None:
        async with started(server) as sampler:

            async def running(count: int) -> bool:
                load = await sampler.load()
                return load.running + load.waiting == count

            async def drawn_tokens() -> float:
                lines = (await sampler.client.get("/metrics")).splitlines()
                return sum(
                    float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{")
                )

            before = await drawn_tokens()
            requests = [request(PROMPT, max_tokens=1900, seed=(i,)) for i in range(16)]
            tasks = [asyncio.create_task(sampler.sample(r)) for r in requests]
            await until(lambda: running(16))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: running(0))
            assert await drawn_tokens() - before < 16 * 1900 / 2  # all of them, where the server goes on

    asyncio.run(main())


def test_more_prompt_tokens_than_a_step_feeds(server: Server, reference: Reference) -> None:
    """vLLM for CPUs dies of a turn with a seed whose prompt it feeds in parts."""
    asked = [request([7 + i] * 900, seed=(i,), conversation=str(i), max_tokens=4) for i in range(6)]

    async def main() -> None:
        async with started(server) as sampler:
            assert not sampler.facts.feeds_in_parts
            for one, output in zip(asked, await asyncio.gather(*map(sampler.sample, asked)), strict=True):
                assert reference.difference(one.prompt_ids or [], output, one.params) <= TOLERANCE

    asyncio.run(main())


def test_512_turns_in_flight(server: Server) -> None:
    outputs = drawn(server, *(request(PROMPT, max_tokens=4, seed=(3, i)) for i in range(512)))
    assert all(len(output.ids or ()) == 4 for output in outputs)
    assert len({tuple(output.ids or ()) for output in outputs}) > 500


# --- weights that change ---
@pytest.fixture
def labelled(server: Server) -> Iterator[Server]:
    """The session's server, its weights named as before afterwards."""
    yield server

    async def main() -> None:
        async with started(server) as sampler:
            await sampler.client.post("/resume")
            await sampler.client.post("/update_weight_version", {"new_version": "default"})

    asyncio.run(main())


def test_versions_that_change_in_mid_turn_are_recorded(labelled: Server) -> None:
    async def main() -> None:
        async with started(labelled) as sampler:
            client = sampler.client
            await client.post("/update_weight_version", {"new_version": "1"})
            sampler.open(1)
            tasks = [asyncio.create_task(sampler.sample(request(PROMPT, max_tokens=1500, seed=(i,)))) for i in range(2)]

            async def begun() -> bool:
                return (await sampler.load()).running == 2

            await until(begun)
            await asyncio.sleep(0.3)
            sampler.hold()
            later = asyncio.create_task(sampler.sample(request(PROMPT, max_tokens=4)))
            await client.post("/pause", mode="keep")
            await client.post("/update_weight_version", {"new_version": "2"})
            await client.post("/reset_prefix_cache", reset_running_requests=True)
            await client.post("/resume")
            sampler.open(2)
            for output in await asyncio.gather(*tasks):
                assert output.version == 1 and [span.version for span in output.versions] == [1, 2]
                assert output.versions[0].start == 0 and output.versions[0].end == output.versions[1].start > 0
                assert output.versions[1].end == len(output.ids or ()) == 1500
            assert (await later).version == 2 and (await later).versions == ()

    asyncio.run(main())


@pytest.mark.slow
def test_a_full_cache_then_a_kill_in_mid_turn_and_a_restart(folder: Path, tmp_path: Path) -> None:
    """96 blocks for 8 turns of 20 blocks: some are put back and drawn again. Then the server dies and comes back."""
    port = vllm_kit.free_port()
    small = ("--kv-cache-memory-bytes", str(96 * 32 * 2 * 2 * 2 * 32 * 4))
    servers = [vllm_kit.start(folder, tmp_path / "first.log", *small, port=port)]
    reference = Reference.of(folder)
    restored: list[int] = []

    async def main() -> None:
        async with started(servers[0]) as sampler:
            turns = [sampler.sample(request(PROMPT, max_tokens=600, seed=(i,))) for i in range(8)]
            for output in await asyncio.gather(*turns):
                assert reference.difference(PROMPT, output, SamplingParams()) <= TOLERANCE
            assert (await sampler.load()).preemptions > 0

            await sampler.client.post("/update_weight_version", {"new_version": "7"})
            sampler.open(7)

            async def restore() -> None:
                restored.append(1)
                await sampler.client.post("/update_weight_version", {"new_version": "7"}, retry=True)
                sampler.open(7)

            sampler.restore = restore
            tasks = [asyncio.create_task(sampler.sample(request(PROMPT, max_tokens=1500, seed=(i,)))) for i in range(4)]

            async def begun() -> bool:
                return (await sampler.load()).running == 4

            await until(begun)
            await asyncio.to_thread(servers[0].stop, hard=True)
            assert not any(task.done() for task in tasks)
            servers.append(await asyncio.to_thread(vllm_kit.start, folder, tmp_path / "second.log", *small, port=port))
            outputs = await asyncio.gather(*tasks)
            assert restored == [1] and [output.version for output in outputs] == [7] * 4
            assert sampler.retries > 4

    try:
        asyncio.run(main())
    finally:
        for server in servers:
            server.stop()


@pytest.mark.slow
def test_weights_that_are_no_numbers_fail_turns(tmp_path: Path) -> None:
    from agentrl.train.tiny import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, 0, hidden=vllm_kit.HIDDEN)
    with torch.no_grad():
        next(iter(model.model.layers[1].parameters())).fill_(torch.nan)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    server = vllm_kit.start(tmp_path / "model", tmp_path / "server.log")
    try:
        with pytest.raises(SamplerError, match="not finite"):
            drawn(server, request(PROMPT))
    finally:
        server.stop()
