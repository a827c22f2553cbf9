"""Layers whose state runs along the row, over a tree of segments: each token follows its own root path alone.

Gated-DeltaNet hybrids (Qwen3-Next, Qwen3.5, OLMo hybrid), Kimi's delta attention and layers that are a short causal
convolution (LFM2). The architecture's own functions do the computing. They are handed rows that are cut differently:
the convolution sees in front of each segment the tokens before it on its path, and the delta rule runs level by level
of the tree, the segments of one depth side by side, each from its parent's final state.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTION = "causal_conv1d_fn"
RULES = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "chunk_kimi_delta_attention")
CHUNK = 64  # tokens that a delta rule computes at once


@dataclass(frozen=True, slots=True)
class Bucket:
    """S segments of one depth, side by side, L tokens each."""

    index_SL: Tensor  # places in the row; behind a segment's end: its last token again
    behind_SL: Tensor | None  # True behind a segment's end; None: all are of one length
    parents_S: Tensor | None  # places of the parents among the segments of the level above; None: roots


@dataclass(frozen=True)
class DeltaLayout:
    """Where the segments of a row lie, and what lies before each: as convolutions and delta rules need it."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    levels: tuple[tuple[Bucket, ...], ...]
    inverse_T: Tensor  # place of each token in the buckets laid end to end
    _windows: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(lengths: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> DeltaLayout:
        """The layout of a row of segments in depth-first order.

        Args:
            lengths: Tokens of each segment, at least 1.
            parents: The segment that each one continues, an earlier one, or -1: it begins a sequence.

        Raises:
            ValueError: An empty segment, or one that does not come after its parent.
        """
        if len(lengths) != len(parents) or not lengths or min(lengths) < 1:
            raise ValueError("a row has segments of at least one token, and a parent (or -1) for each")
        if not all(-1 <= parent < s for s, parent in enumerate(parents)):
            raise ValueError("a segment comes after its parent")
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        deep: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for s, depth in enumerate(depths):
            deep[depth].append(s)
        inverse = torch.empty(starts[-1], dtype=torch.long)
        levels, offset = [], 0
        above: dict[int, int] = {}  # place of each segment of the level above
        for depth, segments in enumerate(deep):
            buckets, here = [], {}
            for group in _alike(segments, lengths):
                size = torch.tensor([lengths[s] for s in group])[:, None]
                steps = torch.arange(int(size.max()))
                index = torch.tensor([starts[s] for s in group])[:, None] + torch.minimum(steps, size - 1)
                real = steps < size
                inverse[index[real]] = offset + real.reshape(-1).nonzero()[:, 0]
                offset += real.numel()
                here |= {s: len(here) + i for i, s in enumerate(group)}
                before = torch.tensor([above[parents[s]] for s in group]).to(device) if depth else None
                buckets.append(Bucket(index.to(device), None if bool(real.all()) else ~real.to(device), before))
            levels.append(tuple(buckets))
            above = here
        return DeltaLayout(lengths, parents, tuple(levels), inverse.to(device))

    def windows(self, kernel: int) -> tuple[Tensor, Tensor, Tensor]:
        """The row with the `kernel` - 1 tokens of its path in front of each segment.

        Returns:
            [W] places in the row; [E] which of them are before a root, where nothing is; [T] where each token lies.
        """
        if kernel not in self._windows:
            more, starts, tails = kernel - 1, [0], []
            for s, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
                tail = tails[parent] if parent >= 0 else [-1] * more
                own = range(starts[s] + max(0, length - more), starts[s] + length)
                tails.append([*tail, *own][len(own) :])
                starts.append(starts[s] + length)
            device, total = self.inverse_T.device, starts[-1]
            fronts = [tails[parent] if parent >= 0 else [-1] * more for parent in self.parents]
            segment = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
            real = torch.arange(total) + more * (segment + 1)
            spread = torch.empty(total + more * len(fronts), dtype=torch.long)
            front = torch.ones_like(spread, dtype=torch.bool)
            spread[real], front[real] = torch.arange(total), False
            spread[front] = torch.tensor(fronts, dtype=torch.long).reshape(-1)
            empty = (spread < 0).nonzero()[:, 0]
            self._windows[kernel] = spread.clamp(min=0).to(device), empty.to(device), real.to(device)
        return self._windows[kernel]


def _alike(segments: list[int], lengths: tuple[int, ...]) -> list[list[int]]:
    """Groups of segments whose numbers of chunks differ by at most a half."""
    groups: list[list[int]] = []
    for s in sorted(segments, key=lambda s: lengths[s]):
        chunks = -(-lengths[s] // CHUNK)
        if groups and 2 * chunks <= 3 * -(-lengths[groups[-1][0]] // CHUNK):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


class _Inside(threading.local):
    """The layout of the layer whose forward this thread is in: other models go on as they are.

    Set and read within one call of a layer, so in recomputation too, which CUDA does in autograd's own thread.
    """

    layout: DeltaLayout | None = None


_inside = _Inside()


def _convolution(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def convolution(hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, C, T] to [1, C, T]: each token with the tokens before it on its path."""
        layout = _inside.layout
        if layout is None or len(hidden_states) > 1:
            return plain(hidden_states, weight, *args, **kwargs)
        if hidden_states.shape[2] != len(layout.inverse_T):
            raise ValueError(f"the row has {hidden_states.shape[2]} tokens, its layout {len(layout.inverse_T)}")
        spread, empty, real = layout.windows(weight.shape[-1])
        row = hidden_states.transpose(1, 2).index_select(1, spread).index_fill_(1, empty, 0.0)
        out = plain(row.transpose(1, 2), weight, *args, **kwargs)
        return out.transpose(1, 2).index_select(1, real).transpose(1, 2)

    return convolution


def _rule(plain: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    @functools.wraps(plain)
    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        """[1, T, H, D] of outputs, each segment started from its parent's final state."""
        layout = _inside.layout
        if layout is None or len(query) > 1:
            return plain(query, key, value, g=g, beta=beta, **kwargs)
        if kwargs.pop("output_final_state", False):
            raise ValueError("a tree of segments has no one final state, so nothing can be cached: use_cache=False")
        outs: list[Tensor] = []
        states: Tensor | None = None
        for depth, level in enumerate(layout.levels):
            ends = []
            for bucket in level:
                parts = [_cut(x[0], bucket.index_SL) for x in (query, key, value, g, beta)]
                if bucket.behind_SL is not None:  # no decay and nothing written: the state stays as it is
                    for i in (3, 4):
                        behind = bucket.behind_SL.view(*bucket.behind_SL.shape, *[1] * (parts[i].dim() - 2))
                        parts[i] = parts[i].masked_fill(behind, 0.0)
                start = None if states is None else states.index_select(0, bucket.parents_S)  # type: ignore[arg-type]
                asked = {"initial_state": start, "output_final_state": depth + 1 < len(layout.levels)}
                out, end = plain(*parts[:3], g=parts[3], beta=parts[4], **(kwargs | asked))
                outs.append(out.flatten(0, 1))
                ends.append(end)
            states = torch.cat(ends) if ends[0] is not None else None
        return torch.cat(outs).index_select(0, layout.inverse_T)[None], None

    return rule


def _cut(x_T: Tensor, index_SL: Tensor) -> Tensor:
    return x_T.index_select(0, index_SL.reshape(-1)).view(*index_SL.shape, *x_T.shape[1:])


def _hooks(module: nn.Module) -> list[tuple[dict[str, Any], str]] | None:
    """Where the functions lie that the layer's forward calls; None: no such layer, or one that calls others.

    A layer that convolves and has parameters of its own, but no rule that is known, runs a recurrence of its own.
    """
    forward = inspect.unwrap(module.forward)
    names = getattr(forward, "__globals__", {})
    called = {name for name in _globals(getattr(forward, "__code__", None)) if callable(names.get(name))}
    rules = [name for name in RULES if name in called]
    if CONVOLUTION not in called or (not rules and next(module.parameters(recurse=False), None) is not None):
        return None
    return [(names, name) for name in (CONVOLUTION, *rules)]


@functools.cache
def _globals(code: CodeType | None) -> frozenset[str]:
    """Names that a function looks up in its module; not those of attributes."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL") if code else frozenset()


def _convolves(module: nn.Module) -> bool:
    """Whether the layer holds a causal convolution of each channel by itself."""
    children = [getattr(child, "base_layer", child) for child in module.children()]
    return any(
        isinstance(child, nn.Conv1d)
        and child.groups == child.in_channels > 1
        and child.kernel_size[0] > 1
        and child.padding == (child.kernel_size[0] - 1,)
        for child in children
    )


def has_delta_layers(model: nn.Module) -> bool:
    """Whether a layer of the model convolves along the row, alone or before a recurrence."""
    return any(_convolves(module) for module in model.modules())


@contextlib.contextmanager
def delta_running(model: nn.Module, layout: DeltaLayout) -> Iterator[None]:
    """Inside, forward and backward passes of `model` run such layers over `layout`; other models run as they do.

    Does nothing for a model without such layers, nor to a batch of more than one: those are sequences side by side, for
    which packed attention has stood down.

    Raises:
        ValueError: A layer that calls other functions than those known here: Mamba, say.
    """
    layers = [module for module in model.modules() if _convolves(module)]
    places: dict[tuple[int, str], dict[str, Any]] = {}
    for layer in layers:
        hooks = _hooks(layer)
        if hooks is None:
            raise ValueError(f"{type(layer).__name__} has a recurrence that agentrl cannot run over a packed row")
        places |= {(id(names), name): names for names, name in hooks}
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_forward_over(layer, layout))
        for (_, name), names in places.items():
            stack.enter_context(_replaced(names, name))
        yield


_lock = threading.Lock()
_replacements: dict[tuple[int, str], tuple[Any, int]] = {}  # the original, and how many contexts need the replacement


@contextlib.contextmanager
def _replaced(names: dict[str, Any], name: str) -> Iterator[None]:
    """A function of an architecture's module knows of layouts, until the last context that needs that ends."""
    place = id(names), name
    with _lock:
        plain, users = _replacements.get(place, (names[name], 0))
        if not users:
            names[name] = _convolution(plain) if name == CONVOLUTION else _rule(plain)
        _replacements[place] = plain, users + 1
    try:
        yield
    finally:
        with _lock:
            plain, users = _replacements.pop(place)
            if users > 1:
                _replacements[place] = plain, users - 1
            else:
                names[name] = plain


@contextlib.contextmanager
def _forward_over(layer: nn.Module, layout: DeltaLayout) -> Iterator[None]:
    """Calls of the layer's forward know the layout."""
    plain, own = layer.forward, layer.__dict__.get("forward")

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = _inside.layout
        _inside.layout = layout if before is None else before  # the layout of the innermost context is set first
        try:
            return plain(*args, **kwargs)
        finally:
            _inside.layout = before

    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own
