"""Which conversation lives in which row of the cache: bookkeeping only, no tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.sampler.drafts import Drafts, Node
from agentrl.types import SampleRequest


@dataclass(slots=True, eq=False)
class Turn:
    """One request on its way."""

    request: SampleRequest
    future: asyncio.Future
    held: list[int]  # prompt and what was drawn so far
    prompt_length: int
    end: int  # `held` is never longer than this
    stream: Iterator[float]
    version: int
    log_probs: list[float] = field(default_factory=list)
    sets: list[Sequence[int]] | None = None  # candidates of each drawn id; None: the whole vocabulary
    tops: list[Mapping[int, float]] | None = None  # the most likely ids where each was drawn; None: not asked for
    spare: list[float] = field(default_factory=list)  # taken from the stream, not drawn with yet
    place: Node | None = None  # where its drawn ids lead in what earlier turns said
    cancelled: bool = False
    waited: int = 0  # decode steps since it arrived

    def numbers(self, count: int) -> list[float]:
        """The random numbers of the next `count` ids; they stay the next ones until ids are drawn."""
        while len(self.spare) < count:
            self.spare.append(next(self.stream))
        return self.spare[:count]

    def guessed(self, drafts: Drafts) -> list[int]:
        """What it probably draws next, where one forward may check that."""
        if self.place is None or self.request.params.repetition_penalty != 1.0:
            return []  # a penalty reads what was drawn before each position
        return drafts.guess(self.place, self.end - len(self.held) - 1)


@dataclass(slots=True, eq=False)
class Row:
    """A conversation with tokens in the cache."""

    conversation_id: str
    slot: int
    ids: list[int] = field(default_factory=list)  # of an idle row
    length: int = 0  # tokens in the cache: a prefix of `ids`, or of the turn's `held`
    turn: Turn | None = None  # set while it is being decoded
    used: int = 0  # when it was last idle, for eviction
    key: tuple[int, ...] | None = None  # of the prompt it can give away

    def holds(self, prompt: Sequence[int], length: int) -> bool:
        """True when the first `length` ids of the prompt are in the cache."""
        ids = self.ids if self.turn is None else self.turn.held
        return self.length >= length and ids[:length] == prompt[:length]


class SlotTable:
    """Slots, kept so that the rows that decode are a prefix.

    Rearranging only notes what has to move; `take_moves` gives it away once, so that the tensors move once.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.rows: list[Row | None] = []  # by slot
        self.by_conversation: dict[str, Row] = {}
        self._donors: dict[tuple[int, ...], set[Row]] = {}  # by first prompt: who may still hold it
        self._origin: dict[int, int] = {}  # slot -> where its content still is
        self._free: list[int] = []
        self._clock = 0

    def add(self, conversation_id: str, busy: set[Row]) -> Row | None:
        """A new, empty row; the least recently used idle one makes room where it must, but never a busy one.

        None when every row decodes or is busy.
        """
        while self._free and (self._free[-1] >= len(self.rows) or self.rows[self._free[-1]] is not None):
            self._free.pop()  # rearranging made this note stale
        if self._free:
            slot = self._free.pop()
        elif (slot := next((s for s, row in enumerate(self.rows) if row is None), -1)) >= 0:
            pass
        elif len(self.rows) < self.max_slots:
            slot = len(self.rows)
            self.rows.append(None)
        else:
            idle = [row for row in self.rows if row is not None and row.turn is None and row not in busy]
            if not idle:
                return None
            oldest = min(idle, key=lambda row: row.used)
            slot = oldest.slot
            self.drop(oldest)
        row = Row(conversation_id, slot)
        self.rows[slot] = row
        self.by_conversation[conversation_id] = row
        return row

    def drop(self, row: Row) -> None:
        """The row is gone and its slot is free."""
        if self.rows[row.slot] is row:
            self.rows[row.slot] = None
            self._free.append(row.slot)
        if self.by_conversation.get(row.conversation_id) is row:
            del self.by_conversation[row.conversation_id]
        if row.key is not None and row.key in self._donors:
            self._donors[row.key].discard(row)
            if not self._donors[row.key]:
                del self._donors[row.key]

    def offer(self, row: Row, prompt: tuple[int, ...]) -> None:
        """Conversations that begin with this prompt may copy it from the row."""
        row.key = prompt
        self._donors.setdefault(prompt, set()).add(row)

    def donor(self, prompt: tuple[int, ...], ids: Sequence[int]) -> Row | None:
        """A row that holds all of the prompt but its last token, whose logits a newcomer needs."""
        return next((row for row in self._donors.get(prompt, ()) if row.holds(ids, len(ids) - 1)), None)

    def rest(self, row: Row) -> None:
        """The row's turn is over; its tokens stay for the next turn."""
        if row.turn is not None:
            row.ids = row.turn.held
            row.turn = None
        self._clock += 1
        row.used = self._clock

    def clear(self) -> None:
        """No rows, no pending moves."""
        self.rows.clear()
        self.by_conversation.clear()
        self._donors.clear()
        self._origin.clear()
        self._free.clear()

    def place(self, rows: Sequence[Row], first: int) -> None:
        """The rows lie at slots first, first + 1, ..., in this order."""
        while len(self.rows) < first + len(rows):
            self.rows.append(None)
        for slot, row in enumerate(rows, first):
            if row.slot != slot:
                self._swap(row.slot, slot)

    def compact(self, count: int) -> list[Row]:
        """The rows with a turn, now a prefix, in slot order; `count` is how long the prefix was before."""
        staying = [row for row in self.rows[:count] if row is not None and row.turn is not None]
        gaps = (s for s in range(len(staying)) if (row := self.rows[s]) is None or row.turn is None)
        for row in [row for row in staying if row.slot >= len(staying)]:
            self._swap(row.slot, next(gaps))
        return [row for row in self.rows[: len(staying)] if row is not None]

    def take_moves(self) -> tuple[list[int], list[int], int]:
        """Source slots, target slots, and how many tokens at most: what the tensors still have to copy."""
        sources, targets, longest = [], [], 0
        for slot, origin in self._origin.items():
            row = self.rows[slot]
            if row is not None and origin != slot and row.length > 0:
                sources.append(origin)
                targets.append(slot)
                longest = max(longest, row.length)
        self._origin.clear()
        return sources, targets, longest

    def _swap(self, one: int, two: int) -> None:
        rows, origin = self.rows, self._origin
        origin[one], origin[two] = origin.get(two, two), origin.get(one, one)
        rows[one], rows[two] = rows[two], rows[one]
        for slot in (one, two):
            row = rows[slot]
            if row is not None:
                row.slot = slot
            else:
                self._free.append(slot)
