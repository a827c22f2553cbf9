"""Rotary positions that depend on the longest sequence of a batch: up to which length they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def rope_limit(config: Any) -> int | None:
    """The longest sequence that is rotated as every shorter one is; None where length changes nothing.

    Beyond it, LongRoPE and dynamic NTK rotate all tokens of a batch by the length of its longest sequence.

    Args:
        config: A model's text config; with one set of rotary parameters, or one per kind of layer.
    """
    limits = []
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        longest = getattr(config, "max_position_embeddings", None)
        if kind in ("longrope", "su"):
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or longest)
        elif "dynamic" in kind:
            limits += [rope.get("original_max_position_embeddings"), longest]
    return min((int(limit) for limit in limits if limit), default=None)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(given, Mapping):
        nested = [rope for rope in given.values() if isinstance(rope, Mapping)]
        yield from nested or [given]


def forget_lengths(model: torch.nn.Module) -> None:
    """The next forward rotates by its own length, not by that of a longer sequence before it (dynamic NTK)."""
    for module in model.modules():
        if "dynamic" in str(getattr(module, "rope_type", "")):  # a name, or one per kind of layer
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)  # every length is then new, and frequencies are made for it
