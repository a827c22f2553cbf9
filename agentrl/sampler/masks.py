"""What the tokens of a forward see: windows by kind of layer, and the masks made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agentrl.sampler.rope import rope_limit

_PLAIN = {"full_attention", "sliding_attention", "chunked_attention"}


def layer_types(config: Any) -> tuple[str, ...] | None:
    """The kinds of attention among the layers; empty where one mask serves all, None where some are not attention."""
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if set(kinds) - _PLAIN:
        return None
    return () if kinds in ((), ("full_attention",)) else kinds


def windows(config: Any, kinds: tuple[str, ...] | None) -> dict[str, int | None]:
    """How far back each kind of layer sees, in tokens; None is everything."""
    sliding = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if kinds:
        sizes = {"full_attention": None, "sliding_attention": sliding, "chunked_attention": chunk}
        return {kind: sizes[kind] for kind in kinds}
    if getattr(config, "layer_types", None):
        return {"full_attention": None}
    return {"full_attention": sliding}


def longest_context(config: Any, max_context: int | None) -> int | None:
    """The longest sequence, in tokens; None where nothing limits it."""
    context = getattr(config, "max_position_embeddings", None)
    if (limit := rope_limit(config)) is not None:
        # A longer sequence rotates all keys anew, those of others in the batch too; cached keys would no longer fit.
        context = limit
    if max_context is not None:
        context = max_context if context is None else min(context, max_context)
    return context


def masks(
    windows: Mapping[str, int | None], positions_NW: torch.Tensor, visible: int, added: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """[N, 1, W, visible] by kind of layer: every token sees the columns up to its own position, in its window.

    Padding, at position 0, sees column 0.

    Args:
        added: None makes masks that are True where a token looks, a dtype such that are added to the scores.
    """
    columns = torch.arange(visible, device=positions_NW.device)
    query = positions_NW[:, None, :, None]
    causal = columns <= query
    made = {}
    for kind, window in windows.items():
        seen = causal
        if window is not None and kind == "chunked_attention":
            seen = causal & (columns // window == query // window)
        elif window is not None and visible > window:
            seen = causal & (columns > query - window)
        made[kind] = seen if added is None else _added(seen, added)
    return made


def _added(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, hidden.new_zeros(()), hidden)
