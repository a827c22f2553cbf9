"""Gymnasium both ways: its environments for language models, and ours as `gymnasium.Env`.

`GymnasiumEnvironment` makes a Gymnasium environment conversational; `AgentEnv` makes a conversational environment a
`gymnasium.Env`. Importing this package imports Gymnasium; `agentrl.registry` does so when a name is looked up.
"""

from __future__ import annotations

from agentrl.gym.adapter import GymnasiumEnvironment
from agentrl.gym.agent_env import AgentEnv
from agentrl.gym.text_space import CallText, FreeText

__all__ = ["AgentEnv", "CallText", "FreeText", "GymnasiumEnvironment"]
