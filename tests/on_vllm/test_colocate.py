"""A vLLM engine in this process: the sampler's door, and what of the process it leaves alone."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import vllm_kit
from vllm_kit import TOLERANCE, Reference, request

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler import draw
from agentrl.sampler.vllm.build import BLOCK_SIZE
from agentrl.sampler.vllm.colocate import ColocateOptions, VLLMSampler
from agentrl.sampler.vllm.wire import Drawing
from agentrl.types import SampleOutput, SampleRequest, SamplingParams, VersionSpan

PROMPTS = [[(3 * i + 7 * k) % 250 for i in range(20 + 3 * k)] for k in range(8)]


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Iterator[VLLMSampler]:
    made = VLLMSampler(ColocateOptions(str(folder), max_model_len=1024, max_num_seqs=16))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def alone(sampler: VLLMSampler) -> Iterator[None]:
    """For tests that build their own: one engine per process."""
    options = sampler.options
    sampler.close()
    try:
        yield
    finally:
        if VLLMSampler._open is not None:
            VLLMSampler._open.close()
        sampler.__init__(options)


def together(sampler: VLLMSampler, *requests: SampleRequest) -> list[SampleOutput]:
    async def main() -> list[SampleOutput]:
        return await asyncio.gather(*(sampler.sample(r) for r in requests))

    return asyncio.run(main())


def eight(**params: Any) -> list[SampleRequest]:
    return [request(p, max_tokens=16, seed=(5, i), conversation=str(i), **params) for i, p in enumerate(PROMPTS)]


def settle(sampler: VLLMSampler) -> None:
    """The first weights are in the engine, version 0, and nothing is cached."""
    model = Reference.of(Path(sampler.options.model)).model
    sampler.load([(name, p.detach()) for name, p in model.named_parameters()], 0)


# --- what it draws ---
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5, "temperature": 1.3},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.4},
    ],
)
def test_log_probs_are_of_what_each_id_was_drawn_from(
    sampler: VLLMSampler, reference: Reference, params: dict[str, Any]
) -> None:
    for prompt, output in zip(PROMPTS, together(sampler, *eight(**params)), strict=True):
        assert output.ids is not None and len(output.ids) == 16 and output.finish_reason == "length"
        wanted = SamplingParams(**params)
        if wanted.temperature:
            assert reference.difference(prompt, output, wanted) <= TOLERANCE
        sets = [list(row) for row in output.sampling_mask or ()]
        expected = draw.candidates(reference.distribution(prompt, output.ids, wanted)) if wanted.truncates else []
        assert sets == [list(row) for row in expected]


def test_the_same_seed_draws_the_same_ids_and_another_others(sampler: VLLMSampler) -> None:
    first, second = together(sampler, *eight()), together(sampler, *eight())
    assert [o.ids for o in first] == [o.ids for o in second]
    twins = together(sampler, request(PROMPTS[0], seed=(1, 2)), request(PROMPTS[0], seed=(12,)))
    assert twins[0].ids != twins[1].ids


def test_it_stops_at_the_requests_ids_and_at_the_context(sampler: VLLMSampler) -> None:
    free = together(sampler, request(PROMPTS[0], max_tokens=40))[0]
    assert free.ids is not None
    stop = free.ids[9]
    output = together(sampler, request(PROMPTS[0], max_tokens=40, stop_ids=(stop,)))[0]
    assert output.ids == free.ids[: free.ids.index(stop) + 1] and output.finish_reason == "stop"
    long = [1] * (sampler.max_model_len - 3)
    output = together(sampler, request(long, max_tokens=40))[0]
    assert output.finish_reason == "length" and len(output.ids or ()) == 3


def test_the_most_likely_ids_are_given(sampler: VLLMSampler, reference: Reference) -> None:
    output = together(sampler, request(PROMPTS[1], max_tokens=8, num_sampler_logprobs=3))[0]
    assert output.ids is not None and output.sampler_logprobs is not None
    expected = draw.most_likely(reference.distribution(PROMPTS[1], output.ids, SamplingParams()), 3)
    for got, wanted in zip(output.sampler_logprobs, expected, strict=True):
        assert list(got) == list(wanted)
        assert all(abs(got[i] - wanted[i]) <= TOLERANCE for i in wanted)


def test_a_turn_feeds_what_is_new_and_at_most_one_block(sampler: VLLMSampler) -> None:
    settle(sampler)
    held = list(PROMPTS[0])
    for turn in range(4):
        before = sampler.counts()
        output = together(sampler, request(held, max_tokens=24, seed=(7, turn)))[0]
        after = sampler.counts()
        fed = (after["prefix_queries"] - before["prefix_queries"]) - (after["prefix_hits"] - before["prefix_hits"])
        new = len(held) if turn == 0 else 10 + 1  # the last id drawn was never fed
        assert new <= fed <= new + BLOCK_SIZE
        held += [*(output.ids or ()), *range(30 + turn, 40 + turn)]


# --- weights ---
@pytest.mark.slow
def test_five_loads_and_what_is_cached_is_gone(sampler: VLLMSampler, folder: Path) -> None:
    moving = Reference.of(folder)
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in moving.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        seconds = sampler.load(list(moving.model.named_parameters()), version)
        assert set(seconds) == {"transfer", "reset"} and all(0 <= s < 30 for s in seconds.values())
        for prompt, output in zip(PROMPTS, together(sampler, *eight()), strict=True):
            assert output.version == sampler.version == version and output.versions == ()
            assert moving.difference(prompt, output, SamplingParams()) <= TOLERANCE
    settle(sampler)


def test_a_turn_in_flight_goes_on_with_new_weights(sampler: VLLMSampler, folder: Path, reference: Reference) -> None:
    moved = Reference.of(folder)
    with torch.no_grad():
        for parameter in moved.model.parameters():
            parameter.mul_(1.2)

    async def main() -> SampleOutput:
        task = asyncio.ensure_future(sampler.sample(request(PROMPTS[0], max_tokens=600)))
        began = sampler.counts()["steps"]
        while sampler.counts()["steps"] < began + 20:
            await asyncio.sleep(0.001)
        sampler.load(list(moved.model.named_parameters()), 7)
        return await task

    output = asyncio.run(main())
    assert output.ids is not None and output.log_probs is not None
    cut = output.versions[0].end
    assert output.version == 0 and 0 < cut < 600
    assert output.versions == (VersionSpan(0, 0, cut), VersionSpan(7, cut, 600))
    old = reference.log_probs(PROMPTS[0], output.ids, SamplingParams())
    new = moved.log_probs(PROMPTS[0], output.ids, SamplingParams())
    got = torch.tensor(output.log_probs)
    assert float((got - old)[:cut].abs().max()) <= TOLERANCE
    # Keys and values of what was drawn before are computed again, not kept from the old weights.
    assert float((got - new)[cut:].abs().max()) <= TOLERANCE
    settle(sampler)


def test_weights_that_are_not_finite_fail_the_turn(sampler: VLLMSampler, folder: Path) -> None:
    broken = Reference.of(folder).model
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    sampler.load(list(broken.named_parameters()), 8)
    with pytest.raises(SamplerError, match="no finite number"):
        together(sampler, request(PROMPTS[0]))
    settle(sampler)
    assert together(sampler, request(PROMPTS[0]))[0].ids


# --- what goes wrong ---
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (request([1] * 1024), SamplerError, "no room for an answer.*vllm_max_model_length"),
        (request([1, 265]), ConfigurationError, "outside the 265"),
        (request([]), SamplerError, "needs prompt ids"),
        (request([1], temperature=-1.0), ConfigurationError, "temperature"),
        (request([1], max_tokens=0), SamplerError, "max_tokens"),
        (request([1], temperature=0.0, repetition_penalty=-1.0), ConfigurationError, "repetition_penalty"),
        (request([1], top_p=0.5), ConfigurationError, "top_k"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(
    sampler: VLLMSampler, bad: SampleRequest, error: type[Exception], message: str
) -> None:
    async def main() -> list[Any]:
        turns = [sampler.sample(r) for r in (request(PROMPTS[0]), bad, request(PROMPTS[1]))]
        return await asyncio.gather(*turns, return_exceptions=True)

    good, refused, other = asyncio.run(main())
    assert isinstance(good, SampleOutput) and isinstance(other, SampleOutput)
    with pytest.raises(error, match=message):
        raise refused


def test_cancelling_aborts_in_the_engine(sampler: VLLMSampler) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(sampler.sample(request(PROMPTS[0], max_tokens=900)))
        other = asyncio.ensure_future(sampler.sample(request(PROMPTS[1], max_tokens=200)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await other).ids or ()) == 200
        assert sampler.llm.llm_engine.get_num_unfinished_requests() == 0

    asyncio.run(main())


def test_a_released_conversation_fails_its_turn(sampler: VLLMSampler) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(sampler.sample(request(PROMPTS[0], max_tokens=900, conversation="gone")))
        await asyncio.sleep(0.05)
        sampler.release("gone")
        sampler.release("unknown")
        with pytest.raises(SamplerError, match="'gone' was released"):
            await task

    asyncio.run(main())


def test_a_step_that_fails_fails_its_turns_and_no_others(sampler: VLLMSampler, reference: Reference) -> None:
    """The engine is broken from outside for one step, as a CUDA error would break it."""
    runner = sampler.llm.llm_engine.model_executor.driver_worker.model_runner
    forward, runner.execute_model = runner.execute_model, lambda *a, **k: 1 / 0

    async def main() -> None:
        results = await asyncio.gather(*(sampler.sample(r) for r in eight()), return_exceptions=True)
        assert all(isinstance(r, SamplerError) and "ZeroDivisionError" in str(r) for r in results)
        runner.execute_model = forward
        output = await sampler.sample(request(PROMPTS[0]))
        assert reference.difference(PROMPTS[0], output, SamplingParams()) <= TOLERANCE

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        runner.execute_model = forward


def test_more_turns_than_sequences_and_than_the_cache_holds(folder: Path, alone: None, reference: Reference) -> None:
    """A full cache: turns are put back and drawn again, and none fails."""
    small = VLLMSampler(ColocateOptions(str(folder), max_model_len=224, max_num_seqs=8, gpu_memory_utilization=1e-9))
    blocks = small.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks < 8 * 224 // BLOCK_SIZE  # the least: it cannot hold eight long sequences
    requests = [request(PROMPTS[i % 8], max_tokens=150, seed=(i,), conversation=str(i)) for i in range(24)]
    for r, output in zip(requests, together(small, *requests), strict=True):
        assert len(output.ids or ()) == 150
        assert reference.difference(r.prompt_ids or [], output, SamplingParams()) <= TOLERANCE


def test_more_prompt_tokens_than_a_step_feeds(sampler: VLLMSampler, reference: Reference) -> None:
    """vLLM for CPUs dies of a turn with a seed whose prompt it feeds in parts."""
    asked = [request([7 + i] * 900, seed=(i,), conversation=str(i), max_tokens=4) for i in range(6)]

    async def play() -> list[Any]:
        return await asyncio.gather(*map(sampler.sample, asked))

    for one, output in zip(asked, asyncio.run(play()), strict=True):
        assert reference.difference(one.prompt_ids or [], output, one.params) <= vllm_kit.TOLERANCE


def test_successive_loops_may_use_it(sampler: VLLMSampler) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(sampler.sample(request(PROMPTS[0], max_tokens=900)))
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()  # with a turn in flight that nobody waits for any more
    assert not task.done()
    assert len(together(sampler, request(PROMPTS[1], max_tokens=5))[0].ids or ()) == 5
    assert sampler.llm.llm_engine.get_num_unfinished_requests() == 0


def test_the_event_loop_goes_on_while_a_step_is_slow(sampler: VLLMSampler) -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.perf_counter())
            await asyncio.sleep(0.001)

    async def main() -> None:
        ticking = asyncio.ensure_future(tick())
        await sampler.sample(request(PROMPTS[0], max_tokens=60))
        ticking.cancel()

    before, sampler.inline_below_s = sampler.inline_below_s, 0.0
    try:
        asyncio.run(main())
    finally:
        sampler.inline_below_s = before
    assert len(ticks) > 30


# --- options ---
@pytest.mark.slow
def test_generation_kwargs_and_regex(folder: Path, alone: None, reference: Reference) -> None:
    drawing = Drawing(extra={"temperature": 0.5, "logit_bias": {65: -100.0}}, regex="[ab]{4}c")
    with_regex = VLLMSampler(ColocateOptions(str(folder), drawing=drawing))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for output in together(with_regex, *(request(p, seed=(i,)) for i, p in enumerate(PROMPTS))):
        text = tokenizer.decode(output.ids, skip_special_tokens=True)
        assert len(text) == 5 and set(text[:4]) <= set("ab") and text[4] == "c"
        assert output.finish_reason == "stop"
    with_regex.close()
    warm = VLLMSampler(ColocateOptions(str(folder), drawing=Drawing(extra={"temperature": 0.5})))
    output = together(warm, request(PROMPTS[0]))[0]
    assert reference.difference(PROMPTS[0], output, SamplingParams(temperature=0.5)) <= TOLERANCE


@pytest.mark.slow
def test_sleeping_states(folder: Path, alone: None) -> None:
    """F163: after a deep sleep nothing is drawn before weights have come."""
    with pytest.warns(UserWarning, match="on a CPU"):
        sleeper = VLLMSampler(ColocateOptions(str(folder), sleep=True))
    weights = list(Reference.of(folder).model.named_parameters())
    sleeper.wake()  # awake already
    assert together(sleeper, request(PROMPTS[0]))[0].version == 0

    async def caught() -> None:
        task = asyncio.ensure_future(sleeper.sample(request(PROMPTS[0], max_tokens=900)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(sleeper.sleep)
        with pytest.raises(SamplerError, match="sleeps"):
            await asyncio.wait_for(task, 20)

    asyncio.run(caught())
    sleeper.sleep()
    with pytest.raises(SamplerError, match="sleeps"):
        together(sleeper, request(PROMPTS[0]))
    with pytest.raises(SamplerError, match="wake"):
        sleeper.load(weights, 1)
    sleeper.wake()
    for _ in range(2):
        with pytest.raises(SamplerError, match="lost its weights"):
            together(sleeper, request(PROMPTS[0]))
    sleeper.load(weights, 1)
    assert together(sleeper, request(PROMPTS[0]))[0].version == 1


def test_only_an_engine_that_was_built_to_sleep_sleeps(sampler: VLLMSampler) -> None:
    with pytest.raises(ConfigurationError, match="vllm_enable_sleep_mode"):
        sampler.sleep()


def test_one_engine_per_process(sampler: VLLMSampler, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"close\(\)"):
        VLLMSampler(ColocateOptions(str(folder)))


@pytest.mark.slow
def test_what_vllm_refuses_is_said_in_its_words(folder: Path, alone: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchLM"], "model_type": "nosuch"}')
    vllm_kit.make_folder(tmp_path / "narrow", hidden=64)
    for options, message in (
        (ColocateOptions(str(folder), max_model_len=4096), "4096.*greater"),
        (ColocateOptions(str(tmp_path)), "nosuch"),
        (ColocateOptions(str(tmp_path / "narrow")), "head_dim=16"),
        (ColocateOptions(str(folder), dtype="float99"), "dtype.*should be"),
        (ColocateOptions(str(folder), tensor_parallel_size=2), "multiple of it.*server"),
    ):
        with pytest.raises(ConfigurationError, match=message) as caught:
            VLLMSampler(options)
        assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)
        assert VLLMSampler._open is None and not torch.distributed.is_initialized()


# --- the process ---
def state() -> dict[str, Any]:
    return {
        "threads": (torch.get_num_threads(), torch.set_num_threads),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "hook": sys.excepthook,
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[union-attr]
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTEST_", "_"))},
    }


@pytest.mark.slow
def test_the_process_is_as_it_was(folder: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    weights = list(Reference.of(folder).model.named_parameters())
    torch.set_num_threads(2)
    before = state()
    made = VLLMSampler(ColocateOptions(str(folder), seed=5))
    named = {"MASTER_ADDR": "localhost", "MASTER_PORT": os.environ["MASTER_PORT"]}
    assert state() == before | {"environment": before["environment"] | named}
    together(made, *eight())
    made.load(weights, 1)
    assert state() == before | {"environment": before["environment"] | named}
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None and not x.grad.is_inference()
    made.close()
    made.close()
    assert state() == before and not torch.distributed.is_initialized()
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_ports(folder: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """12345 unless the environment says otherwise; another where that is taken, but never in place of a named one."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("localhost", 12345))
        taken.listen()
        made = VLLMSampler(ColocateOptions(str(folder)))
        assert os.environ["MASTER_PORT"] != "12345"
        made.close()
        assert "MASTER_PORT" not in os.environ
        monkeypatch.setenv("MASTER_PORT", "12345")
        with pytest.raises(ConfigurationError, match=r"localhost:12345.*MASTER_PORT"):
            VLLMSampler(ColocateOptions(str(folder)))
    port = str(vllm_kit.free_port())
    monkeypatch.setenv("MASTER_PORT", port)
    made = VLLMSampler(ColocateOptions(str(folder)))
    assert os.environ["MASTER_PORT"] == port
    made.close()
    assert os.environ["MASTER_PORT"] == port


RANKS = """
import asyncio, os, sys
import torch
sys.path.insert(0, {kit!r})
from accelerate import Accelerator
from vllm_kit import Reference, request
from agentrl.sampler.vllm.colocate import ColocateOptions, VLLMSampler
from agentrl.types import SamplingParams
from pathlib import Path
folder, size = Path({folder!r}), {size}
accelerator = Accelerator(cpu=True)
sampler = VLLMSampler(ColocateOptions(str(folder), tensor_parallel_size=size, max_num_seqs=8))
rank, model = accelerator.process_index, Reference.of(folder)
assert accelerator.num_processes == 2
prompts = [list(range(10, 30 + i)) for i in range(4)]
async def play():
    turns = [sampler.sample(request(p, seed=(rank, i), conversation=str(i))) for i, p in enumerate(prompts)]
    turns.append(sampler.sample(request([1] * 9999)))
    gone = asyncio.ensure_future(sampler.sample(request(prompts[0], max_tokens=999, conversation="gone")))
    outputs = await asyncio.gather(*turns, return_exceptions=True)
    gone.cancel()
    assert "no room" in str(outputs.pop())
    return outputs
for version in range(3):
    if version:
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter.mul_(1.1)
        sampler.load(list(model.model.named_parameters()), version)
    if size == 1 or rank == 0:
        outputs = asyncio.run(play())
        sampler.dismiss()
        worst = max(model.difference(p, o, SamplingParams()) for p, o in zip(prompts, outputs))
        assert worst <= 3e-5 and outputs[0].version == version, worst
        os.write(1, f"RESULT {{rank}} {{version}} {{outputs[0].ids}}\\n".encode())  # whole lines: two ranks write
    else:
        sampler.follow()
accelerator.wait_for_everyone()
sampler.close()
total = accelerator.reduce(torch.tensor([1.0]))  # the run's own process group goes on
os.write(1, f"END {{rank}} {{total.item()}}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_two_processes(folder: Path, tmp_path: Path, size: int) -> None:
    """Each rank with an engine of its own, or both with one together, under torchrun with gloo."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(kit=str(Path(__file__).parent), folder=str(folder), size=size))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*launch, str(vllm_kit.free_port()), str(script)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(" ", 3) for line in done.stdout.splitlines() if line.startswith(("RESULT", "END"))]
    assert sorted(line[1:3] for line in lines if line[0] == "END") == [["0", "2.0"], ["1", "2.0"]]
    drawn = {(line[1], line[2]): line[3] for line in lines if line[0] == "RESULT"}
    assert len(drawn) == (6 if size == 1 else 3)
    assert len(set(drawn.values())) == len(drawn)  # no rank returns copies of another's


def test_nothing_is_left_of_a_closed_engine(folder: Path, alone: None) -> None:
    made = VLLMSampler(ColocateOptions(str(folder)))
    made.close()
    with pytest.raises(SamplerError, match="closed"):
        together(made, request(PROMPTS[0]))
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o).__name__ == "EngineCore"]
