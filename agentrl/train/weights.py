"""A policy's weights as a checkpoint has them, for whoever serves them: whole, merged, under the saved names.

The names are those that `save_pretrained` writes, because vLLM's loaders read checkpoints: what transformers fuses when
it loads (experts, say) is taken apart again. Adapters are merged by their own code, one layer at a time, into tensors
that take the layer's place meanwhile, so the model itself stays bitwise as it is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.errors import ConfigurationError
from agentrl.train.setup import bare

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")  # wrappers that add no name: compiled, recomputed


@dataclass(frozen=True, slots=True)
class _Unit:
    """A module's own tensors, or an adapted layer with all of its tensors."""

    name: str  # of the module, adapter wrappers left out; "" is the model
    module: nn.Module
    adapted: bool

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{self.name}.{key}" if self.name else key: tensor for key, tensor in tensors.items()}


def policy_weights(model: nn.Module, accelerator: Any = None) -> Iterator[tuple[str, Tensor]]:
    """The policy's full tensors under the names that `save_pretrained` writes, in the same order on every rank.

    Adapters are merged, tied weights come once, FSDP2 and ZeRO-3 shards are gathered, a decoder layer at a time. It is
    collective: every rank iterates to the end. Tensors may be views of the model's own: read them before it is trained
    on.

    Args:
        model: The policy, with whatever wraps it (PEFT, DDP, FSDP2, DeepSpeed, torch.compile).
        accelerator: The `Accelerator` that prepared it, where there is one.

    Raises:
        ConfigurationError: Weights that no other program can take: quantized, sharded by FSDP 1, an adapter that cannot
            be merged, or one that unties tied embeddings.
    """
    plain = unwrapped(model, accelerator)
    base = bare(plain)
    _check(base)
    units = list(_units(base, ""))
    left_out = _tied(base, units) | set(getattr(base, "_keys_to_ignore_on_save", None) or ())
    for _, group in itertools.groupby(units, key=lambda unit: _layer_of(unit.name)):
        held: dict[str, Tensor] = {}
        for unit in group:
            held.update({name: t for name, t in unit.named(_tensors(unit)).items() if name not in left_out})
        with torch.no_grad():
            yield from revert_weight_conversion(base, held).items()


@contextlib.contextmanager
def drained(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Whatever happens inside, this rank goes through all weights, because the others wait for its shards."""
    try:
        yield weights
    finally:
        for _ in weights:
            pass


def unwrapped(model: nn.Module, accelerator: Any = None) -> nn.Module:
    """The model without what distributed training and compilation put around it; a PEFT model stays one."""
    if accelerator is not None:
        return accelerator.unwrap_model(model, keep_torch_compile=False)
    return extract_model_from_parallel(model, keep_torch_compile=False)


@torch.no_grad()
def gathered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Full tensors; a collective where they are shards, else the tensors themselves, detached."""
    with _zero3([t for t in tensors if hasattr(t, "ds_id")]):
        return [_full(t) for t in tensors]


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        shard: DTensor = tensor.detach()  # pyright: ignore[reportAssignmentType]
        device = shard.device_mesh.device_type
        if shard.device.type != device:  # offloaded to the CPU, but shards travel over the GPUs' group
            shard = shard.to(device)  # pyright: ignore[reportAssignmentType]
        return shard.full_tensor()
    return tensor.detach().clone() if hasattr(tensor, "ds_id") else tensor.detach()


def _zero3(sharded: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed  # pyright: ignore[reportMissingImports]

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=None)


def _check(base: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in base.modules()):
        raise ConfigurationError("Weights cannot be sent while FSDP 1 shards the model; set fsdp_version to 2.")
    method = getattr(base, "quantization_method", None)
    if method is None and all(p.is_floating_point() for p in base.parameters()):
        return
    kind = str(getattr(method, "value", method or "an integer type"))
    raise ConfigurationError(
        f"The model is quantized ({kind}), and such weights cannot be sent to vLLM. Load it unquantized, or train a "
        "LoRA adapter and start the server with --enable-lora, so that the adapter is sent alone."
    )


def _units(module: nn.Module, name: str) -> Iterator[_Unit]:
    """The model's tensors in order, as far as a checkpoint has them."""
    chosen = _trained_copy(module)
    if chosen is not None:
        yield from _units(chosen, name)
    elif _adapts(module):
        yield _Unit(name, module, adapted=True)
    else:
        yield _Unit(name, module, adapted=False)
        for key, child in module.named_children():
            inner = name if key in _TRANSPARENT else f"{name}.{key}" if name else key
            yield from _units(child, inner)


def _adapts(module: nn.Module) -> bool:
    """An adapter layer of PEFT, around a layer of the model."""
    return hasattr(module, "adapter_layer_names") and not {"base_layer", "token_adapter"}.isdisjoint(module._modules)


def _trained_copy(module: nn.Module) -> nn.Module | None:
    """The active one of PEFT's `modules_to_save`, which stands for the whole module."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or not hasattr(module, "adapter_layer_names"):
        return None
    active = [name for name in getattr(module, "active_adapters", ()) if name in copies]
    return copies[active[0]] if active else module.get_submodule("original_module")


def _layer_of(name: str) -> str:
    """The name up to its first number, which is the decoder layer's: what is converted together lies within one.

    >>> _layer_of("model.layers.3.mlp.experts"), _layer_of("model.norm")
    ('model.layers.3', '')
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _tensors(unit: _Unit) -> dict[str, Tensor]:
    if unit.adapted:
        return _merged(unit)
    own = _own(unit.module)
    return dict(zip(own, gathered(list(own.values())), strict=True))


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and the buffers that are saved, those of its children left out."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    hidden = module._non_persistent_buffers_set
    return found | {name: b for name, b in module._buffers.items() if b is not None and name not in hidden}


def _merged(unit: _Unit) -> dict[str, Tensor]:
    """The tensors of the layer that the adapter is around, with the adapter in them."""
    adapters = [module for module in unit.module.modules() if callable(getattr(type(module), "merge", None))]
    base = _innermost(unit.module)
    with _copied(unit.module), _forgetting(adapters):
        try:
            for adapter in adapters:  # more than one where adapters sit around adapters
                merge: Callable[[], None] = adapter.merge  # pyright: ignore[reportAssignmentType]
                merge()
        except NotImplementedError as error:
            raise ConfigurationError(
                f"The adapter of '{unit.name}' cannot be merged into the model ({error}), so it cannot be sent to vLLM."
            ) from error
        return {key: tensor.detach() for key, tensor in base.state_dict(keep_vars=True).items()}


def _innermost(module: nn.Module) -> nn.Module:
    while _adapts(module):
        module = module.get_submodule("base_layer" if "base_layer" in module._modules else "token_adapter")
    return module


@contextlib.contextmanager
def _copied(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer computes with full copies of its parameters; afterwards with its own again."""
    slots = [(m, name, p) for m in layer.modules() for name, p in m._parameters.items() if p is not None]
    own = {id(p): p for _, _, p in slots}
    full = gathered(list(own.values()))
    with torch.no_grad():
        copies = {key: nn.Parameter(t.clone(), requires_grad=False) for key, t in zip(own, full, strict=True)}
    try:
        for module, name, parameter in slots:
            module._parameters[name] = copies[id(parameter)]
        yield
    finally:
        for module, name, parameter in slots:
            module._parameters[name] = parameter


@contextlib.contextmanager
def _forgetting(adapters: Sequence[Any]) -> Iterator[None]:
    """What adapters note about themselves while they merge is gone afterwards."""
    notes = [(adapter, list(adapter.merged_adapters), dict(getattr(adapter, "_caches", {}))) for adapter in adapters]
    try:
        yield
    finally:
        for adapter, merged, caches in notes:
            adapter.merged_adapters[:] = merged
            if hasattr(adapter, "_caches"):
                adapter._caches.clear()
                adapter._caches.update(caches)


def _tied(base: nn.Module, units: Sequence[_Unit]) -> set[str]:
    """Names of tensors that are another one under a second name, which a checkpoint leaves out.

    Raises:
        ConfigurationError: Two that should be one have come to differ: vLLM ties them, and would serve another policy.
    """
    by_name = {unit.name: unit for unit in units}
    pairs: dict[str, str] = dict(getattr(base, "all_tied_weights_keys", None) or {})
    for second, first in pairs.items():
        owners = [by_name.get(name.rpartition(".")[0]) for name in (second, first)]
        if None in owners:
            continue
        left, right = (owner for owner in owners if owner is not None)
        same = not left.adapted and not right.adapted and _slot(left, second) is _slot(right, first)
        if not same and not torch.equal(_tensors(left)[_key(second)], _tensors(right)[_key(first)]):
            raise ConfigurationError(
                f"'{second}' and '{first}' are tied in this model and the adapter changes only one of them, which vLLM "
                "cannot serve. Leave both out of the adapter's target_modules and modules_to_save, or use a model with "
                "tie_word_embeddings=False."
            )
    return set(pairs)


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _slot(unit: _Unit, name: str) -> Tensor | None:
    return _own(unit.module).get(_key(name))
