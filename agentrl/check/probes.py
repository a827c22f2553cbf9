"""Resets, calls and scores, repeated where a promise says that they repeat."""

from __future__ import annotations

import time
from typing import Any

from agentrl.check.player import Played, Player, same, text_of
from agentrl.environment import Instance, reset_kwargs

_EPISODES = 4
_SLOW_S = 4.0  # after which two episodes are enough
_SLOW_INLINE_MS = 2.0
_CHEAP_MS = 0.1


class Probe:
    """The promises of an environment, tried on three instances, or on one where only one was given."""

    def __init__(self, player: Player, instances: list[Instance], rows: list[dict[str, Any]], seed: int) -> None:
        self.player, self.add, self.name = player, player.add, player.name
        self.one, self.other, self.fresh = instances[0], instances[len(instances) // 2], instances[-1]
        self.rows, self.seed = rows, seed
        self.observation = ""
        self.steady = True  # until something differs by chance: then nothing can be said about what is left behind
        self.clean: Played | None = None  # the first episode
        self.one_task = ""  # a sentence, where seeds seem to make no difference
        self.milliseconds: dict[str, float] = {}  # median of reset, get_reward and each tool

    async def everything(self) -> None:
        if not self.one.tools:
            self.add("warning", f"{self.name} has no tools: the model can only answer once.")
        for row in self.rows:
            await self.check_reset(row)
        episodes = []
        started = time.perf_counter()
        for episode in range(_EPISODES):
            if episode > 1 and time.perf_counter() - started > _SLOW_S:
                break
            row = self.rows[episode % len(self.rows)]
            episodes.append(await self.check_episode(row, self.seed + episode, first=episode == 0))
        if len(self.rows) == 1:
            await self.check_variation(self.rows[0], episodes)
        self.milliseconds = self.player.medians()
        self.report_times(self.milliseconds)

    # --- resets ------------------------------------------------------------------------
    async def check_reset(self, row: dict[str, Any]) -> None:
        starts = []
        for instance in (self.one, self.other):
            starts.append(await self.player.reset(instance, row, self.seed))
            await self.player.score(instance, "doing nothing", "right after reset()")
        self.observation = self.observation or text_of(starts[0])
        if not same(*starts):
            fix = "Derive everything random from it."
            if not self._seeded(row):
                fix = "Give reset() an argument `seed` and use it."
            self.add("warning", f"{self.name}.reset() started differently twice with the same row and seed. {fix}")
            self.steady = False
        if starts[0] is None and "prompt" not in row:
            self.add("note", f"{self.name}.reset() returns nothing, so the rows need a column 'prompt'.")

    def _seeded(self, row: dict[str, Any]) -> bool:
        return "seed" in reset_kwargs(self.one.env, row, self.seed)

    async def check_variation(self, row: dict[str, Any], episodes: list[Played]) -> None:
        """Several seeds give several tasks, at least behind the same start."""
        if not self._seeded(row) or "seed" in row or any(not same(e.start, episodes[0].start) for e in episodes):
            return
        for seed in range(self.seed + 1, self.seed + len(episodes)):
            if episodes[0].difference(await self.player.play(self.one, row, seed, episodes[0].calls)) is not None:
                return
        self.one_task = (
            f"{self.name}.reset() shows the same start for {len(episodes)} different seeds, and the same calls get "
            "the same answers. Unless the difference is well hidden, every group plays the same task."
        )

    # --- episodes ----------------------------------------------------------------------
    async def check_episode(self, row: dict[str, Any], seed: int, *, first: bool) -> Played:
        """Plays random calls and plays them again: on the other instance, on a used one, with another one at work.

        Until the first episode, both instances have the same past, so that a difference between them is chance and
        one that a used instance makes is a leak.
        """
        played = await self.player.play(self.one, row, seed)
        self.clean = self.clean or played
        if played.reward is not None:
            second = await self.player.score(self.one, "random calls", "a second time")
            if second != played.reward and self.player.scores:
                self.add("warning", f"{self.name}.get_reward() gave two numbers for one episode. Make it only read.")
                self.steady = False
        again = await self.player.play(self.other, row, seed, played.calls)
        if self.steady and (what := played.difference(again)) is not None:
            self.add("warning", f"{self.name}.{what} in a repeated episode (same seed, same calls).")
            self.steady = False
        if self.steady and first and self.one is not self.other:
            await self.check_leaks(row, seed, played)
        return played

    async def check_leaks(self, row: dict[str, Any], seed: int, clean: Played) -> None:
        second = await self.player.play(self.one, row, seed + 1)
        what = second.difference(await self.player.play(self.fresh, row, seed + 1, second.calls))
        what = what or clean.difference(await self.player.play(self.one, row, seed, clean.calls))
        if what is not None:
            self.add(
                "error",
                f"{self.name}.{what} in an instance that had played before: something is left over from the last "
                "episode. Set everything that an episode changes in reset().",
            )
            self.steady = False

    # --- times -------------------------------------------------------------------------
    def report_times(self, medians: dict[str, float]) -> None:
        instance = self.one
        if not callable(getattr(instance.env, "get_reward", None)):
            self.add("note", f"{self.name} has no get_reward(): training it needs reward functions.")
        each = ", ".join(f"{name} {ms:.3f}" for name, ms in medians.items())
        self.add("note", f"{self.name} takes, in ms per call (median): {each}.")
        for name, tool in instance.tools.items():
            if instance.inline and not tool.is_async and medians.get(name, 0.0) > _SLOW_INLINE_MS:
                self.add(
                    "warning",
                    f"{self.name} sets run_inline, but {name} takes {medians[name]:.1f} ms: every other rollout waits. "
                    "Leave run_inline off.",
                )
        slowest = self.player.slowest_ms(list(instance.tools), _CHEAP_MS)
        if not instance.inline and slowest < _CHEAP_MS and not any(t.is_async for t in instance.tools.values()):
            self.add("note", f"Every tool of {self.name} is cheap: run_inline = True saves it a thread.")
