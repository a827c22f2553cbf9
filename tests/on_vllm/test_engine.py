"""The weight-transfer engine inside a real vLLM: log-probs follow transformers, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm_kit import TOLERANCE, Reference, request

from agentrl.errors import SamplerError
from agentrl.sampler.vllm import engine, plugin
from agentrl.sampler.vllm.colocate import ColocateOptions, VLLMSampler
from agentrl.train.tiny import make_tokenizer
from agentrl.types import SamplingParams

PROMPTS = [list(range(10 + 7 * i, 24 + 9 * i)) for i in range(4)]


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[VLLMSampler]:
    sampler = VLLMSampler(ColocateOptions(str(folder), max_model_len=512, max_num_seqs=8, **options))
    try:
        yield sampler
    finally:
        sampler.close()


def difference(sampler: VLLMSampler, model: Any) -> float:
    """The largest difference between log-probs of what the sampler draws now and the model's own."""

    async def draw() -> list[Any]:
        turns = [sampler.sample(request(p, max_tokens=16, seed=(0, i))) for i, p in enumerate(PROMPTS)]
        return await asyncio.gather(*turns)

    reference, outputs = Reference(model), asyncio.run(draw())
    return max(reference.difference(p, o, SamplingParams()) for p, o in zip(PROMPTS, outputs, strict=True))


@torch.no_grad()
def perturb(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.1 * (float(parameter.std()) if parameter.numel() > 1 else 1.0) + 0.01
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def checkpoint(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The weights as a checkpoint names them: experts one by one, a tied head left out."""
    model.save_pretrained(folder / "checkpoint")
    return load_file(folder / "checkpoint" / "model.safetensors")


def update(sampler: VLLMSampler, info: dict[str, Any]) -> None:
    """As a server's routes do it."""
    sampler.llm.collective_rpc("start_weight_update")
    sampler.llm.collective_rpc("update_weights", args=(info,))
    sampler.llm.collective_rpc("finish_weight_update")
    sampler.llm.reset_prefix_cache()


def make(name: str) -> Any:
    """A tiny model of a family whose weights vLLM fuses or packs in its own way."""
    small: dict[str, Any] = dict(
        vocab_size=len(make_tokenizer()), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, intermediate_size=96, max_position_embeddings=512, initializer_range=0.1,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    experts: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True)
    makers: dict[str, Callable[[], Any]] = {
        "tied": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, tie_word_embeddings=True)),
        # Biases stay live while vLLM reloads: a refused file must not have written them.
        "untied, biases": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**small, tie_word_embeddings=False)
        ),
        "experts": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**small, **experts, moe_intermediate_size=64, tie_word_embeddings=False)
        ),
        "experts, padded": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**small, **experts, moe_intermediate_size=40, tie_word_embeddings=True)
        ),
    }
    torch.manual_seed(0)
    model = makers[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_()
    return model.eval()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied, biases", "experts", "experts, padded"])
def test_log_probs_follow_the_weights(name: str, tmp_path: Path) -> None:
    """Five syncs by file; then a list, an iterator, bf16 weights, and files that are refused without a trace.

    Red without `repack_tied_heads` ("tied"), and without `_forget_expert_kernels` ("experts").
    """
    model = make(name)
    with engine_of(saved(model, tmp_path)) as sampler:
        assert difference(sampler, model) <= TOLERANCE
        for sync in range(5):
            perturb(model, sync)
            save_file(checkpoint(model, tmp_path), tmp_path / "weights.safetensors")
            update(sampler, {"path": str(tmp_path / "weights.safetensors")})
            assert difference(sampler, model) <= TOLERANCE, sync
        perturb(model, 5)
        sampler.load(list(checkpoint(model, tmp_path).items()), 1)
        assert difference(sampler, model) <= TOLERANCE
        perturb(model, 6)
        sampler.load(iter(checkpoint(model, tmp_path).items()), 2)
        assert difference(sampler, model) <= TOLERANCE
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        sampler.load([(n, t.bfloat16()) for n, t in checkpoint(model, tmp_path).items()], 3)
        assert difference(sampler, model) <= TOLERANCE
        refused(sampler, model, tmp_path)


def refused(sampler: VLLMSampler, model: Any, folder: Path) -> None:
    """Whatever a file lacks, it is named, and the old weights are in place."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    perturb(model, 7)
    good, path = checkpoint(model, folder), folder / "bad.safetensors"
    model.load_state_dict(kept)
    key = next(name for name in reversed(good) if "k_proj.weight" in name)

    def attempt(message: str, weights: dict[str, torch.Tensor] | bytes) -> None:
        path.write_bytes(weights) if isinstance(weights, bytes) else save_file(weights, path)
        with pytest.raises(ValueError, match=message):
            update(sampler, {"path": str(path)})

    attempt("lacks weights that the model needs, in full or in part: .*qkv_proj", without(good, key))
    attempt("lacks weights that the model needs", without(good, "model.norm.weight"))
    attempt(f"does not fit .* at tensor '{key}'", good | {key: good[key][:-1].clone()})
    attempt("at tensor 'model.layers.9.foo.weight'", good | {"model.layers.9.foo.weight": torch.zeros(3)})
    if bias := [name for name in good if name.endswith("q_proj.bias")]:
        attempt("lacks weights", {name: good[name] for name in (*bias, "model.norm.weight")})
    save_file(good, path)
    attempt("cannot be read", path.read_bytes()[:-100])
    attempt("cannot be read", b"no safetensors")
    for info, message in (
        ({"path": str(folder / "none")}, "cannot be read"),
        ({"handle": -1}, "No weights are offered"),
        ({}, "names either `path`"),
        ({"path": "a", "handle": 1}, "names either `path`"),
    ):
        with pytest.raises(ValueError, match=message):
            update(sampler, info)
    with pytest.raises(SamplerError, match=r"version 9 were not loaded .* lacks weights"):
        sampler.load(list(without(good, key).items()), 9)
    assert difference(sampler, model) <= TOLERANCE
    # An iterator cannot be rehearsed: nothing is sampled from what it leaves, until a whole one came.
    with pytest.raises(SamplerError, match="lacks weights"):
        sampler.load(iter(without(good, key).items()), 9)
    with pytest.raises(SamplerError, match="incomplete"):
        difference(sampler, model)
    sampler.load(iter(checkpoint(model, folder).items()), 10)
    assert difference(sampler, model) <= TOLERANCE


def without(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in weights.items() if key != name}


@pytest.mark.slow
def test_fp32_weights_into_a_bf16_model(folder: Path) -> None:
    model = Reference.of(folder).model
    perturb(model, 1)
    with engine_of(folder, dtype="bfloat16") as sampler:
        sampler.load([(name, p) for name, p in model.named_parameters()], 1)
        assert difference(sampler, model.to(torch.bfloat16)) < 0.05
        assert difference(sampler, Reference.of(folder).model) > 0.05


@pytest.mark.slow
def test_the_transformers_implementation_leaves_transformers_alone(folder: Path) -> None:
    """vLLM decorates transformers' own class for it; red without `_give_back_classes`."""
    model = Reference.of(folder).model
    cls = type(model.model)
    init, bases = cls.__init__, cls.__bases__
    with engine_of(folder, model_impl="transformers") as sampler:
        assert "transformers" in type(sampler.llm.apply_model(lambda m: m)[0]).__module__
        assert "__call__" not in vars(cls) and cls.__init__ is init and cls.__bases__ == bases
        perturb(model, 1)
        sampler.load([(name, p) for name, p in model.named_parameters()], 1)
        assert difference(sampler, model) <= TOLERANCE
    assert Reference.of(folder).log_probs([1, 2], [3], SamplingParams()).shape == (1,)


def test_registering_twice_is_fine() -> None:
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    plugin.register()
    plugin.register()
    assert WeightTransferEngineFactory._registry["agentrl"]() is engine.AgentRLWeights
    assert WeightTransferEngineFactory._registry["nccl"] is not None


def test_handles_end_with_their_block() -> None:
    weights = [("a", torch.zeros(1))]
    with engine.offered(weights) as handle, engine.offered([]) as other:
        assert handle != other
        assert engine._open(engine.UpdateInfo(handle=handle))[0] is weights
    with pytest.raises(ValueError, match="No weights are offered"):
        engine._open(engine.UpdateInfo(handle=handle))
