"""How rows may go through a model: found by running a small one every way, and comparing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.train.attention import unheeded, watch_windows
from agentrl.train.rows import Row, TrainItem, make_row
from agentrl.types import TrainingSequence

if TYPE_CHECKING:
    from agentrl.train.log_probs import PolicyForward

log = logging.getLogger(__name__)
SEGMENT_WEIGHTS = 1_000_000  # a segment more takes about as long as a token of a model with so many parameters


@torch.no_grad()
def find_ways(policy: PolicyForward) -> None:
    """`packs`, `splits_head` and `least_shared` are known; each is used only where it gives the plain model's numbers.

    A small row is run padded, then with the output layer apart, then packed, then with beginnings that are shared.
    """
    was_training = policy.model.training
    policy.model.eval()
    try:
        row = probe_row(policy)
        policy.packs = policy.splits_head = False
        plain = policy.run(row).log_probs_N
        policy.splits_head = True
        policy.splits_head = _agrees(policy, row, plain, "splitting off the output layer")
        config = policy.model.config.get_text_config()
        policy.why_not_shared = f"rows of {type(policy.model).__name__} cannot be packed"
        if not policy.takes_positions or config._attn_implementation != "sdpa":
            return
        policy.packs = True
        watch_windows()
        policy.packs = _agrees(policy, row, plain, "packing") and policy.packs  # a mask may have switched it off
        policy.longest_packed = unheeded(config, row.longest)
        if policy.packs and _drops_out(policy.model):
            policy.why_not_shared = "dropout (which disable_dropout=True turns off) or router noise is on"
        elif policy.packs:
            policy.why_not_shared = f"{type(policy.model).__name__} gives other numbers with it"
            parts = _forked(row)
            apart, together = (make_row(parts, row.input_ids_T.device, least) for least in (None, 1))
            with policy.context(apart):
                plain = policy.run(apart).log_probs_N
            if _agrees(policy, together, plain, "sharing beginnings"):
                weights = sum(p.numel() for p in policy.model.parameters())
                policy.least_shared = max(1, round(SEGMENT_WEIGHTS / max(1, weights)))
    finally:
        policy.model.train(was_training)


def _drops_out(model: torch.nn.Module) -> bool:
    """Whether dropout is on: a token that stands for several sequences would be dropped in all of them at once."""
    for module in model.modules():
        named = [value for name, value in vars(module).items() if "drop" in name]  # attention_dropout, OPT's dropout
        if isinstance(module, torch.nn.Dropout):
            named.append(module.p)
        named.append(getattr(module, "jitter_noise", 0.0))  # of a router: as random as dropout
        if any(isinstance(value, float) and value > 0 for value in named):
            return True
    return False


def probe_row(policy: PolicyForward) -> Row:
    """Three sequences, one of them longer than the model's window."""
    config = policy.model.config.get_text_config()
    device = next(policy.model.parameters()).device
    words = [i for i in range(min(3, config.vocab_size - 1), config.vocab_size) if i not in policy.placeholders]
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    long = max(min(window + 9, 600) if window else 24 for window in windows)
    most = long if policy.limit is None else policy.limit  # so that it is packing that is tried
    sequences = []
    for n, length in enumerate((7, long, 12)):
        ids = [words[(n * 31 + 7 * t * t + t) % len(words)] for t in range(min(length, most))]
        sequences.append(_sequence(ids))
    return make_row([TrainItem(0, tuple(sequences), 1.0, True)], device)


def _sequence(ids: list[int]) -> TrainingSequence:
    return TrainingSequence(ids, [t > 1 for t in range(len(ids))], [0.0] * len(ids))


def _forked(row: Row) -> list[TrainItem]:
    """Sequences that part and part again: the row's longest whole, its beginning, and its beginning continued."""
    short, long, other = (list(s.input_ids) for item in row.items for s in item.sequences)
    half, third = len(long) // 2, len(long) // 3
    every = [[*long[:half], *short], long, [*long[:third], *other], long[:half], [*long[:half], *short[:3], *other]]
    return [TrainItem(n, (_sequence(ids[: len(long)]),), 1.0, True) for n, ids in enumerate(every)]


def _agrees(policy: PolicyForward, row: Row, plain: Tensor, what: str) -> bool:
    """Whether the way that is switched on gives the plain model's numbers, and no sequence sees another's tokens."""
    fp32 = next(policy.model.parameters()).dtype == torch.float32
    try:
        with policy.context(row):
            got = policy.run(row).log_probs_N
            changed = policy.run(_other_end(row)).log_probs_N
    except Exception as error:  # whatever a foreign architecture raises means the same: not this way
        log.info("%s is not used for %s: %s", what, type(policy.model).__name__, error)
        return False
    after = row.scored_at_N >= row.sequence_lengths[0]
    leak = (changed - got)[after].abs().max().item()
    worst = (got - plain).abs().max().item()
    if not (worst <= (1e-4 if fp32 else 0.15) and leak <= (1e-5 if fp32 else 1e-3)):
        log.info("%s is not used for %s: off by %.3g, leak %.3g", what, type(policy.model).__name__, worst, leak)
        return False
    return True


def _other_end(row: Row) -> Row:
    """The row with other tokens where only its first sequence has any: nothing else may change."""
    first = row.sequence_lengths[0]
    alone = torch.ones_like(row.input_ids_T, dtype=torch.bool)
    alone[row.places_M[first:]] = False
    ids = row.input_ids_T.clone()
    ids[alone] = ids[alone].flip(0)
    return replace(row, input_ids_T=ids)
