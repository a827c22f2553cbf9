"""What an environment returned, as a model would see it: is it what the author meant?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from agentrl.check.report import Level
from agentrl.pictures import open_image
from agentrl.types import Content

HUGE = 100_000  # characters
_ADDRESS = re.compile(r"<[\w.<>\s]{1,200} (?:object )?at 0x[0-9a-fA-F]+>")


def judge(label: str, value: Any, content: Content | None) -> Iterator[tuple[Level, str]]:
    """What is odd about a returned value, one sentence for each.

    Args:
        label: What returned it.
        value: As it was returned.
        content: As a model reads it.

    >>> [level for level, _ in judge("Door.push", None, "None")]
    ['warning']
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        yield "warning", f"{label} returned {type(value).__name__}, which is shown decoded as UTF-8. Return text."
    if value is None and content is not None:
        yield "warning", f"{label} returned None, and the model reads 'None'. Return what the model should know."
    if isinstance(value, float) and content in ("nan", "inf", "-inf"):
        yield "warning", f"{label} returned {content}. Return text that says what that means."
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        text = "".join(block.get("text") or "" for block in content)
        yield from _pictures(label, content)
    if len(text) > HUGE:
        yield (
            "warning",
            (
                f"{label} returned {len(text):,} characters. An episode ends where a result does not fit the context: "
                "cut it, and say that it was cut."
            ),
        )
    if (found := _ADDRESS.search(text[:HUGE])) is not None:
        yield "warning", f"{label} returned an object that the model reads as {found[0]!r}. Return text or JSON."


def _pictures(label: str, content: list[dict[str, Any]]) -> Iterator[tuple[Level, str]]:
    for block in content:
        if block.get("type") == "image":
            try:
                open_image(block)
            except ValueError as why:
                yield "error", f"{label} returned an image that cannot be shown: {why}"
