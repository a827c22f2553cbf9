"""Keys and values of many conversations in one tensor per layer, each row with its own length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SLOT_ATTENTION = "agentrl_slots"  # the name under which models find `slot_attention`
_SPECIAL = ("s_aux", "softcap", "position_bias", "sinks")  # arguments that are left to transformers' own function
_FIRST_COLUMNS = 64  # of a new store; it doubles from there
_MANY = 32  # small products, of a row and a shared head each, ...
_FEW_SCORES = 4096  # ... of this many scores at most: there plain products beat the fused kernel on a CPU


class SlotCache(Cache):
    """Row `b` holds its tokens at columns 0, 1, 2, ... of `keys[layer][b]`; the last column is trash.

    One forward covers the contiguous rows ``first .. first + n``. `begin` says where its new tokens go; then each
    layer's `update` writes them and answers views of everything that the step may see, so nothing is gathered.
    Padding is written to the trash column, which no step ever sees. Stores are zeroed when they grow: what a mask
    hides still meets a probability of zero, and zero times a NaN of fresh memory would be NaN.

    Shapes: keys and values ``[slots, kv_heads, columns, head_dim]``, one pair per layer, allocated when the layer is
    first written.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.slots = 0
        self.columns = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._range = slice(0, 0)
        self._rows_N1 = torch.empty(0, 1, dtype=torch.long)
        self._columns_NW = torch.empty(0, 0, dtype=torch.long)
        self._visible = 0

    @property
    def trash(self) -> int:
        """The column that padding is written to."""
        return self.columns - 1

    def reserve(self, slots: int, columns: int, most_columns: int | None = None) -> None:
        """There is room for this many rows of this many tokens; what was held is kept.

        Args:
            slots: Rows needed.
            columns: Tokens per row needed.
            most_columns: Doubling stops here (the model's context).
        """
        need = columns + 1  # the trash column
        if slots <= self.slots and need <= self.columns:
            return
        if need > self.columns:
            doubled = max(_FIRST_COLUMNS, self.columns)
            while doubled < need:
                doubled *= 2
            self.columns = doubled if most_columns is None else max(need, min(doubled, most_columns + 1))
        self.slots = max(slots, self.slots)
        for store in (self._keys, self._values):
            for layer, old in store.items():
                store[layer] = self._grown(old)

    def begin(self, first: int, columns_NW: torch.Tensor, visible: int) -> None:
        """The next forward feeds `W` tokens to each of the `N` rows from slot `first`, seeing `visible` columns."""
        count = columns_NW.shape[0]
        self._range = slice(first, first + count)
        self._rows_N1 = torch.arange(first, first + count, device=columns_NW.device)[:, None]
        self._columns_NW = columns_NW
        self._visible = visible

    def copy(self, sources: list[int], targets: list[int], length: int, begin: int = 0) -> None:
        """Row `targets[i]` holds tokens ``begin .. length`` of what row `sources[i]` held; all at once."""
        index: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for store in (self._keys, self._values):
            for held in store.values():
                if held.device not in index:
                    pair = torch.tensor([sources, targets]).to(held.device)
                    index[held.device] = (pair[0], pair[1])
                source, target = index[held.device]
                part = held[:, :, begin:length]
                part.index_copy_(0, target, part.index_select(0, source))

    def free(self) -> None:
        """Nothing is held, and the memory is given back."""
        self._keys.clear()
        self._values.clear()
        self.slots = self.columns = 0

    # --- what the models call ---
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values ``[N, H, W, D]`` are held; the answer is ``[N, H, visible, D]`` of each."""
        keys = self._keys.get(layer_idx)
        if keys is None:
            keys = self._keys[layer_idx] = self._fresh(key_states)
            self._values[layer_idx] = self._fresh(value_states)
        values = self._values[layer_idx]
        # Layers of a model that is split over devices live where their keys are.
        device = keys.device
        where = (self._rows_N1.to(device), slice(None), self._columns_NW.to(device))
        keys[where] = key_states.transpose(1, 2).to(keys.dtype)
        values[where] = value_states.transpose(1, 2).to(values.dtype)
        return keys[self._range, :, : self._visible], values[self._range, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this step, by the longest row."""
        return max(0, self._visible - self._columns_NW.shape[1])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._visible, 0

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        return self.get_seq_length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        # A model may ask per layer. Windows are in our masks: every layer holds every token.
        return [False] * max(1, len(self._keys))

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _fresh(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = like.shape
        return torch.zeros(self.slots, heads, self.columns, dim, dtype=like.dtype, device=like.device)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        if old.shape[0] == self.slots and old.shape[2] == self.columns:
            return old
        new = torch.zeros(self.slots, old.shape[1], self.columns, old.shape[3], dtype=old.dtype, device=old.device)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers' own "sdpa" answers; it would copy every key and value once per query head, at every token.

    Args:
        query: [N, H, W, D]; key and value: [N, K, T, D] with K dividing H.
        attention_mask: [N, 1, W, T], True where a query looks; or in float32, to be added to the scores; or None.

    Returns:
        [N, W, H, D] and no weights.
    """
    N, H, W, D = query.shape
    K = key.shape[1]
    special = dropout or any(kwargs.get(name) is not None for name in _SPECIAL)
    if attention_mask is None or special or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask.dtype == query.dtype and N * K >= _MANY and H // K * W * key.shape[2] <= _FEW_SCORES:
        return _by_products(query, key, value, attention_mask, D**-0.5 if scaling is None else scaling), None
    if W == 1:  # the heads that share keys are the rows of one small matrix product
        grouped = query.reshape(N, K, H // K, D)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(N, 1, H, -1), None
    if query.device.type == "cpu":
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    # Elsewhere the fast kernels do not take a mask and shared heads at once.
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask_N1WT: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention [N, W, H, D] as two batched products: the heads that share keys are the rows of one small matrix."""
    N, H, W, D = query.shape
    K, T = key.shape[1:3]
    grouped = (query * scaling).reshape(N * K, H // K * W, D)
    scores = torch.bmm(grouped, key.reshape(N * K, T, D).transpose(1, 2)).view(N, K, H // K, W, T)
    scores += mask_N1WT[:, :, None]
    out = torch.bmm(scores.softmax(-1).view(N * K, H // K * W, T), value.reshape(N * K, T, -1))
    return out.view(N, H, W, -1).transpose(1, 2)


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
