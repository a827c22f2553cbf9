"""Weight syncs with a real vLLM: after each its log-probs are those of the policy as it is now, by every way."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import vllm_kit
from transformers import AutoModelForCausalLM
from vllm_kit import TOLERANCE, Reference, request

from agentrl.errors import RunStopped, SamplerError
from agentrl.rollout.loop import LoopThread
from agentrl.sampler.vllm.colocate import ColocateOptions, VLLMSampler
from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler
from agentrl.train.self_check import check_agreement, trainer_log_probs
from agentrl.train.tiny import make_tokenizer
from agentrl.train.weight_sync import DirectSync, server_sync
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

PROMPTS = [list(range(10 + 7 * i, 24 + 9 * i)) for i in range(4)]
TEMPERATURE = 0.7
VOCABULARY = len(make_tokenizer())
ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


class Trainer:
    """What a trainer holds for syncs with a server."""

    def __init__(self, server: vllm_kit.Server, folder: Path, timeout_s: float = 60.0) -> None:
        self.loop, self.folder, self.timeout_s = LoopThread(), folder, timeout_s
        self.sampler = VLLMServerSampler(ServerOptions(server.base_url, timeout_s=timeout_s))
        self.facts = self.run(self.sampler.start)

    def run(self, work: Callable[[], Any]) -> Any:
        return self.loop.run(work())

    def sync(self, model: Any, **options: Any) -> Any:
        return server_sync(
            model, self.sampler, self.run, **{"folder": self.folder, "timeout_s": self.timeout_s, **options}
        )

    def sample(self, asked: SampleRequest) -> SampleOutput:
        async def one() -> SampleOutput:
            return await self.sampler.sample(asked)

        return self.run(one)

    def close(self) -> None:
        self.run(self.sampler.close)
        self.loop.close()


def difference(sampler: Any, model: Any, run: Callable[[Callable[[], Any]], Any], version: int) -> float:
    """The largest difference between log-probs of what the sampler draws now and the model's own."""

    async def draw() -> list[SampleOutput]:
        turns = [
            sampler.sample(request(p, max_tokens=32, seed=(version, i, 0), temperature=TEMPERATURE))
            for i, p in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*turns)

    reference, outputs, params = Reference(model), run(draw), SamplingParams(temperature=TEMPERATURE)
    assert {output.version for output in outputs} == {version}
    return max(reference.difference(p, o, params) for p, o in zip(PROMPTS, outputs, strict=True))


def step(model: Any, seed: int) -> None:
    """Every trained parameter moves by about a tenth of its size, as in a few hundred optimizer steps."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                scale = float(parameter.std()) if parameter.numel() > 1 else 1.0
                parameter.add_(torch.randn_like(parameter) * (0.1 * scale + 0.01))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def five_syncs(sync: Any, model: Any, sampler: Any, run: Any, way: str) -> None:
    """Before the first and after each of five."""
    for version in range(6):
        stale = difference(sampler, model, run, version - 1) if version > 0 else 0.0
        times = sync.publish(version)
        exact = difference(sampler, model, run, version)
        print(f"\n{way} {version}: {exact:.1e} (before it {stale:.1e}) " + " ".join(
            f"{name}={seconds:.3f}" for name, seconds in dataclasses.asdict(times).items() if name.endswith("_s")
        ))  # fmt: skip
        assert times.way == sync.way == way and exact < TOLERANCE
        assert version == 0 or stale > 0.01  # else the check would show nothing
        step(model, version)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_kit.Server]:
    """A server of this module's own, which serves adapters too; tests run in order, the adapters first."""
    log = tmp_path_factory.mktemp("served") / "server.log"
    running = vllm_kit.start(folder, log, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def trainer(served: vllm_kit.Server, tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(served, tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_adapters_sent_alone(trainer: Trainer, folder: Path) -> None:
    assert trainer.facts.lora == (8, 2) and trainer.facts.lora_updates
    model = peft.get_peft_model(load(folder), peft.LoraConfig(**ADAPTER))
    sync = trainer.sync(model)
    five_syncs(sync, model, trainer.sampler, trainer.run, "lora")
    ours = trainer_log_probs(model, TEMPERATURE)
    with pytest.raises(RunStopped, match="other weights"):  # it moved after the last sync
        check_agreement(trainer.sample, ours, half=False, vocabulary=VOCABULARY, temperature=TEMPERATURE)
    sync.publish(7)
    largest = check_agreement(trainer.sample, ours, half=False, vocabulary=VOCABULARY, temperature=TEMPERATURE)
    assert largest < TOLERANCE
    sync.close()


@pytest.mark.slow
def test_a_turn_that_began_under_an_adapter_ends_under_it(trainer: Trainer, folder: Path) -> None:
    model = peft.get_peft_model(load(folder), peft.LoraConfig(**{**ADAPTER, "use_rslora": True}))
    step(model, 0)
    sync = trainer.sync(model)
    sync.publish(0)
    before = {name: p.clone() for name, p in model.named_parameters()}

    async def begin() -> Any:
        turn = asyncio.create_task(trainer.sampler.sample(request(PROMPTS[0], max_tokens=1900)))
        while not turn.done() and (await trainer.sampler.load()).running == 0:
            await asyncio.sleep(0.01)
        return turn

    turn = trainer.run(begin)
    step(model, 1)
    sync.publish(1)

    async def end() -> SampleOutput:
        return await turn

    output = trainer.run(end)
    assert output.version == 0 and len(output.ids or ()) == 1900
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    assert Reference(model).difference(PROMPTS[0], output, SamplingParams()) < TOLERANCE
    sync.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"modules_to_save": ["norm"]}], ids=["dora", "modules_to_save"]
)
def test_adapters_that_vllm_cannot_serve_are_merged(
    trainer: Trainer, folder: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = peft.get_peft_model(load(folder), peft.LoraConfig(**{**ADAPTER, **changes}))
    sync = trainer.sync(model)
    assert "gets merged weights" in caplog.text
    five_syncs(sync, model, trainer.sampler, trainer.run, "file")
    sync.close()


@pytest.mark.slow
def test_all_weights_by_file(trainer: Trainer, folder: Path) -> None:
    model = load(folder)
    sync = trainer.sync(model)
    five_syncs(sync, model, trainer.sampler, trainer.run, "file")
    sync.close()
    assert not list(trainer.folder.rglob("*.safetensors"))


@pytest.mark.slow
def test_weights_that_change_in_mid_turn_are_in_its_spans(trainer: Trainer, folder: Path) -> None:
    model = load(folder)
    sync = trainer.sync(model)
    sync.publish(0)

    async def begin() -> Any:
        turn = asyncio.create_task(trainer.sampler.sample(request(PROMPTS[0], max_tokens=1900)))
        while not turn.done() and (await trainer.sampler.load()).running == 0:
            await asyncio.sleep(0.01)
        return turn

    turn = trainer.run(begin)
    old = Reference(load(folder))
    step(model, 1)
    times = sync.publish(1)

    async def end() -> SampleOutput:
        return await turn

    output = trainer.run(end)
    assert [span.version for span in output.versions] == [0, 1] and output.version == 0
    first, second = output.versions
    assert output.ids is not None and (first.start, first.end, second.end) == (0, second.start, 1900)
    assert times.pause_s < 5
    theirs = torch.tensor(output.log_probs)
    for span, reference in ((first, old), (second, Reference(model))):
        part = slice(span.start, span.end)
        ours = reference.log_probs(PROMPTS[0], output.ids, SamplingParams())[part]
        assert float((theirs[part] - ours).abs().max()) < TOLERANCE
    sync.close()


@pytest.mark.slow
def test_a_file_of_another_model_stops_the_run_and_the_next_sync_heals(trainer: Trainer, folder: Path) -> None:
    model = load(folder)
    sync = trainer.sync(model)
    sync.publish(0)
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(RunStopped, match=r"Weights 1 did not reach .*'load the weights' failed"):
        sync.publish(1)
    with pytest.raises(SamplerError, match="Weights 1"):
        trainer.sample(request(PROMPTS[0]))
    whole = load(folder)
    step(whole, 3)
    healed = trainer.sync(whole)
    healed.publish(2)
    assert difference(trainer.sampler, whole, trainer.run, 2) < TOLERANCE
    sync.close()
    healed.close()


@pytest.mark.slow
def test_an_update_that_nobody_finished_is_ended_by_the_next_sync(trainer: Trainer, folder: Path) -> None:
    model = load(folder)
    step(model, 4)

    async def leave() -> None:
        await trainer.sampler.client.post("/pause", mode="keep")
        await trainer.sampler.client.post("/start_weight_update")

    trainer.run(leave)
    sync = trainer.sync(model)
    sync.publish(0)
    assert difference(trainer.sampler, model, trainer.run, 0) < TOLERANCE
    sync.close()


# --- in this process ---
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "lora", "dora"])
def test_weights_loaded_directly(folder: Path, kind: str) -> None:
    loop = LoopThread()
    model = load(folder)
    if kind != "plain":
        model = peft.get_peft_model(model, peft.LoraConfig(**{**ADAPTER, "use_dora": kind == "dora"}))
    sampler = VLLMSampler(ColocateOptions(str(folder), max_model_len=512, max_num_seqs=8))
    try:
        sync = DirectSync(model, sampler)
        five_syncs(sync, model, sampler, lambda work: loop.run(work()), "direct")
        sync.publish(9)
        largest = check_agreement(
            lambda asked: loop.run(sampler.sample(asked)), trainer_log_probs(model, TEMPERATURE), half=False,
            vocabulary=VOCABULARY, temperature=TEMPERATURE,
        )  # fmt: skip
        assert largest < TOLERANCE
    finally:
        sampler.close()
        loop.close()


# --- what is used of vLLM's own sender, which needs GPUs ---
def test_vllms_sender_has_the_form_that_nccl_sync_uses() -> None:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    assert list(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters) == [
        "init_info", "client", "source"
    ]  # fmt: skip
    info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=1, world_size=2, rank=1)
    assert not info.is_sender and info.backend == "nccl"
    assert list(inspect.signature(HTTPVLLMWeightSyncClient).parameters) == ["base_url", "timeout"]
    for name in ("start_weight_update", "finish_weight_update", "shutdown_weight_transfer_engine"):
        assert callable(getattr(HTTPVLLMWeightSyncClient, name))
    assert ParamMeta("a", torch.float32, (1,)).shape == (1,)
    assert WeightSource.__abstractmethods__ == {"metadata", "__iter__"}
    assert list(inspect.signature(NCCLTrainerWeightTransferEngine.send_weights).parameters) == ["self"]


def test_our_source_and_client_fit_vllms_own_checks(folder: Path) -> None:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from agentrl.train.nccl_sync import _client, _source

    source = _source(peft.get_peft_model(load(folder), peft.LoraConfig(**ADAPTER)), None)
    meta = source.metadata()
    assert len(list(NCCLTrainerWeightTransferEngine._checked_iter(source, meta))) == len(meta) > 20
    assert isinstance(_client("http://127.0.0.1:1", 1.0), VLLMWeightSyncClient)


# --- a server that dies ---
@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_gets_the_last_weights_back(folder: Path, tmp_path: Path) -> None:
    first = vllm_kit.start(folder, tmp_path / "first.log")
    trainer = Trainer(first, tmp_path)
    model = load(folder)
    step(model, 5)
    sync = trainer.sync(model)
    try:
        sync.publish(3)
        first.stop(hard=True)
        with pytest.raises(RunStopped, match="'pause' failed"):
            sync.publish(4)
        port = int(first.base_url.rpartition(":")[2])
        second = vllm_kit.start(folder, tmp_path / "second.log", port=port)
        try:
            with pytest.raises(SamplerError, match="Weights 4"):
                trainer.sample(request(PROMPTS[0]))
            sync.publish(5)
            assert difference(trainer.sampler, model, trainer.run, 5) < TOLERANCE
            os.killpg(second.process.pid, signal.SIGKILL)
            second.process.wait()
            third = vllm_kit.start(folder, tmp_path / "third.log", port=port)
            try:  # without a sync
                assert difference(trainer.sampler, model, trainer.run, 5) < TOLERANCE
            finally:
                third.stop()
        finally:
            second.stop()
    finally:
        sync.close()
        trainer.close()
        first.stop()
