"""Rollouts that begin alike, models of many families, and a row compared with one sequence at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import train_kit as kit
from test_train_rows import PACKS, alone, gradient, sequence, some_loss

from agentrl.train.log_probs import PLAIN, PolicyForward, Row, Wanted
from agentrl.train.rows import TrainItem, make_row

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = dict(PACKS)


def forks(seed: int = 0, prompt: int = 24, groups: int = 2, size: int = 3, longest: int = 14) -> list[TrainItem]:
    """Groups whose rollouts begin with a prompt; each is one sequence, or a few that repeat the conversation so far."""
    draw = random.Random(seed)

    def words(n: int) -> list[int]:
        return [draw.randrange(3, 290) for _ in range(n)]

    items: list[TrainItem] = []
    system = words(prompt // 3)
    for group in range(groups):
        start = [*system, *words(prompt - len(system))]
        for _ in range(size):
            parts, so_far = [], list(start)
            for _ in range(draw.choice([1, 1, 2, 3])):
                said = words(draw.randint(1, longest))
                parts.append(sequence([*so_far, *said], [t >= len(so_far) for t in range(len(so_far) + len(said))]))
                so_far += said[: draw.randint(0, len(said))]
            items.append(TrainItem(len(items), tuple(parts), 1.0 - len(items), True, group=group))
    return items


def sequences(items: Sequence[TrainItem]) -> list[Any]:
    return [s for item in items for s in item.sequences]


def truth(model: Any, items: Sequence[TrainItem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of trained tokens and the gradient of all parameters, by the plain model, one sequence at a time."""
    want = alone(model, sequences(items))
    return want.detach(), gradient(model, some_loss(want))


def through(policy: PolicyForward, row: Row, wanted: Wanted = PLAIN) -> tuple[torch.Tensor, torch.Tensor]:
    with policy.context(row):
        out = policy.run(row, wanted)
        return out.log_probs_N.detach(), gradient(policy.model, some_loss(out.log_probs_N))


def probed(kind: str, seed: int = 0, **changes: Any) -> PolicyForward:
    policy = PolicyForward(kit.build(kind, seed, **(FAMILIES.get(kind, {}) | changes)), 1.0)
    policy.probe()
    return policy


def shared_row(items: Sequence[TrainItem], least: int = 1) -> Row:
    row = make_row(items, CPU, least)
    assert row.shared
    return row


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """max |a - b| / max |a|"""
    assert got.shape == want.shape
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
