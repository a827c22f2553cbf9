"""One of two processes (gloo) of the tests of weight synchronisation: `sync_worker.py WHAT FOLDER ARGUMENTS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from fake_vllm import VOCABULARY, refusal
from safetensors.torch import save_file
from sync_kit import FakeServer
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from weights_kit import SHARDED

from agentrl.errors import ConfigurationError, RunStopped, SamplerError
from agentrl.rollout.loop import LoopThread
from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler
from agentrl.train import file_sync
from agentrl.train.weight_sync import DirectSync, server_sync
from agentrl.train.weights import policy_weights
from agentrl.types import SampleRequest, SamplingParams


def sharded(kind: str) -> Any:
    model = SHARDED[kind]()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shard(kind: str, folder: Path) -> None:
    """What each rank gets of a model that FSDP2 shards; one rank's is saved."""
    model = sharded(kind)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    weights = {name: t.clone() for name, t in policy_weights(model)}
    assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()  # it still trains
    rank = dist.get_rank()
    (folder / f"{kind}_{rank}.json").write_text(json.dumps(list(weights)))
    if rank == 1:
        save_file({name: t.contiguous() for name, t in weights.items()}, folder / f"{kind}.safetensors")


def publish(way: str, folder: Path) -> None:
    """Syncs of a sharded model: what a rank was told, saw and raised is written down."""
    accelerator, rank, loop = Accelerator(cpu=True), dist.get_rank(), LoopThread()
    told: list[Any] = []
    with ExitStack() as stack:
        fake = FakeServer()
        if way == "lora":
            assert fake.info is not None
            fake.info["vllm_config"]["lora_config"] = {"max_lora_rank": 8, "max_loras": 2}
        file_sync.SHARED_MEMORY = folder / "memory"
        file_sync.SHARED_MEMORY.mkdir(exist_ok=True)
        url = [stack.enter_context(fake).url]
        dist.broadcast_object_list(url)
        sampler = VLLMServerSampler(ServerOptions(url[0], timeout_s=5.0))
        loop.run(sampler.start(VOCABULARY))
        run = lambda work: loop.run(work())  # noqa: E731
        model = sharded("lora")
        sync = server_sync(model, sampler, run, accelerator=accelerator, folder=folder / way, timeout_s=30.0)

        def attempt(version: int) -> None:
            try:
                times = sync.publish(version)
                request = SampleRequest([], [], [1, 2, 3], 4, SamplingParams(), (0, rank, version), "c")
                output = loop.run(sampler.sample(request))
                told.append([output.version, times.way, times.barrier_s > 0])
            except (RunStopped, ConfigurationError) as error:
                told.append(str(error))
                try:
                    loop.run(sampler.sample(SampleRequest([], [], [1], 1, SamplingParams(), (0, 0, 0), "c")))
                except SamplerError as broken:
                    told.append(str(broken))
            dist.barrier()

        attempt(0)
        step = "/v1/load_lora_adapter" if way == "lora" else "/update_weights"
        fake.trouble[step] = lambda: refusal(500, "out of memory")
        attempt(1)  # the main rank fails
        fake.trouble.clear()
        if way == "file":
            original = file_sync.policy_weights
            for failing in (1, 0):  # the other rank cannot give its share; the main one has no memory for it
                if rank == failing:
                    file_sync.policy_weights = _fails_late if failing == 0 else _fails  # pyright: ignore
                attempt(2)
                file_sync.policy_weights = original
        attempt(3)
        told.append(sorted({path for path, _, _ in fake.calls}))
        told.append(sorted({body["model"].split("-")[1] if "-" in body["model"] else "" for body in fake.bodies}))
        dist.barrier()
        sync.close()
        loop.run(sampler.close())
    (folder / f"{way}_{rank}.json").write_text(json.dumps(told))


class NoMemory:
    """A tensor for which there is no memory on the main rank."""

    def cpu(self) -> Tensor:
        raise MemoryError("no memory")


def _fails(model: Any, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    list(policy_weights(model, accelerator))  # its collectives are done: else the others would wait for them
    raise ValueError("a shard is lost")
    yield


def _fails_late(model: Any, accelerator: Any) -> Iterator[tuple[str, Any]]:
    for number, (name, tensor) in enumerate(policy_weights(model, accelerator)):
        yield name, NoMemory() if number == 5 else tensor


def direct(failing: str, folder: Path) -> None:
    """A rank whose engine takes no weights stops all."""

    class Engine:
        def load(self, weights: Any, version: int) -> dict[str, float]:
            next(weights)
            if dist.get_rank() == int(failing):
                raise SamplerError("no room")
            return {"transfer": float(len(list(weights)))}

    try:
        DirectSync(sharded("lora"), Engine(), Accelerator(cpu=True)).publish(7)  # pyright: ignore[reportArgumentType]
        told = "published"
    except RunStopped as error:
        told = str(error)
    (folder / f"direct_{failing}_{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, where, *more = sys.argv[1:]
    for argument in more:
        {"shard": shard, "publish": publish, "direct": direct}[what](argument, Path(where))
    dist.destroy_process_group()
