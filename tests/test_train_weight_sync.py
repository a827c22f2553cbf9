"""Weight syncs with a server that speaks vLLM's HTTP: what it holds, in which order, and what every failure leaves."""

# ruff: noqa: F811  (fixtures that are imported)
from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from aiohttp import web
from fake_vllm import VOCABULARY, refusal
from sync_kit import STEPS, FakeServer, Trainer, change, fake, files, lora, memory, trainer, turn_request, weights  # noqa: F401  (fixtures)
from weights_kit import adapted, qwen3, same, two_processes

from agentrl.errors import ConfigurationError, RunStopped, SamplerError
from agentrl.train import file_sync
from agentrl.train.file_sync import FileSync
from agentrl.train.weight_sync import DirectSync
from agentrl.types import SampleOutput


# --- by file ---
def test_a_sync_goes_through_its_steps_in_order_and_times_each(
    fake: FakeServer, trainer: Trainer, memory: Path
) -> None:
    model = qwen3()
    sync = trainer.sync(model)
    assert isinstance(sync, FileSync) and sync.way == "file"
    for version in (0, 1, 2):
        fake.calls.clear()
        times = sync.publish(version)
        same(fake.weights, weights(model))
        assert [path for path, _, _ in fake.calls] == list(STEPS.values())
        assert fake.calls[0][1] == {"mode": "keep"}
        assert fake.calls[3][2] == {"weight_version": trainer.sampler.name_of(version)}
        assert trainer.sampler.name_of(version) == f"{trainer.sampler.run}-{version}" and len(trainer.sampler.run) == 8
        output = trainer.sample()
        assert trainer.sampler.version == output.version == version
        assert list(times.steps) == [
            "gather the weights", "write the weights", "wait for the other ranks", *STEPS
        ]  # fmt: skip
        assert 0 < times.pause_s < times.total_s and 0 < times.transfer_s < times.total_s and times.way == "file"
        assert times.barrier_s < times.pause_s and sum(times.steps.values()) < times.total_s
        assert len(files(memory)) == 1
        change(model, version)
    sync.close()
    assert list(memory.iterdir()) == []


def test_requests_wait_while_weights_change_and_none_is_sent_to_a_paused_server(
    fake: FakeServer, trainer: Trainer
) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)
    seen: list[int] = []
    fake.trouble = {path: lambda: seen.append(len(fake.bodies)) for path in list(STEPS.values())[1:-1]}

    turns: list[asyncio.Task[SampleOutput]] = []

    def run(work: Callable[[], Any]) -> Any:
        async def with_a_turn() -> Any:
            working = asyncio.ensure_future(work())
            await asyncio.sleep(0)  # the sampler is held by now
            turns.append(asyncio.create_task(trainer.sampler.sample(turn_request(len(turns)))))
            return await working

        return trainer.loop.run(with_a_turn())

    sync._run = run
    sync.publish(1)
    assert seen == [0, 0, 0, 0]

    async def outputs() -> list[SampleOutput]:
        return await asyncio.gather(*turns)

    assert [output.version for output in trainer.run(outputs)] == [1, 1]


def test_a_turn_that_is_answered_the_moment_the_server_resumes_counts(fake: FakeServer, trainer: Trainer) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)

    async def slow() -> None:  # the answer to "resume" comes after that of the turn in flight
        fake.paused = False
        await asyncio.sleep(0.2)

    fake.trouble["/resume"] = slow
    turns: list[asyncio.Task[SampleOutput]] = []

    def run(work: Callable[[], Any]) -> Any:
        async def with_a_turn() -> Any:
            if not turns:
                fake.paused = True
                turns.append(asyncio.create_task(trainer.sampler.sample(turn_request())))
                while not fake.bodies:
                    await asyncio.sleep(0.005)
            return await work()

        return trainer.loop.run(with_a_turn())

    sync._run = run
    sync.publish(1)

    async def output() -> SampleOutput:
        return await turns[0]

    assert trainer.run(output).version == 1 and trainer.sampler.retries == 0


async def _never() -> None:
    await asyncio.sleep(60)


def _dies() -> Any:
    raise web.HTTPInternalServerError(text="engine died")


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "500": (lambda: refusal(500, "CUDA error"), "CUDA error"),
    "refused": (lambda: refusal(400, "not in this state"), "not in this state"),
    "died": (_dies, "engine died"),
    "no answer": (_never, "not (done|answered)"),
}


REPEATED = ("pause", "reset the prefix cache", "resume")


@pytest.mark.parametrize("step", REPEATED)
def test_a_server_that_fails_once_in_a_step_that_may_be_repeated_is_asked_again(
    fake: FakeServer, trainer: Trainer, step: str
) -> None:
    model = qwen3()
    sync = trainer.sync(model)
    once = [refusal(503, "busy")]
    fake.trouble[STEPS[step]] = lambda: once.pop() if once else None
    sync.publish(0)
    assert not once and trainer.sample().version == 0
    same(fake.weights, weights(model))


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", STEPS)
def test_no_mixed_policy_is_sampled_after_a_step_failed_and_a_later_sync_heals(
    fake: FakeServer, tmp_path: Path, step: str, failure: str
) -> None:
    instead, said = FAILURES[failure]
    again = step in REPEATED and failure in ("500", "died")  # tried until the sync's time is over
    trainer = Trainer(fake, tmp_path, timeout_s=0.6 if failure == "no answer" else 1.5 if again else 20.0)
    model = qwen3()
    sync = trainer.sync(model)
    sync.publish(0)
    change(model, 0)
    fake.trouble[STEPS[step]] = lambda: None if fake.calls[-1][1] == {"mode": "abort"} else instead()
    began = time.monotonic()
    with pytest.raises(RunStopped, match=rf"Weights 1 did not reach .*'{step}' failed \(.*{said}"):
        sync.publish(1)
    assert time.monotonic() - began < 5
    assert fake.calls[-1][:2] == ("/pause", {"mode": "abort"}) and fake.paused
    with pytest.raises(SamplerError, match=rf"Weights 1 .*'{step}' failed"):
        trainer.sample()
    assert fake.bodies == []  # nothing was even asked for
    fake.trouble.clear()
    trainer.timeout_s = 20.0
    sync.publish(2)
    same(fake.weights, weights(model))
    assert trainer.sample().version == 2
    sync.close()
    trainer.run(trainer.sampler.close)
    trainer.loop.close()


def test_a_server_that_is_gone_stops_the_run_and_one_that_comes_back_is_healed(
    fake: FakeServer, trainer: Trainer
) -> None:
    model = qwen3()
    sync = trainer.sync(model)
    sync.publish(0)
    asyncio.run_coroutine_threadsafe(fake._runner.sites.copy().pop().stop(), fake._loop).result(5)
    trainer.run(trainer.sampler.close)  # connections that are kept would still be served
    with pytest.raises(RunStopped, match=r"'pause' failed \(/pause: Client"):
        sync.publish(1)
    with pytest.raises(SamplerError, match="Weights 1"):
        trainer.sample()

    async def again() -> None:
        port = int(fake.url.rpartition(":")[2])
        await web.TCPSite(fake._runner, "127.0.0.1", port).start()

    asyncio.run_coroutine_threadsafe(again(), fake._loop).result(5)
    fake.restarted()
    sync.publish(1)
    same(fake.weights, weights(model))
    assert trainer.sample().version == 1


def test_a_turn_in_flight_when_a_sync_fails_is_no_sample(fake: FakeServer, trainer: Trainer) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)
    fake.trouble["/update_weights"] = lambda: refusal(500, "out of memory")

    async def both() -> Any:
        fake.paused = True
        turn = asyncio.create_task(trainer.sampler.sample(turn_request()))
        while not fake.bodies:
            await asyncio.sleep(0.005)
        return turn

    turn = trainer.run(both)
    with pytest.raises(RunStopped):
        sync.publish(1)
    fake.paused = False

    async def result() -> SampleOutput:
        return await turn

    with pytest.raises(SamplerError, match="Weights 1"):
        trainer.run(result)


def test_a_prefix_cache_that_does_not_let_go_at_once_is_asked_again(fake: FakeServer, trainer: Trainer) -> None:
    sync = trainer.sync(qwen3())
    answers = iter([False, False, True])
    fake.trouble["/reset_prefix_cache"] = lambda: web.json_response({"success": next(answers)})
    sync.publish(0)
    assert list(answers) == []
    fake.trouble["/reset_prefix_cache"] = lambda: web.json_response({"success": False})
    sync.timeout_s = 0.5
    with pytest.raises(RunStopped, match=r"'reset the prefix cache' failed \((it still uses|not done)"):
        sync.publish(1)


def test_a_server_that_was_restarted_gets_its_last_weights_back_from_the_sampler(
    fake: FakeServer, trainer: Trainer
) -> None:
    model = qwen3()
    sync = trainer.sync(model)
    sync.publish(3)
    held = dict(fake.weights)
    change(model, 0)  # what is trained meanwhile must not be sent
    fake.restarted()
    assert trainer.sample().version == 3
    same(fake.weights, held)
    sync.close()
    fake.restarted()
    with pytest.raises(SamplerError, match="restarted"):
        trainer.sample()


def test_an_interrupted_sync_leaves_a_broken_sampler(fake: FakeServer, trainer: Trainer) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)

    def interrupt(session: Any, version: int) -> None:
        raise KeyboardInterrupt

    sync.send, send = interrupt, sync.send
    with pytest.raises(KeyboardInterrupt):
        sync.publish(1)
    with pytest.raises(SamplerError, match="interrupted"):
        trainer.sample()
    sync.send = send
    sync.publish(1)
    assert trainer.sample().version == 1


def test_weights_that_cannot_be_sent_are_a_configuration_error(fake: FakeServer, trainer: Trainer) -> None:
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    change(model, 0)
    with pytest.raises(ConfigurationError, match="tied"):
        trainer.sync(model).publish(0)
    assert [path for path, query, _ in fake.calls if query.get("mode") != "abort"] == []


# --- where files lie ---
def test_a_file_that_does_not_fit_into_shared_memory_goes_to_the_folder(
    fake: FakeServer, trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen3()
    size = sum(t.numel() * 4 for t in weights(model).values())
    free = {memory: size - 1}
    monkeypatch.setattr(file_sync, "_free", lambda folder: free[folder])
    sync = trainer.sync(model)
    sync.publish(0)
    assert files(memory) == [] and files(trainer.folder) == ["0.safetensors"]
    free[memory] = 3 * size
    sync.publish(1)
    assert files(trainer.folder) == files(memory) == ["1.safetensors"]
    sync.close()
    assert [p for p in trainer.folder.iterdir() if p != memory] == [] and files(memory) == []


def test_a_full_disk_stops_the_run_before_the_server_is_touched(
    fake: FakeServer, trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)
    fake.calls.clear()

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_sync, "save_file", full)
    with pytest.raises(RunStopped, match=r"'write the weights' failed .*No space left"):
        sync.publish(1)
    assert [query for _, query, _ in fake.calls] == [{"mode": "abort"}]
    assert files(memory) == ["0.safetensors"] and not list(memory.rglob("*.part"))


def test_a_server_in_a_container_is_told_about(fake: FakeServer, trainer: Trainer) -> None:
    sync = trainer.sync(qwen3())
    fake.trouble["/update_weights"] = lambda: refusal(500, "Weight file 'x' cannot be read: No such file or directory.")
    with pytest.raises(RunStopped, match=r"docker run --ipc=host"):
        sync.publish(0)


def test_only_a_server_on_this_host_is_given_shared_memory(trainer: Trainer, memory: Path) -> None:
    assert file_sync.on_this_host("http://localhost:1") and file_sync.on_this_host("http://[::1]:1")
    assert not file_sync.on_this_host("http://192.0.2.1:8000") and not file_sync.on_this_host("http://no.such.host.:1")


def test_files_go_when_nobody_closes_the_sync(fake: FakeServer, trainer: Trainer, memory: Path) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)
    assert len(files(memory)) == 1
    trainer.sampler.restore = None
    del sync
    assert files(memory) == []


# --- choosing ---
def test_a_server_that_takes_weights_over_nccl_needs_a_gpu(fake: FakeServer, trainer: Trainer) -> None:
    fake.info["vllm_config"]["weight_transfer_config"] = {"backend": "nccl"}  # pyright: ignore[reportOptionalSubscript]
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    with pytest.raises(ConfigurationError, match=r"NCCL.*GPU.*\"backend\": \"agentrl\""):
        trainer.sync(qwen3())


@pytest.mark.parametrize("backend", [None, "ipc"])
def test_a_server_without_a_way_is_refused_with_the_flag(lora: FakeServer, trainer: Trainer, backend: Any) -> None:
    lora.info["vllm_config"]["weight_transfer_config"] = {"backend": backend}  # pyright: ignore[reportOptionalSubscript]
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    with pytest.raises(ConfigurationError, match=r'cannot take.*DoRA.*--weight-transfer-config .{"backend": "nccl"}'):
        trainer.sync(adapted("dora"))


# --- in this process ---
class Engine:
    """Stands for VLLMSampler."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.error: Exception | None = None

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        self.left = weights
        self.held = dict(itertools.islice(weights, 3)) if self.error else dict(weights)
        if self.error:
            raise self.error
        return {"transfer": 0.25, "reset": 0.125}


def test_an_engine_in_this_process_takes_the_weights_directly() -> None:
    model, engine = adapted("lora"), Engine()
    times = DirectSync(model, engine).publish(4)  # pyright: ignore[reportArgumentType]
    same(engine.held, weights(model))
    assert (times.way, times.transfer_s, times.steps["reset"]) == ("direct", 0.25, 0.125) and times.pause_s > 0
    engine.error = SamplerError("no such tensor")
    with pytest.raises(RunStopped, match=r"Weights 5 did not reach the vLLM engine \(no such tensor\)"):
        DirectSync(model, engine).publish(5)  # pyright: ignore[reportArgumentType]
    assert list(engine.left) == []  # this rank went through all of them, as the others do


# --- several ranks ---
@pytest.mark.slow
def test_one_rank_sends_and_an_error_of_any_rank_is_raised_on_all(tmp_path: Path) -> None:
    two_processes("publish", str(tmp_path), "file", "lora")
    main, other = (json.loads((tmp_path / f"file_{rank}.json").read_text()) for rank in range(2))
    assert main[0] == other[0] == [0, "file", True]
    assert main[-3] == other[-3] == [3, "file", True]
    assert main[1:-3] == other[1:-3] and len(main[1:-3]) == 6  # three failures, and what `sample` raised after each
    said = ["'load the weights' failed (/update_weights (500): out of memory)", "(a shard is lost)", "(no memory)"]
    for number, text in enumerate(said):
        assert text in main[1 + 2 * number] and text in main[2 + 2 * number]
    assert main[-2] == sorted(STEPS.values()) and other[-2] == []
    main, other = (json.loads((tmp_path / f"lora_{rank}.json").read_text()) for rank in range(2))
    assert main[0] == other[0] == [0, "lora", True] and main[-3] == other[-3] == [3, "lora", True]
    assert main[1] == other[1] and "out of memory" in main[1]
    assert other[-2] == [] and len(main[-1]) == 1  # both asked for the same adapters


@pytest.mark.slow
def test_an_engine_that_fails_on_one_rank_stops_all(tmp_path: Path) -> None:
    two_processes("direct", str(tmp_path), "0", "1", "5")
    said = [json.loads((tmp_path / f"direct_{f}_{rank}.json").read_text()) for f in (0, 1, 5) for rank in (0, 1)]
    assert set(said[:4]) == {"Weights 7 did not reach the vLLM engine (no room)."} and said[4:] == ["published"] * 2
