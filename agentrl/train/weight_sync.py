"""Which way weights take from the trainer to the sampler."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from agentrl.errors import ConfigurationError, RunStopped
from agentrl.sampler.vllm.server import VLLMServerSampler
from agentrl.train.file_sync import FileSync
from agentrl.train.lora_sync import LoraSync, check_server, why_not_alone, why_not_base
from agentrl.train.nccl_sync import NcclSync
from agentrl.train.sync_steps import RANKS, Clock, Ranks, Run, SyncTimes
from agentrl.train.weights import drained, policy_weights, unwrapped

if TYPE_CHECKING:
    from agentrl.sampler.vllm.colocate import VLLMSampler

__all__ = ["DirectSync", "SyncTimes", "WeightSync", "server_sync"]
log = logging.getLogger(__name__)


class WeightSync(Protocol):
    """Keeps a sampler's weights those of the trainer."""

    way: str
    ranks: Ranks

    def publish(self, version: int) -> SyncTimes:
        """The sampler draws from the policy as it is now, under the name `version`; every rank calls it."""
        ...

    def close(self) -> None:
        """Files, memory and connections that syncs needed are gone."""
        ...


def server_sync(
    model: nn.Module, sampler: VLLMServerSampler, run: Run, *, accelerator: Any = None, folder: Path,
    group_port: int = 51216, timeout_s: float = 240.0, max_staleness: int = 0,
) -> WeightSync:  # fmt: skip
    """The way that the server and the model allow: the adapter alone, else all weights over NCCL or as a file.

    Args:
        model: The policy.
        sampler: Of this rank, started.
        run: Runs a coroutine function on the loop of the sampler.
        accelerator: That prepared the model, where there is one.
        folder: For files that do not go into shared memory; the server must see it too.
        group_port: Of this machine, on which the server meets the trainer for NCCL.
        timeout_s: A sync that takes longer has failed.
        max_staleness: How many versions older than the newest one a turn may end under (adapters only).

    Raises:
        ConfigurationError: The server has no way to take these weights, or too little room for the adapter.
    """
    ranks, facts = Ranks(accelerator), sampler.facts
    sampler.run = ranks.agreed(uuid.uuid4().hex[:8])
    why = why_not_alone(unwrapped(model, accelerator))
    if facts.lora is not None and why is None and not facts.lora_updates:
        why = "it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    if facts.lora is not None and why is None:
        why = why_not_base(run, sampler, ranks)
    if facts.lora is not None and why is None:
        check_server(unwrapped(model, accelerator), facts, max_staleness)
        return LoraSync(model, sampler, run, ranks, timeout_s, folder, keep=max_staleness + 1)
    if facts.lora is not None and ranks.main:
        log.warning("The vLLM server serves adapters, but gets merged weights: %s.", why)
    if facts.weight_backend == "agentrl":
        return FileSync(model, sampler, run, ranks, timeout_s, folder)
    if facts.weight_backend == "nccl":
        if next(model.parameters()).device.type != "cuda":
            raise ConfigurationError(
                "The vLLM server takes weights over NCCL, which needs the trained model on a GPU; on a CPU start the "
                """server with --weight-transfer-config '{"backend": "agentrl"}'."""
            )
        return NcclSync(model, sampler, run, ranks, timeout_s, group_port)
    given = f"with the backend '{facts.weight_backend}'" if facts.weight_backend else "without --weight-transfer-config"
    raise ConfigurationError(
        f"The vLLM server was started {given}, so it cannot take the policy's weights ({why}): start it with "
        """--weight-transfer-config '{"backend": "nccl"}', or "agentrl" (files; works on every device)."""
    )


class DirectSync:
    """The weights of a vLLM engine in this process follow the trainer's; every rank has an engine of its own."""

    way = "direct"

    def __init__(self, model: nn.Module, sampler: VLLMSampler, accelerator: Any = None) -> None:
        self.model, self.sampler, self.ranks = model, sampler, Ranks(accelerator)

    def publish(self, version: int) -> SyncTimes:
        """The engine draws from the policy as it is now.

        Raises:
            RunStopped: It did not take the weights, here or on another rank.
            ConfigurationError: These weights cannot be sent at all.
        """
        clock = Clock()
        clock.held()
        error: Exception | None = None
        try:
            with drained(policy_weights(self.model, self.ranks.accelerator)) as weights:
                clock.steps.update(self.sampler.load(weights, version))
        except Exception as raised:
            error = raised
        with clock.step(RANKS):
            found = self.ranks.first_error(error and f"Weights {version} did not reach the vLLM engine ({error}).")
        if isinstance(error, ConfigurationError):
            raise error
        if found is not None:
            raise RunStopped(found) from error
        return clock.times(self.way)

    def close(self) -> None:
        """Nothing was kept."""
