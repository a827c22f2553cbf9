"""Drawn tokens on their way into their turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from agentrl.sampler.runner import Drawn
    from agentrl.sampler.slots import Turn


def hold(turn: Turn, guess: Sequence[int], drawn: Drawn, begin: int) -> Literal["stop", "length"] | None:
    """The turn holds what was drawn for it from place `begin` on, up to the first token that its guess had not.

    Returns:
        Why the turn ended; None where it goes on.
    """
    held, stop_ids, place = turn.held, turn.request.stop_ids, turn.place
    reason: Literal["stop", "length"] | None = None
    at = begin
    for expected in (*guess, None):
        token = drawn.ids[at]
        held.append(token)
        turn.log_probs.append(drawn.log_probs[at])
        if turn.sets is not None and drawn.sets is not None:
            turn.sets.append(drawn.sets[at])
        if turn.tops is not None and drawn.tops is not None:
            turn.tops.append(drawn.tops[at])
        if place is not None:
            place = place.next.get(token)
        at += 1
        if token in stop_ids:
            reason = "stop"
        elif len(held) >= turn.end:
            reason = "length"
        if reason is not None or token != expected:
            break  # what follows was drawn behind a token that is not there
    turn.place = place
    del turn.spare[: at - begin]
    return reason
