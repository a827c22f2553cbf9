"""The vLLM server's sampler against a server that fails in every way that one can; tests/on_vllm has the real one."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fake_vllm import MODEL_LENGTH, VOCABULARY, FakeVLLM, answer, choice, refusal

from agentrl.errors import ConfigurationError, RunStopped, SamplerError
from agentrl.sampler.vllm.http import ServerClient, ServerRefused
from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler
from agentrl.sampler.vllm.wire import Drawing
from agentrl.types import SampleRequest, SamplingParams, VersionSpan


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


@asynccontextmanager
async def started(fake: FakeVLLM, **options: Any) -> AsyncIterator[VLLMServerSampler]:
    sampler = VLLMServerSampler(ServerOptions(fake.url, **{"timeout_s": 5.0, **options}))
    await sampler.start(VOCABULARY)
    try:
        yield sampler
    finally:
        await sampler.close()


def a_request(turn: int = 0, *, prompt: Any = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> SampleRequest:
    ids = None if prompt is None else list(prompt)
    return SampleRequest([], [], ids, max_tokens, SamplingParams(), (0, turn, 0), f"c{turn}", **fields)


async def until(what: Any, seconds: float = 5) -> None:
    """`what()` is true; fails after these seconds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


# --- getting ready ---
def test_the_facts_of_a_server_are_read(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            facts = sampler.facts
            assert (facts.version, facts.model, facts.root) == ("0.32.0", "policy", "/models/tiny")
            assert (facts.max_model_len, facts.vocabulary, facts.dtype) == (MODEL_LENGTH, VOCABULARY, "float32")
            assert facts.dev_mode and facts.scale_out and facts.weight_backend == "agentrl" and facts.lora is None
            assert facts.lora_updates and facts.block_size == 32 and facts.world_size == 1
            assert fake.bodies == []  # nothing was drawn for it: it works while the engine is paused

    asyncio.run(main())


def test_a_server_that_is_loading_is_waited_for(fake: FakeVLLM) -> None:
    fake.health = lambda: web.Response(status=503 if fake.healthy_calls < 3 else 200)

    async def main() -> None:
        async with started(fake):
            assert fake.healthy_calls == 3

    asyncio.run(main())


def test_a_server_that_never_gets_ready_is_a_connection_error_with_its_own_words(fake: FakeVLLM) -> None:
    fake.health = lambda: refusal(503, "The engine is dead: no memory")

    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=r"within 0\.5 s .*The engine is dead: no memory"):
            async with started(fake, timeout_s=0.5):
                pass
        assert time.monotonic() - began < 2

    asyncio.run(main())


def test_a_server_that_takes_the_connection_and_says_nothing_is_a_connection_error() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        async def main() -> None:
            sampler = VLLMServerSampler(ServerOptions(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5))
            with pytest.raises(ConnectionError, match="not answered within"):
                await sampler.start()
            await sampler.close()

        asyncio.run(main())


def test_no_server_at_all_is_a_connection_error_that_names_the_address() -> None:
    async def main() -> None:
        sampler = VLLMServerSampler(ServerOptions("http://127.0.0.1:9", timeout_s=0.3))
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9 .*vllm_server_base_url"):
            await sampler.start()
        await sampler.close()

    asyncio.run(main())


def test_a_proxy_of_the_environment_is_not_used(fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def main() -> None:
        async with started(fake) as sampler:
            assert (await sampler.sample(a_request())).ids

    asyncio.run(main())


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        (None, "scale_out", False, "--enable-scale-out"),
        (None, "info", None, "VLLM_SERVER_DEV_MODE=1"),
        ("weight_transfer_config", "backend", None, r"""--weight-transfer-config '{"backend": "agentrl"}'"""),
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "max_logprobs", 20, "--max-logprobs -1"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
def test_a_flag_that_is_missing_is_named(fake: FakeVLLM, where: str | None, name: str, value: Any, said: str) -> None:
    if where is None:
        setattr(fake, name, value)
    else:
        assert fake.info is not None
        fake.info["vllm_config"][where][name] = value

    async def main() -> None:
        sampler = VLLMServerSampler(ServerOptions(fake.url, timeout_s=2))
        with pytest.raises(ConfigurationError) as caught:
            await sampler.start(VOCABULARY, log_probs=21)
        assert said in str(caught.value) and str(caught.value).count(". ") == 0
        await sampler.close()

    asyncio.run(main())


def test_a_gpu_may_feed_prompts_in_parts(fake: FakeVLLM) -> None:
    assert fake.info is not None
    fake.info["vllm_config"]["scheduler_config"]["enable_chunked_prefill"] = True
    fake.info["vllm_config"]["device_config"]["device"] = "cuda"

    async def main() -> None:
        async with started(fake) as sampler:
            assert not sampler.facts.feeds_in_parts

    asyncio.run(main())


def test_a_server_that_is_only_sampled_from_needs_no_dev_mode(fake: FakeVLLM) -> None:
    fake.info = None

    async def main() -> None:
        sampler = VLLMServerSampler(ServerOptions(fake.url, timeout_s=2))
        facts = await sampler.start(VOCABULARY, weights=False)
        assert not facts.dev_mode and facts.dtype is None and (await sampler.sample(a_request())).version == 0
        await sampler.close()

    asyncio.run(main())


def test_another_vocabulary_another_model_and_another_service_are_refused(fake: FakeVLLM) -> None:
    async def refused(vocabulary: int, model: str | None) -> str:
        sampler = VLLMServerSampler(ServerOptions(fake.url, timeout_s=1, model=model))
        with pytest.raises(ConfigurationError) as caught:
            await sampler.start(vocabulary)
        await sampler.close()
        return str(caught.value)

    assert "with 100 ids, and the model that is trained has 101" in asyncio.run(refused(101, None))
    assert "does not serve 'nope' but policy" in asyncio.run(refused(100, "nope"))
    fake.models = [{"name": "something else"}]
    assert "is no vLLM server" in asyncio.run(refused(100, None))


def test_an_address_that_is_none_and_options_that_cannot_work_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="'localhost:8000'"):
            await VLLMServerSampler(ServerOptions("localhost:8000")).start()

    asyncio.run(main())
    with pytest.raises(ConfigurationError, match="at least 1"):
        ServerOptions("http://x", max_connections=0)


def test_without_aiohttp_the_extra_is_named() -> None:
    code = (
        "import sys, asyncio; sys.modules['aiohttp'] = None\n"
        "from agentrl.sampler.vllm import ServerOptions, VLLMServerSampler\n"
        "asyncio.run(VLLMServerSampler(ServerOptions('http://127.0.0.1:9')).start())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDependency" in done.stderr and ".[vllm-client]" in done.stderr


# --- what is tried again, and what is not ---
async def _hangs(request: web.Request, body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


async def _cuts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Half of a good answer, and the connection is closed."""
    whole = json.dumps({"choices": [choice(body)]}).encode()
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(whole))})
    await response.prepare(request)
    await response.write(whole[: len(whole) // 2])
    assert request.transport is not None
    request.transport.close()
    return response


async def _resets(request: web.Request, body: dict[str, Any]) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


FAULTS: dict[str, Any] = {
    "500": lambda request, body: refusal(500, "EngineCore encountered an issue"),
    "503": lambda request, body: web.Response(status=503),
    "429": lambda request, body: refusal(429, "too many requests"),
    "reset": _resets,
    "cut": _cuts,
    "no JSON": lambda request, body: web.Response(text="<html>", content_type="application/json"),
    "a page": lambda request, body: web.Response(text="<html>welcome</html>", content_type="text/html"),
    "half JSON": lambda request, body: web.Response(text='{"choices": [{"tok', content_type="application/json"),
    "other JSON": lambda request, body: web.json_response({"choices": []}),
    "null": lambda request, body: web.json_response(None),
    "other ids": lambda request, body: answer(body, token_ids=[1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_pass_is_tried_again(fake: FakeVLLM, fault: str) -> None:
    fake.replies = [FAULTS[fault], FAULTS[fault]]

    async def main() -> None:
        async with started(fake) as sampler:
            expected = await sampler.sample(a_request(1))
            assert sampler.retries == 2 and len(fake.bodies) == 3
            assert fake.bodies[0] == fake.bodies[2]  # the same seed: the same ids as without the fault
            assert await sampler.sample(a_request(1)) == expected

    asyncio.run(main())


def test_an_answer_that_does_not_come_is_tried_again(fake: FakeVLLM) -> None:
    fake.replies = [_hangs]

    async def main() -> None:
        async with started(fake, timeout_s=0.4, answer_s=0.4) as sampler:
            assert (await sampler.sample(a_request())).ids is not None
            assert sampler.retries == 1
            await until(lambda: fake.dropped == 1)

    asyncio.run(main())


def test_a_turn_that_waits_behind_others_is_waited_for_while_the_server_is_healthy(fake: FakeVLLM) -> None:
    async def late(request: Any, body: dict[str, Any]) -> Any:
        await asyncio.sleep(1.0)
        return answer(body)

    fake.replies = [late]

    async def main() -> None:
        async with started(fake, timeout_s=0.2) as sampler:
            assert (await sampler.sample(a_request())).ids is not None
            assert sampler.retries == 0

    asyncio.run(main())


@pytest.mark.parametrize("names", [["default"], ["theirs-1"], ["default", "theirs-1"]])
def test_an_adapter_on_weights_of_another_run_stops_this_one(fake: FakeVLLM, names: list[str]) -> None:
    spans = [{"version": name, "start": i, "end": i + 1} for i, name in enumerate(names)]
    fake.usual = lambda request, body: answer(body, weight_versions=spans)

    async def main() -> None:
        async with started(fake) as sampler:
            sampler.open(4, adapter="policy")
            if names == ["default"]:
                assert (await sampler.sample(a_request())).version == 4
                return
            with pytest.raises(RunStopped, match="under the adapter of this one"):
                await sampler.sample(a_request())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "said"), [("500", "EngineCore encountered"), ("null", "cannot be read"), ("reset", "")]
)
def test_a_fault_that_stays_is_a_failed_turn_with_the_last_cause(fake: FakeVLLM, fault: str, said: str) -> None:
    fake.usual = FAULTS[fault]

    async def main() -> None:
        async with started(fake, timeout_s=0.5) as sampler:
            began = time.monotonic()
            with pytest.raises(SamplerError, match=f"failed .* time.*{said}"):
                await sampler.sample(a_request())
            assert time.monotonic() - began < 1.5
            assert 2 <= len(fake.bodies) <= 6  # with growing pauses

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (400, "top_p must be in (0, 1], got 2.", r"top_p must be in \(0, 1\], got 2\."),
        (404, "The model `policy` does not exist. Valid aliases: other.", "Valid aliases: other"),
        (400, "Requested sample logprobs of 30, which is greater than max allowed: 20", "--max-logprobs -1"),
        (401, "Unauthorized", "--api-key"),
        (422, "no", "no"),
    ],
)
def test_what_the_server_always_refuses_is_said_at_once(fake: FakeVLLM, status: int, message: str, said: str) -> None:
    fake.usual = lambda request, body: refusal(status, message)

    async def main() -> None:
        async with started(fake) as sampler:
            with pytest.raises(ConfigurationError, match=said):
                await sampler.sample(a_request())
            assert sampler.retries == 0 and len(fake.bodies) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/pause", "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("/v1/completions", "Is it a vLLM server"),
    ],
)
def test_a_route_that_is_not_there_names_what_adds_it(fake: FakeVLLM, path: str, flag: str) -> None:
    async def main() -> None:
        client = ServerClient(fake.url, timeout_s=1)
        with pytest.raises(ServerRefused, match=flag):
            await client.post(path)
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": None}, "no log-probs"),
        ({"finish_reason": "abort"}, "gave up this turn"),
        ({"token_ids": [], "logprobs": {"content": []}}, "without a single token"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_fails_its_turn(fake: FakeVLLM, changes: dict[str, Any], said: str) -> None:
    fake.usual = lambda request, body: answer(body, **changes)

    async def main() -> None:
        async with started(fake) as sampler:
            with pytest.raises(SamplerError, match=said):
                await sampler.sample(a_request())
            assert len(fake.bodies) == 1

    asyncio.run(main())


def test_nan_weights_are_named_as_the_cause(fake: FakeVLLM) -> None:
    def nan(request: web.Request, body: dict[str, Any]) -> web.Response:
        broken = choice(body)
        broken["logprobs"]["content"][2]["logprob"] = -9999.0  # as vLLM writes NaN
        return web.json_response({"choices": [broken]})

    fake.usual = nan

    async def main() -> None:
        async with started(fake) as sampler:
            with pytest.raises(SamplerError, match="weights that it holds are not finite"):
                await sampler.sample(a_request())

    asyncio.run(main())


# --- requests ---
def test_the_body_of_a_request(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake, drawing=Drawing(extra={"min_tokens": 1})) as sampler:
            await sampler.sample(a_request(prompt=range(60), max_tokens=50, stop_ids=(9,)))
            (body,) = fake.bodies
            assert body["token_ids"] == list(range(60)) and body["model"] == "policy"
            params = body["sampling_params"]
            assert params["max_tokens"] == MODEL_LENGTH - 60  # what the context leaves
            assert params["stop_token_ids"] == [9] and params["min_tokens"] == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (a_request(prompt=None), SamplerError, "needs prompt ids"),
        (a_request(prompt=range(MODEL_LENGTH)), SamplerError, "no room for an answer"),
        (a_request(max_tokens=0), SamplerError, "at least 1"),
        (a_request(media=("picture",)), ConfigurationError, "1 image"),
        (a_request(prompt=[1, VOCABULARY]), ConfigurationError, "outside the 100"),  # the real engine would die of it
        (a_request(prompt=[-1]), ConfigurationError, "outside the 100"),
    ],
)
def test_what_cannot_be_sent_is_not_sent(
    fake: FakeVLLM, request_: SampleRequest, error: type[Exception], said: str
) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            with pytest.raises(error, match=said):
                await sampler.sample(request_)
            assert fake.bodies == []

    asyncio.run(main())


def test_a_sampler_that_was_not_started_says_so(fake: FakeVLLM) -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"await sampler\.start\(\)"):
            await VLLMServerSampler(ServerOptions(fake.url)).sample(a_request())

    asyncio.run(main())


def test_512_requests_are_in_flight_together_and_control_calls_get_through(fake: FakeVLLM) -> None:
    go = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go.wait()
        return answer(body)

    fake.usual = waits

    async def main() -> None:
        async with started(fake, timeout_s=60.0) as sampler:
            tasks = [asyncio.create_task(sampler.sample(a_request(i))) for i in range(600)]
            await until(lambda: fake.in_flight >= 512, 20)
            await sampler.load()  # on a connection of its own
            await asyncio.sleep(0.05)
            assert fake.in_flight == 512
            fake._loop.call_soon_threadsafe(go.set)
            outputs = await asyncio.gather(*tasks)
            assert fake.most_in_flight == 512 and sampler.retries == 0 and len(outputs) == 600
            assert len({body["sampling_params"]["seed"] for body in fake.bodies}) == 600

    asyncio.run(main())


def test_cancelling_a_turn_drops_it_in_the_server(fake: FakeVLLM) -> None:
    fake.usual = _hangs

    async def main() -> None:
        async with started(fake) as sampler:
            tasks = [asyncio.create_task(sampler.sample(a_request(i))) for i in range(5)]
            await until(lambda: fake.in_flight == 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: fake.dropped == 5)
            fake.usual = lambda request, body: answer(body)
            assert (await sampler.sample(a_request())).ids

    asyncio.run(main())


def test_successive_event_loops_use_the_same_sampler(fake: FakeVLLM, caplog: pytest.LogCaptureFixture) -> None:
    sampler = VLLMServerSampler(ServerOptions(fake.url, timeout_s=5, max_connections=2))
    fake.replies = [FAULTS["500"]]

    async def first() -> None:
        await sampler.start(VOCABULARY)
        await asyncio.gather(*(sampler.sample(a_request(i)) for i in range(20)))

    async def second() -> int:
        await asyncio.gather(*(sampler.sample(a_request(i)) for i in range(20)))
        return sampler.retries

    with caplog.at_level(logging.ERROR):
        asyncio.run(first())  # leaves its connection open
        assert asyncio.run(second()) == 1  # counted over loops
        asyncio.run(sampler.close())
        gc.collect()
    assert [record.message for record in caplog.records] == []


def test_a_second_loop_while_the_first_one_runs_is_refused(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            with pytest.raises(SamplerError, match="another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(sampler.sample(a_request())))

    asyncio.run(main())


def test_what_a_server_is_doing(fake: FakeVLLM) -> None:
    names = {"kv_cache_usage_perc": 0.5, "num_requests_running": 3, "num_requests_waiting": 2,
             "num_preemptions_total": 7, "prefix_cache_queries_total": 1e6, "prefix_cache_hits_total": 5e5}  # fmt: skip
    fake.metrics = "".join(
        f'# HELP x\nvllm:{n}{{engine="0"}} {v}\nvllm:{n}{{engine="1"}} {v}\n' for n, v in names.items()
    )

    async def main() -> None:
        async with started(fake) as sampler:
            load = await sampler.load()
            assert (load.kv_cache_usage, load.running, load.waiting, load.preemptions) == (0.5, 6, 4, 14)
            assert (load.prefix_queries, load.prefix_hits) == (2_000_000, 1_000_000)

    asyncio.run(main())


# --- weights that change ---
def test_f165_while_held_nothing_is_sent_and_what_is_in_flight_ends(fake: FakeVLLM) -> None:
    """F165: two in flight, 50 queued behind them, and a weight sync begins."""
    fake.version = "1"
    go = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go.wait()
        return answer(body, fake.version)

    fake.usual = waits

    async def main() -> None:
        async with started(fake, max_connections=2) as sampler:
            sampler.open(1)
            tasks = [asyncio.create_task(sampler.sample(a_request(i))) for i in range(52)]
            await until(lambda: fake.in_flight == 2)
            sampler.hold()
            fake._loop.call_soon_threadsafe(go.set)
            await until(lambda: fake.in_flight == 0)
            await asyncio.sleep(0.1)
            assert len(fake.bodies) == 2 and sum(task.done() for task in tasks) == 2
            fake.version = "2"
            sampler.open(2)
            outputs = await asyncio.gather(*tasks)
            assert sorted(output.version for output in outputs) == [1] * 2 + [2] * 50

    asyncio.run(main())


def test_the_gate_opens_from_another_thread(fake: FakeVLLM) -> None:
    fake.version = "1"

    async def main() -> None:
        async with started(fake) as sampler:
            sampler.hold()
            task = asyncio.create_task(sampler.sample(a_request()))
            await asyncio.sleep(0.05)
            assert fake.bodies == []
            await asyncio.to_thread(sampler.open, 1)
            assert (await asyncio.wait_for(task, 2)).version == 1

    asyncio.run(main(), debug=True)  # in which a loop refuses what is not safe from another thread


def test_broken_weights_are_never_sampled_from(fake: FakeVLLM) -> None:
    """A sync that died half-way: neither turns that wait nor those in flight count, until weights are whole again."""
    fake.version = "1"
    go = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go.wait()
        return answer(body, fake.version)

    async def main() -> None:
        async with started(fake, max_connections=2) as sampler:
            sampler.open(1)
            fake.usual = waits
            sent = asyncio.create_task(sampler.sample(a_request(0)))
            await until(lambda: fake.in_flight == 1)
            sampler.hold()
            waiting = asyncio.create_task(sampler.sample(a_request(1)))
            await asyncio.sleep(0.02)
            sampler.broken("The weight sync to version 2 died.")
            fake._loop.call_soon_threadsafe(go.set)
            for task in (sent, waiting, asyncio.create_task(sampler.sample(a_request(2)))):
                with pytest.raises(SamplerError, match="sync to version 2 died"):
                    await asyncio.wait_for(task, 2)
            assert len(fake.bodies) == 1
            fake.version = "3"
            sampler.open(3)
            assert (await sampler.sample(a_request(3))).version == 3

    asyncio.run(main())


def test_a_turn_that_was_in_flight_over_a_break_is_thrown_away_after_it(fake: FakeVLLM) -> None:
    fake.version = "1"
    go = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go.wait()
        return answer(body, "1")

    async def main() -> None:
        async with started(fake) as sampler:
            sampler.open(1)
            fake.replies = [waits]
            task = asyncio.create_task(sampler.sample(a_request()))
            await until(lambda: fake.in_flight == 1)
            sampler.broken("half")
            sampler.open(2)
            fake._loop.call_soon_threadsafe(go.set)
            with pytest.raises(SamplerError, match="meanwhile"):
                await task

    asyncio.run(main())


def test_weights_that_change_in_mid_turn_are_recorded_token_for_token(fake: FakeVLLM) -> None:
    spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 4}]
    fake.usual = lambda request, body: answer(body, weight_versions=spans)

    async def main() -> None:
        async with started(fake) as sampler:
            sampler.open(1)
            sampler.open(2)
            output = await sampler.sample(a_request())
            assert output.version == 1 and output.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))

    asyncio.run(main())


def test_before_the_first_sync_the_servers_own_weights_are_version_0(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            assert (await sampler.sample(a_request())).version == 0

    asyncio.run(main())


def test_a_turn_that_began_before_the_first_sync_is_drawn_again(fake: FakeVLLM) -> None:
    spans = [{"version": "default", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 4}]
    fake.replies = [lambda request, body: answer(body, weight_versions=spans)]
    fake.version = "1"

    async def main() -> None:
        async with started(fake) as sampler:
            sampler.open(1)
            output = await sampler.sample(a_request())
            assert output.version == 1 and output.versions == () and len(fake.bodies) == 2

    asyncio.run(main())


def test_another_run_on_the_same_server_stops_this_one(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            sampler.run = "ours"
            sampler.open(3)
            fake.version = sampler.name_of(3)
            assert (await sampler.sample(a_request())).version == 3
            fake.version = "theirs-3"
            with pytest.raises(RunStopped, match=r"Another run sends its weights .* give each run a server of its own"):
                await sampler.sample(a_request())

    asyncio.run(main())


def test_a_server_that_was_restarted_gets_its_weights_once_for_all_that_wait(fake: FakeVLLM) -> None:
    calls = []

    async def main() -> None:
        async with started(fake) as sampler:

            async def restore() -> None:
                sampler.hold()
                calls.append(1)
                await asyncio.sleep(0.05)
                fake.version = "4"
                sampler.open(4)

            sampler.open(4)
            sampler.restore = restore
            outputs = await asyncio.gather(*(sampler.sample(a_request(i)) for i in range(20)))
            assert calls == [1] and all(output.version == 4 for output in outputs)
            fake.version = "default"  # and again
            assert (await sampler.sample(a_request())).version == 4 and calls == [1, 1]

    asyncio.run(main())


def test_what_a_restarted_server_drew_before_its_weights_came_does_not_send_them_twice(fake: FakeVLLM) -> None:
    calls = []
    go = asyncio.Event()

    async def late(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go.wait()
        return answer(body, "default")

    fake.replies = [late]

    async def main() -> None:
        async with started(fake) as sampler:

            async def restore() -> None:
                calls.append(1)
                fake.version = "4"
                sampler.open(4)

            sampler.open(4)
            sampler.restore = restore
            first = asyncio.create_task(sampler.sample(a_request(0)))
            await until(lambda: fake.in_flight == 1)
            assert (await sampler.sample(a_request(1))).version == 4
            fake._loop.call_soon_threadsafe(go.set)
            assert (await first).version == 4 and calls == [1]

    asyncio.run(main())


def test_a_restarted_server_without_its_weights_fails_turns_and_is_never_trained_on(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            sampler.open(4)
            with pytest.raises(SamplerError, match="was restarted and holds its first weights"):
                await sampler.sample(a_request())

            async def restore() -> None:
                raise OSError("the file of the weights is gone")

            sampler.restore = restore
            turns = [sampler.sample(a_request(i)) for i in range(5)]
            for error in await asyncio.gather(*turns, return_exceptions=True):
                assert isinstance(error, SamplerError) and "the file of the weights is gone" in str(error)
            sent = len(fake.bodies)
            with pytest.raises(SamplerError, match="could not be sent again"):
                await sampler.sample(a_request())
            assert len(fake.bodies) == sent

    asyncio.run(main())


def test_an_answer_without_versions_is_no_answer_once_weights_were_published(fake: FakeVLLM) -> None:
    fake.usual = lambda request, body: answer(body, weight_versions=None)

    async def main() -> None:
        async with started(fake, timeout_s=0.3) as sampler:
            sampler.open(1)
            with pytest.raises(SamplerError, match="no weight versions"):
                await sampler.sample(a_request())

    asyncio.run(main())


def test_an_adapter_is_asked_for_by_its_name_and_its_version_counts(fake: FakeVLLM) -> None:
    async def main() -> None:
        async with started(fake) as sampler:
            sampler.open(3, adapter="agentrl-3")
            output = await sampler.sample(a_request())
            assert fake.bodies[0]["model"] == "agentrl-3" and output.version == 3 and output.versions == ()

    asyncio.run(main())


def test_a_restarted_server_that_lost_its_adapter_gets_it_again(fake: FakeVLLM) -> None:
    loaded = set()

    def reply(request: web.Request, body: dict[str, Any]) -> web.Response:
        known = body["model"] in loaded
        return answer(body) if known else refusal(404, f"The model `{body['model']}` does not exist.")

    fake.usual = reply

    async def main() -> None:
        async with started(fake) as sampler:

            async def restore() -> None:
                loaded.add("agentrl-3")
                sampler.open(3, adapter="agentrl-3")

            sampler.open(3, adapter="agentrl-3")
            sampler.restore = restore
            assert (await sampler.sample(a_request())).version == 3

    asyncio.run(main())


def test_a_server_that_is_gone_for_a_while_is_waited_for(fake: FakeVLLM) -> None:
    """Killed in mid-turn: connections are refused until it is back; no turn is lost to it."""
    port = int(fake.url.rpartition(":")[2])

    async def main() -> None:
        async with started(fake, timeout_s=10) as sampler:
            fake.usual = _hangs
            task = asyncio.create_task(sampler.sample(a_request()))
            await until(lambda: fake.in_flight == 1)
            await asyncio.to_thread(fake.__exit__, None, None, None)
            await asyncio.sleep(0.4)
            assert not task.done()
            fake.usual = lambda request, body: answer(body)
            await asyncio.to_thread(fake.listen, port)
            assert (await asyncio.wait_for(task, 5)).ids and sampler.retries >= 2

    asyncio.run(main())


def test_the_facts_do_not_change_what_the_caller_passed(fake: FakeVLLM) -> None:
    drawing = Drawing(regex="a+")
    before = copy.copy(drawing)

    async def main() -> None:
        async with started(fake, drawing=drawing) as sampler:
            await sampler.sample(a_request())
            assert fake.bodies[0]["sampling_params"]["structured_outputs"] == {"regex": "a+"}

    asyncio.run(main())
    assert drawing == before
