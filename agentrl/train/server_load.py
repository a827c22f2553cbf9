"""rollout/vllm_* and perf/weight_sync_*: how a vLLM server bears a generation phase, and what a sync costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from agentrl.train.metrics import MetricWindow

if TYPE_CHECKING:
    from agentrl.train.weight_sync import SyncTimes

EVERY_S = 5.0  # seconds between two looks at the server


def add_sync(window: MetricWindow, times: SyncTimes) -> None:
    """perf/weight_sync_s, and of it the seconds that the sampler was held, that weights moved, that ranks waited."""
    window.add("perf/weight_sync_s", times.total_s)
    window.add("perf/weight_sync_pause_s", times.pause_s)
    window.add("perf/weight_sync_transfer_s", times.transfer_s)
    window.add("perf/weight_sync_barrier_s", times.barrier_s)


class LoadWatch:
    """Looks at the server's own metrics while rollouts are played; does nothing for samplers without a server."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler if hasattr(sampler, "retries") and hasattr(sampler, "load") else None
        self._retries = 0.0
        self._preemptions: float | None = None  # the server's count at the last look; it may have served others before

    @contextlib.asynccontextmanager
    async def during(self, window: MetricWindow | None) -> AsyncIterator[None]:
        """The metrics of this phase are in `window`."""
        if self._sampler is None or window is None:
            yield
            return
        looked = [False]
        task = asyncio.get_running_loop().create_task(self._poll(window, looked), name="agentrl-server-load")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not looked[0]:
                await self._look(window)
            retries = float(self._sampler.retries)
            window.count("rollout/vllm_retry_count", retries - self._retries)
            self._retries = retries

    async def _poll(self, window: MetricWindow, looked: list[bool]) -> None:
        await asyncio.sleep(min(0.5, EVERY_S))  # the first turns are on their way
        while True:
            await self._look(window)
            looked[0] = True
            await asyncio.sleep(EVERY_S)

    async def _look(self, window: MetricWindow) -> None:
        with contextlib.suppress(Exception):  # a server without metrics is no fault of the rollouts
            assert self._sampler is not None
            load = await self._sampler.load()
            window.add("rollout/vllm_kv_cache_usage_frac", load.kv_cache_usage)
            window.add("rollout/vllm_running_requests", load.running)
            window.add("rollout/vllm_queued_requests", load.waiting)
            before = load.preemptions if self._preemptions is None else self._preemptions
            window.count("rollout/vllm_preemption_count", max(0.0, load.preemptions - before))
            self._preemptions = load.preemptions
