"""A policy's weights leave under the names that `save_pretrained` writes, merged and whole; the model stays as is."""

from __future__ import annotations

import copy
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weights_kit import (
    ADAPTERS,
    SHARDED,
    adapted,
    deepseek,
    gemma2,
    gemma3,
    gpt2,
    llama,
    mixtral,
    qwen2_vl,
    qwen3,
    qwen3_moe,
    qwen3_next,
    same,
    saved,
    two_processes,
)  # fmt: skip

from agentrl.errors import ConfigurationError
from agentrl.train.weights import policy_weights


@pytest.mark.parametrize(
    "make", [qwen3, llama, gemma2, gemma3, gpt2, qwen3_moe, mixtral, deepseek, qwen3_next, qwen2_vl]
)
def test_the_names_and_values_are_those_that_save_pretrained_writes(make: Any, tmp_path: Path) -> None:
    model = make()
    same(dict(policy_weights(model)), saved(model, tmp_path))
    read = type(model).from_pretrained(tmp_path)  # remembers how the names of its checkpoint were changed
    same(dict(policy_weights(read)), saved(read, tmp_path / "again"))


def test_the_names_of_an_old_checkpoint_are_kept(tmp_path: Path) -> None:
    model = qwen2_vl()
    old = {name.replace("model.language_model.", "model."): t for name, t in model.state_dict().items()}
    old = {name.replace("model.visual.", "visual."): t for name, t in old.items()}
    model.config.save_pretrained(tmp_path)
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    read = type(model).from_pretrained(tmp_path)
    same(dict(policy_weights(read)), saved(read, tmp_path / "again"))
    assert dict(policy_weights(read)).keys() == old.keys()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_merged_and_the_model_stays_bitwise_the_same(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    ids = torch.tensor([[1, 3, 5, 7, 9]])
    before, parameters, logits = state(model), dict(model.named_parameters()), model(ids).logits
    sent = {name: tensor.clone() for name, tensor in policy_weights(model)}
    same(state(model), before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(model(ids).logits, logits)
    assert not any(getattr(module, "merged", False) or getattr(module, "_caches", {}) for module in model.modules())
    merged = model.merge_and_unload()
    same(sent, saved(merged, tmp_path))
    assert not torch.equal(logits, ADAPTERS[kind][0]()(ids).logits)  # the adapter does something


def test_gradients_flow_as_before(tmp_path: Path) -> None:
    model, fresh = adapted("lora"), adapted("lora")
    dict(policy_weights(model))
    for m in (model, fresh):
        m(torch.tensor([[1, 3, 5]])).logits.sum().backward()
    grads = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
    assert grads and all(torch.equal(dict(model.named_parameters())[name].grad, g) for name, g in grads.items())


def test_an_adapter_that_unties_the_embeddings_is_refused() -> None:
    for config in (
        peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
        peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    ):
        model = peft.get_peft_model(qwen3(), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
        with pytest.raises(ConfigurationError, match=r"'lm_head.weight' and 'model.embed_tokens.weight' are tied"):
            dict(policy_weights(model))


def test_an_adapter_that_cannot_be_merged_is_refused_and_the_model_stays() -> None:
    model = peft.get_peft_model(
        qwen3(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[3])
    )
    before = state(model)
    with pytest.raises(ConfigurationError, match=r"'model.layers.0.self_attn.q_proj' cannot be merged"):
        dict(policy_weights(model))
    same(state(model), before)


def test_quantized_weights_are_refused() -> None:
    model = qwen3()
    model.quantization_method = transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
    with pytest.raises(ConfigurationError, match=r"quantized \(bitsandbytes\).*--enable-lora"):
        dict(policy_weights(model))
    other = qwen3()
    other.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigurationError, match=r"quantized"):
        dict(policy_weights(other))


def test_what_compilation_and_checkpointing_put_into_names_is_left_out(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = qwen3()
    want = saved(model, tmp_path)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    same(dict(policy_weights(torch.compile(model, backend="eager"))), want)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def zero3(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A double of `deepspeed.zero.GatheredParameters`; how many parameters each use gathered."""
    uses: list[int] = []

    @contextmanager
    def gather(params: list[Any], modifier_rank: int | None = None) -> Iterator[None]:
        assert modifier_rank is None and all(p.numel() == 0 for p in params)
        uses.append(len(params))
        for p in params:
            p.data = p.ds_whole
        yield
        for p in params:
            p.data = torch.empty(0)

    module = types.ModuleType("deepspeed")
    module.__spec__ = importlib.machinery.ModuleSpec("deepspeed", None)
    module.zero = types.SimpleNamespace(GatheredParameters=gather)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    return uses


@pytest.mark.parametrize("kind", [None, "lora", "modules_to_save"])
def test_zero_3_shards_are_gathered_a_module_at_a_time(zero3: list[int], kind: str | None, tmp_path: Path) -> None:
    model = adapted(kind) if kind else qwen3()
    plain = copy.deepcopy(model)
    want = saved(plain.merge_and_unload() if kind else plain, tmp_path)
    total = 0
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_whole = number, parameter.data.clone()
        parameter.data = torch.empty(0)
        total += 1
    same(dict(policy_weights(model)), want)
    assert max(zero3) < total / 2
    assert all(p.numel() == 0 for p in model.parameters())


@pytest.mark.slow
def test_fsdp2_shards_are_gathered_in_the_same_order_on_every_rank(tmp_path: Path) -> None:
    kinds = ["qwen3", "mixtral", "lora", "dora", "modules_to_save"]
    two_processes("shard", str(tmp_path), *kinds)
    for kind in kinds:
        names = [json.loads((tmp_path / f"{kind}_{rank}.json").read_text()) for rank in range(2)]
        want = dict(policy_weights(SHARDED[kind]()))
        assert names[0] == names[1] == list(want)
        same(load_file(tmp_path / f"{kind}.safetensors"), want)
