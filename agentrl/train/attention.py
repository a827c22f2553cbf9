"""Attention over a packed row: each segment sees itself and nothing else, with work proportional to the segments.

Segments of similar length are laid side by side and run as one causal SDPA call: right padding needs no mask there,
because a causal query never looks behind itself. A dense [T, T] mask is never built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

NAME = "agentrl_packed"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the segments of a row lie. Buckets: [S, L] indices into the row, short segments padded with any index."""

    buckets: tuple[Tensor, ...]
    inverse_T: Tensor  # place of each token in the buckets laid end to end

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> Layout:
        """Buckets of segments whose lengths differ by less than a factor of about 1.5."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        groups: list[list[int]] = []
        for i in order:
            if groups and lengths[i] <= 1.5 * lengths[groups[-1][0]] + 8:
                groups[-1].append(i)
            else:
                groups.append([i])
        inverse = torch.empty(starts[-1], dtype=torch.long)
        buckets, offset = [], 0
        for group in groups:
            longest = max(lengths[i] for i in group)
            steps = torch.arange(longest)
            begin = torch.tensor([starts[i] for i in group])[:, None]
            size = torch.tensor([lengths[i] for i in group])[:, None]
            index = begin + torch.minimum(steps, size - 1)
            real = steps < size
            inverse[index[real]] = offset + torch.arange(index.numel()).view_as(index)[real]
            buckets.append(index.to(device))
            offset += index.numel()
        return Layout(tuple(buckets), inverse.to(device))


class MaskNeeded(ValueError):
    """The model attends by a mask of its own, which packed attention would ignore."""


class _Current:
    """The layout of the row that is being run. Not thread-local: CUDA runs recomputation in autograd's own thread."""

    layout: Layout | None = None
    before: str | None = None  # the attention that the model has outside `running`
    asked: ClassVar[set[int]] = set()  # windows and chunks of the masks that the model asked for, in tokens
    heeded: ClassVar[set[int]] = set()  # windows that its attention layers then named


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of a packed row, as transformers' attention interface wants it.

    Args:
        query: [1, H, T, D]; key and value: [1, K, T, D] with K dividing H.

    Returns:
        [1, T, H, D] and no weights.

    Raises:
        ValueError: A model that needs what this does not do: soft-capping, attention sinks, two-way attention.
        MaskNeeded: A model that makes a mask of its own.
    """
    layout = _Current.layout
    unknown = softcap is not None or kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None
    if layout is None or unknown:
        raise ValueError("packed attention has no soft-capping, sinks or biases, and runs only inside `running`")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False or query.shape[0] != 1:
        raise ValueError("packed attention is causal and takes one row")
    if attention_mask is not None:
        raise MaskNeeded("packed attention takes no mask, and the model gave one")
    if sliding_window is not None:
        _Current.heeded.add(sliding_window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    grouped = query.shape[1] != key.shape[1]
    outs = []
    for index in layout.buckets:
        S, L = index.shape
        flat = index.reshape(-1)
        qs, ks, vs = (x.index_select(0, flat).view(S, L, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
        mask = _band(L, sliding_window, q.device) if sliding_window is not None and sliding_window < L else None
        out = F.scaled_dot_product_attention(
            qs, ks, vs, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).reshape(S * L, *out.shape[1::2]))
    flat_out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return flat_out.index_select(0, layout.inverse_T)[None], None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] True where a query may look: itself and the window - 1 tokens before it."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)


def _no_mask(*args: object, local_size: int | None = None, **kwargs: object) -> None:
    """The layout carries the mask, so transformers builds none."""
    if local_size is not None:
        _Current.asked.add(local_size)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)


@contextlib.contextmanager
def running(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """Inside, forward and backward passes of `model` run packed attention over `layout`."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    _Current.layout, _Current.before = layout, before
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _Current.layout = None


def stand_down(model: PreTrainedModel) -> None:
    """The rest of the current `running` goes without packed attention."""
    if _Current.layout is not None:
        _Current.layout = None
        model.config.get_text_config()._attn_implementation = _Current.before


def watch_windows() -> None:
    """`unheeded` tells of what runs from now on."""
    _Current.asked, _Current.heeded = set(), set()


def unheeded(config: Any, tried: int) -> int | None:
    """The smallest window that a sequence of `tried` tokens does not fill and that packed attention may not know of.

    That is one that the config names or that a mask was asked for with, and no attention layer named. A sequence that
    is no longer than it is attended to in full; packing a longer one may differ from the model.
    """
    named = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    windows = _Current.asked | {window for window in named if isinstance(window, int) and window > 0}
    return min((window for window in windows - _Current.heeded if window >= tried), default=None)
