"""An episode record as a person reads it: who said what, which tool answered, what it was worth.

`transcript_text` gives plain text, `render_transcript` the same lines with colours for rich. Control characters in what
a model or a tool wrote are shown as escapes, so that no text can act on the terminal.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.record import turn_prompt_ids

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_WIDTH = 100
MAX_CHARS = 2000  # of one message; the rest is counted, not shown

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_STYLES = {
    "head": "bold",
    "note": "dim",
    "system": "blue",
    "user": "cyan",
    "assistant": "",
    "thinking": "dim italic",
    "call": "green",
    "tool": "yellow",
    "error": "red",
    "good": "bold green",
    "ids": "dim",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph of a transcript: a label for the margin, its text, and what kind of thing it is."""

    kind: str  # a key of _STYLES
    label: str
    text: str


def transcript_lines(
    record: Mapping[str, Any], *, ids: bool = False, max_chars: int | None = MAX_CHARS
) -> Iterator[Line]:
    """Yields the paragraphs of an episode record. `ids` adds each turn's token ids and log-probs."""
    yield Line("head", "", _title(record))
    yield Line("note", "", _facts(record))
    calls = {(call["turn"], call["id"]): call for call in record["tool_calls"]}
    turn_of = {turn["message_index"]: n for n, turn in enumerate(record["turns"]) if "message_index" in turn}
    prompts = turn_prompt_ids(record)
    turn = -1
    for index, message in enumerate(record["messages"]):
        if index in turn_of:
            turn = turn_of[index]
            yield from _turn_notes(record, turn, prompts, ids)
        for line in _message_lines(message, turn, calls):
            yield Line(line.kind, line.label, _shorten(_visible(line.text), max_chars))
    for number, entry in enumerate(record["turns"]):
        if "message" in entry:  # sampled, but not in the conversation
            yield Line("note", "", f"turn {number} was sampled and is not part of the conversation:")
            yield from _turn_notes(record, number, prompts, ids)
            for line in _message_lines(entry["message"], number, calls):
                yield Line(line.kind, line.label, _shorten(_visible(line.text), max_chars))
    yield from _ending(record, max_chars)


def _title(record: Mapping[str, Any]) -> str:
    task = record["task"]
    parts = [f"episode {record['id']}", f"group {record['group_id']} member {record['member']}"]
    if record["step"] is not None:
        parts.append(f"step {record['step']}")
    if record["environment"]:
        parts.append(str(record["environment"]))
    parts.append(f"row {task['index']} epoch {task['epoch']} seed {task['seed']}")
    return _visible(" · ".join(parts))


def _facts(record: Mapping[str, Any]) -> str:
    sampled = sum(len(turn["output_ids"] or ()) for turn in record["turns"])
    parts = [_count(len(record["turns"]), "turn"), _count(len(record["tool_calls"]), "tool call")]
    if sampled:
        parts.append(f"{_count(sampled, 'sampled token')} in {_count(len(record['sequences']), 'sequence')}")
    if record["attempts"] > 1:
        parts.append(f"attempt {record['attempts']}")
    if "total" in record["seconds"]:
        parts.append(f"{record['seconds']['total']:.2f} s")
    versions = sorted({turn["version"] for turn in record["turns"]})
    if versions and versions != [0]:
        parts.append("weights " + (f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"))
    return " · ".join(parts)


def _turn_notes(record: Mapping[str, Any], turn: int, prompts: list[list[int] | None], ids: bool) -> Iterator[Line]:
    entry = record["turns"][turn]
    if entry["drift"] is not None:
        yield from _drift_lines(turn, entry["drift"])
    if entry["finish_reason"] == "length":
        yield Line("note", "", f"turn {turn} was cut at its token limit")
    if not ids:
        return
    prompt, output, log_probs = prompts[turn], entry["output_ids"], entry["output_log_probs"]
    if prompt is None or output is None:
        yield Line("ids", "", f"turn {turn} has no ids (the sampler gave text only)")
        return
    new = entry.get("prompt_suffix_ids")
    shown = f"{' '.join(map(str, prompt))}" if new is None else f"... {' '.join(map(str, new))}"
    yield Line("ids", "", f"turn {turn} prompt, {_count(len(prompt), 'id')}: {shown}")
    pairs = zip(output, log_probs or [None] * len(output), strict=False)
    shown = " ".join(
        str(i) if p is None else f"{i}({p:.2f})" if isinstance(p, float) else f"{i}({p})" for i, p in pairs
    )
    yield Line("ids", "", f"turn {turn} sampled, {_count(len(output), 'id')} (log-prob): {shown}")


def _drift_lines(turn: int, drift: Mapping[str, Any]) -> Iterator[Line]:
    held = drift.get("held")  # records of earlier versions have `at` and `why` only
    where = f"token {drift['at']}" + (f" of {held} held" if held else "")
    yield Line("note", "", _visible(f"turn {turn} starts a new sequence: {where} differs, {drift['why']}"))
    if held:
        for side, key in (("held", "held_text"), ("new", "new_text")):
            text = f"after {drift['before']!r}: " if drift["before"] else ""
            yield Line("note", "", _visible(f"  {side:<4} {text}{drift[key]!r}"))


def _message_lines(message: Mapping[str, Any], turn: int, calls: Mapping[Any, Mapping[str, Any]]) -> Iterator[Line]:
    role = str(message.get("role", "?"))
    text = _content_text(message.get("content"))
    if role == "tool":
        call = calls.get((turn, message.get("tool_call_id")))
        failed = call is not None and call["error"] is not None
        yield Line("error" if failed else "tool", f"<- {message.get('name') or 'tool'}", text + _call_note(call))
        return
    if message.get("reasoning_content"):
        yield Line("thinking", "(thinks)", str(message["reasoning_content"]))
    tool_calls = message.get("tool_calls") or []
    if text or not tool_calls:
        yield Line(role if role in _STYLES else "note", role, text or "(empty)")
    for call in tool_calls:
        function = call.get("function", call)
        yield Line("call", role, f"-> {function.get('name')}({_arguments_text(function.get('arguments'))})")


def _call_note(call: Mapping[str, Any] | None) -> str:
    if call is None:
        return ""
    note = f"  [{call['error']}]" if call["error"] else ""
    return note + (f"  ({call['seconds']:.2f} s)" if call["seconds"] >= 0.1 else "")


def _arguments_text(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return "" if arguments is None else str(arguments)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _content_text(content: Any) -> str:
    """The text of a message's content; other blocks as a short note in brackets."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    parts = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "text":
            parts.append(str(block.get("text", "")))
        elif isinstance(block, dict) and "sha256" in block:
            size = block.get("size")
            size = "x".join(map(str, size)) if isinstance(size, list) else size
            parts.append(f"[{block.get('type')} {size} {block['sha256'][:8]}]")
        else:
            parts.append(f"[{json.dumps(block, ensure_ascii=False)[:80]}]")
    return "\n".join(parts)


def _ending(record: Mapping[str, Any], max_chars: int | None) -> Iterator[Line]:
    reward = record["reward"]
    text = f"{record['outcome']}: " + ("not scored" if reward is None else f"reward {_number(reward)}")
    sources = record["rewards"]
    if len(sources) > 1:
        text += " = " + " + ".join(
            f"{name} {'-' if value is None else _number(value)}" for name, value in sources.items()
        )
    if record["advantage"] is not None:
        text += f", advantage {_number(record['advantage'], sign=True)}"
    if record["truncated"]:
        text += ", truncated"
    failed = bool(record["error"]) or record["outcome"].endswith("_failed") or record["outcome"] == "deadline"
    yield Line("error" if failed else "good", "", _visible(text))
    if record["extra"]:
        yield Line("note", "extra", _shorten(_visible(json.dumps(record["extra"], ensure_ascii=False)), max_chars))
    if record["error"]:
        yield Line("error", "", _visible(record["error"].rstrip()))


def _number(value: Any, *, sign: bool = False) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:{'+' if sign else ''}.3f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _visible(text: str) -> str:
    """The text with control characters (terminal escapes, text direction) written out.

    >>> _visible(chr(27) + "[2J ok")
    '\\\\x1b[2J ok'
    """
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def _shorten(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} ...\n({len(text) - max_chars} more characters)"


_MARGIN = 12  # columns for the label; longer labels push the text


def _wrapped(line: Line, width: int) -> str:
    """The paragraph as indented lines no wider than `width`."""
    margin = "" if line.kind in ("head", "note", "ids", "good", "error") and not line.label else " " * _MARGIN
    first = f"{line.label:<{_MARGIN - 1}} " if margin else ""
    paragraphs = line.text.split("\n")
    out = []
    for number, paragraph in enumerate(paragraphs):
        start = first if number == 0 else margin
        wrapped = textwrap.wrap(
            paragraph.expandtabs(4),
            max(width, 40),
            initial_indent=start,
            subsequent_indent=margin,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        out.extend(piece.rstrip() for piece in wrapped or [start])
    return "\n".join(out)


def transcript_text(
    record: Mapping[str, Any], *, width: int = DEFAULT_WIDTH, ids: bool = False, max_chars: int | None = MAX_CHARS
) -> str:
    """The episode as plain text, wrapped at `width` columns."""
    return "\n".join(_wrapped(line, width) for line in transcript_lines(record, ids=ids, max_chars=max_chars))


def render_transcript(
    record: Mapping[str, Any], *, width: int | None = None, ids: bool = False, max_chars: int | None = MAX_CHARS
) -> RenderableType:
    """The episode as a rich renderable with colours: the same lines as `transcript_text`."""
    from rich.console import Group  # rich costs 30 ms to import, plain text does not need it
    from rich.text import Text

    lines = transcript_lines(record, ids=ids, max_chars=max_chars)
    # Text, not markup: what a model wrote in square brackets stays as it is.
    return Group(*(Text(_wrapped(line, width or DEFAULT_WIDTH), style=_STYLES[line.kind]) for line in lines))
