"""Small models of many families, with adapters that were trained, and two processes: for tests of weight syncs."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def qwen3(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied, attention_bias=True)
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8))


def gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, head_dim=8))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, decoder_sparse_step=1, mlp_only_layers=[])
    )


def mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    )


def deepseek() -> Any:
    """Has a buffer that is saved."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=8, first_k_dense_replace=1,
        )
    )  # fmt: skip


def qwen3_next() -> Any:
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **SIZES | {"num_hidden_layers": 4}, **EXPERTS, head_dim=8, shared_expert_intermediate_size=16,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        )
    )  # fmt: skip


def qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = SIZES | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)  # pyright: ignore[reportArgumentType]
    return transformers.Qwen2VLForConditionalGeneration(config)


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


ADAPTERS: dict[str, tuple[Any, Any]] = {
    "lora": (qwen3, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")),
    "rslora": (qwen3, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True)),
    "dora": (qwen3, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True)),
    "bias": (qwen3, peft.LoraConfig(r=4, target_modules=["q_proj"], bias="all")),
    "modules_to_save": (
        lambda: qwen3(tied=False), peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    ),
    "embeddings": (lambda: qwen3(tied=False), peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"])),
    "tokens": (
        lambda: qwen3(tied=False),
        peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 5]}),
    ),
    "tied tokens": (qwen3, peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5])),
    "patterns": (qwen3, peft.LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"layers.1.self_attn.q_proj": 2})),
    "conv1d": (gpt2, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)),
    "experts": (
        mixtral,
        peft.LoraConfig(
            r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        ),
    ),
    "ia3": (qwen3, peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": (qwen3, peft.LoHaConfig(r=4, target_modules=["q_proj"])),
    "oft": (qwen3, peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"])),
    "vera": (qwen3, peft.VeraConfig(r=4, target_modules=["q_proj"])),
}  # fmt: skip


def adapted(kind: str) -> Any:
    """A model with an adapter that was trained, somehow."""
    make, config = ADAPTERS[kind]
    model = peft.get_peft_model(make().eval(), copy.deepcopy(config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


SHARDED: dict[str, Any] = {"qwen3": qwen3, "mixtral": mixtral, **{kind: lambda k=kind: adapted(k) for kind in ADAPTERS}}


def two_processes(*arguments: str, timeout_s: float = 120.0) -> None:
    """`sync_worker.py` ran in two processes (gloo)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("sync_worker.py")), *arguments]
    env = {
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **env, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-3000:] for error in errors)
