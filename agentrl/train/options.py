"""Options that this version does not have: refused with one sentence, never accepted and ignored."""

from __future__ import annotations

import dataclasses
from typing import Any

from agentrl.errors import ConfigurationError

UNAVAILABLE: dict[str, str] = {
    "ds3_gather_for_generation": "DeepSpeed is not supported in this version, and vLLM would need the whole weights",
    "log_multimodal": "images are not logged in this version",
    "log_completions_hub_repo": "uploading completions is not in this version",
    "use_liger_kernel": "Liger patches the model's forward, where log-probs are computed here, and its fused loss is "
    "not needed: the output layer runs in chunks, only where a token is trained",
    "deepspeed": "DeepSpeed is not supported in this version; use DDP (accelerate launch)",
    "fsdp": "FSDP is not supported in this version; use DDP (accelerate launch)",
    "torch_compile": "torch.compile is not supported in this version",
    "auto_find_batch_size": "searching for a batch size is not supported: it would change the size of a step",
    "neftune_noise_alpha": "NEFTune noise is not supported: sampled and trained log-probs would differ",
    "train_sampling_strategy": "the order of the rows is that of shuffle_dataset and data_seed, not of a sampler",
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
