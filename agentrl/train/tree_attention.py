"""Attention over a tree of segments with the work of the tree, on the CPU's flash kernel.

A segment attends to itself and to its root path in two kernel calls: causal within segments, and unmasked from the
children of a segment to what lies above them. The kernel gives the log-sum-exp of each query's scores, by which the two
results are put together. The backward pass of a kernel call only needs that of the whole (its probabilities are
exp(score - logsumexp)), so it runs over each part by itself: ring attention's way (arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.train.layout import Bucket, Layout, band, gather

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Layout, *, window: int | None, scale: float
) -> Tensor:
    """[T, H, D] what each token reads from its own root path.

    Args:
        q_THD: Queries of H heads; keys and values of K heads, K dividing H. On the CPU, any float type.
        layout: The segments of the row.
        window: Tokens that a token sees, itself included; None: all.
        scale: Of the scores.
    """
    values, size = v_TKD.shape[-1], max(v_TKD.shape[-1], q_THD.shape[-1])
    if values < size:  # multi-head latent attention: the kernel wants one size
        v_TKD = torch.nn.functional.pad(v_TKD, (0, size - values))
    elif q_THD.shape[-1] < size:
        q_THD, k_TKD = (torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in (q_THD, k_TKD))
    out: Tensor = _Tree.apply(q_THD, k_TKD, v_TKD, layout, window, scale)  # type: ignore[assignment]
    return out[..., :values]


class _Tree(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None, scale: float
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        lse_TH = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for bucket in layout.own:
            qs, ks, vs = gather(q, bucket), _wide(gather(k, bucket), q), _wide(gather(v, bucket), q)
            band = _band(bucket, window, q)
            o, lse = _flash(qs, ks, vs, 0.0, band is None, attn_mask=band, scale=scale)
            _put(out, bucket, o.transpose(1, 2).flatten(0, 1))
            _put(lse_TH, bucket, lse.transpose(1, 2).flatten(0, 1))
        for bucket in layout.above(window):
            qs, ks, vs = _folded(q, bucket, k.shape[1]), _keys(k, bucket), _keys(v, bucket)
            o, lse = _flash(qs, ks, vs, 0.0, False, attn_mask=_bias(bucket, q, k.shape[1]), scale=scale)
            _merge(out, lse_TH, bucket, _unfolded(o, bucket), _unfolded(lse[..., None], bucket)[..., 0])
        ctx.save_for_backward(q, k, v, out, lse_TH)
        ctx.layout, ctx.window, ctx.scale = layout, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        # Padding gets an infinite log-sum-exp, which makes all of its probabilities 0. That of another query would not
        # do: a score far above it overflows, and 0 x inf is NaN.
        q, k, v, out, lse_TH = ctx.saved_tensors
        scale, heads = ctx.scale, k.shape[1]
        to_q, to_k, to_v = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype), torch.empty(
            v.shape, dtype=v.dtype)  # fmt: skip
        for bucket in ctx.layout.own:
            band = _band(bucket, ctx.window, q)
            parts = _flash_backward(
                gather(grad, bucket), gather(q, bucket), _wide(gather(k, bucket), q),
                _wide(gather(v, bucket), q), gather(out, bucket),
                gather(lse_TH[..., None], bucket, padding=torch.inf)[..., 0],
                0.0, band is None, attn_mask=band, scale=scale,
            )  # fmt: skip
            for whole, part in zip((to_q, to_k, to_v), parts, strict=True):
                _put(whole, bucket, _narrow(part, whole.shape[1]).transpose(1, 2).flatten(0, 1))
        for bucket in ctx.layout.above(ctx.window):
            dq, dk, dv = _flash_backward(
                _folded(grad, bucket, heads), _folded(q, bucket, heads), _keys(k, bucket), _keys(v, bucket),
                _folded(out, bucket, heads), _folded(lse_TH[..., None], bucket, heads, padding=torch.inf)[..., 0],
                0.0, False, attn_mask=_bias(bucket, q, heads), scale=scale,
            )  # fmt: skip
            _add(to_q, bucket.rows_R, bucket.span, _unfolded(dq, bucket))
            for whole, part in ((to_k, dk), (to_v, dv)):
                _add(whole, bucket.keys_SK.reshape(-1), bucket.key_span, part.transpose(1, 2).flatten(0, 1))
        return to_q, to_k, to_v, None, None, None


# --- between the row and a bucket ---
def _keys(x_TKD: Tensor, bucket: Bucket) -> Tensor:
    """[S, K, keys, D]"""
    if bucket.key_span is not None:
        return x_TKD[slice(*bucket.key_span)].unflatten(0, bucket.keys_SK.shape).transpose(1, 2)
    return x_TKD.index_select(0, bucket.keys_SK.reshape(-1)).unflatten(0, bucket.keys_SK.shape).transpose(1, 2)


def _put(whole_T: Tensor, bucket: Bucket, flat: Tensor) -> None:
    """What was computed for a bucket's real queries stands in the row."""
    if bucket.span is not None:
        whole_T[bucket.span[0] : bucket.span[1]] = flat
    else:
        whole_T.index_copy_(0, bucket.rows_R, flat if bucket.real_R is None else flat.index_select(0, bucket.real_R))


def _add(whole_T: Tensor, places: Tensor, span: tuple[int, int] | None, flat: Tensor) -> None:
    if span is not None:
        whole_T[slice(*span)] += flat
    else:
        whole_T.index_add_(0, places, flat)


def _merge(out: Tensor, lse_TH: Tensor, bucket: Bucket, more: Tensor, more_lse: Tensor) -> None:
    """Softmax over both sets of keys, from softmax over each."""
    part, before = _take(out, bucket), _take(lse_TH, bucket)
    lse = torch.logaddexp(before, more_lse)
    old, new = before.sub_(lse).exp_()[..., None], more_lse.sub_(lse).exp_()[..., None]
    part.mul_(old).addcmul_(more, new.to(more.dtype))
    if bucket.span is None:
        out.index_copy_(0, bucket.rows_R, part)
        lse_TH.index_copy_(0, bucket.rows_R, lse)
    else:
        before.copy_(lse)


def _take(whole_T: Tensor, bucket: Bucket) -> Tensor:
    """What stands in the row for a bucket's real queries: a view where they are neighbours, else a copy."""
    if bucket.span is not None:
        return whole_T[slice(*bucket.span)]
    return whole_T.index_select(0, bucket.rows_R)


# --- heads that share keys ---
def _wide(x_SKLD: Tensor, q: Tensor) -> Tensor:
    """[S, H, L, D] with each key head once for every query head that reads it."""
    times = q.shape[1] // x_SKLD.shape[1]
    return x_SKLD if times == 1 else x_SKLD.repeat_interleave(times, 1)


def _narrow(x_SHLD: Tensor, heads: int) -> Tensor:
    """[S, heads, L, D] the sum over the heads that `_wide` made of one."""
    return x_SHLD if x_SHLD.shape[1] == heads else x_SHLD.unflatten(1, (heads, -1)).sum(2)


def _folded(x_THD: Tensor, bucket: Bucket, heads: int, *, padding: float | None = None) -> Tensor:
    """[S, K, G * Q, D] where the G query heads of a key head stand as more queries, so that no key is repeated."""
    x = gather(x_THD, bucket, padding=padding)
    return x.unflatten(1, (heads, -1)).flatten(2, 3)


def _unfolded(x_SKGD: Tensor, bucket: Bucket) -> Tensor:
    """[R, H, D] of the real queries."""
    queries = bucket.queries_SQ.shape[1]
    flat = x_SKGD.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    return flat if bucket.real_R is None else flat.index_select(0, bucket.real_R)


def _bias(bucket: Bucket, q: Tensor, heads: int) -> Tensor | None:
    if bucket.bias_SQK is None:
        return None
    bias = bucket.bias_SQK[:, None].to(q.dtype)
    return bias if bias.shape[2] == 1 else bias.repeat(1, 1, q.shape[1] // heads, 1)


def _band(bucket: Bucket, window: int | None, q: Tensor) -> Tensor | None:
    """`band` as a bias: 0 where a query may look, -inf where not."""
    length = bucket.queries_SQ.shape[1]
    seen = band(length, window, q.device)
    return None if seen is None else torch.zeros(length, length, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
