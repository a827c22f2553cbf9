"""Weight syncs with a server that speaks vLLM's HTTP: what it holds, in which order, and what every failure leaves."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
from aiohttp import web
from fake_vllm import VOCABULARY, FakeVLLM, answer, refusal
from safetensors.torch import load_file
from weights_kit import adapted, qwen3, same, two_processes

from agentrl.errors import ConfigurationError, MissingDependency, RunStopped, SamplerError
from agentrl.rollout.loop import LoopThread
from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler
from agentrl.train import file_sync, scratch
from agentrl.train.file_sync import FileSync
from agentrl.train.lora_sync import LoraSync, why_not_alone
from agentrl.train.nccl_sync import NcclSync
from agentrl.train.sync_steps import Ranks
from agentrl.train.weight_sync import DirectSync, server_sync
from agentrl.train.weights import policy_weights
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

STEPS = {  # of a sync by file, in order
    "pause": "/pause", "start the update": "/start_weight_update", "load the weights": "/update_weights",
    "finish the update": "/finish_weight_update", "reset the prefix cache": "/reset_prefix_cache", "resume": "/resume",
}  # fmt: skip
LORA = {"max_lora_rank": 8, "max_loras": 2}


class FakeServer(FakeVLLM):
    """Takes weights as vLLM does; `trouble` decides what a route does instead."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.trouble: dict[str, Callable[[], Any]] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.adapters: dict[str, str] = {}
        self.updating = self.paused = False
        self.usual = self._drawn  # pyright: ignore[reportIncompatibleVariableOverride]

    async def _drawn(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if body["model"] != "policy" and body["model"] not in self.adapters:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        while self.paused:
            await asyncio.sleep(0.005)
        return answer(body, self.version)

    async def _step(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.calls.append((request.path, dict(request.query), body))
        if request.path in self.trouble:
            instead = self.trouble[request.path]()
            if asyncio.iscoroutine(instead):
                instead = await instead
            if instead is not None:
                return instead
        return getattr(self, request.path.rpartition("/")[2])(request.query, body) or web.json_response({})

    def pause(self, query: Any, body: Any) -> None:
        self.paused = True

    def resume(self, query: Any, body: Any) -> None:
        self.paused = False

    def start_weight_update(self, query: Any, body: Any) -> web.Response | None:
        if self.updating:
            return refusal(500, "start_weight_update called while a weight update is already active.")
        self.updating = True

    def update_weights(self, query: Any, body: Any) -> None:
        assert self.updating and self.paused
        self.weights = load_file(body["update_info"]["path"])

    def finish_weight_update(self, query: Any, body: Any) -> None:
        assert self.updating
        self.updating = False
        self.version = body.get("weight_version", self.version)

    def reset_prefix_cache(self, query: Any, body: Any) -> web.Response:
        assert query["reset_running_requests"] == "true"
        return web.json_response({"success": True})

    def load_lora_adapter(self, query: Any, body: Any) -> web.Response | None:
        if body["lora_name"] in self.adapters:
            return refusal(400, "The lora adapter has already been loaded.")
        assert (Path(body["lora_path"]) / "adapter_config.json").is_file()
        self.adapters[body["lora_name"]] = body["lora_path"]

    def unload_lora_adapter(self, query: Any, body: Any) -> None:
        del self.adapters[body["lora_name"]]

    def _app(self) -> web.Application:
        app = super()._app()
        for path in [*STEPS.values(), "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]:
            app.router.add_post(path, self._step)
        app.router.add_get("/weight_info", self._weight_info)
        return app

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    def restarted(self) -> None:
        self.version, self.weights, self.adapters, self.updating, self.paused = "default", {}, {}, False, False


class Trainer:
    """What a trainer holds for syncs with `fake`."""

    def __init__(self, fake: FakeServer, folder: Path, timeout_s: float = 20.0) -> None:
        self.loop, self.folder, self.timeout_s = LoopThread(), folder, timeout_s
        self.sampler = VLLMServerSampler(ServerOptions(fake.url, timeout_s=2.0))
        self.run(lambda: self.sampler.start(VOCABULARY))

    def run(self, work: Callable[[], Any]) -> Any:
        return self.loop.run(work())

    def sync(self, model: Any, **options: Any) -> Any:
        options = {"folder": self.folder, "timeout_s": self.timeout_s, **options}
        return server_sync(model, self.sampler, self.run, **options)

    def sample(self, seed: int = 0) -> SampleOutput:
        request = SampleRequest([], [], [1, 2, 3], 4, SamplingParams(), (0, seed, 0), "c")
        return self.run(lambda: self.sampler.sample(request))


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def trainer(fake: FakeServer, tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(fake, tmp_path)
    yield made
    made.run(made.sampler.close)
    made.loop.close()


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(file_sync, "SHARED_MEMORY", folder)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.safetensors"))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in policy_weights(model)}


def change(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


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
        assert fake.calls[0][1] == {"mode": "keep"} and fake.calls[3][2] == {"weight_version": str(version)}
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
            turns.append(asyncio.create_task(trainer.sampler.sample(_request(len(turns)))))
            return await working

        return trainer.loop.run(with_a_turn())

    sync._run = run
    sync.publish(1)
    assert seen == [0, 0, 0, 0]

    async def outputs() -> list[SampleOutput]:
        return await asyncio.gather(*turns)

    assert [output.version for output in trainer.run(outputs)] == [1, 1]


def _request(seed: int = 0) -> SampleRequest:
    return SampleRequest([], [], [1, 2, 3], 4, SamplingParams(), (0, seed, 0), f"c{seed}")


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
                turns.append(asyncio.create_task(trainer.sampler.sample(_request())))
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


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", STEPS)
def test_no_mixed_policy_is_sampled_after_a_step_failed_and_a_later_sync_heals(
    fake: FakeServer, tmp_path: Path, step: str, failure: str
) -> None:
    instead, said = FAILURES[failure]
    trainer = Trainer(fake, tmp_path, timeout_s=0.6 if failure == "no answer" else 20.0)
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
        turn = asyncio.create_task(trainer.sampler.sample(_request()))
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


LEAVE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("scratch", sys.argv[3])  # alone: its package takes seconds to import
scratch = module_from_spec(spec)
spec.loader.exec_module(scratch)
folder = scratch.Scratch(Path(sys.argv[1]), "agentrl-weights-")
(folder.path / "0.safetensors").write_bytes(b"weights")
print("ready", flush=True)
if sys.argv[2] == "wait":
    input()
elif sys.argv[2] == "raise":
    raise RuntimeError
"""


def test_files_go_with_their_process_however_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "left"

    def start(how: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", LEAVE, str(folder), how, scratch.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    for how in ("end", "raise"):
        start(how).wait(20)
        assert list(folder.iterdir()) == []
    killed, alive = start("wait"), start("wait")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(20)
    assert len(files(folder)) == 2
    mine = scratch.Scratch(folder, "agentrl-weights-")  # the next run
    assert len(files(folder)) == 1 and alive.poll() is None
    alive.communicate("\n", timeout=20)
    mine.close()
    assert list(folder.iterdir()) == []


def test_files_go_when_nobody_closes_the_sync(fake: FakeServer, trainer: Trainer, memory: Path) -> None:
    sync = trainer.sync(qwen3())
    sync.publish(0)
    assert len(files(memory)) == 1
    trainer.sampler.restore = None
    del sync
    assert files(memory) == []


# --- adapters alone ---
@pytest.fixture
def lora(fake: FakeServer) -> FakeServer:
    assert fake.info is not None
    fake.info["vllm_config"]["lora_config"] = dict(LORA)
    return fake


def test_an_adapter_goes_alone_and_versions_are_kept_for_turns_that_began_under_them(
    lora: FakeServer, tmp_path: Path
) -> None:
    lora.info["vllm_config"]["lora_config"]["max_loras"] = 4  # pyright: ignore[reportOptionalSubscript]
    trainer = Trainer(lora, tmp_path)
    model = adapted("lora")
    sync = trainer.sync(model, max_staleness=2)
    assert isinstance(sync, LoraSync)
    orders: list[str] = []
    lora.trouble["/v1/load_lora_adapter"] = lambda: orders.append(f"load beside {len(lora.adapters)}")
    lora.trouble["/v1/unload_lora_adapter"] = lambda: orders.append(f"unload from {len(lora.adapters)}")
    for version in range(5):
        times = sync.publish(version)
        assert times.pause_s == 0 and times.way == "lora" and 0 < times.transfer_s < times.total_s
        output = trainer.sample()
        assert output.version == version
        assert lora.bodies[-1]["model"] in lora.adapters and f"-{version}-" in lora.bodies[-1]["model"]
        assert len(lora.adapters) == min(version + 1, 3) == len(list((tmp_path / ".vllm_lora").glob("*/agentrl-*")))
        read = peft.PeftModel.from_pretrained(qwen3(), lora.adapters[lora.bodies[-1]["model"]])
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(read(ids).logits, model(ids).logits)
        change(model, version)
    assert orders[-2:] == ["load beside 3", "unload from 4"]
    sync.close()
    assert not (tmp_path / ".vllm_lora").exists()
    trainer.run(trainer.sampler.close)
    trainer.loop.close()


@pytest.mark.parametrize("step", ["load_lora_adapter", "unload_lora_adapter"])
def test_an_adapter_that_fails_leaves_a_broken_sampler_and_a_later_one_heals(
    lora: FakeServer, trainer: Trainer, step: str
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    sync = trainer.sync(adapted("lora"))
    sync.publish(0)
    lora.trouble[f"/v1/{step}"] = lambda: refusal(500, "no room")
    with pytest.raises(RunStopped, match=r"load.*failed .*no room"):
        sync.publish(1)
    with pytest.raises(SamplerError, match="Weights 1"):
        trainer.sample()
    assert not lora.paused
    lora.trouble.clear()
    sync.publish(1)
    assert trainer.sample().version == 1


def test_a_restarted_server_gets_its_adapters_back(lora: FakeServer, trainer: Trainer) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    sync = trainer.sync(adapted("lora"))
    sync.publish(0)
    sync.publish(1)
    lora.restarted()
    assert trainer.sample().version == 1 and len(lora.adapters) == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("dora", "DoRA"), ("modules_to_save", "modules_to_save"), ("embeddings", "embedding or the output layer"),
        ("bias", "bias='all'"), ("tokens", "trainable_token_indices"), ("experts", "target_parameters"),
        ("ia3", "no LoRA"), ("lora", None), ("rslora", None), ("patterns", None),
    ],
)  # fmt: skip
def test_what_vllm_cannot_serve_as_an_adapter_is_merged_and_the_reason_is_logged(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture, kind: str, why: str | None
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    model = adapted(kind)
    with caplog.at_level(logging.WARNING, logger="agentrl"):
        sync = trainer.sync(model)
    if why is None:
        assert sync.way == "lora" and caplog.records == []
        return
    assert sync.way == "file" and why in str(why_not_alone(model))
    sync.publish(0)
    sync.publish(1)
    assert len(caplog.records) == 1 and why in caplog.text
    same(lora.weights, weights(model))


def test_an_adapter_that_changed_the_base_model_is_merged() -> None:
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora"))
    assert why_not_alone(model) == "init_lora_weights='olora' changed the base model"
    plain = adapted("lora")
    plain.get_base_model().model.norm.weight.requires_grad_(True)
    assert "'base_model.model.model.norm.weight' is trained beside it" in str(why_not_alone(plain))


def test_a_server_without_enough_room_says_with_what_to_restart_it(lora: FakeServer, trainer: Trainer) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=12, target_modules=["q_proj"], rank_pattern={"x": 20}))
    with pytest.raises(ConfigurationError, match=r"rank 20 .*--max-lora-rank 32 --max-loras 2\."):
        trainer.sync(model)
    with pytest.raises(ConfigurationError, match=r"max_staleness=4 .*--max-lora-rank 8 --max-loras 6\."):
        trainer.sync(adapted("lora"), max_staleness=4)
    with pytest.raises(ConfigurationError, match=r"--max-loras 3\."):  # the next is loaded before the oldest goes
        trainer.sync(adapted("lora"), max_staleness=1)
    big = peft.get_peft_model(qwen3(), peft.LoraConfig(r=600, target_modules=["q_proj"]))
    with pytest.raises(ConfigurationError, match=r"up to rank 512"):
        trainer.sync(big)


def test_a_server_that_does_not_let_adapters_change_gets_merged_weights(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    lora.info["vllm_env"] = {}  # pyright: ignore[reportOptionalSubscript]
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    assert trainer.sync(adapted("lora")).way == "file"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in caplog.text


def test_a_server_whose_base_model_an_earlier_run_changed_gets_merged_weights(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    lora.version = "17"
    assert trainer.sync(adapted("lora")).way == "file"
    assert "an earlier run changed its base model (to weights '17')" in caplog.text


def test_a_server_that_an_earlier_run_left_paused_goes_on(lora: FakeServer, trainer: Trainer) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    lora.paused = True
    trainer.sync(adapted("lora")).publish(0)
    assert trainer.sample().version == 0


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


# --- over NCCL, with a double of vLLM's sender ---
class Sender:
    """Stands for vLLM's NCCLTrainerWeightTransferEngine."""

    made: ClassVar[list[Sender]] = []

    def __init__(self, info: Any, client: Any, source: Any) -> None:
        self.info, self.client, self.source = info, client, source
        self.sent: dict[str, torch.Tensor] = {}
        self.trouble: Callable[[], None] = lambda: None
        self.is_shut = False
        self.made.append(self)

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.trouble()
        declared = [(m.name, m.dtype, m.shape) for m in self.source.metadata()]
        self.sent = dict(self.source)
        assert declared == [(name, t.dtype, tuple(t.shape)) for name, t in self.sent.items()]
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.is_shut = True


class PlainClient:
    """Stands for vLLM's HTTPVLLMWeightSyncClient."""

    def __init__(self, base_url: str, timeout: float) -> None:
        self.base_url, self.timeout = base_url, timeout

    def _post(self, path: str, body: Any = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(
            f"{self.base_url}/{path}", data, {"content-type": "application/json"}, method="POST"
        )
        try:
            urllib.request.urlopen(call, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            failed: Any = RuntimeError(f"{path} ({error.code})")
            failed.response = types.SimpleNamespace(status_code=error.code)
            raise failed from error

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version} if weight_version else None)

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("shutdown_weight_transfer_engine")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Sender]:
    """Doubles of the parts of vLLM that send."""
    Sender.made.clear()
    init = lambda info, *, client, source: Sender(info, client, source)  # noqa: E731
    parts: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferTrainerFactory": types.SimpleNamespace(trainer_init=init)},
        "vllm.distributed.weight_transfer.nccl_engine": {"NCCLTrainerInitInfo": types.SimpleNamespace},
        "vllm.distributed.weight_transfer.clients": {"HTTPVLLMWeightSyncClient": PlainClient},
        "vllm.distributed.weight_transfer.base": {
            "WeightSource": object, "ParamMeta": collections.namedtuple("ParamMeta", "name dtype shape"),
        },
    }  # fmt: skip
    for name, content in parts.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return Sender


def test_vllms_own_sender_broadcasts_between_our_steps(fake: FakeServer, trainer: Trainer, nccl: type[Sender]) -> None:
    model = adapted("lora")
    sync = NcclSync(model, trainer.sampler, trainer.run, Ranks(), 20.0, 51216)
    for version in (0, 1):
        fake.calls.clear()
        times = sync.publish(version)
        assert [path for path, _, _ in fake.calls] == [
            "/pause", "/start_weight_update", "/finish_weight_update", "/reset_prefix_cache", "/resume"
        ]  # fmt: skip
        assert times.way == "nccl" and 0 < times.transfer_s < times.total_s and times.pause_s > 0
        same(nccl.made[0].sent, weights(model))
        assert trainer.sample().version == version
        change(model, version)
    (sender,) = nccl.made  # one group for the whole run
    assert vars(sender.info) == {"master_address": "127.0.0.1", "master_port": 51216, "world_size": 2, "rank": 0}
    sync.close()
    assert sender.is_shut


def test_a_broadcast_that_fails_or_hangs_stops_the_run_and_the_next_sync_makes_a_new_group(
    fake: FakeServer, trainer: Trainer, nccl: type[Sender]
) -> None:
    sync = NcclSync(qwen3(), trainer.sampler, trainer.run, Ranks(), 20.0, 51216)
    sync.publish(0)

    def lost() -> None:
        raise RuntimeError("NCCL: unhandled system error")

    nccl.made[0].trouble = lost
    with pytest.raises(RunStopped, match=r"'load the weights' failed \(NCCL: unhandled"):
        sync.publish(1)
    assert nccl.made[0].is_shut and fake.updating and fake.paused
    with pytest.raises(SamplerError, match="Weights 1"):
        trainer.sample()
    sync.publish(1)  # ends the update that was left open
    assert len(nccl.made) == 2 and trainer.sample().version == 1
    hung = threading.Event()
    nccl.made[1].trouble = lambda: hung.wait(30) and None
    sync.timeout_s = 0.5
    with pytest.raises(RunStopped, match=r"'load the weights' failed \(not done after 0.5 s\)"):
        sync.publish(2)
    hung.set()


def test_nccl_without_vllm_beside_the_trainer_names_the_extra(trainer: Trainer) -> None:
    with pytest.raises(MissingDependency, match=r"\[vllm\]"):
        NcclSync(qwen3(), trainer.sampler, trainer.run, Ranks(), 20.0, 51216)
