"""Weights go from GPU to GPU by vLLM's own sender, which doubles stand for here."""

# ruff: noqa: F811  (fixtures that are imported)
from __future__ import annotations

import collections
import json
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from sync_kit import FakeServer, Trainer, change, fake, memory, trainer, weights  # noqa: F401  (fixtures)
from weights_kit import adapted, qwen3, same

from agentrl.errors import MissingDependency, RunStopped, SamplerError
from agentrl.train.nccl_sync import NcclSync
from agentrl.train.sync_steps import Ranks


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
