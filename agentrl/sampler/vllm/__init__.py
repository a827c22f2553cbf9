"""Policies that vLLM serves, in another process or in this one. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.sampler.vllm.colocate import ColocateOptions, VLLMSampler
    from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler
    from agentrl.sampler.vllm.wire import Drawing

__all__ = ["ColocateOptions", "Drawing", "ServerOptions", "VLLMSampler", "VLLMServerSampler"]

_WHERE = {
    "ColocateOptions": "colocate",
    "Drawing": "wire",
    "ServerOptions": "server",
    "VLLMSampler": "colocate",
    "VLLMServerSampler": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
