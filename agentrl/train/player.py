"""The trainer's side of the rollout engine: one sampler, one loop, pools that live as long as the trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_groups
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.scoring import RewardSource, Scorer
from agentrl.tool_schema import Tool
from agentrl.train.metrics import MetricWindow
from agentrl.train.policy_sampler import PolicySampler
from agentrl.train.server_load import LoadWatch, add_sync
from agentrl.types import RolloutGroup


class Player:
    """Plays groups with the policy as it is now."""

    def __init__(
        self,
        policy: PolicySampler,
        loop: LoopThread,
        renderer: Renderer,
        pools: Mapping[str | None, EnvironmentPool],
        tools: Mapping[str, Tool],
        sources: Sequence[RewardSource],
        settings: RolloutSettings,
    ) -> None:
        self.policy, self._loop = policy, loop
        self.engine = RolloutEngine(policy.sampler, renderer, pools, tools, settings)
        self.scorer = Scorer(sources)
        self._watch = LoadWatch(policy.sampler)
        self._warned = False

    @property
    def sampler(self) -> Any:
        """What draws the turns, unless somebody gave the engine another sampler."""
        return self.policy.sampler

    def play(
        self, plans: Sequence[GroupPlan], *, version: int, trainer_state: Any = None, window: MetricWindow | None = None
    ) -> list[RolloutGroup]:
        """The groups of `plans`, played by the weights of now (`version`) and scored; what it cost is in `window`."""
        self.publish(version, window)
        with self.policy.together() as leads:
            groups = self._loop.run(self._play(plans, trainer_state, window)) if leads else []
        self.policy.rest()
        return groups

    def publish(self, version: int, window: MetricWindow | None = None) -> None:
        """The sampler draws from the weights of now. Collective."""
        drawing = self.engine.sampler
        if drawing is not self.policy.sampler:  # somebody's own
            if callable(publish := getattr(drawing, "publish", None)):
                publish(version)
            elif not self._warned:
                self._warned = True
                warnings.warn(
                    f"{type(drawing).__name__} has no publish(version), so the trainer's weights do not reach it: it "
                    "draws from what it holds for the whole run.", stacklevel=2,
                )  # fmt: skip
            return
        times = self.policy.publish(version)
        if times is not None and window is not None:
            add_sync(window, times)

    async def _play(
        self, plans: Sequence[GroupPlan], trainer_state: Any, window: MetricWindow | None
    ) -> list[RolloutGroup]:
        async with self._watch.during(window):
            groups = await run_groups(self.engine, self.scorer, plans, trainer_state=trainer_state)
        quiet: Any = getattr(self.sampler, "quiet", None)
        if quiet is not None:
            await quiet()  # turns that were given up may have left a forward under way
        return groups

    def run(self, work: Callable[[], Any]) -> Any:
        """The result of a coroutine function, on the player's loop."""
        return self._loop.run(work())

    def close(self) -> None:
        """Environments are closed; engines, servers, threads and the loop are gone."""

        async def close_pools() -> None:
            for pool in self.engine.pools.values():
                await pool.close()

        self.policy.close()
        self._loop.run(close_pools())
        self._loop.close()
