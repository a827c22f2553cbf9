"""Episodes on disk: everything comes back, a crash tears at most the last line, any value can be written."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agentrl.errors import ConfigurationError
from agentrl.json_safe import json_safe
from agentrl.record import (
    EPISODES_FILE,
    SCHEMA_VERSION,
    EpisodeWriter,
    begin_record,
    episode_to_dict,
    mask_borders,
    read_episodes,
    rollout_from_dict,
    turn_prompt_ids,
)
from agentrl.types import Drift, Outcome, Rollout, Task, ToolCallRecord, TrainingSequence, TurnRecord

NAN = float("nan")


def make_rollout(**changes) -> Rollout:
    """Two turns by hand. Prompt [1, 2, 3], sampled [10, 11], a tool result [4, 5], sampled [12]."""
    say = {"role": "assistant", "content": "", "tool_calls": [_call("search", {"place": "cave"})]}
    end = {"role": "assistant", "content": "done"}
    messages = [
        {"role": "user", "content": "find it"},
        say,
        {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "nothing in the cave"},
        end,
    ]
    rollout = Rollout(
        id="r7",
        group_id="g3",
        member=1,
        task=Task(index=5, epoch=2, seed=99, row={"prompt": "find it", "level": 3}, environment="hunt"),
        environment="Hunt",
        prompt=messages[:1],
        messages=messages,
        completion=messages[1:],
        completion_ids=[10, 11, 4, 5, 12],
        turns=(
            TurnRecord([1, 2, 3], [10, 11], [-0.1, -0.2], say, "stop", 4, None, 0.5),
            TurnRecord([1, 2, 3, 10, 11, 4, 5], [12], [-0.3], end, "stop", 5, None, 0.25),
        ),
        sequences=(
            TrainingSequence(
                [1, 2, 3, 10, 11, 4, 5, 12],
                [False, False, False, True, True, False, False, True],
                [NAN, NAN, NAN, -0.1, -0.2, NAN, NAN, -0.3],
                4,
            ),
        ),
        tool_calls=(ToolCallRecord(0, "call_0", "search", {"place": "cave"}, "nothing in the cave", None, 0.001),),
        outcome=Outcome.FINISHED,
        rewards={"Hunt": 0.5, "length": None},
        reward=0.5,
        advantage=-1.25,
        extra={"note": "ok"},
        seconds={"total": 1.5},
    )
    return dataclasses.replace(rollout, **changes)


def _call(name, arguments):
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def through_json(rollout: Rollout, **kwargs) -> dict:
    return json.loads(json.dumps(episode_to_dict(rollout, **kwargs), allow_nan=False))


def same(left: Rollout, right: Rollout) -> bool:
    return repr(left) == repr(right)  # NaN equals NaN, 1 differs from 1.0


# --- the shape, by hand ----------------------------------------------------------------
def test_the_record_by_hand():
    record = through_json(make_rollout(), step=40)
    assert record["schema_version"] == SCHEMA_VERSION == 1
    assert [record[key] for key in ("id", "group_id", "member", "step")] == ["r7", "g3", 1, 40]
    row = {"prompt": "find it", "level": 3}
    assert record["task"] == {"index": 5, "epoch": 2, "seed": 99, "row": row, "environment": "hunt"}
    assert record["outcome"] == "finished"
    assert record["rewards"] == {"Hunt": 0.5, "length": None}
    assert [record["reward"], record["advantage"]] == [0.5, -1.25]
    first, second = record["turns"]
    assert first["prompt_ids"] == [1, 2, 3] and "prompt_suffix_ids" not in first
    assert second["prompt_suffix_ids"] == [4, 5] and "prompt_ids" not in second
    assert [first["prompt_length"], second["prompt_length"]] == [3, 7]
    assert [first["message_index"], second["message_index"]] == [1, 3]
    assert record["sequences"] == [
        {"input_ids": [1, 2, 3, 10, 11, 4, 5, 12], "completion_mask": [[3, 5], [7, 8]], "version": 4}
    ]
    assert turn_prompt_ids(record) == [[1, 2, 3], [1, 2, 3, 10, 11, 4, 5]]


def test_a_fork_keeps_its_whole_prompt():
    rollout = make_rollout()
    fork = dataclasses.replace(rollout.turns[1], prompt_ids=[1, 9, 4, 5], drift=Drift(1, "the template dropped it"))
    sequences = (
        TrainingSequence([1, 2, 3, 10, 11], [False] * 3 + [True] * 2, [NAN] * 3 + [-0.1, -0.2], 4),
        TrainingSequence([1, 9, 4, 5, 12], [False] * 4 + [True], [NAN] * 4 + [-0.3], 5),
    )
    rollout = dataclasses.replace(rollout, turns=(rollout.turns[0], fork), sequences=sequences)
    record = through_json(rollout)
    assert record["turns"][1]["prompt_ids"] == [1, 9, 4, 5]
    assert record["turns"][1]["drift"] == {
        "at": 1,
        "why": "the template dropped it",
        "held": 0,
        "before": "",
        "held_text": "",
        "new_text": "",
    }
    assert not any("old_log_probs" in sequence for sequence in record["sequences"])  # the turns hold them
    assert same(rollout_from_dict(record), rollout)


def test_log_probs_that_are_not_the_turns_own_are_kept():
    rollout = make_rollout()
    sequence = dataclasses.replace(rollout.sequences[0], old_log_probs=[NAN] * 3 + [-9.0, -8.0] + [NAN] * 2 + [-7.0])
    rollout = dataclasses.replace(rollout, sequences=(sequence,))
    assert through_json(rollout)["sequences"][0]["old_log_probs"] == [-9.0, -8.0, -7.0]
    assert same(rollout_from_dict(through_json(rollout)), rollout)


def test_a_turn_that_is_not_in_the_conversation_keeps_its_message():
    rollout = make_rollout()
    lost = dataclasses.replace(rollout.turns[1], message={"role": "assistant", "content": "rolled back"})
    rollout = dataclasses.replace(rollout, turns=(rollout.turns[0], lost))
    assert through_json(rollout)["turns"][1]["message"]["content"] == "rolled back"
    assert same(rollout_from_dict(through_json(rollout)), rollout)


def test_turns_without_ids_and_plain_strings():
    message = {"role": "assistant", "content": " blue."}
    turn = TurnRecord(None, None, None, message, "stop")
    rollout = make_rollout(
        prompt="The sky is", completion=" blue.", completion_ids=[], messages=[message], turns=(turn,), sequences=()
    )
    record = through_json(rollout)
    assert record["completion"] == " blue." and turn_prompt_ids(record) == [None]
    assert same(rollout_from_dict(record), rollout)


def test_a_failed_episode_keeps_its_traceback():
    rollout = make_rollout(
        outcome=Outcome.RESET_FAILED, error="Traceback ...\nOSError: gone", reward=None, advantage=None, attempts=3
    )
    back = rollout_from_dict(through_json(rollout))
    assert back.outcome is Outcome.RESET_FAILED and back.outcome.failed
    assert same(back, rollout)


# --- any rollout -----------------------------------------------------------------------
ids = st.lists(st.integers(0, 50), max_size=6)
log_prob = st.floats(-20, 0) | st.just(NAN) | st.just(-math.inf)
text = st.text(max_size=8)  # surrogates included
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def rollouts(draw):
    turns, messages = [], [{"role": "user", "content": draw(text)}]
    held, sequences, mask, logs = [], [], [], []
    for _ in range(draw(st.integers(0, 4))):
        if held and draw(st.booleans()):
            suffix = draw(ids)
            prompt = held + suffix
            mask, logs = mask + [False] * len(suffix), logs + [NAN] * len(suffix)
        else:
            if held:
                sequences.append(TrainingSequence(held, mask, logs, 3))
            prompt = draw(ids)
            mask, logs = [False] * len(prompt), [NAN] * len(prompt)
        output = draw(ids)
        log_probs = [draw(log_prob) for _ in output]
        message = {"role": "assistant", "content": draw(text)}
        if draw(st.booleans()):
            messages.append(message)
        drift = Drift(1, "why") if draw(st.booleans()) else None
        turns.append(TurnRecord(prompt, output, log_probs, message, "stop", 1, drift, 0.5))
        held, mask, logs = prompt + output, mask + [True] * len(output), logs + log_probs
    if turns:
        sequences.append(TrainingSequence(held, mask, logs, 3))
    return make_rollout(
        messages=messages,
        prompt=messages[:1],
        completion=messages[1:],
        completion_ids=draw(ids),
        turns=tuple(turns),
        sequences=tuple(sequences),
        task=Task(0, 0, 0, draw(st.dictionaries(text, json_values, max_size=3))),
        extra={"x": draw(json_values)},
        reward=draw(st.none() | st.floats(-5, 5)),
        outcome=draw(st.sampled_from(Outcome)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts(), max_size=3))
def test_property_what_is_written_is_read_back(tmp_path_factory, rollouts):
    path = tmp_path_factory.mktemp("episodes") / EPISODES_FILE
    with EpisodeWriter(path) as writer:
        writer.write_all(rollouts, step=1)
    back = [rollout_from_dict(record) for record in read_episodes(path.parent)]
    assert [repr(x) for x in back] == [repr(x) for x in rollouts]


@given(st.lists(st.booleans(), max_size=40))
def test_property_borders_are_the_mask(mask):
    rebuilt = [False] * len(mask)
    for start, stop in mask_borders(mask):
        assert start < stop
        rebuilt[start:stop] = [True] * (stop - start)
    assert rebuilt == mask


# --- values that JSON does not know ----------------------------------------------------
def test_images_are_named_not_written():
    picture = Image.new("RGB", (4, 3), "red")
    block = json_safe({"type": "image", "image": picture})
    assert block == {"type": "image", "sha256": block["sha256"], "size": [4, 3]} and len(block["sha256"]) == 64
    assert json_safe(picture) == block
    assert json_safe(Image.new("RGB", (4, 3), "blue"))["sha256"] != block["sha256"]
    assert json_safe({"type": "image", "image": "cat.png"}) == {"type": "image", "image": "cat.png"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NAN, None),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, NAN]]), [[1.0, None]]),
        ((1, {2}), [1, [2]]),
        ({1: "a"}, {"1": "a"}),
        (Outcome.FINISHED, "finished"),
        (date(2026, 1, 2), "2026-01-02"),
        (Drift(3, "x"), {"at": 3, "why": "x", "held": 0, "before": "", "held_text": "", "new_text": ""}),
        (b"ab", {"type": "bytes", "size": 2, "sha256": json_safe(b"ab")["sha256"]}),
        (range(3), {"type": "object", "class": "range", "repr": "range(0, 3)"}),
    ],
)
def test_values_become_json(value, expected):
    assert json_safe(value) == expected
    json.dumps(json_safe(value), allow_nan=False)


def test_a_cycle_ends():
    value: dict = {}
    value["self"] = value
    assert "nested more than" in json.dumps(json_safe(value))


def test_a_nan_reward_is_null():
    record = through_json(make_rollout(rewards={"a": NAN}, reward=NAN))
    assert record["rewards"] == {"a": None} and record["reward"] is None


# --- the file --------------------------------------------------------------------------
def write(path: Path, count: int) -> None:
    with EpisodeWriter(path) as writer:
        for member in range(count):
            writer.write(make_rollout(member=member), step=member)


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_writer(tmp_path):
    path = tmp_path / "sub" / "episodes.jsonl"
    write(path, 3)
    whole = path.read_bytes()
    for lost in (1, 2, 100, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-lost])
        kept = 3 if lost == 1 else 2  # only the newline was lost: the record is whole
        assert len(list(read_episodes(path))) == kept
        write(path, 1)
        assert [r["member"] for r in read_episodes(path)] == [*[0, 1, 2][:kept], 0]


def test_garbage_in_the_middle_names_the_line(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    for garbage, said in (
        (b"{broken\n", "line 2: this is not JSON"),
        (b"\xff\xfe\n", "line 2: this is not JSON"),
        (b"[1]\n", "line 2: this is not an episode record"),
        (b'{"schema_version": 99}\n', "line 2: schema_version is 99"),
    ):
        path.write_bytes(first + garbage + second)
        records = read_episodes(path)
        assert next(records)["member"] == 0
        with pytest.raises(ConfigurationError, match=said):
            next(records)


def test_a_missing_file_and_an_empty_one(tmp_path):
    with pytest.raises(ConfigurationError, match="no file"):
        read_episodes(tmp_path / "none.jsonl")
    (tmp_path / "episodes.jsonl").write_text("\n")
    assert list(read_episodes(tmp_path)) == []


def test_every_line_is_on_disk_when_write_returns(tmp_path):
    """A process that dies without closing loses nothing that was written."""
    path = tmp_path / "e.jsonl"
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from agentrl.record import EpisodeWriter\n"
        "writer = EpisodeWriter(sys.argv[1])\n"
        "for n in range(3): writer.write_record({'schema_version': 1, 'n': n})\n"
        "os._exit(9)\n"
    )
    root = str(Path(__file__).parent.parent)
    assert subprocess.run([sys.executable, "-c", code, str(path), root], env=dict(os.environ)).returncode == 9
    assert [r["n"] for r in read_episodes(path)] == [0, 1, 2]


def test_line_separators_and_surrogates_stay_inside_their_line(tmp_path):
    said = "a\u2028b\x85c\ud800d\n"
    path = tmp_path / "e.jsonl"
    with EpisodeWriter(path) as writer:
        writer.write(make_rollout(extra={"said": said}))
        writer.write(make_rollout(extra={"said": "шторм\u2028"}))
    assert [r["extra"]["said"] for r in read_episodes(path)] == [said, "шторм\u2028"]
    assert "шторм".encode() in path.read_bytes()  # readable with grep


def test_writing_64_episodes_costs_less_than_15_ms_of_cpu(tmp_path):
    rng = random.Random(0)
    prompt, sampled = [rng.randrange(500) for _ in range(60)], []
    turns, messages = [], [{"role": "user", "content": "find the treasure " * 8}]
    held, mask, logs = list(prompt), [False] * 60, [NAN] * 60
    for turn in range(4):
        output, log_probs = [rng.randrange(500) for _ in range(15)], [-rng.random() for _ in range(15)]
        message = {"role": "assistant", "content": "", "tool_calls": [_call("search", {"place": "cave", "turn": turn})]}
        messages += [message, {"role": "tool", "tool_call_id": f"call_{turn}", "name": "search", "content": "nothing"}]
        turns.append(TurnRecord(list(held), output, log_probs, message, "stop"))
        result = [rng.randrange(500) for _ in range(8)]
        held += output + result
        mask += [True] * 15 + [False] * 8
        logs += log_probs + [NAN] * 8
        sampled += output
    sequence = TrainingSequence(held, mask, logs)
    rollout = make_rollout(turns=tuple(turns), messages=messages, sequences=(sequence,), completion_ids=held[60:])
    best = math.inf
    with EpisodeWriter(tmp_path / "e.jsonl") as writer:
        for _ in range(5):
            start = time.process_time()
            writer.write_all([rollout] * 64, step=0)
            best = min(best, time.process_time() - start)
    assert best < 0.015


def test_a_new_run_moves_the_old_record_aside_and_a_resumed_one_takes_out_what_it_plays_again(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"schema_version":1,"id":"a","step":0}\n{"schema_version":1,"id":"b","step":4}\n{"schema_ver')
    begin_record(path, 4)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a"]
    begin_record(path, 0)
    path.write_text("second\n")
    begin_record(path, 0)
    assert not path.exists()
    assert (tmp_path / "episodes-1.jsonl").exists() and (tmp_path / "episodes-2.jsonl").read_text() == "second\n"


def test_a_resumed_run_keeps_episodes_whose_text_holds_other_line_separators(tmp_path):
    path = tmp_path / "episodes.jsonl"
    lines = [
        json.dumps({"schema_version": 1, "step": step, "text": "a\u2028b\x85c\x1cd"}, ensure_ascii=False)
        for step in (0, 1)
    ]
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    begin_record(path, 1)
    assert path.read_bytes().decode() == lines[0] + "\n"
