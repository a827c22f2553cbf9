"""What a model may write for a tool although it should not: it is answered in text and changes nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from agentrl.check.arguments import bad_arguments
from agentrl.check.player import Player, Seen, schema_of, shown
from agentrl.check.probes import Probe
from agentrl.environment import Instance
from agentrl.errors import EnvironmentFailed
from agentrl.types import ToolResult


class Hostile:
    """Calls every tool with bad arguments, on one instance.

    Args:
        probe: What is known already; an environment whose starts differ by chance is not compared with itself.
        instance: Where it is tried.
        budget: Seconds after which no further arguments are tried.
    """

    def __init__(self, player: Player, probe: Probe, instance: Instance, budget: float) -> None:
        self.player, self.probe, self.instance, self.budget = player, probe, instance, budget
        self.row, self.seed = probe.rows[0], probe.seed
        self.fresh = False  # nothing has been done since the last reset
        self.start: tuple[bool, float | None] = (False, None)
        self._said: set[str] = set()

    async def everything(self) -> None:
        """Each tool has been tried, and the instance is as good as before."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.budget
        await self._renew()
        for name, tool in self.instance.tools.items():
            for arguments in bad_arguments(schema_of(tool), random.Random(self.seed)):
                if loop.time() > end:
                    self.player.add("note", f"{self.player.name} is slow: not all bad arguments were tried on {name}.")
                    break
                if not await self.once(name, arguments):
                    return
        clean = self.probe.clean
        if self.probe.steady and clean is not None:
            again = await self.player.play(self.instance, clean.row, clean.seed, clean.calls)
            if (what := clean.difference(again)) is not None:
                self.player.add(
                    "error",
                    f"{self.player.name}.{what} in an instance whose tools had been called with bad arguments: "
                    "something is left of them after reset().",
                )

    async def once(self, name: str, arguments: Any) -> bool:
        """One call; False where the instance cannot be used any more."""
        label, seen = f"{self.player.name}.{name}", Seen()
        if not self.fresh:
            await self._renew()
        try:
            result = await self.player.call(self.instance, name, arguments, seen)
        except EnvironmentFailed as error:
            self._once(
                f"failed {name}",
                f"{label} broke on arguments that a model can write, {shown(arguments)}: {error} "
                "Answer with text, or raise ToolArgumentError.",
            )
            self.fresh = False
            return not self.instance.broken
        if seen.ran:
            await self._check_refused(label, arguments, result)
        return True

    async def _check_refused(self, label: str, arguments: Any, result: ToolResult) -> None:
        """A call that was refused has changed neither `done` nor the reward."""
        self.fresh = False
        if result.error not in ("bad_arguments", "raised") or not self.probe.steady:
            return
        changed = self.instance.done != self.start[0]
        what = "ended the episode"
        if not changed:
            changed = await self.player.score(self.instance, "random calls") != self.start[1]
            what = "changed the reward"
        if changed and self.player.scores:
            how = "refused" if result.error == "bad_arguments" else "did not survive"
            self._once(
                f"changed {label}",
                f"{label} {how} {shown(arguments)} and {what} all the same. Check the arguments first.",
                "error" if result.error == "bad_arguments" else "warning",
            )
        self.fresh = not changed

    async def _renew(self) -> None:
        await self.player.reset(self.instance, self.row, self.seed)
        if self.start[1] is None:
            self.start = (self.instance.done, await self.player.score(self.instance, "doing nothing"))
        self.fresh = True

    def _once(self, key: str, text: str, level: Any = "error") -> None:
        if key not in self._said:
            self._said.add(key)
            self.player.add(level, text)
