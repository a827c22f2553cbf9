"""Attention over a tree of segments is softmax over each token's own root path, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import trees

from agentrl.train import layout as layout_module
from agentrl.train.attention import packed_attention, running
from agentrl.train.flex import block_mask, flex_tree_attention
from agentrl.train.layout import Layout
from agentrl.train.tree_attention import tree_attention

torch.set_num_threads(1)
CPU = torch.device("cpu")
# prompts, completions, forks in forks, a chain, and one that stands alone
FOREST = ((40, 9, 17, 3, 1, 25, 30, 6, 6, 1, 33), (-1, 0, 1, 1, 0, 4, -1, 6, 6, 8, -1))


def sees(layout: Layout, window: int | None) -> torch.Tensor:
    """[T, T] by following each token's predecessors."""
    before: list[int] = []
    for start, length, parent in zip(layout.starts, layout.lengths, layout.parents, strict=True):
        before += [-1 if parent < 0 else layout.starts[parent] + layout.lengths[parent] - 1]
        before += range(start, start + length - 1)
    seen = torch.zeros(len(before), len(before), dtype=torch.bool)
    for query in range(len(before)):
        key, far = query, 0
        while key >= 0 and (window is None or far < window):
            seen[query, key] = True
            key, far = before[key], far + 1
    return seen


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, window: int | None, scale: float,
            softcap: float | None = None) -> torch.Tensor:  # fmt: skip
    times = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(times, 1)) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~sees(layout, window), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(times, 1))


def inputs(total: int, heads: int = 4, keys: int = 2, size: int = 8, values: int = 8, seed: int = 0,
           dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    shapes = ((total, heads, size), (total, keys, size), (total, keys, values))
    return [torch.randn(s, generator=draw, dtype=torch.float64).mul_(1.5).to(dtype).requires_grad_() for s in shapes]


def both(layout: Layout, window: int | None = None, scale: float = 0.4, **shape: Any) -> tuple[list, list]:
    """Result and gradients of q, k, v: by the tree and by hand."""
    leaves = inputs(sum(layout.lengths), **shape)
    out = []
    for function in (lambda *x: tree_attention(*x, layout, window=window, scale=scale),
                     lambda *x: by_hand(*x, layout, window, scale)):  # fmt: skip
        made = function(*leaves)
        weigh = torch.linspace(-1, 2, made.numel(), dtype=made.dtype).view_as(made).sin()
        out.append([made.detach(), *torch.autograd.grad((made * weigh).sum(), leaves)])
    return out[0], out[1]


def assert_close(layout: Layout, window: int | None = None, tolerance: float = 1e-10, **shape: Any) -> None:
    for got, want in zip(*both(layout, window, **shape), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        size = want.abs().max().clamp_min(1e-3)  # a window of one token leaves no gradient to queries and keys
        assert (got - want).abs().max() <= tolerance * size


def small(patch: pytest.MonkeyPatch, pairs: int, piece: int) -> None:
    patch.setattr(layout_module, "SMALL", pairs)
    patch.setattr(layout_module, "PIECE", piece)


# --- the CPU's kernel --------------------------------------------------------------------
@given(trees(longest=12, most=9), st.integers(0, 30), st.sampled_from([0, 1 << 14]), st.sampled_from([3, 128]))
@settings(max_examples=60, deadline=None)
def test_random_trees_and_windows_in_float64(tree: tuple, window: int, pairs: int, piece: int):
    """Many buckets or few, long segments in pieces or whole; window 0 stands for none."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch, pairs, piece)
        assert_close(Layout.of(*tree, CPU).in_pieces(), window or None)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 39, 40, 41, 200])
@pytest.mark.parametrize(("pairs", "piece"), [(0, 128), (1 << 14, 128), (0, 7), (1 << 14, 7)])
def test_a_forest_with_windows_on_every_side_of_its_borders(
    monkeypatch: pytest.MonkeyPatch, window: int | None, pairs: int, piece: int
):
    small(monkeypatch, pairs, piece)
    assert_close(Layout.of(*FOREST, CPU).in_pieces(), window)


@pytest.mark.parametrize(("heads", "keys"), [(1, 1), (4, 4), (6, 3), (8, 2), (5, 1)])
def test_heads_that_share_keys(heads: int, keys: int):
    assert_close(Layout.of(*FOREST, CPU), None, heads=heads, keys=keys)
    assert_close(Layout.of(*FOREST, CPU), 5, heads=heads, keys=keys)


@pytest.mark.parametrize(("size", "values"), [(12, 8), (16, 4), (8, 12), (3, 1)])
def test_values_of_another_size_than_keys(size: int, values: int):
    """Multi-head latent attention has smaller values; larger ones are as right."""
    assert_close(Layout.of(*FOREST, CPU), None, size=size, values=values)


@pytest.mark.parametrize("size", [1, 5, 8, 33, 64])
def test_any_head_size(size: int):
    assert_close(Layout.of(*FOREST, CPU), 11, size=size, values=size)


def test_float32_is_within_the_bound_that_is_asked_for():
    assert_close(Layout.of((600, 130, 70, 300), (-1, 0, 0, -1), CPU).in_pieces(), None, 1e-5, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float64_as_one_softmax_is(dtype: torch.dtype):
    """Two partial results that are rounded and put together: at most about twice the error of the kernel's one."""
    layout = Layout.of((150, 60, 40, 90), (-1, 0, 0, 1), CPU)
    leaves = [x.detach().to(dtype) for x in inputs(340, dtype=torch.float64)]
    exact = by_hand(*(x.double() for x in leaves), layout, None, 0.4)
    got = tree_attention(*leaves, layout, window=None, scale=0.4)
    mask = torch.zeros(340, 340, dtype=dtype).masked_fill_(~sees(layout, None), -torch.inf)
    q, k, v = (x.transpose(0, 1)[None] for x in leaves)
    one = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4, enable_gqa=True)
    error, usual = ((x.double() - exact).abs().max() for x in (got, one[0].transpose(0, 1)))
    assert got.dtype == dtype and error <= 3 * usual


def test_half_precision_gradients():
    layout = Layout.of(*FOREST, CPU)
    for dtype, tolerance in ((torch.bfloat16, 0.04), (torch.float16, 0.006)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs(sum(FOREST[0]))]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        got = torch.autograd.grad(tree_attention(*leaves, layout, window=6, scale=0.4).sin().sum().double(), leaves)
        want = torch.autograd.grad(by_hand(*exact, layout, 6, 0.4).sin().sum(), exact)
        for g, w in zip(got, want, strict=True):
            assert (g.double() - w).abs().max() <= tolerance * w.abs().max()


def test_large_scores_do_not_overflow_where_results_are_put_together():
    """One part of the softmax may be e^200 times the other; what pads a bucket must not turn into NaN either."""
    layout = Layout.of((5, 4, 4), (-1, 0, 0), CPU)
    leaves = inputs(13, dtype=torch.float32)
    with torch.no_grad():
        leaves[0].mul_(20)
        leaves[1].mul_(20)
    got = tree_attention(*leaves, layout, window=None, scale=1.0)
    torch.testing.assert_close(got, by_hand(*leaves, layout, None, 1.0), atol=2e-5, rtol=1e-5)
    want = torch.autograd.grad(by_hand(*leaves, layout, None, 1.0).sin().sum(), leaves)
    for g, w in zip(torch.autograd.grad(got.sin().sum(), leaves), want, strict=True):
        torch.testing.assert_close(g, w, atol=1e-3, rtol=1e-3)


def test_a_sibling_reaches_nothing():
    """Bit for bit: one completion's keys and values are other ones, and neither prompt nor sibling moves."""
    layout = Layout.of((30, 12, 12, 9), (-1, 0, 0, -1), CPU)
    one = inputs(63, dtype=torch.float32)
    other = [x.detach().clone() for x in one]
    for x in other:
        x[30:42] = x[30:42].flip(0) + 1
    a, b = (tree_attention(*x, layout, window=None, scale=0.4) for x in (one, other))
    kept = torch.ones(63, dtype=torch.bool)
    kept[30:42] = False
    assert torch.equal(a[kept], b[kept]) and not torch.equal(a[~kept], b[~kept])


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = inputs(sum(FOREST[0]))
    layout = Layout.of(*FOREST, CPU)
    frozen = tree_attention(q, k.detach(), v.detach(), layout, window=None, scale=0.4)
    whole = tree_attention(q, k, v, layout, window=None, scale=0.4)
    assert torch.equal(torch.autograd.grad(frozen.sum(), q)[0], torch.autograd.grad(whole.sum(), q)[0])


# --- flex attention, uncompiled ----------------------------------------------------------
@pytest.mark.parametrize("window", [None, 1, 2, 9, 41])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [2, 4])
def test_flex_attention_by_hand(window: int | None, softcap: float | None, heads: int):
    layout = Layout.of(*FOREST, CPU)
    leaves = [x.detach() for x in inputs(sum(FOREST[0]), heads=heads, dtype=torch.float32)]
    got = flex_tree_attention(*leaves, layout, window=window, scale=0.4, softcap=softcap)
    want = by_hand(*leaves, layout, window, 0.4, softcap)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    if softcap is None:
        torch.testing.assert_close(tree_attention(*leaves, layout, window=window, scale=0.4), got, atol=1e-5, rtol=1e-5)


@given(trees(), st.sampled_from([None, 1, 2, 4, 9]))
@settings(max_examples=25, deadline=None)
def test_the_mask_of_flex_attention_is_the_root_path(tree: tuple, window: int | None):
    layout = Layout.of(*tree, CPU)
    mask = block_mask(layout, window)
    at = torch.arange(sum(layout.lengths))
    got = mask.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :])
    assert torch.equal(got, sees(layout, window))
    assert block_mask(layout, window) is mask  # made once


def test_flex_attention_skips_blocks_that_nobody_sees():
    """Eight branches of 256 tokens: a block of queries meets its prompt and itself, not its siblings."""
    mask = block_mask(Layout.of((256, *[256] * 8), (-1, *[0] * 8), CPU), None)
    assert mask.to_dense().sum() == 3 + 8 * (2 * 2 + 3)


# --- as transformers calls it --------------------------------------------------------------
class Model:
    """What `running` needs of one."""

    class config:
        _attn_implementation = "sdpa"

        @classmethod
        def get_text_config(cls) -> Any:
            return cls


def test_what_shared_rows_cannot_have_is_refused():
    q, k, v = (x.detach().transpose(0, 1)[None] for x in inputs(20, dtype=torch.float32))
    module = torch.nn.Module()
    with running(Model(), Layout.of((10, 5, 5), (-1, 0, 0), CPU)):  # type: ignore[arg-type]
        out, _ = packed_attention(module, q, k, v, None, scaling=0.4)
        assert out.shape == (1, 20, 4, 8)
        for error, given_ in (("dropout", {"dropout": 0.1}), ("soft-capping", {"softcap": 20.0}),
                              ("sinks", {"s_aux": torch.zeros(4)}), ("causal", {"is_causal": False})):  # fmt: skip
            with pytest.raises(ValueError, match=error):
                packed_attention(module, q, k, v, None, **given_)
    with pytest.raises(ValueError, match="inside `running`"):
        packed_attention(module, q, k, v, None)


@pytest.mark.parametrize("window", [None, 1, 4, 11])
def test_unshared_rows_go_another_way_to_the_same_numbers(window: int | None):
    layout = Layout.of((12, 3, 20, 20, 1), (-1,) * 5, CPU)
    leaves = inputs(56, dtype=torch.float32)
    with running(Model(), layout):  # type: ignore[arg-type]
        q, k, v = (x.transpose(0, 1)[None] for x in leaves)
        got = packed_attention(torch.nn.Module(), q, k, v, None, scaling=0.4, sliding_window=window)[0][0]
    torch.testing.assert_close(got, by_hand(*leaves, layout, window, 0.4), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, tree_attention(*leaves, layout, window=window, scale=0.4), atol=1e-5, rtol=1e-5)
