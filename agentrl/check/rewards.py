"""What the rewards of the three policies say about an environment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from agentrl.check.report import Level, RewardSpread

_NAMES = {"no-op": "Doing nothing", "random": "The random policy", "gold": "The gold policy"}
_CLOSE = 1e-6
_ENOUGH = 8  # random episodes from which "every" says something

Found = Iterator[tuple[Level, str]]


def judge_rewards(
    name: str,
    rewards: dict[str, list[float]],
    limits: tuple[float, float] | None,
    *,
    trouble: str = "",
    closed: bool = True,
) -> Found:
    """What to tell the author of environment `name`.

    Args:
        rewards: By policy: "no-op", "random", "gold"; of each at least one, or it is left out.
        limits: Its `reward_range`.
        trouble: What went wrong for the gold policy.
        closed: Random calls can make every call that there is.
    """
    for policy in ("no-op", "random", "gold"):
        if policy in rewards:
            yield "note", f"{_NAMES[policy]} in {name} gets reward {RewardSpread.of(rewards[policy])}."
    nothing, drawn, gold = (rewards.get(policy, []) for policy in ("no-op", "random", "gold"))
    yield from _judge_gold(name, gold, limits, trouble)
    yield from _judge_nothing(name, nothing, gold, limits)
    if not drawn:
        return
    if gold and statistics.fmean(drawn) >= statistics.fmean(gold):
        yield "warning", f"Random calls in {name} get as much as the gold policy: there is nothing to learn."
    if len(drawn) < _ENOUGH or len(set(drawn)) > 1:
        return
    if nothing and _close(drawn[0], nothing[0]) and gold and closed and not _close(drawn[0], statistics.fmean(gold)):
        yield (
            "warning",
            (
                f"All of {len(drawn)} random episodes of {name} got what doing nothing gets: a policy that begins "
                "there has nothing to learn from. Reward steps on the way, or begin with easier tasks."
            ),
        )
        return
    yield (
        "note",
        (
            f"Every random episode of {name} got the same reward: a policy that begins there has nothing to learn "
            "from. Reward steps on the way, or warm the policy up."
        ),
    )


def _judge_gold(name: str, gold: list[float], limits: tuple[float, float] | None, trouble: str) -> Found:
    if not gold:
        return
    if limits is None:
        yield "note", f"{name} has no reward_range: what the gold policy should get is not known. Set (least, most)."
        return
    short = [reward for reward in gold if not _close(reward, limits[1]) and reward < limits[1]]
    if short:
        why = f" ({trouble})" if trouble else ""
        yield (
            "error",
            (
                f"The gold policy of {name} does not get the top reward, {limits[1]:g}, in {len(short)} of {len(gold)} "
                f"episodes, but {min(short):g}{why}. Nobody can learn what cannot be done: mend the reward, "
                "the task, reward_range or _gold."
            ),
        )


def _judge_nothing(name: str, nothing: list[float], gold: list[float], limits: tuple[float, float] | None) -> Found:
    if not nothing:
        return
    top = limits[1] if limits is not None else max(gold, default=math.inf)
    reached = [reward for reward in nothing if reward >= top or _close(reward, top)]
    if reached:
        level: Level = "error" if len(reached) == len(nothing) else "warning"
        yield (
            level,
            (
                f"Doing nothing in {name} gets the top reward, {top:g}, in {len(reached)} of {len(nothing)} episodes: "
                "a policy learns to do nothing. Reward what was done."
            ),
        )


def judge_range(
    name: str, rewards: list[tuple[str, float]], limits: tuple[float, float] | None, say: Callable[[Level, str], None]
) -> None:
    """A reward outside of the range was told, the one that is farthest out."""
    if limits is None:
        return
    slack = _CLOSE * max(1.0, *(abs(edge) for edge in limits if math.isfinite(edge)), 0.0)
    out = [(max(limits[0] - reward, reward - limits[1]), who, reward) for who, reward in rewards]
    worst = max(out, default=(0.0, "", 0.0))
    if worst[0] > slack:
        say(
            "error",
            f"{name}.get_reward() gave {worst[2]:g} for {worst[1]}, outside of its reward_range "
            f"({limits[0]:g}, {limits[1]:g}).",
        )


def _close(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=_CLOSE, abs_tol=_CLOSE)
