"""Episodes per second of each ready environment with its gold policy: run as `python tests/benchmarks/bench_envs.py`.

An episode is reset, the turns of `_gold`, and the reward, through an `Instance` as a rollout uses it (argument checks,
threads or inline calls), without a model: what an environment costs beside one. One at a time, for about two seconds
each; seeds differ. Ids as arguments measure these only: `python tests/benchmarks/bench_envs.py agentrl/Wordle-v0`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass

import agentrl_envs
import gymnasium

from agentrl.check.tokens import token_cost
from agentrl.environment import Instance, reset_kwargs
from agentrl.errors import AgentRLError
from agentrl.registry import make

SECONDS, MOST_EPISODES, MOST_TURNS = 2.0, 2000, 2000


@dataclass(frozen=True)
class Speed:
    """What the episodes of one environment cost."""

    episodes: int
    seconds: float
    gold_seconds: float  # of these
    turns: int
    rewards: tuple[float, ...]

    @property
    def milliseconds(self) -> float:
        return 1000 * self.seconds / self.episodes


async def episode(instance: Instance, seed: int) -> tuple[int, float, float | None]:
    """(turns, seconds of the policy, reward) of one episode of the gold policy."""
    await instance.reset(reset_kwargs(instance.env, {}, seed, {"rollout_id": "bench"}))
    turns, gold = 0, 0.0
    while not instance.done and turns < MOST_TURNS:
        started = time.perf_counter()
        turn = await instance.run(instance.env._gold)
        gold += time.perf_counter() - started
        turns += 1
        calls = turn.get("tool_calls") or () if isinstance(turn, dict) else ()
        for made in calls:
            made = made.get("function", made)
            await instance.call(instance.tools[made["name"]], made["arguments"])
        if not calls:
            break
    return turns, gold, await instance.reward()


async def measure(id: str) -> Speed:
    """The speed of one environment, after an episode to warm up."""
    instance = Instance(make(id))
    try:
        await episode(instance, 0)
        turns, gold, rewards = 0, 0.0, []
        started = time.perf_counter()
        while (spent := time.perf_counter() - started) < SECONDS and len(rewards) < MOST_EPISODES:
            more, thought, reward = await episode(instance, len(rewards) + 1)
            turns, gold = turns + more, gold + thought
            rewards.append(0.0 if reward is None else reward)
        return Speed(len(rewards), spent, gold, turns, tuple(rewards))
    finally:
        await instance.close()


def schema_tokens(id: str) -> int:
    """Tokens of the tool schemas in a first prompt, one token per byte."""
    schemas = [tool.schema for tool in Instance(make(id)).tools.values()]
    return token_cost(schemas, [{"role": "user", "content": "Go."}]).tools


def main(ids: list[str]) -> None:
    agentrl_envs.register_all()
    ids = ids or sorted(id for id in gymnasium.registry if id.startswith("agentrl/"))
    print("Gold policy, one episode at a time; 'gold ms' is what the policy itself takes of an episode.")
    print("Tokens of the tool schemas: one per byte, about four times those of a trained tokenizer.")
    heads = f"{'episodes/s':>11}{'ms per episode':>16}{'gold ms':>9}{'turns':>8}{'tool tokens':>13}{'reward':>9}"
    print(f"{'environment':<28}{heads}")
    for id in ids:
        try:
            if not hasattr(make(id), "_gold"):
                print(f"{id:<28} has no gold policy")
                continue
            speed = asyncio.run(measure(id))
        except AgentRLError as error:  # no sandbox here, a package that is missing
            print(f"{id:<28} {error}")
            continue
        mean = sum(speed.rewards) / len(speed.rewards)
        per_second, turns = 1000 / speed.milliseconds, speed.turns / speed.episodes
        gold = 1000 * speed.gold_seconds / speed.episodes
        figures = f"{per_second:>11.0f}{speed.milliseconds:>16.2f}{gold:>9.2f}{turns:>8.1f}"
        print(f"{id:<28}{figures}{schema_tokens(id):>13}{mean:>9.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
