"""Ready environments, one small package each, registered when this package is imported."""

from __future__ import annotations

from agentrl.registry import register


def register_all() -> None:
    """Every environment of this package can be built by its id. They are imported when they are built."""
    register("agentrl/Hunt-v0", "agentrl_envs.hunt:Hunt")
    register("agentrl/Courier-v0", "agentrl_envs.courier:Courier")
    register("agentrl/Recycle-v0", "agentrl_envs.recycle:Recycle")


register_all()
