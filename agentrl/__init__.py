"""agentrl: environments and tools in Python, and language models that learn to act in them.

Names are found lazily, so that importing the package (and ``agentrl --help``) needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

_WHERE = {
    "AgentEnv": "gym",
    "AgentRLError": "errors",
    "ConfigurationError": "errors",
    "Deadlines": "types",
    "Environment": "environment",
    "EnvironmentFailed": "errors",
    "EnvironmentPool": "pool",
    "EnvironmentSpec": "mixing",
    "EpisodeWriter": "record",
    "GRPOConfig": "train.config",
    "GRPOTrainer": "train.trainer",
    "GymnasiumEnvironment": "gym",
    "Outcome": "types",
    "RandomPolicy": "sampler.random_policy",
    "Renderer": "render.renderer",
    "Rollout": "types",
    "RolloutEngine": "rollout.engine",
    "RolloutSettings": "rollout.engine",
    "SampleOutput": "types",
    "SampleRequest": "types",
    "Sampler": "types",
    "SamplingParams": "types",
    "ScriptedSampler": "sampler.scripted",
    "ToolDefinitionError": "errors",
    "TransformersSampler": "sampler.transformers",
    "check_environment": "check",
    "make": "registry",
    "play_episode": "rollout.play",
    "read_episodes": "record",
    "register": "registry",
    "tiny_policy": "train.tiny",
    "tool": "tool_schema",
    "warm_up": "train.warm_up",
}

__all__ = [
    "AgentEnv",
    "AgentRLError",
    "ConfigurationError",
    "Deadlines",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentPool",
    "EnvironmentSpec",
    "EpisodeWriter",
    "GRPOConfig",
    "GRPOTrainer",
    "GymnasiumEnvironment",
    "Outcome",
    "RandomPolicy",
    "Renderer",
    "Rollout",
    "RolloutEngine",
    "RolloutSettings",
    "SampleOutput",
    "SampleRequest",
    "Sampler",
    "SamplingParams",
    "ScriptedSampler",
    "ToolDefinitionError",
    "TransformersSampler",
    "__version__",
    "check_environment",
    "make",
    "play_episode",
    "read_episodes",
    "register",
    "tiny_policy",
    "tool",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'agentrl' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"agentrl.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
