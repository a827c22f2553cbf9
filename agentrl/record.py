"""What was played and trained, on disk: one JSON line per episode (`episodes.jsonl`).

A line holds everything of a `Rollout`: `rollout_from_dict(episode_to_dict(rollout))` gives it back. Ids that can be
derived are not written twice: a turn's prompt that continues the previous turn is written as `prompt_suffix_ids`, and
a mask as the borders of its runs. Not-a-number is written as null, infinity as the string "Infinity" or "-Infinity".
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.json_safe import json_safe, safe_float
from agentrl.types import (
    Drift,
    Message,
    Outcome,
    Rollout,
    Task,
    ToolCallRecord,
    TrainingSequence,
    TurnRecord,
    VersionSpan,
)

SCHEMA_VERSION = 1
EPISODES_FILE = "episodes.jsonl"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


# --- writing ---------------------------------------------------------------------------
def episode_to_dict(rollout: Rollout, *, step: int | None = None) -> dict[str, Any]:
    """The rollout as a dict of JSON types, schema version 1. `step` is the optimizer step that it was played for."""
    return _to_dict(rollout, step, json_safe(rollout.task))


def _to_dict(rollout: Rollout, step: int | None, task: Any) -> dict[str, Any]:
    messages = json_safe(rollout.messages)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": rollout.id,
        "group_id": rollout.group_id,
        "member": rollout.member,
        "step": step,
        "task": task,
        "environment": rollout.environment,
        "prompt": _prompt_to_json(rollout, messages),
        "messages": messages,
        "completion": _completion_to_json(rollout, messages),
        "completion_ids": rollout.completion_ids,
        "turns": _turns_to_json(rollout.turns, rollout.messages),
        "sequences": _sequences_to_json(rollout),
        "tool_calls": [_call_to_json(call) for call in rollout.tool_calls],
        "rewards": json_safe(rollout.rewards),
        "reward": json_safe(rollout.reward),
        "advantage": json_safe(rollout.advantage),
        "outcome": rollout.outcome.value,
        "error": rollout.error,
        "attempts": rollout.attempts,
        "truncated": rollout.truncated,
        "extra": json_safe(rollout.extra),
        "seconds": json_safe(rollout.seconds),
    }


def _prompt_to_json(rollout: Rollout, messages: list[Any]) -> Any:
    prompt = rollout.prompt
    if isinstance(prompt, list) and rollout.messages[: len(prompt)] == prompt:
        return messages[: len(prompt)]
    return json_safe(prompt)


def _call_to_json(call: ToolCallRecord) -> dict[str, Any]:
    return {
        "turn": call.turn, "id": call.id, "name": call.name, "arguments": json_safe(call.arguments),
        "content": json_safe(call.content), "error": call.error, "seconds": json_safe(call.seconds),
    }  # fmt: skip


def _completion_to_json(rollout: Rollout, messages: list[Any]) -> Any:
    """Text, messages, or {"from_message": n} where the completion is the conversation from its n-th message on."""
    completion = rollout.completion
    if isinstance(completion, list):
        start = len(rollout.messages) - len(completion)
        if start >= 0 and rollout.messages[start:] == completion:
            return {"from_message": start}
    return json_safe(completion)


def _turns_to_json(turns: tuple[TurnRecord, ...], messages: list[Any]) -> list[dict[str, Any]]:
    out = []
    held: list[int] | None = None  # the previous turn's prompt and output
    after = 0  # messages before this index belong to earlier turns
    for turn in turns:
        entry: dict[str, Any] = {"prompt_length": None if turn.prompt_ids is None else len(turn.prompt_ids)}
        if turn.prompt_ids is not None:
            if held is not None and turn.prompt_ids[: len(held)] == held:
                entry["prompt_suffix_ids"] = turn.prompt_ids[len(held) :]
            else:
                entry["prompt_ids"] = turn.prompt_ids
        index = next((i for i in range(after, len(messages)) if _same(messages[i], turn.message)), None)
        if index is None:  # not in the conversation (rolled back, say): keep it here
            entry["message"] = json_safe(turn.message)
        else:
            entry["message_index"], after = index, index + 1
        entry["output_ids"] = turn.output_ids
        entry["output_log_probs"] = _floats(turn.output_log_probs)
        entry["finish_reason"] = turn.finish_reason
        entry["version"] = turn.version
        if turn.versions:
            entry["versions"] = [[span.version, span.start, span.end] for span in turn.versions]
        entry["drift"] = None if turn.drift is None else json_safe(turn.drift)
        entry["seconds"] = json_safe(turn.seconds)
        out.append(entry)
        held = None if turn.prompt_ids is None or turn.output_ids is None else turn.prompt_ids + turn.output_ids
    return out


def _same(message: Message, other: Message) -> bool:
    return message is other or (message.get("role") == other.get("role") and message == other)


def _floats(values: list[float] | None) -> list[Any] | None:
    return values if values is None or all(map(math.isfinite, values)) else [safe_float(float(x)) for x in values]


def _sequences_to_json(rollout: Rollout) -> list[dict[str, Any]]:
    """Each sequence; its log-probs are written only where they are not the turns' own, one after the other."""
    sampled = [x for turn in rollout.turns for x in turn.output_log_probs or ()]
    out, start = [], 0
    for sequence in rollout.sequences:
        borders = mask_borders(sequence.completion_mask)
        trained = [x for left, right in borders for x in sequence.old_log_probs[left:right]]
        entry: dict[str, Any] = {
            "input_ids": sequence.input_ids,
            "completion_mask": borders,
            "version": sequence.version,
        }
        if sampled[start : start + len(trained)] != trained:
            entry["old_log_probs"] = _floats(trained)
        if sequence.media:
            entry["media"] = json_safe(sequence.media)
        start += len(trained)
        out.append(entry)
    return out


def mask_borders(mask: list[bool]) -> list[list[int]]:
    """The runs of True as [start, stop) pairs.

    >>> mask_borders([False, True, True, False, True])
    [[1, 3], [4, 5]]
    """
    borders, stop, length = [], 0, len(mask)
    while stop < length:
        try:
            start = mask.index(True, stop)
        except ValueError:
            break
        try:
            stop = mask.index(False, start)
        except ValueError:
            stop = length
        borders.append([start, stop])
    return borders


class EpisodeWriter:
    """Appends episodes to a file, one line and one write each, so that a crash can tear only the last line.

    A torn last line that an earlier run left is cut off when the file is opened. Close it with `close` or `with`.

    >>> import tempfile
    >>> from agentrl.types import Outcome, Rollout, Task
    >>> rollout = Rollout("r0", "g0", 0, Task(0, 0, 1), None, "hi", [], "", [], (), (), (), Outcome.FINISHED)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with EpisodeWriter(f"{folder}/episodes.jsonl") as writer:
    ...         writer.write(rollout, step=3)
    ...     [record["step"] for record in read_episodes(writer.path)]
    [3]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        missing_newline = _cut_torn_line(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - held open for the life of the writer
        if missing_newline:
            self._file.write(b"\n")

    def write(self, rollout: Rollout, *, step: int | None = None) -> None:
        """The episode is in the file, and survives a crash of this process."""
        self.write_record(episode_to_dict(rollout, step=step))

    def write_all(self, rollouts: Iterable[Rollout], *, step: int | None = None) -> None:
        """All the episodes are in the file, in order."""
        last: tuple[Task, Any] | None = None  # the members of a group have one task
        for rollout in rollouts:
            if last is None or last[0] is not rollout.task:
                last = rollout.task, json_safe(rollout.task)
            self.write_record(_to_dict(rollout, step, last[1]))

    def write_record(self, record: Mapping[str, Any]) -> None:
        """A dict made by `episode_to_dict` is in the file; extra keys are kept."""
        try:
            line = _encode(record).encode() + b"\n"
        except UnicodeEncodeError:  # a lone surrogate in a string: JSON's \u escapes can hold it, UTF-8 cannot
            line = _encode_ascii(record).encode() + b"\n"
        rest = memoryview(line)
        while rest:  # a raw write may take fewer bytes than it was given
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_record(path: str | os.PathLike[str], step: int) -> None:
    """The file holds no episode of step `step` or later: what follows can be appended.

    At step 0 a run begins: the file of an earlier run is moved aside to ``<name>-1``, ``-2`` and so on. Later, a run
    was resumed: episodes that it will play again are taken out.
    """
    file = Path(path)
    if not file.exists():
        return
    if step == 0:
        numbers = itertools.count(1)
        file.rename(next(p for n in numbers if not (p := file.with_stem(f"{file.stem}-{n}")).exists()))
        return
    replacement = file.with_suffix(".tmp")
    with open(file, "rb") as old, open(replacement, "wb") as kept:
        kept.writelines(line for line in old if _step_of(line) < step)  # bytes: text may hold other line separators
    replacement.replace(file)


def _step_of(line: bytes) -> float:
    """The step of a record's line; infinite for one that cannot be read (the torn last line of a killed run)."""
    try:
        return json.loads(line).get("step") or 0
    except (ValueError, AttributeError):
        return math.inf


def _cut_torn_line(path: Path) -> bool:
    """Cuts what a crash left after the last newline; True where a whole record only lacks its newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        tail = b""
        while end > 0 and b"\n" not in tail:
            start = max(0, end - 65536)
            file.seek(start)
            tail = file.read(end - start) + tail
            end = start
        torn = tail.rpartition(b"\n")[2]
        if not torn:
            return False
        try:
            json.loads(torn)
            return True
        except ValueError:
            file.seek(-len(torn), os.SEEK_END)
            file.truncate()
            return False


# --- reading ---------------------------------------------------------------------------
def read_episodes(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the file's records in order. A torn last line is left out; any other line that is no record is an error.

    `path` may be a folder that holds `episodes.jsonl`. Raises ConfigurationError with the line number.
    """
    file = Path(path)
    if file.is_dir():
        file = file / EPISODES_FILE
    if not file.is_file():
        raise ConfigurationError(f"There is no file '{file}'. Give the path of an episodes.jsonl that a run wrote.")
    return _records(file)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:  # bad JSON or bad UTF-8
                if not line.endswith(b"\n"):
                    return
                text = f"{path}, line {number}: this is not JSON. Remove the line to read the rest."
                raise ConfigurationError(text) from None
            if not isinstance(record, dict) or "schema_version" not in record:
                raise ConfigurationError(
                    f"{path}, line {number}: this is not an episode record (it has no schema_version). "
                    "Give a file that EpisodeWriter wrote."
                )
            if record["schema_version"] != SCHEMA_VERSION:
                raise ConfigurationError(
                    f"{path}, line {number}: schema_version is {record['schema_version']!r} and this agentrl reads "
                    f"{SCHEMA_VERSION}. Use the agentrl version that wrote the file."
                )
            yield record


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def turn_prompt_ids(record: Mapping[str, Any]) -> list[list[int] | None]:
    """The whole prompt ids of each turn, None for turns without ids.

    >>> turns = [{"prompt_ids": [1, 2], "output_ids": [3]}, {"prompt_suffix_ids": [4], "output_ids": [5]}]
    >>> turn_prompt_ids({"turns": turns})
    [[1, 2], [1, 2, 3, 4]]
    """
    prompts: list[list[int] | None] = []
    held: list[int] = []
    for turn in record["turns"]:
        suffix = turn.get("prompt_suffix_ids")
        prompt = turn.get("prompt_ids") if suffix is None else held + suffix
        prompts.append(prompt)
        held = (prompt or []) + (turn["output_ids"] or [])
    return prompts


def rollout_from_dict(record: Mapping[str, Any]) -> Rollout:
    """The rollout that the record was made from; pictures and bytes stay the small dicts that they were written as."""
    completion = record["completion"]
    if isinstance(completion, dict):
        completion = record["messages"][completion["from_message"] :]
    reward, advantage = record["reward"], record["advantage"]
    return Rollout(
        **{key: record[key] for key in _AS_THEY_ARE},
        task=Task(**record["task"]),
        completion=completion,
        turns=tuple(_turns_from_json(record)),
        sequences=tuple(_sequences_from_json(record)),
        tool_calls=tuple(ToolCallRecord(**call) for call in record["tool_calls"]),
        outcome=Outcome(record["outcome"]),
        rewards={name: None if value is None else float(value) for name, value in record["rewards"].items()},
        reward=None if reward is None else float(reward),
        advantage=None if advantage is None else float(advantage),
    )


_AS_THEY_ARE = (
    *("id", "group_id", "member", "environment", "prompt", "messages", "completion_ids"),
    *("error", "attempts", "truncated", "extra", "seconds"),
)


def _turns_from_json(record: Mapping[str, Any]) -> Iterator[TurnRecord]:
    for turn, prompt_ids in zip(record["turns"], turn_prompt_ids(record), strict=True):
        log_probs = turn["output_log_probs"]
        yield TurnRecord(
            prompt_ids=prompt_ids,
            output_ids=turn["output_ids"],
            output_log_probs=None if log_probs is None else [_number(x) for x in log_probs],
            message=turn["message"] if "message" in turn else record["messages"][turn["message_index"]],
            finish_reason=turn["finish_reason"],
            version=turn["version"],
            versions=tuple(VersionSpan(*span) for span in turn.get("versions", ())),
            drift=None if turn["drift"] is None else Drift(**turn["drift"]),
            seconds=turn["seconds"],
        )


def _sequences_from_json(record: Mapping[str, Any]) -> Iterator[TrainingSequence]:
    sampled = [x for turn in record["turns"] for x in turn["output_log_probs"] or ()]
    start = 0
    for sequence in record["sequences"]:
        borders, length = sequence["completion_mask"], len(sequence["input_ids"])
        count = sum(right - left for left, right in borders)
        trained = iter(sequence.get("old_log_probs", sampled[start : start + count]))
        mask, log_probs = [False] * length, [math.nan] * length
        for left, right in borders:
            for index in range(left, right):
                mask[index], log_probs[index] = True, _number(next(trained))
        start += count
        yield TrainingSequence(
            sequence["input_ids"], mask, log_probs, sequence["version"], tuple(sequence.get("media", ()))
        )
