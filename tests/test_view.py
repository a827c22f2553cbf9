"""The transcript and the reward curve, by hand."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agentrl.record import episode_to_dict
from agentrl.types import Drift, Outcome, Rollout, Task, ToolCallRecord, TurnRecord
from agentrl.view.curve import curve_text, smooth, ticks, write_png, write_svg
from agentrl.view.transcript import render_transcript, transcript_text

SAY = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "hmm",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {"place": "cave"}}}
    ],
}
MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "find it"}, {"type": "image", "sha256": "ab" * 32, "size": [2, 3]}],
    },
    SAY,
    {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "no such place"},
]
CALL = ToolCallRecord(0, "call_0", "search", {"place": "cave"}, "no such place", "bad_arguments", 0.25)
ROLLOUT = Rollout(
    "r7", "g3", 1, Task(5, 2, 99), "Hunt", MESSAGES[:1], MESSAGES, MESSAGES[1:], [10, 11],
    (TurnRecord([1, 2], [10, 11], [-0.5, -1.0], SAY, "length", 0, Drift(1, "the template dropped it")),),
    (), (CALL,), Outcome.ENV_DONE, rewards={"Hunt": 0.25, "len": None}, reward=0.25, advantage=1.5,
    seconds={"total": 2.0},
)  # fmt: skip


def test_the_transcript_by_hand():
    assert transcript_text(episode_to_dict(ROLLOUT, step=40)).split("\n") == [
        "episode r7 · group g3 member 1 · step 40 · Hunt · row 5 epoch 2 seed 99",
        "1 turn · 1 tool call · 2 sampled tokens in 0 sequences · 2.00 s",
        "user        find it",
        "            [image 2x3 abababab]",
        "turn 0 starts a new sequence: token 1 differs, the template dropped it",
        "turn 0 was cut at its token limit",
        "(thinks)    hmm",
        "assistant   I look.",
        'assistant   -> search(place="cave")',
        "<- search   no such place  [bad_arguments]  (0.25 s)",
        "env_done: reward 0.250 = Hunt 0.250 + len -, advantage +1.500",
    ]


def test_ids_are_shown_on_request():
    text = transcript_text(episode_to_dict(ROLLOUT), ids=True)
    assert "turn 0 prompt, 2 ids: 1 2" in text
    assert "turn 0 sampled, 2 ids (log-prob): 10(-0.50) 11(-1.00)" in text


def test_a_failure_shows_its_traceback():
    failed = dataclasses.replace(ROLLOUT, outcome=Outcome.RESET_FAILED, error="Traceback\nOSError: gone", reward=None)
    text = transcript_text(episode_to_dict(failed))
    assert "reset_failed: not scored" in text and text.endswith("Traceback\nOSError: gone")


def test_no_text_can_act_on_the_terminal():
    nasty = {"role": "assistant", "content": "\x1b[2J\x07\r\x9b31m\u202eevil [bold]x[/bold]"}
    rollout = dataclasses.replace(ROLLOUT, messages=[nasty], turns=())
    record = episode_to_dict(rollout)
    text = transcript_text(record)
    assert not any((ord(c) < 32 and c != "\n") or ord(c) in (0x9B, 0x202E) for c in text)
    assert r"\x1b[2J\x07\r\x9b31m\u202eevil [bold]x[/bold]" in text
    assert r"\x1b[2J" in drawn(record) and "[bold]x[/bold]" in drawn(record)


def drawn(record) -> str:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_transcript(record, width=100))
    return console.export_text()


def test_rich_shows_the_same_lines():
    record = episode_to_dict(ROLLOUT, step=40)
    assert [x.rstrip() for x in drawn(record).rstrip().split("\n")] == transcript_text(record).split("\n")


def test_long_messages_are_cut_and_say_so():
    rollout = dataclasses.replace(ROLLOUT, messages=[{"role": "user", "content": "x" * 5000}], turns=())
    record = episode_to_dict(rollout)
    assert "(3000 more characters)" in transcript_text(record)
    assert "more characters" not in transcript_text(record, max_chars=None)
    assert max(map(len, transcript_text(record, width=80).split("\n"))) <= 80


content = (
    st.none() | st.text(max_size=30) | st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=4)), max_size=2)
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "assistant", "odd"]), "content": content}))
)
def test_property_any_conversation_can_be_shown(messages):
    record = episode_to_dict(dataclasses.replace(ROLLOUT, messages=messages, turns=()))
    text = transcript_text(record)
    assert "env_done: reward 0.250" in text
    assert all(c == "\n" or (ord(c) >= 32 and ord(c) != 127) for c in text)


# --- curve -----------------------------------------------------------------------------
def test_smooth_by_hand():
    assert smooth([0, 3, 6, 9], window=3) == [1.5, 3, 6, 7.5]
    assert smooth([1, None, 3], window=1)[0::2] == [1, 3]
    assert smooth([]) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, 12, [-4, -2, 0, 2, 4, 6, 8, 10, 12]),
        (0.5, 0.5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_ticks_by_hand(low, high, expected):
    assert ticks(low, high) == expected


def test_curve_text_unicode():
    assert curve_text([0, 1], width=8, height=2, title="t").split("\n") == [
        "t",
        "1 ┤  ╭──",
        "0 ┤──╯",
        "  └─────",
        "   1   2",
    ]


def test_curve_text_of_nothing():
    assert curve_text([], title="t") == "t\n(no values yet)"
    assert curve_text([None, float("nan")]) == "(no values yet)"


numbers = st.none() | st.floats(-1e6, 1e6) | st.just(float("nan")) | st.just(float("inf"))


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, max_size=200), st.integers(1, 100), st.integers(1, 20), st.booleans())
def test_property_any_curve_fits_its_width(values, width, height, ascii):
    text = curve_text(values, width=width, height=height, ascii=ascii)
    assert not ascii or text.isascii()
    assert all(len(line) <= max(width, 25) for line in text.split("\n"))


@pytest.mark.parametrize("values", [[], [0.5], [None, 0.1, float("nan"), 0.9], [i / 99 for i in range(100)]])
def test_pictures_are_written(tmp_path, values):
    write_svg(tmp_path / "c.svg", values, title="a < b & c")
    root = ElementTree.parse(tmp_path / "c.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    known = [x for x in values if x is not None and math.isfinite(x)]
    assert len(root.findall(f"{svg}circle")) == len(known)
    assert "a < b & c" in [node.text for node in root.iter(f"{svg}text")]
    write_png(tmp_path / "c.png", values, title="a < b & c")
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.size == (1440, 800)
        blue = picture.tobytes().count(b"\x1f\x6f\xeb")
    assert (blue > 500) == (len(values) == 100)
