"""How prompts with one set of tools begin: a held prompt of other tools must not be continued (F063)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.render.codec import Codec
from agentrl.render.learn import Behaviour
from agentrl.render.probe import MARK, user
from agentrl.render.template import ChatTemplate, Tools
from agentrl.types import Message

_CACHED = 1024
_COMPARED = 32  # characters of the first user's text that are compared as well
_TOKENS = 4  # for one character at most: its bytes
_SPACES = 8  # tokens of white space that may stand before it


@dataclass(frozen=True, slots=True)
class Head:
    """How prompts with one set of tools, and one system message, begin and end."""

    ids: tuple[list[int], ...]  # up to the last control token before the first user's text; one of these ways
    tail: str  # the text after that, up to the user's
    usual: bool  # the generation prompt is the template's usual one


class Heads:
    """The heads of one template, made once for each set of tools and system message."""

    def __init__(
        self, template: ChatTemplate, codec: Codec, like: Behaviour, with_bos: Callable[[list[int]], list[int]]
    ) -> None:
        self._template, self._codec, self._like, self._with_bos = template, codec, like, with_bos
        self._known: dict[tuple[str, str | None], Head] = {}
        self._accepted: set[tuple[str, tuple[int, ...]]] = set()  # beginnings that were compared before

    def of(self, messages: Sequence[Message], tools: Tools) -> Head:
        """The head of prompts that begin as these messages do."""
        lead = [messages[0]] if _leads(messages) else []
        content = lead[0].get("content") if lead else None
        key = (
            self._template.tools_key(tools),
            content if content is None or isinstance(content, str) else repr(content),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _CACHED:
                self._known.clear()
            known = self._known[key] = self._make(lead, tools)
        return known

    def fits(self, head: Head, held: list[int], messages: Sequence[Message]) -> bool:
        """True where the held prompt begins with `head`."""
        if not self._like.reads_tools:
            return True
        begins = next((ids for ids in head.ids if held[: len(ids)] == ids), None)
        if begins is None:
            return False
        first = messages[1 if _leads(messages) else 0]
        if first["role"] != "user":
            return True
        # As text, and with the user's own words after it: one list of tools may begin like another.
        content = first.get("content")
        want = head.tail.lstrip() + (content.strip()[:_COMPARED] if isinstance(content, str) else "")
        seen = tuple(held[len(begins) : len(begins) + _TOKENS * len(want) + _SPACES])
        if (want, seen) not in self._accepted:
            text = self._codec.decode(self._codec.encode_plain(want))[: len(want)].rstrip()
            if not self._codec.decode(list(seen)).lstrip().startswith(text):
                return False
            if len(self._accepted) >= _CACHED:
                self._accepted.clear()
            self._accepted.add((want, seen))
        return True

    def _make(self, lead: list[Message], tools: Tools) -> Head:
        text = self._template.render([*lead, user(MARK)], tools)
        usual = text.endswith(self._like.generation)
        text = text[: text.index(MARK)] if MARK in text else ""
        cut = max((at + len(name) for at, name in self._codec.controls(text)), default=0)
        head, tail = text[:cut], text[cut:]
        # What follows the last control token is encoded together with the user's text, so it is compared as text.
        # Two ways, where tokens swallow the space around them: a text that spells control tokens is encoded in parts.
        ways = (self._codec.encode(head), self._codec.encode_segments(self._codec.segments(head)))
        return Head(tuple(self._with_bos(ids) for ids in ways), "".join(map(str, self._codec.segments(tail))), usual)


def _leads(messages: Sequence[Message]) -> bool:
    return messages[0]["role"] in ("system", "developer")
