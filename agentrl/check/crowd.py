"""Many instances at once, and calls that are given up in the middle."""

from __future__ import annotations

import asyncio

from agentrl.check.places import source_of, told
from agentrl.check.player import Played, Player, Slowest
from agentrl.check.probes import Probe
from agentrl.environment import Instance
from agentrl.errors import EnvironmentFailed
from agentrl.pool import EnvironmentPool

INSTANCES = 16
_CALLS = 6  # in an episode of the crowd
_CANCELLED_TOOLS = 4  # at most, the slowest first
_STEPS = 3  # of the event loop until a call has begun
_TIMER_S = 0.002
_AFTER_S = 5.0  # for what was cancelled to end


async def acquire(pool: EnvironmentPool, seconds: float) -> Instance:
    """An instance, within the deadline.

    Raises:
        EnvironmentFailed: It could not be built, or not in time.
    """
    try:
        return await asyncio.wait_for(pool.acquire(), seconds)
    except TimeoutError:
        raise EnvironmentFailed(
            f"Building an instance of {pool.name} took longer than {seconds:g} s.", deadline=True
        ) from None


class Crowd:
    """Further instances of the environment, built by its pool.

    Args:
        budget: Seconds for the episodes one after another; no further instance is built after them.
    """

    def __init__(self, player: Player, probe: Probe, pool: EnvironmentPool, budget: float) -> None:
        self.player, self.probe, self.pool, self.budget = player, probe, pool, budget
        self.name = player.name

    async def acquire(self) -> Instance:
        with self.player.watch.doing(f"{self.name}()"):
            return await acquire(self.pool, self.player.timeout)

    async def side_by_side(self, instances: list[Instance]) -> None:
        """16 instances whose steps take turns have played what one plays alone; `instances` has them all."""
        loop, rows = asyncio.get_running_loop(), self.probe.rows
        end = loop.time() + self.budget
        alone: list[Played] = []
        while len(alone) < INSTANCES and (len(alone) < 2 or loop.time() < end):
            number = len(alone)
            row = rows[number % len(rows)]
            alone.append(await self.player.play(instances[0], row, self.probe.seed + number, most=_CALLS))
        while len(instances) < len(alone) and (len(instances) < 3 or loop.time() < end):
            instances.append(await self.acquire())
        count = min(len(instances), len(alone))
        jobs = [
            self.player.play(instance, played.row, played.seed, played.calls, yielding=True)
            for instance, played in zip(instances, alone, strict=False)
        ]
        done = await asyncio.gather(*jobs, return_exceptions=True)
        for played, other in zip(alone, done, strict=False):
            if isinstance(other, EnvironmentFailed):
                what = f"{told(other, source_of(instances[0].env))} That was"
            elif isinstance(other, BaseException):
                raise other
            else:
                what = played.difference(other)
                what = what and f"{self.name}.{what}"
            if what is not None:
                self.player.add(
                    "error",
                    f"{what} while {count - 1} other instances were playing: they share something (a class attribute, "
                    "a global, a file). Keep what an episode changes on self.",
                )
                return

    async def cancelled(self) -> None:
        """Calls that were given up in the middle have ended, their instances are closed, and others play as before."""
        if self.probe.one.inline:
            tools = [tool for tool in self.probe.one.tools.values() if tool.is_async]
        else:
            tools = [tool for tool in self.probe.one.tools.values() if tool.is_async or not tool.inline]
        known = [(self.player.slowest[t.name], t) for t in tools if t.name in self.player.slowest]
        known.sort(key=lambda pair: -pair[0].seconds)
        for slowest, tool in known[:_CANCELLED_TOOLS]:
            if not await self._cancel(slowest, tool.name, is_async=tool.is_async):
                return

    async def _cancel(self, slowest: Slowest, name: str, *, is_async: bool) -> bool:
        """One call given up: an async one cancelled, as when a run stops, a sync one by its deadline."""
        instance = await self.acquire()
        try:
            played = Played(slowest.row, slowest.seed, await self.player.reset(instance, slowest.row, slowest.seed))
            for before, arguments in slowest.before:
                await self.player.call(instance, before, arguments)
            await self._give_up(instance, name, slowest, is_async)
        finally:
            self.pool.release(instance, healthy=False)
        label, waited = f"{self.name}.{name}", min(self.player.timeout, _AFTER_S)
        if not await self._ended(waited):
            self.player.add(
                "warning",
                f"{label} or close() goes on for more than {waited:g} s after the call was given up: each such call "
                "holds a thread or a task. Give what it waits for a deadline, and let cancellation through.",
            )
        if instance.close_error is not None:
            self.player.add("error", f"{self.name}.close() failed after {label} was given up: {instance.close_error}.")
        return await self._as_before(label, played)

    async def _give_up(self, instance: Instance, name: str, slowest: Slowest, is_async: bool) -> None:
        usual = self.probe.milliseconds.get(name, 0.0) / 1e3
        part = min(slowest.seconds / 3, usual / 2, 0.5)
        if not is_async:
            try:
                await instance.call(instance.tools[name], slowest.arguments, part)
            except EnvironmentFailed:  # late, as was meant
                return
            return
        call = asyncio.ensure_future(self.player.call(instance, name, slowest.arguments))
        for _ in range(_STEPS):  # shorter calls than a timer can cut: it has begun, and waits for its first await
            await asyncio.sleep(0)
        if part > _TIMER_S:
            await asyncio.wait({call}, timeout=part)
        call.cancel()
        await asyncio.wait({call}, timeout=_AFTER_S)  # an instance leaves its calls a moment to notice
        if call.done() and not call.cancelled():
            call.exception()  # its failure is not what this is about

    async def _ended(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.pool.abandoned:
            if loop.time() > end:
                return False
            await asyncio.sleep(0.005)
        return True

    async def _as_before(self, label: str, played: Played) -> bool:
        """Another instance plays the first episode as it was."""
        clean, instance = self.probe.clean, await self.acquire()
        healthy = False
        try:
            assert clean is not None
            again = await self.player.play(instance, clean.row, clean.seed, clean.calls)
            what, healthy = clean.difference(again), True
            what = what and f"{self.name}.{what}"
        except EnvironmentFailed as error:
            what = str(error)
        finally:
            self.pool.release(instance, healthy=healthy)
        if what is None or not self.probe.steady:
            return True
        self.player.add(
            "error",
            f"{what.rstrip('.')}, in another instance after {label} had been given up in the middle: something that "
            "they share was left taken (a lock, a file, a connection). Use with or try/finally.",
        )
        return False
