"""A LoRA adapter goes to a vLLM server alone, as one more model that it serves: no pause, a hundredth of the bytes.

Each version is an adapter of its own name, so a turn that began under an earlier one ends under it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import AgentRLError, ConfigurationError
from agentrl.sampler.vllm.facts import ServerFacts
from agentrl.sampler.vllm.launch_flags import LORA_RANKS
from agentrl.sampler.vllm.server import VLLMServerSampler
from agentrl.train.scratch import Scratch
from agentrl.train.sync_steps import GATHER, Ranks, Run, ServerSync, Session
from agentrl.train.weights import gathered, unwrapped

log = logging.getLogger(__name__)
FOLDER = ".vllm_lora"
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")  # of init_lora_weights; others change the base model too
_NEWER = ("layer_replication", "alora_invocation_tokens", "use_bdlora", "use_qalora", "lora_bias", "target_parameters",
          "trainable_token_indices", "arrow_config", "velora_config", "kasa_config", "monteclora_config")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Adapter:
    name: str  # in the server, the same on every rank
    folder: Path


class LoraSync(ServerSync):
    """The server serves the adapter of each of the last `keep` versions; requests go to the newest."""

    way = "lora"

    def __init__(
        self, model: nn.Module, sampler: VLLMServerSampler, run: Run, ranks: Ranks, timeout_s: float, folder: Path,
        keep: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(sampler, run, ranks, timeout_s)
        self.model, self.keep = model, keep
        self._scratch = Scratch(folder / FOLDER, "run-") if ranks.main else None
        self._run_name = ranks.agreed(f"agentrl-{secrets.token_hex(4)}")  # the server may know adapters of earlier runs
        self._numbers = itertools.count()
        self._served: list[_Adapter] = []
        self._new: _Adapter | None = None
        sampler.restore = self.restore

    def collect(self, session: Session, version: int) -> None:
        with session.clock.step(GATHER):
            peft_model: Any = unwrapped(self.model, self.ranks.accelerator)
            own = {name: p for name, p in peft_model.named_parameters() if "lora_" in name}
            held = dict(zip(own, gathered(list(own.values())), strict=True))
        name = f"{self._run_name}-{version}-{next(self._numbers)}"
        folder = Path(name)
        if self._scratch is not None:
            with session.clock.step("write the weights"):
                folder = save_adapter(peft_model, held, self._scratch.path / name)
        self._new = _Adapter(name, folder)

    def send(self, session: Session, version: int) -> None:
        new = self._new
        assert new is not None

        async def load() -> None:
            if self.ranks.main:
                if not self._served:  # an earlier run may have left the server paused
                    await session.resume()
                await _load(session, new)

        self.on_loop(session, load)

    def release(self, session: Session, version: int) -> None:
        async def switch() -> None:
            assert self._new is not None
            self.sampler.open(version, self._new.name)
            self._served.append(self._new)
            while len(self._served) > self.keep:
                await self._unload(session, self._served[0])

        self.on_loop(session, switch)

    def stop(self) -> None:
        """Nothing to stop: earlier adapters are whole, and what they draw now is not taken."""

    async def restore(self) -> None:
        """A server that was restarted serves the adapters of now again.

        Raises:
            AgentRLError: It did not take them.
        """
        session = Session(self.sampler, self.timeout_s)
        async with self.busy:
            for adapter in self._served if self.ranks.main else ():
                try:
                    await _load(session, adapter)
                except AgentRLError as error:
                    if "already been loaded" not in str(error):
                        raise

    def close(self) -> None:
        """The adapters' files are gone; the server forgets the adapters when it is stopped."""
        if self.sampler.restore == self.restore:
            self.sampler.restore = None
        if self._scratch is not None:
            parent = self._scratch.path.parent
            self._scratch.close()
            with contextlib.suppress(OSError):
                parent.rmdir()

    async def _unload(self, session: Session, adapter: _Adapter) -> None:
        if self.ranks.main:
            try:
                await session.post("unload the oldest", "/v1/unload_lora_adapter", {"lora_name": adapter.name})
            except AgentRLError as error:  # the new one is there; the server drops old ones by itself when it is full
                log.warning("The vLLM server keeps the adapter %s: %s", adapter.name, error)
            shutil.rmtree(adapter.folder, ignore_errors=True)
        self._served.remove(adapter)


async def _load(session: Session, adapter: _Adapter) -> None:
    body = {"lora_name": adapter.name, "lora_path": str(adapter.folder.resolve())}
    await session.post("load the adapter", "/v1/load_lora_adapter", body)


def save_adapter(peft_model: Any, weights: dict[str, Tensor], folder: Path) -> Path:
    """The folder in which the active adapter lies, as PEFT saves it; whole, or not there."""
    active = peft_model.active_adapters[0]
    part = folder.with_name(f"{folder.name}.part")
    state = {name: t.cpu() for name, t in weights.items()}
    with torch.no_grad():
        peft_model.save_pretrained(part, state_dict=state, selected_adapters=[active], save_embedding_layers=False)
    part.rename(folder)
    return folder if active == "default" else folder / active


def why_not_alone(model: nn.Module) -> str | None:
    """Why this model cannot be served as an adapter beside its base model; None: it can.

    >>> why_not_alone(nn.Linear(1, 1))
    'the model has no adapter of PEFT'
    """
    active = getattr(model, "active_adapters", None)
    configs = getattr(model, "peft_config", None)
    if configs is None or active is None:
        return "the model has no adapter of PEFT"
    if len(active) != 1:
        return f"{len(active)} adapters are active"
    config = configs[active[0]]
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return f"its adapter is {config.peft_type}, no LoRA"
    if config.use_dora:
        return "it is a DoRA adapter"
    if config.modules_to_save:
        return f"it has modules_to_save ({', '.join(config.modules_to_save)})"
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        return f"init_lora_weights={start!r} changed the base model"
    if config.bias != "none":
        return f"bias={config.bias!r} changes the base model"
    if found := next((name for name in _NEWER if getattr(config, name, None)), None):
        return f"it uses {found}"
    return _other_parameters(model)


def _other_parameters(model: nn.Module) -> str | None:
    getters = (getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None))
    for module in (get() for get in getters if get is not None):
        if module is not None and hasattr(module, "adapter_layer_names"):
            return "it adapts the embedding or the output layer"
    other = next((name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name), None)
    return None if other is None else f"'{other}' is trained beside it"


def why_not_base(run: Run, sampler: VLLMServerSampler, ranks: Ranks) -> str | None:
    """Why this server's base model is not the one that the adapter was made for; None: it is as it was loaded."""

    async def ask() -> Any:
        return await sampler.client.get("/weight_info")

    found = run(ask) if ranks.main else {}
    version = ranks.agreed(str(found.get("weight_version", "default")))
    if version == "default":
        return None
    return f"an earlier run changed its base model (to weights '{version}'); restart it to send the adapter alone"


def check_server(model: Any, facts: ServerFacts, max_staleness: int) -> None:
    """The server has room for the adapters.

    Raises:
        ConfigurationError: It was started with too small a rank or too few adapters; the message holds the values.
    """
    assert facts.lora is not None
    config = model.peft_config[model.active_adapters[0]]
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    most_rank, most = facts.lora
    if rank <= most_rank and most >= max_staleness + 2:
        return
    enough = next((r for r in LORA_RANKS if r >= max(rank, most_rank)), None)
    if enough is None:
        most = LORA_RANKS[-1]
        raise ConfigurationError(f"vLLM serves LoRA adapters up to rank {most}, and this one has rank {rank}.")
    raise ConfigurationError(
        f"The vLLM server serves {most} adapter(s) of rank {most_rank} at most; the adapter has rank {rank} and "
        f"max_staleness={max_staleness} needs {max_staleness + 2} at a time: restart it with --max-lora-rank {enough} "
        f"--max-loras {max(most, max_staleness + 2)}."
    )
