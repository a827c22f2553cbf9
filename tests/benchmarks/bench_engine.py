"""What the rollout engine costs without a model: run as `python tests/benchmarks/bench_engine.py`.

The scripted sampler hands out ids that were encoded before, so that what is measured is the engine, the renderer and
the environments: process CPU per turn, growth with the number of turns, and the wall time of tools that sleep.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_tokenizers import qwen

from agentrl.environment import Environment
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_groups
from agentrl.rollout.scoring import Scorer
from agentrl.sampler import ScriptedSampler
from agentrl.types import SampleRequest, Task

VISITORS = itertools.count(1)  # no two results are the same text: the renderer's cache of texts must not help


class Inline(Environment):
    run_inline = True
    calls = 0

    def reset(self, seed: int) -> str:
        self.calls = 0
        return "Search the places."

    def get_reward(self) -> float:
        return float(self.calls)

    def search(self, place: str) -> str:
        """
        Search a place.

        Args:
            place: Where to search.
        """
        self.calls += 1
        return f"nothing in the {place}, says visitor {next(VISITORS)}"


class Threaded(Inline):
    run_inline = False


class Sleepy(Threaded):
    def search(self, place: str) -> str:
        """
        Search a place, slowly.

        Args:
            place: Where to search.
        """
        time.sleep(0.05)
        return f"nothing in the {place}"


def build(environment: type, turns: int, episodes: int) -> Callable[[], Awaitable[Any]]:
    """A coroutine function that plays `episodes` of `turns` tool calls each."""
    tokenizer = qwen()
    call = '<tool_call>\n{"name": "search", "arguments": {"place": "cave"}}\n</tool_call><|im_end|>'
    words, end = tokenizer.encode(call), tokenizer.encode("the answer is hello<|im_end|>")

    def script(request: SampleRequest) -> list[int]:
        return words if request.seed[-1] < turns else end

    settings = RolloutSettings(max_completion_length=1 << 20, max_concurrent=episodes)
    engine = RolloutEngine(
        ScriptedSampler(script), Renderer(tokenizer), {None: EnvironmentPool(environment)}, settings=settings
    )
    scorer = Scorer([])
    rounds = iter(range(1 << 30))

    async def play() -> None:
        number = next(rounds)
        plans = [GroupPlan(f"{number}.{i}", Task(i, 0, i), 8) for i in range(episodes // 8)]
        for group in await run_groups(engine, scorer, plans):
            assert all(len(rollout.tool_calls) == turns for rollout in group.rollouts), group.rollouts[0].error
        engine.sampler.requests.clear()  # type: ignore[attr-defined]

    return play


def measure(environment: type, turns: int, episodes: int = 64, repeats: int = 5) -> tuple[float, float]:
    """(process CPU seconds, wall seconds) of one round, the best of `repeats` after one to warm up."""
    play = build(environment, turns, episodes)

    async def run() -> tuple[float, float]:
        await play()
        cpu, wall = [], []
        for _ in range(repeats):
            started, clock = time.process_time(), time.perf_counter()
            await play()
            cpu.append(time.process_time() - started)
            wall.append(time.perf_counter() - clock)
        return min(cpu), min(wall)

    return asyncio.run(run())


def main() -> None:
    episodes, turns = 64, 16
    print("Scripted sampler, tiny Qwen3 tokenizer, one trivial tool call per turn, best of 5 rounds.")
    for name, environment, target in (("inline", Inline, 0.15), ("threads", Threaded, 0.3)):
        cpu, _ = measure(environment, turns)
        per_turn = 1000 * cpu / (episodes * (turns + 1))
        print(f"{name}: {per_turn:.3f} ms of process CPU per turn at 64 concurrent episodes (target <= {target})")
    short, _ = measure(Inline, 8)
    long, _ = measure(Inline, 64)
    print(f"growth: cost(64 turns) / cost(8 turns) = {long / short:.2f} (target <= 9)")
    _, wall = measure(Sleepy, 4, episodes=32, repeats=2)
    print(f"sleeping: 32 episodes x 4 turns with tools that sleep 50 ms on threads: {wall:.3f} s (target <= 0.6)")


if __name__ == "__main__":
    main()
