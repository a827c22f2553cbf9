"""Where a prompt leaves the tokens held so far, as a record that a person can read."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.types import Drift

_SHOWN = 8  # tokens of text on each side of the first difference


def drift_between(held: list[int], ids: list[int], why: str, decode: Callable[[list[int]], str]) -> Drift:
    """The record of a prompt `ids` that does not begin with `held`.

    >>> drift_between([1, 2, 3, 4], [1, 2, 7], "the template dropped it", lambda ids: " ".join(map(str, ids)))
    Drift(at=2, why='the template dropped it', held=4, before='1 2', held_text='3 4', new_text='7')
    """
    pairs = enumerate(zip(held, ids, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(held), len(ids)))
    sides = (decode(one[at : at + _SHOWN]) for one in (held, ids))
    return Drift(at, why, len(held), decode(held[max(0, at - _SHOWN) : at]), *sides)
