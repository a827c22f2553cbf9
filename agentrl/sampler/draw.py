"""From logits to ids: the distribution that sampling parameters describe, and drawing from it.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from array import array
from collections.abc import Iterator, Sequence

import torch

from agentrl.errors import SamplerError
from agentrl.types import SamplingParams

MAX_CANDIDATES = 512
"""Where top-p or min-p leaves more ids than this, the most likely ones are kept (a larger top-k keeps its own number):
the candidates of every token are recorded, and training reads them again."""
_BLOCK = struct.Struct("<8Q")  # what one hash gives


def uniforms(seed: Sequence[int]) -> Iterator[float]:
    """An endless stream of uniform numbers in [0, 1), named by `seed` alone.

    Block i of the stream is a hash of the seed and i, so a turn needs no state from the turns before it, and the
    stream is the same everywhere and always. A generator of numpy's costs ten times as much to begin as the few
    numbers of a short turn.

    >>> first, again, other = uniforms((1, 2)), uniforms((1, 2)), uniforms((1, 3))
    >>> a, b, c = next(first), next(again), next(other)
    >>> a == b, a == c
    (True, False)
    """
    name = ",".join(map(str, seed)) + "/"
    for block in itertools.count():
        digest = hashlib.blake2b(f"{name}{block}".encode(), digest_size=_BLOCK.size).digest()
        for word in _BLOCK.unpack(digest):
            yield (word >> 11) * 2.0**-53


def log_probs(logits_BV: torch.Tensor, params: SamplingParams, seen_BV: torch.Tensor | None = None) -> torch.Tensor:
    """Log-probs [B, V] of the distribution that `params` describe: minus infinity for ids that cannot be drawn.

    The order is the one of transformers: repetition penalty, temperature, top-k, top-p, min-p; at most
    `MAX_CANDIDATES` ids (or `top_k`, where that is more) pass them. At temperature 0 the answer is the distribution at
    temperature 1, without the filters, of which the drawing takes the best.

    Args:
        logits_BV: Float32.
        params: The same for all rows.
        seen_BV: True for ids that are in the row already; only used with a repetition penalty.
    """
    if params.repetition_penalty != 1.0 and seen_BV is not None:
        penalty = params.repetition_penalty
        logits_BV = torch.where(
            seen_BV, torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV
        )
    if params.temperature == 0:
        return torch.log_softmax(logits_BV, dim=-1)
    if params.temperature != 1.0:
        logits_BV = logits_BV / params.temperature
    if 0 < params.top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if params.top_p < 1.0:
        logits_BV = _top_p(logits_BV, params.top_p)
    if params.min_p:
        probs_BV = logits_BV.softmax(dim=-1)
        floor_B1 = params.min_p * probs_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(probs_BV < floor_B1, -torch.inf)
    if params.truncates:
        logits_BV = _bounded(logits_BV, max(params.top_k, MAX_CANDIDATES))
    return torch.log_softmax(logits_BV, dim=-1)


def _bounded(logits_BV: torch.Tensor, most: int) -> torch.Tensor:
    """Minus infinity for all but `most` ids of each row: ties can leave more than top-k asks for."""
    if logits_BV.shape[-1] <= most or int((logits_BV > -torch.inf).sum(-1).max()) <= most:
        return logits_BV
    best = logits_BV.topk(most, dim=-1)
    return torch.full_like(logits_BV, -torch.inf).scatter(-1, best.indices, best.values)


def candidates(log_probs_BV: torch.Tensor) -> list[Sequence[int]]:
    """The ids of each row that can be drawn; an empty list where all can.

    >>> candidates(torch.tensor([[0.5, 0.0, 0.5], [0.2, 0.3, 0.5]]).log())
    [array('i', [0, 2]), ()]
    """
    possible_BV = log_probs_BV > -torch.inf
    sizes = possible_BV.sum(-1).tolist()
    ids = array("i", possible_BV.nonzero()[:, 1].int().cpu().numpy().tobytes())
    ends = list(itertools.accumulate(sizes))
    whole = log_probs_BV.shape[-1]
    return [() if size == whole else ids[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def most_likely(log_probs_BV: torch.Tensor, count: int) -> list[dict[int, float]]:
    """Log-probs by id of each row's `count` most likely ids, best first; ids that cannot be drawn are left out.

    >>> most_likely(torch.tensor([[0.25, 0.0, 0.75]]).log(), 3)[0].keys()
    dict_keys([2, 0])
    """
    best = log_probs_BV.topk(min(count, log_probs_BV.shape[-1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{i: lp for i, lp in zip(*row, strict=True) if lp > -float("inf")} for row in rows]


def _top_p(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of best ids whose probability reaches `top_p`; the best id always stays."""
    ascending_BV, order_BV = logits_BV.sort(dim=-1)
    drop_BV = ascending_BV.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    drop_BV[:, -1] = False
    return logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter(1, order_BV, drop_BV), -torch.inf)


def draw(log_probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Ids [B]: the inverse of each row's cumulative distribution at its uniform number.

    An id of probability zero is never drawn. The sums are in the precision of `uniform_B`.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 3).log(), torch.tensor([0.0, 0.24, 0.25])).tolist()
    [0, 0, 2]
    """
    dtype = uniform_B.dtype
    cumulative_BV = log_probs_BV.exp().cumsum(dim=-1, dtype=dtype)
    total_B1 = cumulative_BV[:, -1:]
    # In float32 a uniform number can round up to 1, which lies beyond the last id that has probability.
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniform_B[:, None] * total_B1, below_B1)
    # Past the end where the sums are NaN: an index that no reader may meet.
    return torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp(max=log_probs_BV.shape[-1] - 1)


def pick(
    log_probs_BV: torch.Tensor, params: SamplingParams, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drawn ids [B] and their log-probs [B], for rows that share their parameters.

    Raises:
        SamplerError: Logits were NaN or infinite.
    """
    ids_B = log_probs_BV.argmax(dim=-1) if params.temperature == 0 else draw(log_probs_BV, uniform_B)
    chosen_B = log_probs_BV.gather(1, ids_B[:, None])[:, 0]
    if not bool(torch.isfinite(chosen_B).all()):
        raise SamplerError(
            "The policy's weights are not finite (or too large for its precision): its logits are no numbers."
        )
    return ids_B, chosen_B
