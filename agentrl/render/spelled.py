"""Turns in which the policy spells a tag with ordinary tokens: only the tag's own token opens a call or a thought.

Tools quote what they found, and policies quote tools. Text that spells ``<tool_call>`` is text on its way in
(`Codec.guard`), so it is text on its way out as well, wherever the tokenizer has a token for the tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentrl.render.codec import Codec, map_strings
from agentrl.types import ParsedTurn


class Markers:
    """The tags of a turn format that are control tokens of this tokenizer."""

    def __init__(self, codec: Codec, markers: frozenset[str]) -> None:
        self._codec = codec
        names = sorted(markers & codec.control.keys(), key=len, reverse=True)
        self._ids = frozenset(codec.control[name] for name in names)
        self._tag = re.compile("|".join(map(re.escape, names))) if names else None

    def spelled(self, text: str, ids: Sequence[int]) -> bool:
        """True where `text`, which `ids` say, holds a tag that none of them is."""
        if self._tag is None or self._tag.search(text) is None:
            return False
        return sum(1 for _ in self._tag.finditer(text)) != sum(i in self._ids for i in ids)

    def read(self, ids: Sequence[int], read: Callable[[str], ParsedTurn]) -> ParsedTurn:
        """What `read` makes of the ids, with tags that are only spelled out of its sight."""
        parts: list[str] = []
        run: list[int] = []
        for i in [*ids, None]:
            if i is not None and i not in self._ids:
                run.append(i)
                continue
            parts.append(self._codec.guard(self._codec.decode(run)) if run else "")
            run = []
            parts.append(self._codec.decode([i]) if i is not None else "")
        turn = read("".join(parts))
        calls = tuple(
            replace(c, name=self._spell(c.name), arguments=self._spell(c.arguments), error=self._spell(c.error))
            for c in turn.calls
        )
        return ParsedTurn(self._spell(turn.message), calls)

    def _spell(self, value: Any) -> Any:
        return map_strings(value, self._codec.spell)
