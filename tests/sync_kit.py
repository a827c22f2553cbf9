"""A server that takes weights as vLLM does, and a trainer that sends it some: for tests of weight syncs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_vllm import VOCABULARY, FakeVLLM, answer, refusal
from safetensors.torch import load_file

from agentrl.rollout.loop import LoopThread
from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler
from agentrl.train import file_sync
from agentrl.train.weight_sync import server_sync
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


def turn_request(seed: int = 0) -> SampleRequest:
    return SampleRequest([], [], [1, 2, 3], 4, SamplingParams(), (0, seed, 0), f"c{seed}")


@pytest.fixture
def lora(fake: FakeServer) -> FakeServer:
    assert fake.info is not None
    fake.info["vllm_config"]["lora_config"] = dict(LORA)
    return fake
