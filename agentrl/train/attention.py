"""Attention over a row: each segment sees its own root path and nothing else, with work proportional to the tree.

Where nothing is shared, segments of similar length are laid side by side and run as one causal SDPA call: right padding
needs no mask there, because a causal query never looks behind itself. Where segments continue others, the CPU's flash
kernel does it (tree_attention.py), on GPUs flex attention (flex.py). A dense [T, T] mask is never built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from agentrl.train.flex import flex_tree_attention
from agentrl.train.layout import Layout, band, gather
from agentrl.train.tree_attention import tree_attention

NAME = "agentrl_packed"


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
        ValueError: A model that needs what this does not do: attention sinks, two-way attention, soft-capping (but on
            a GPU), attention dropout where tokens are shared.
        MaskNeeded: A model that makes a mask of its own.
    """
    layout = _Current.layout
    unknown = kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None
    if layout is None or unknown:
        raise ValueError("packed attention has no sinks or biases, and runs only inside `running`")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False or query.shape[0] != 1:
        raise ValueError("packed attention is causal and takes one row")
    if attention_mask is not None:
        raise MaskNeeded("packed attention takes no mask, and the model gave one")
    if sliding_window is not None:
        _Current.heeded.add(sliding_window)
    q, k, v = (x[0].transpose(0, 1) for x in _one_dtype(query, key, value))  # [T, heads, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if q.device.type == "cuda" and (layout.shared or softcap is not None):
        if dropout:
            raise ValueError("flex attention has no dropout")
        return flex_tree_attention(q, k, v, layout, window=sliding_window, scale=scale, softcap=softcap)[None], None
    if softcap is not None:
        raise ValueError("packed attention has no soft-capping on this device")
    if layout.shared:
        if dropout or q.device.type != "cpu":
            raise ValueError("shared beginnings need a CPU or a CUDA GPU, and a model without attention dropout")
        return tree_attention(q, k, v, layout.in_pieces(), window=sliding_window, scale=scale)[None], None
    return _segments(q, k, v, layout, sliding_window, scale, dropout)[None], None


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast's type, as SDPA does it by itself; where it is off, that of the values."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return tuple(x if x.dtype == dtype else x.to(dtype) for x in tensors)


def _segments(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None, scale: float, dropout: float
) -> Tensor:
    """[T, H, D] each segment with itself, by SDPA."""
    grouped = q.shape[1] != k.shape[1]
    outs = []
    for bucket in layout.own:
        S, L = bucket.queries_SQ.shape
        qs, ks, vs = (gather(x, bucket) for x in (q, k, v))
        mask = band(L, window, q.device)
        out = F.scaled_dot_product_attention(
            qs, ks, vs, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        flat = out.transpose(1, 2).reshape(S * L, *out.shape[1::2])
        outs.append(flat if bucket.real_R is None else flat.index_select(0, bucket.real_R))
    if len(outs) == 1 and layout.own[0].span is not None:
        return outs[0]
    if "order" not in layout.kept:
        layout.kept["order"] = torch.argsort(torch.cat([bucket.rows_R for bucket in layout.own]))
    return torch.cat(outs).index_select(0, layout.kept["order"])


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
