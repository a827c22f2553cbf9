"""How waiting turns get into the cache: from their own earlier tokens, from a sibling, or by feeding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.sampler.slots import Row, SlotTable, Turn


@dataclass(slots=True, eq=False)
class Feed:
    """A turn that starts: `start` tokens are in its row (or come from another), `new` are fed."""

    turn: Turn
    row: Row
    start: int
    new: list[int]
    donor: Row | None = None  # its row's first `start` tokens are copied before feeding
    leader: Feed | None = None  # the same prompt in the same step: cache and logits are copied after feeding
    held: int = 0  # of `start` tokens those that lie in its own row before anything is copied
    guess: list[int] = field(default_factory=list)  # fed behind `new`: what the turn may draw


@dataclass(slots=True)
class Admission:
    """What became of the waiting turns."""

    feeds: list[Feed] = field(default_factory=list)  # leaders first, shortest first, in slot order
    later: list[Turn] = field(default_factory=list)
    refused: list[tuple[Turn, str]] = field(default_factory=list)  # and why
    shared_tokens: int = 0  # copied from another conversation


def admit(waiting: Sequence[Turn], active: int, table: SlotTable, vocabulary: int) -> Admission:
    """The turns that start now lie in consecutive slots behind the `active` first ones.

    A turn waits where no row is left for it, or while an earlier turn of its conversation runs.
    """
    admission = Admission()
    busy: set[Row] = set()
    leaders: dict[tuple[int, ...], Feed] = {}
    for turn in waiting:
        row = table.by_conversation.get(turn.request.conversation_id)
        if active + len(admission.feeds) >= table.max_slots or (row and (row.turn is not None or row in busy)):
            admission.later.append(turn)
        elif why := _outside(turn.held, vocabulary):
            admission.refused.append((turn, why))
        elif feed := _continue(turn, row, table, leaders) or _begin(turn, table, busy, leaders):
            busy.add(feed.row)
            admission.feeds.append(feed)
            if feed.donor is not None or feed.leader is not None:
                admission.shared_tokens += feed.start - feed.held
        else:
            admission.later.append(turn)
    admission.feeds.sort(key=lambda feed: (feed.leader is not None, len(feed.new)))
    for feed in admission.feeds:
        feed.row.turn = feed.turn
    table.place([feed.row for feed in admission.feeds], active)
    return admission


def _continue(turn: Turn, row: Row | None, table: SlotTable, leaders: dict[tuple[int, ...], Feed]) -> Feed | None:
    """The conversation's own tokens are used as far as the prompt still begins with them; None if not at all."""
    if row is None:
        return None
    start = min(_common(row.ids, turn.held, row.length), len(turn.held) - 1)  # the last token's logits are needed
    if start == 0:
        table.drop(row)
        return None
    row.length = start
    feed = Feed(turn, row, start, turn.held[start:], held=start)
    leader = leaders.setdefault(tuple(turn.held), feed)
    return feed if leader is feed else Feed(turn, row, len(turn.held), [], leader=leader, held=start)


def _begin(turn: Turn, table: SlotTable, busy: set[Row], leaders: dict[tuple[int, ...], Feed]) -> Feed | None:
    """A new row for the conversation, copied from a sibling where one has the same prompt; None without a row."""
    held, key, name = turn.held, tuple(turn.held), turn.request.conversation_id
    if leader := leaders.get(key):
        row = table.add(name, busy)
        if row is None:
            return None
        table.offer(row, key)
        return Feed(turn, row, len(held), [], leader=leader)
    donor = table.donor(key, held) if len(held) > 1 else None
    if donor is not None:
        # It must not be evicted before it has given its copy, unless its slot is the only one left.
        row = table.add(name, busy | {donor})
        if row is not None:
            busy.add(donor)
            table.offer(row, key)
            return Feed(turn, row, len(held) - 1, held[-1:], donor=donor)
    row = table.add(name, busy)
    if row is None:
        return None
    table.offer(row, key)
    feed = leaders[key] = Feed(turn, row, 0, held[:])
    return feed


def _outside(ids: list[int], vocabulary: int) -> str | None:
    """What is wrong with the ids. On a GPU the forward would take the whole process along."""
    low, high = min(ids), max(ids)
    if low >= 0 and high < vocabulary:
        return None
    return f"The prompt has id {low if low < 0 else high}, outside the model's {vocabulary} ids."


def _common(ids: list[int], prompt: list[int], most: int) -> int:
    """How many ids at the start are the same, at most `most`."""
    most = min(most, len(prompt), len(ids))
    if ids[:most] == prompt[:most]:
        return most
    return next(i for i in range(most) if ids[i] != prompt[i])
