"""The table of docs/gymnasium.md: `python tests/benchmarks/bench_gym.py`; ids as arguments measure these only.

Each id is played with random actions, in episodes of at most 100 steps. A step is a call of the tool `act` without an
`Instance` around it: Gymnasium's own step and what the model is shown of it.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl.errors import AgentRLError
from agentrl.registry import make
from agentrl.sampler.random_policy import draw_value

EPISODES, STEPS = 10, 100
OWN = ("gymnasium.envs.toy_text", "gymnasium.envs.classic_control")
MINIGRID = (
    "BlockedUnlockPickup-v0", "LavaCrossingS9N1-v0", "SimpleCrossingS9N1-v0", "DistShift1-v0", "DoorKey-5x5-v0",
    "Dynamic-Obstacles-5x5-v0", "Empty-5x5-v0", "Fetch-5x5-N2-v0", "FourRooms-v0", "GoToDoor-5x5-v0",
    "GoToObject-6x6-N2-v0", "KeyCorridorS3R1-v0", "LavaGapS5-v0", "LockedRoom-v0", "MemoryS7-v0", "MultiRoom-N2-S4-v0",
    "ObstructedMaze-1Dl-v0", "Playground-v0", "PutNear-6x6-N2-v0", "RedBlueDoors-6x6-v0", "Unlock-v0",
    "UnlockPickup-v0",
)  # fmt: skip
BABYAI = ("GoToRedBall-v0", "GoToLocal-v0", "OpenDoor-v0", "PickupLoc-v0", "PutNextLocal-v0", "BossLevel-v0")
ATARI = (
    "Asteroids", "BeamRider", "Breakout", "Enduro", "Freeway", "MontezumaRevenge", "MsPacman", "Pong", "Qbert",
    "Seaquest", "SpaceInvaders", "Tetris",
)  # fmt: skip


def own_ids() -> list[str]:
    """All of toy_text and classic_control."""
    return [id for id, spec in gymnasium.registry.items() if str(spec.entry_point).startswith(OWN)]


def all_ids() -> list[str]:
    """What the table shows."""
    grids = [*(f"MiniGrid-{name}" for name in MINIGRID), *(f"BabyAI-{name}" for name in BABYAI)]
    return [*own_ids(), *grids, *(f"ALE/{name}-v5" for name in ATARI)]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    id: str
    actions: str
    observation: str
    reset_ms: float
    step_ms: float
    rewards: tuple[float, ...]

    def __str__(self) -> str:
        mean, least, most = statistics.fmean(self.rewards), min(self.rewards), max(self.rewards)
        return (
            f"| `{self.id}` | {self.actions} | {self.observation} | {self.reset_ms:.2g} | {self.step_ms:.2g} | "
            f"{mean:.3g} ({least:.3g} to {most:.3g}) |"
        )


def form(content: Any) -> str:
    """What the content is made of: "text", or a picture's size with what is beside it."""
    if isinstance(content, str):
        return "text"
    sizes = ["x".join(map(str, block["image"].size)) for block in content if block["type"] == "image"]
    return f"{', '.join(sizes)} picture{'' if len(content) == len(sizes) else ' and text'}"


def named(space: spaces.Space[Any]) -> str:
    """The action space in a few words."""
    return f"Box{space.shape}" if isinstance(space, spaces.Box) else str(space)


def measure(id: str, episodes: int = EPISODES, steps: int = STEPS) -> Row:
    """Random play of one id: median milliseconds, and the returns."""
    env = make(id)
    schema = type(env).act.tool_schema["parameters"]
    resets, calls, rewards, shown = [], [], [], ""
    for seed in range(episodes):
        rng = random.Random(seed)
        resets.append(_timed(functools.partial(env.reset, seed=seed))[0])
        for _ in range(steps):
            spent, content = _timed(functools.partial(env.act, **draw_value(schema, ["word"], rng)))
            calls.append(spent)
            shown = form(content) if not shown or not env.done else shown  # the last one has words beside a picture
            if env.done:
                break
        rewards.append(env.get_reward())
    row = Row(id, named(env._env.action_space), shown, statistics.median(resets),
              statistics.median(calls), tuple(rewards))  # fmt: skip
    env.close()
    return row


def _timed(call: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - start), result


def main() -> None:
    print("| id | actions | observation | ms per reset | ms per step | return of random play: mean (range) |")
    print("|---|---|---|---|---|---|")
    failed = False
    for id in sys.argv[1:] or all_ids():
        try:
            print(measure(id), flush=True)
        except AgentRLError as error:
            failed = True
            print(f"{id}: {error}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
