"""The rollouts of one task, played side by side and scored together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.environment import Instance
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.scoring import Scorer
from agentrl.types import Rollout, RolloutGroup, Task


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group to play: its task, its size and a name that no other group of the run has."""

    id: str
    task: Task
    size: int


async def run_group(
    engine: RolloutEngine, scorer: Scorer, plan: GroupPlan, *, trainer_state: Any = None,
    slots: Sequence[asyncio.Semaphore] = (),
) -> RolloutGroup:  # fmt: skip
    """Plays `plan.size` rollouts of one task and scores the survivors together.

    A member that failed stays in the group, unscored, so that every reader sees it; the others keep their
    baseline. Where fewer than `min_survivors` of several are left, the group is marked dropped. Each rollout holds one
    of every semaphore in `slots`, taken in this order.
    """
    pool = engine.pool_of(plan.task)

    async def one(member: int) -> tuple[Rollout, Instance | None]:
        async with contextlib.AsyncExitStack() as held:
            for slot in slots:
                await held.enter_async_context(slot)
            rollout, instance = await engine.play(
                plan.task, rollout_id=f"{plan.id}.{member}", group_id=plan.id, member=member
            )
            if instance is not None and not scorer.reads_environments:
                pool.release(instance, healthy=True)  # others need not build one while this group is unfinished
                instance = None
            return rollout, instance

    members = [asyncio.ensure_future(one(member)) for member in range(plan.size)]
    try:
        played = await asyncio.gather(*members)
    except BaseException:
        for member in members:
            member.cancel()
        for done in await asyncio.gather(*members, return_exceptions=True):
            if isinstance(done, tuple) and done[1] is not None:
                pool.release(done[1], healthy=False)
        raise
    rollouts = [rollout for rollout, _ in played]
    alive = [i for i, rollout in enumerate(rollouts) if not rollout.outcome.failed]
    instances = [instance for _, instance in played if instance is not None]
    metrics: dict[str, list[float]] = {}
    healthy = False
    try:
        if alive:
            environments = [instance.env for instance in instances] if pool.name and instances else None
            started = time.perf_counter()
            scored, metrics = await scorer.score([rollouts[i] for i in alive], environments, trainer_state)
            for i, rollout in zip(alive, scored, strict=True):
                rollouts[i] = rollout
            metrics["rollout/score_s"] = [time.perf_counter() - started]
        healthy = True
    finally:
        for instance in instances:
            pool.release(instance, healthy=healthy)
    dropped = len(alive) < min(engine.settings.min_survivors, plan.size)
    metrics["rollout/start_state_mismatch"] = [float(_start_states_differ(engine, rollouts, alive, pool.name))]
    return RolloutGroup(plan.id, plan.task, tuple(rollouts), dropped, metrics)


def _start_states_differ(engine: RolloutEngine, rollouts: Sequence[Rollout], alive: Sequence[int], name: str) -> bool:
    prompts = [rollouts[i].prompt for i in alive]
    differ = any(prompt != prompts[0] for prompt in prompts[1:])
    if differ and name not in engine.warned:
        engine.warned.add(name)
        warnings.warn(
            f"Rollouts of one group began differently in {name}: the baseline compares different tasks. "
            "Derive the start state from the `seed` that reset() can take.",
            stacklevel=2,
        )
    return differ


async def run_groups(
    engine: RolloutEngine, scorer: Scorer, plans: Sequence[GroupPlan], *, trainer_state: Any = None
) -> list[RolloutGroup]:
    """Plays several groups at once, at most `max_concurrent` rollouts at a time; the first error ends all.

    An environment with a `max_concurrent` of its own has at most so many of them. Its rollouts wait for that before
    they take a place among all: what waits for a busy environment is in nobody's way.
    """
    everybody = asyncio.Semaphore(engine.settings.max_concurrent)
    own = {key: asyncio.Semaphore(number) for key, number in engine.concurrency().items()}
    tasks = [
        asyncio.ensure_future(
            run_group(
                engine, scorer, plan, trainer_state=trainer_state,
                slots=[slot for slot in (own.get(plan.task.environment), everybody) if slot is not None],
            )
        )
        for plan in plans
    ]  # fmt: skip
    try:
        with _rarer_collections():
            return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@contextlib.contextmanager
def _rarer_collections(allocations: int = 20_000) -> Iterator[None]:
    """Inside, Python looks for cyclic garbage every 20,000 allocations instead of every 700.

    Each look walks over all ids of all turns that are alive, which made a turn's cost grow with the conversation.
    """
    before = gc.get_threshold()
    if 0 < before[0] < allocations:
        gc.set_threshold(allocations, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def play_and_close(engine: RolloutEngine, scorer: Scorer, plans: Sequence[GroupPlan]) -> list[RolloutGroup]:
    """The groups of `plans`; afterwards the engine's environments are closed. Works inside a running loop, too."""

    async def play() -> list[RolloutGroup]:
        try:
            return await run_groups(engine, scorer, plans)
        finally:
            for pool in engine.pools.values():
                await pool.close()

    loop = LoopThread()
    try:
        return loop.run(play())
    finally:
        loop.close()


def with_advantages(group: RolloutGroup, advantages: Sequence[float]) -> RolloutGroup:
    """The group with one advantage per member."""
    pairs = zip(group.rollouts, advantages, strict=True)
    return replace(group, rollouts=tuple(replace(rollout, advantage=a) for rollout, a in pairs))
