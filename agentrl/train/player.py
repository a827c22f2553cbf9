"""The trainer's side of the rollout engine: one sampler, one loop, pools that live as long as the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_groups
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.scoring import RewardSource, Scorer
from agentrl.sampler.transformers import TransformersSampler
from agentrl.tool_schema import Tool
from agentrl.types import RolloutGroup


class Player:
    """Plays groups with the policy as it is now."""

    def __init__(
        self,
        model: torch.nn.Module,
        renderer: Renderer,
        pools: Mapping[str | None, EnvironmentPool],
        tools: Mapping[str, Tool],
        sources: Sequence[RewardSource],
        settings: RolloutSettings,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.sampler = TransformersSampler(
            model, max_context=settings.max_context, max_slots=max(1, settings.max_concurrent),
            autocast_dtype=autocast_dtype,
        )  # fmt: skip
        self._on_accelerator = next(model.parameters()).device.type != "cpu"
        self.engine = RolloutEngine(self.sampler, renderer, pools, tools, settings)
        self.scorer = Scorer(sources)
        self._loop = LoopThread()

    def play(self, plans: Sequence[GroupPlan], *, version: int, trainer_state: Any = None) -> list[RolloutGroup]:
        """The groups of `plans`, played by the weights of now (`version`) and scored."""
        self.sampler.publish(version)
        groups = self._loop.run(self._play(plans, trainer_state))
        if self._on_accelerator:
            self.sampler.reset()  # the cache's memory is free for the training phase
        return groups

    async def _play(self, plans: Sequence[GroupPlan], trainer_state: Any) -> list[RolloutGroup]:
        return await run_groups(self.engine, self.scorer, plans, trainer_state=trainer_state)

    def run(self, work: Callable[[], Any]) -> Any:
        """The result of a coroutine function, on the player's loop."""
        return self._loop.run(work())

    def close(self) -> None:
        """Environments are closed, threads and the loop are gone."""

        async def close_pools() -> None:
            for pool in self.engine.pools.values():
                await pool.close()

        self.sampler.close()
        self._loop.run(close_pools())
        self._loop.close()
