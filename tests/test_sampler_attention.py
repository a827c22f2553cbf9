"""The sampler's attention against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.sampler import kv_cache
from agentrl.sampler.kv_cache import slot_attention


def tensors(heads: int, shared: int, width: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Query, key, value and mask of three rows of unlike lengths; key and value are views of a larger store."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(3, width, heads, 8, generator=random).transpose(1, 2)
    store = torch.randn(2, 5, shared, 20, 8, generator=random)
    ends = torch.tensor([9, 4, 6])[:, None] - width + 1 + torch.arange(width)
    mask = torch.arange(10) <= ends[:, None, :, None]
    return query, store[0, :3, :, :10], store[1, :3, :, :10], mask


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (4, 1), (6, 2), (4, 4)])
def test_it_answers_what_transformers_answers(heads: int, shared: int, width: int) -> None:
    module: Any = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    query, key, value, mask = tensors(heads, shared, width)
    wanted, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    got, weights = slot_attention(module, query, key, value, mask, scaling=0.3)
    assert weights is None
    assert got.shape == (3, width, heads, 8)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_what_a_row_may_not_see_does_not_change_it() -> None:
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    query, key, value, mask = tensors(4, 2, 1)
    before, _ = slot_attention(module, query, key, value, mask)
    key[1, :, 5:], value[1, :, 5:] = 7.0, -7.0  # row 1 sees columns 0 to 4
    after, _ = slot_attention(module, query, key, value, mask)
    assert torch.equal(before, after)


def test_without_a_mask_it_is_causal() -> None:
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    query, _, _, _ = tensors(4, 2, 4)
    key, value = torch.randn(2, 3, 2, 4, 8)
    wanted, _ = sdpa_attention_forward(module, query, key, value, None)
    assert torch.equal(slot_attention(module, query, key, value, None)[0], wanted)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (4, 1), (6, 2), (4, 4)])
def test_many_small_rows_are_two_products_with_the_same_answer(
    heads: int, shared: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_MANY", 1)
    monkeypatch.setattr(kv_cache.F, "scaled_dot_product_attention", None)  # it must do without
    module: Any = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    query, key, value, mask = tensors(heads, shared, width)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    got, weights = slot_attention(module, query, key, value, added, scaling=0.3)
    monkeypatch.undo()
    wanted, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
