"""Runs inside vLLM: receives a policy's weights from a file or from the same process, all of them or none.

vLLM keeps weights fused (qkv, gate and up), sharded and packed for its kernels, so its own loader must place them:
layers are put into the form that checkpoints have, loaded, and packed again. Three traps are handled here. A file is
rehearsed before a single value changes, so one that is incomplete, or of another model, leaves the old weights in
place. Biases stay live while vLLM reloads, so the rehearsal writes nowhere. A head that is tied to the embedding is no
layer of its own to the reload and would keep its packed copy of the old weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

Weights = Iterable[tuple[str, torch.Tensor]]

_offers: dict[int, Weights] = {}
_handles = itertools.count()


@contextmanager
def offered(weights: Weights) -> Iterator[int]:
    """A handle under which an engine of this process finds `weights`, while the block lasts.

    A sequence is rehearsed before it is loaded; an iterator is loaded as it comes, and what it lacks is found after.
    """
    handle = next(_handles)
    _offers[handle] = weights
    try:
        yield handle
    finally:
        del _offers[handle]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing needs to be agreed beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are: `path` of a safetensors file that holds all of them, or `handle` in this process."""

    path: str | None = None
    handle: int | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.handle is None):
            raise ValueError("An update names either `path`, a safetensors file, or `handle`, tensors of this process.")


class AgentRLWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's model holds the weights that an update names, all of them, under the names a checkpoint has.

    Floating-point dtypes are converted to the model's. Everything happens within `update_weights`: whoever dies between
    start and finish leaves a model that works.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    model: Any

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """The layers hold the new weights, packed for their kernels.

        Raises:
            ValueError: The file, or the sequence behind the handle, is not this model's: the old weights are in place.
                An iterator that turns out to be incomplete leaves some of both.
        """
        weights, what = _open(update_info)
        names = {name for name, _ in self.model.named_parameters()}  # without tied ones, which the reload parts
        with torch.no_grad():
            reload.initialize_layerwise_reload(self.model)
            kernels = self._forget_expert_kernels()
            try:
                if isinstance(weights, Sequence):
                    self._rehearse(weights, what, names)
                    self.model.load_weights(iter(weights))
                else:
                    coverage = _Coverage(self.model, names, write=True)
                    self._load(weights, what, coverage)
                    coverage.check(what)
            finally:  # layers that got nothing have what they had
                reload.finalize_layerwise_reload(self.model, self.model_config)
                for method, kernel in kernels:
                    method.moe_kernel = method.moe_kernel or kernel
                repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _forget_expert_kernels(self) -> list[tuple[Any, Any]]:
        """On CPUs, experts that are loaded get their kernel anew; answers what to put back where nothing is loaded.

        vLLM keeps it across reloads, for CUDA graphs, and then leaves out the packing that CPU kernels need.
        """
        if self.device.type != "cpu":
            return []
        methods: list[Any] = [getattr(module, "quant_method", None) for module in self.model.modules()]
        kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
        for method, _ in kernels:
            method.moe_kernel = None
        return kernels

    def _rehearse(self, weights: Sequence[tuple[str, torch.Tensor]], what: str, names: Set[str]) -> None:
        """The model's own loader would take these weights, and they are complete; nothing was written."""
        tensors: list[Any] = [t for module in self.model.modules() for t in _own(module).values()]
        wrapped = [(tensor, tensor.weight_loader) for tensor in tensors if hasattr(tensor, "weight_loader")]
        coverage = _Coverage(self.model, names, write=False)
        try:
            for tensor, loader in wrapped:
                while loader.__name__ == "online_process_loader":  # vLLM's, which loads a layer once it is complete
                    loader = loader.__wrapped__
                tensor.weight_loader = loader
            self._load(weights, what, coverage)
        finally:
            for tensor, loader in wrapped:
                tensor.weight_loader = loader
        coverage.check(what)

    def _load(self, weights: Weights, what: str, coverage: _Coverage) -> None:
        name, shape = "", []

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal name, shape
            for name, tensor in weights:
                shape = list(tensor.shape)
                yield name, tensor

        try:
            with coverage:
                self.model.load_weights(named())
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".partition(". ")[0].rstrip(": ")
            raise ValueError(
                f"{what} does not fit vLLM's {type(self.model).__name__} at tensor '{name}' of shape {shape} ({cause})."
            ) from error


def repack_tied_heads(model: Any) -> None:
    """A head that shares the embedding's weight computes with its present values.

    On CPUs vLLM gives each layer a packed copy of its weight, and a reload packs the layers that it loaded: the
    embedding, and not a head that has the same tensor.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for tensor in _own(module).values():
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and owners.get(id(getattr(module, "weight", None)), 0) > 1:
            module.quant_method.process_weights_after_loading(module)


class _Coverage(TorchDispatchMode):
    """Which elements of a model's parameters were written while it was active.

    Args:
        model: Its parameters in the form that checkpoints have (between start and finish of a reload).
        names: Of those that a checkpoint fills.
        write: False: nothing is written, not even to tensors that are live.
    """

    def __init__(self, model: torch.nn.Module, names: Set[str], write: bool) -> None:
        super().__init__()
        self.write = write
        self.parameters = _expected(model, names)  # keeps them alive, so that no other tensor gets their address
        self.regions: dict[int, dict[tuple[int, int], None]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            if target.numel() != source.numel():
                raise ValueError(f"{list(source.shape)} values for {list(target.shape)} places")
            region = (target.storage_offset(), target.numel())
            self.regions.setdefault(_storage(target), {})[region] = None
            if not self.write:
                return target
        elif not self.write and func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            return args[0]
        return func(*args, **(kwargs or {}))

    def check(self, what: str) -> None:
        """Every parameter was written whole.

        Raises:
            ValueError: Naming those that were not.
        """
        lacking = [
            name
            for name, (parameter, numel) in self.parameters.items()
            if sum(count for _, count in self.regions.get(_storage(parameter), {})) < numel
        ]
        if lacking:
            names = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            raise ValueError(f"{what} lacks weights that the model needs, in full or in part: {names}.")


def _expected(model: Any, names: Set[str]) -> dict[str, tuple[torch.Tensor, int]]:
    """The parameters `names`, and how many elements of each a checkpoint fills.

    Vocabularies are padded: the rows beyond the checkpoint's are zeros.
    """
    found: dict[str, tuple[torch.Tensor, int]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            numel = getattr(parameter, "weight_loader_numel", parameter.numel())
            if isinstance(module, VocabParallelEmbedding) and parameter.ndim:
                rows = module.shard_indices.org_vocab_end_index - module.shard_indices.org_vocab_start_index
                numel = rows * (parameter.numel() // max(1, parameter.shape[0]))
            if name in names:
                found[name] = (parameter, numel)
    return found


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's own parameters and buffers, those of its children left out."""
    tensors = itertools.chain(module._parameters.items(), module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _open(info: UpdateInfo) -> tuple[Weights, str]:
    """The weights that `info` names, and what to call them."""
    if info.path is None:
        if info.handle not in _offers:
            raise ValueError(f"No weights are offered under handle {info.handle} in this process; send a path instead.")
        return _offers[info.handle], "What the trainer sent"
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(info.path, "pt") as file:
            return [(name, file.get_tensor(name)) for name in file.keys()], f"Weight file '{info.path}'"  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"Weight file '{info.path}' cannot be read: {error}.") from error
