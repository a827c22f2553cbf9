"""The policies: every one answers `sample(request)` and `release(conversation_id)`.

The samplers of a model in this process import torch, and those of vLLM what it needs, only when asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentrl.sampler.random_policy import RandomPolicy
from agentrl.sampler.scripted import ScriptedSampler

if TYPE_CHECKING:
    from agentrl.sampler.continuous import ContinuousSampler
    from agentrl.sampler.generate import GenerateSampler
    from agentrl.sampler.transformers import TransformersSampler
    from agentrl.sampler.vllm import VLLMSampler, VLLMServerSampler

__all__ = [
    "ContinuousSampler", "GenerateSampler", "RandomPolicy", "ScriptedSampler", "TransformersSampler", "VLLMSampler",
    "VLLMServerSampler",
]  # fmt: skip

_LATER = {
    "ContinuousSampler": "agentrl.sampler.continuous",
    "GenerateSampler": "agentrl.sampler.generate",
    "TransformersSampler": "agentrl.sampler.transformers",
    "VLLMSampler": "agentrl.sampler.vllm",
    "VLLMServerSampler": "agentrl.sampler.vllm",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
