"""Where the segments of a row lie, and which of them attend together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.train.tree import Ints, depths_of

WASTE = 1.15  # padded over real query-key pairs in a bucket, where more than SMALL would be padding
SMALL = 1 << 14  # query-key pairs that cost less than one more kernel call
MOST_PIECES = 8  # of a segment: each reads all that lies above it
PIECE = 128  # tokens; the CPU's kernel computes a causal block whole, so longer segments run as a chain of pieces


@dataclass(frozen=True, slots=True)
class Bucket:
    """S sets of queries, each with keys of its own, padded to [S, Q] and [S, K] indices into the row."""

    queries_SQ: Tensor
    keys_SK: Tensor
    rows_R: Tensor  # where the real queries lie in the row
    real_R: Tensor | None  # where they lie in [0, S * Q); None: all are real, in order
    span: tuple[int, int] | None  # the queries are these neighbours in the row, in order; None: they are not
    key_span: tuple[int, int] | None = None  # the same of the keys
    bias_SQK: Tensor | None = None  # [S, Q or 1, K] 0 where a query may look, -inf where not; None: everywhere


@dataclass(frozen=True, slots=True)
class Layout:
    """The S segments of a row of T tokens, and how attention over them is done.

    A token attends to its segment up to itself, and to the segments that its own continues: its root path.
    """

    lengths: tuple[int, ...]  # [S]
    parents: tuple[int, ...]  # [S] -1: none
    device: torch.device
    starts: tuple[int, ...]  # [S] in the row
    depths: tuple[int, ...]  # [S] the position of a segment's first token
    kept: dict[Any, Any] = field(default_factory=dict)  # what is made once, when it is first asked for

    @staticmethod
    def of(lengths: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> Layout:
        """The layout of segments in depth-first order."""
        starts = [0, *np.cumsum(lengths).tolist()][: len(lengths)]
        return Layout(lengths, parents, device, tuple(starts), tuple(depths_of(lengths, parents)))

    def in_pieces(self) -> Layout:
        """The same attention over segments of about `PIECE` tokens: the pieces of a long one continue each other."""
        if "pieces" not in self.kept:
            lengths, parents, last = [], [], []
            for length, parent in zip(self.lengths, self.parents, strict=True):
                count = min(max(1, round(length / PIECE)), MOST_PIECES)
                above = last[parent] if parent >= 0 else -1
                for n in range(count):
                    parents.append(above if n == 0 else len(lengths) - 1)
                    lengths.append((n + 1) * length // count - n * length // count)
                last.append(len(lengths) - 1)
            whole = len(lengths) == len(self.lengths)
            self.kept["pieces"] = self if whole else Layout.of(tuple(lengths), tuple(parents), self.device)
        return self.kept["pieces"]

    @property
    def own(self) -> tuple[Bucket, ...]:
        """Each segment with itself, causal."""
        if "own" not in self.kept:
            each = [np.arange(start, start + n) for start, n in zip(self.starts, self.lengths, strict=True)]
            groups = together([(n, n) for n in self.lengths])
            self.kept["own"] = tuple(_bucket([each[i] for i in group], None, self.device) for group in groups)
        return self.kept["own"]

    @property
    def shared(self) -> bool:
        """Whether a segment continues another."""
        return any(parent >= 0 for parent in self.parents)

    def above(self, window: int | None) -> tuple[Bucket, ...]:
        """Tokens with what lies above their segment: the children of one segment have the same keys.

        With a window, a token sees itself and the `window` - 1 tokens before it; those that see nothing above are left
        out, and keys that nobody sees.
        """
        if window not in self.kept:
            self.kept[window] = self._above(window)
        return self.kept[window]

    def _above(self, window: int | None) -> tuple[Bucket, ...]:
        reach = None if window is None else window - 1
        path: dict[int, Ints] = {-1: np.empty(0, np.int64)}
        children: dict[int, list[Ints]] = {}
        inner = {parent for parent in self.parents if parent >= 0}
        for s, (start, length, parent) in enumerate(zip(self.starts, self.lengths, self.parents, strict=True)):
            if s in inner:
                whole = np.concatenate([path[parent], np.arange(start, start + length)])
                path[s] = whole if reach is None else whole[max(0, len(whole) - reach) :]
            if parent >= 0 and reach != 0:
                seen = length if reach is None else min(length, reach)
                children.setdefault(parent, []).append(np.arange(start, start + seen))
        pairs = [(np.concatenate(below), path[parent]) for parent, below in children.items()]
        groups = together([(len(queries), len(keys)) for queries, keys in pairs])
        position = None if window is None else self.positions()
        return tuple(
            _bucket([pairs[i][0] for i in group], [pairs[i][1] for i in group], self.device, window, position)
            for group in groups
        )

    def positions(self) -> Ints:
        """[T] each token's place in its sequences."""
        return np.concatenate([np.arange(d, d + n) for d, n in zip(self.depths, self.lengths, strict=True)])


def gather(x_TnD: Tensor, bucket: Bucket, *, padding: float | None = None) -> Tensor:
    """[S, n, Q, D] of a bucket's queries; padding repeats one, or has the value `padding`."""
    if bucket.span is not None:
        return x_TnD[slice(*bucket.span)].unflatten(0, bucket.queries_SQ.shape).transpose(1, 2)
    flat = x_TnD.index_select(0, bucket.queries_SQ.reshape(-1))
    if padding is not None and bucket.real_R is not None:
        kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_fill_(0, bucket.real_R, True)
        flat.masked_fill_(~kept[:, None, None], padding)
    return flat.unflatten(0, bucket.queries_SQ.shape).transpose(1, 2)


def band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L] True where a query may look: itself and the window - 1 tokens before it; None where all are so near."""
    if window is None or window >= length:
        return None
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)


def together(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Sets of (queries, keys) that are padded to one size, so that little is computed in vain.

    >>> together([(600, 600), (3, 3), (590, 590), (4, 4), (300, 300)])
    [[1, 3], [4], [2, 0]]
    """
    groups: list[list[int]] = []
    most = (0, 0)
    real = 0
    for i in sorted(range(len(sizes)), key=lambda i: (sizes[i][1], sizes[i][0])):
        wide = (max(most[0], sizes[i][0]), max(most[1], sizes[i][1]))
        more = real + sizes[i][0] * sizes[i][1]
        padded = wide[0] * wide[1] * (len(groups[-1]) + 1 if groups else 1)
        if groups and padded <= max(WASTE * more, more + SMALL):
            groups[-1].append(i)
            most, real = wide, more
        else:
            groups.append([i])
            most, real = sizes[i], sizes[i][0] * sizes[i][1]
    return groups


def _bucket(
    queries: Sequence[Ints], keys: Sequence[Ints] | None, device: torch.device,
    window: int | None = None, position_T: Ints | None = None,
) -> Bucket:  # fmt: skip
    """Queries with themselves, or with `keys`; with a window, their positions say what they see."""
    queries_SQ, few_queries = _rectangle(queries)
    flat = queries_SQ.reshape(-1)
    real = None if few_queries is None else np.flatnonzero(few_queries)
    rows = flat if real is None else flat[real]
    span = None if real is not None else _span(flat)
    keys_SK, bias = queries_SQ, None
    if keys is not None:
        keys_SK, few_keys = _rectangle(keys)
        sees = None if few_keys is None else few_keys[:, None, :]
        if window is not None and position_T is not None:
            near = position_T[queries_SQ][:, :, None] - position_T[keys_SK][:, None, :] < window
            if not near.all():
                sees = near if sees is None else near & sees
        if sees is not None:
            bias = torch.from_numpy(np.where(sees, 0.0, -np.inf).astype(np.float32)).to(device)

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    queries_t = tensor(queries_SQ)
    keys_t = queries_t if keys is None else tensor(keys_SK)
    real_t = None if real is None else tensor(real)
    return Bucket(queries_t, keys_t, tensor(rows), real_t, span, _span(keys_SK.reshape(-1)), bias)


def _span(places: Ints) -> tuple[int, int] | None:
    """Where neighbours begin and end; None where the places are not neighbours in order."""
    if not len(places) or (np.diff(places) != 1).any():
        return None
    return int(places[0]), int(places[-1]) + 1


def _rectangle(parts: Sequence[Ints]) -> tuple[Ints, np.ndarray | None]:
    """[S, L] the parts side by side, short ones padded with their first entry; and which are real, None: all."""
    sizes = np.array([len(part) for part in parts])
    longest = int(sizes.max(initial=0))
    if (sizes == longest).all():
        return np.stack(parts) if parts else np.empty((0, 0), np.int64), None
    real = np.arange(longest)[None, :] < sizes[:, None]
    whole = np.repeat(np.array([part[0] for part in parts])[:, None], longest, axis=1)
    whole[real] = np.concatenate(parts)
    return whole, real
