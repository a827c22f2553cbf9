"""Options that this version does not have: refused with one sentence, never accepted and ignored."""

from __future__ import annotations

import dataclasses
from typing import Any

from agentrl.errors import ConfigurationError

VLLM = "generation with vLLM is not in this version; the in-process transformers sampler is"
ENTROPY = "entropy regularisation is not in this version"

UNAVAILABLE: dict[str, str] = {
    "use_vllm": VLLM,
    **dict.fromkeys(
        (
            "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
            "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
            "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
            "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
        ),
        VLLM,
    ),
    **dict.fromkeys(
        (
            "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
            "entropy_coef_delta", "entropy_target",
        ),
        ENTROPY,
    ),
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        "moving the reference model is not in this version",
    ),
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
        "transformers' own batching engine is not in this version; the default sampler already batches continuously",
    ),
    "cast_lm_head_to_fp32": "an fp32 output layer is not in this version",
    "ds3_gather_for_generation": "DeepSpeed is not supported in this version",
    "pad_to_multiple_of": "padding to a multiple is not in this version",
    "generation_kwargs": "extra generation arguments are not in this version; use temperature, top_p, top_k, min_p, "
    "repetition_penalty",
    "cache_implementation": "the sampler keeps its own cache, so this choice would do nothing",
    "log_multimodal": "images are not logged in this version",
    "log_completions_hub_repo": "uploading completions is not in this version",
    "use_liger_kernel": "Liger kernels are not in this version",
    "deepspeed": "DeepSpeed is not supported in this version; use DDP (accelerate launch)",
    "fsdp": "FSDP is not supported in this version; use DDP (accelerate launch)",
    "torch_compile": "torch.compile is not supported in this version",
    "auto_find_batch_size": "searching for a batch size is not supported: it would change the size of a step",
    "neftune_noise_alpha": "NEFTune noise is not supported: sampled and trained log-probs would differ",
    "label_smoothing_factor": "label smoothing has no meaning for a policy loss",
}  # fmt: skip


def check_unavailable(config: Any) -> None:
    """Nothing that this version cannot do is set.

    Raises:
        ConfigurationError: Names the option and the reason.
    """
    for option in dataclasses.fields(config):
        reason = UNAVAILABLE.get(option.name)
        if reason is None:
            continue
        value = getattr(config, option.name)
        default = option.default if option.default is not dataclasses.MISSING else None
        unset = value == default or (option.name in ("fsdp", "deepspeed") and not value)
        if not unset:
            raise ConfigurationError(f"{option.name}={value!r} is not available: {reason}. Leave it at {default!r}.")
