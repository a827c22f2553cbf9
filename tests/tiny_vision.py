"""Tiny random models that see images, for the processors of `tests.tiny_processors`."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.3,
}  # fmt: skip
_QWEN_EYES: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                              "initializer_range": 0.3}  # fmt: skip


def _text(processor: Any, **more: Any) -> dict[str, Any]:
    tokenizer = processor.tokenizer
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return _TEXT | {"vocab_size": len(tokenizer)} | ends | more


def _rope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


def _qwen_ids(processor: Any) -> dict[str, Any]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
             "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
    return {name: processor.tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _built(kind: str, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # Gemma's begins as zeros: no image would have an effect
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def qwen3_vl_model(processor: Any, seed: int = 0) -> Any:
    """For `tiny_processors.qwen3_vl()`."""
    eyes = {"patch_size": 16, "out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(
        text_config=_text(processor, rope_parameters=_rope(4, 2, 2) | {"mrope_interleaved": True}),
        vision_config=_QWEN_EYES | eyes, tie_word_embeddings=False, **_qwen_ids(processor),
    )  # fmt: skip
    return _built("Qwen3VL", config, seed)


def qwen2_5_vl_model(processor: Any, seed: int = 0) -> Any:
    """For `tiny_processors.qwen2_5_vl()`."""
    eyes = {"patch_size": 14, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 56}
    config = transformers.Qwen2_5_VLConfig(
        text_config=_text(processor, rope_parameters=_rope(4, 2, 2)),
        vision_config=_QWEN_EYES | eyes, tie_word_embeddings=False, **_qwen_ids(processor),
    )  # fmt: skip
    return _built("Qwen2_5_VL", config, seed)


def gemma3_model(processor: Any, seed: int = 0) -> Any:
    """For `tiny_processors.gemma3()`: four soft tokens per image, which see each other both ways."""
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 7}  # fmt: skip
    ids = processor.tokenizer.convert_tokens_to_ids(["<image_soft_token>", "<start_of_image>", "<end_of_image>"])
    config = transformers.Gemma3Config(
        text_config=_text(processor, sliding_window=16, query_pre_attn_scalar=16,
                          layer_types=["sliding_attention", "full_attention"]),
        vision_config=eyes, mm_tokens_per_image=4, image_token_index=ids[0], boi_token_index=ids[1],
        eoi_token_index=ids[2], tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    return _built("Gemma3", config, seed)
