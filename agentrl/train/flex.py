"""Attention over a tree of segments on GPUs, by flex attention: a block of queries skips the keys that none of it sees.

In depth-first order a token's descendants stand right behind it, so one number per key says who sees it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentrl.train.layout import Layout
from agentrl.train.tree import Ints

_compiled: list[Any] = []  # flex attention needs compiling on a GPU, once for all shapes


def flex_tree_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Layout, *, window: int | None, scale: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """[T, H, D] what each token reads from its own root path; as `tree_attention`, and with soft-capped scores."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    grouped = q_THD.shape[1] != k_TKD.shape[1]
    out = _flex(q.device)(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask(layout, window),
        scale=scale,
        enable_gqa=grouped,
    )
    return out[0].transpose(0, 1)


def block_mask(layout: Layout, window: int | None) -> BlockMask:
    """Which keys each query sees; made once for a layout."""
    key = ("flex", window)
    if key not in layout.kept:
        ends, positions = (torch.from_numpy(of).to(layout.device) for of in (_ends(layout), layout.positions()))

        reach = None if window is None else torch.tensor(window, device=layout.device)  # a number would be compiled in

        def sees(batch: Tensor, head: Tensor, query: Tensor, at: Tensor) -> Tensor:
            seen = (at <= query) & (query < ends[at])
            return seen if reach is None else seen & (positions[query] - positions[at] < reach)

        total = len(positions)
        layout.kept[key] = create_block_mask(sees, None, None, total, total, device=layout.device.type)
    return layout.kept[key]


def _ends(layout: Layout) -> Ints:
    """[T] where the last descendant of each token's segment ends in the row."""
    ends = [start + length for start, length in zip(layout.starts, layout.lengths, strict=True)]
    for s in range(len(ends) - 1, -1, -1):
        if (parent := layout.parents[s]) >= 0:
            ends[parent] = max(ends[parent], ends[s])
    return np.repeat(np.array(ends), layout.lengths)


def _flex(device: torch.device) -> Any:
    if device.type == "cpu":  # without compiling it computes densely: for comparison
        return flex_attention
    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]
