"""The policies: every one answers `sample(request)` and `release(conversation_id)`.

Only `agentrl.sampler.transformers` and the files that it uses import torch, and only when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.sampler.random_policy import RandomPolicy
from agentrl.sampler.scripted import ScriptedSampler

if TYPE_CHECKING:
    from agentrl.sampler.transformers import TransformersSampler

__all__ = ["RandomPolicy", "ScriptedSampler", "TransformersSampler"]


def __getattr__(name: str) -> Any:
    if name == "TransformersSampler":
        from agentrl.sampler.transformers import TransformersSampler

        return TransformersSampler
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
