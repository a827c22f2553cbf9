"""Forks by hand: what is joined, what the metrics count, what a record and its transcript keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.record import episode_to_dict, rollout_from_dict
from agentrl.rollout.sequences import rendered_again, to_sequences
from agentrl.train.metrics import MetricWindow, Reported, add_rollout_metrics
from agentrl.types import Drift, Outcome, Rollout, RolloutGroup, Task, TurnRecord
from agentrl.view.transcript import transcript_text


def turn(prompt: list[int] | None, output: list[int] | None, drift: Drift | None = None) -> TurnRecord:
    return TurnRecord(prompt, output, None if output is None else [-1.0] * len(output), {}, "stop", drift=drift)


def rollout(turns: list[TurnRecord], reward: float | None = None, member: int = 0, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "id": f"r{member}", "group_id": "g", "member": member, "task": Task(0, 0, 0), "environment": None,
        "prompt": "x", "messages": [], "completion": "", "completion_ids": [], "turns": tuple(turns),
        "sequences": tuple(to_sequences(turns)), "tool_calls": (), "outcome": Outcome.FINISHED, "reward": reward,
        "rewards": {} if reward is None else {"score": reward},
    }  # fmt: skip
    return Rollout(**(fields | changes))


# The prompts of a rollout that continues, then differs in its last held token, then in the second of its prompt.
WOBBLE = [
    turn([1, 2], [10, 11]),
    turn([1, 2, 10, 11, 3], [12, 13]),  # continues the 4 held tokens
    turn([1, 2, 10, 11, 3, 12, 99, 4], [14]),  # 7 held, the last one another: 1 rendered again
    turn([1, 7, 4, 5], [15, 16]),  # 9 held, 1 in common: 8 rendered again
]


def test_three_kinds_of_transitions_by_hand_F067() -> None:
    assert rendered_again(WOBBLE) == [0, 1, 8]
    assert [(s.input_ids, s.completion_mask) for s in to_sequences(WOBBLE)] == [
        ([1, 2, 10, 11, 3, 12, 13], [False, False, True, True, False, True, True]),
        ([1, 2, 10, 11, 3, 12, 99, 4, 14], [False] * 8 + [True]),
        ([1, 7, 4, 5, 15, 16], [False] * 4 + [True] * 2),
    ]


def test_equal_ids_of_other_images_are_a_fork() -> None:
    one, same, other = (
        TurnRecord(prompt, [3], [-1.0], {}, "stop", media=media)
        for prompt, media in (([1, 2], ("cat",)), ([1, 2, 3, 4], ("cat", "dog")), ([1, 2, 3, 4, 3, 5], ("cow", "dog")))
    )
    assert rendered_again([one, same, other]) == [0, 5]


def logged(*groups: RolloutGroup) -> dict[str, float]:
    window = MetricWindow()
    add_rollout_metrics(window, groups, Reported(frozenset({"push"})))
    return MetricWindow.values([window.state()])


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup("g", Task(0, 0, 0), tuple(rollouts))


def test_fork_metrics_count_transitions_by_hand() -> None:
    calm = [turn([1], [2]), turn([1, 2, 3], [4])]  # one transition that continues
    single = [turn([1], [2])]  # no transition
    api = [turn(None, None), turn(None, None)]  # text only: nothing can be compared
    cut = [turn([1], []), turn([1, 5], [])]  # nothing sampled: no sample
    groups = [[WOBBLE, calm], [single, api, cut], [single, cut]]
    got = logged(*(group(*map(rollout, turns)) for turns in groups))
    # Transitions: 3 + 1, 0 + 0 + 1, 0 + 1; 2 of them forked, 1 + 8 held tokens were rendered again.
    assert got["rollout/fork_frac"] == pytest.approx(2 / 6)
    assert got["rollout/drift_tokens_mean"] == pytest.approx(9 / 6)
    assert got["rollout/drift_tokens_max"] == 8
    assert got["rollout/samples_per_rollout"] == pytest.approx((3 + 1 + 1 + 0 + 0 + 1 + 0) / 7)


def test_fork_metrics_without_transitions_and_of_failed_rollouts() -> None:
    failed = rollout(WOBBLE, outcome=Outcome.TOOL_FAILED, sequences=())
    got = logged(group(rollout([turn([1], [2])]), failed))
    names = ("fork_frac", "drift_tokens_mean", "drift_tokens_max", "samples_per_rollout")
    assert [got[f"rollout/{name}"] for name in names] == [0.0, 0.0, 0, 1.0]


def test_windows_of_several_ranks_join_by_transition() -> None:
    states = []
    for turns in (WOBBLE, [turn([1], [2]), turn([1, 2, 3], [4])]):
        window = MetricWindow()
        add_rollout_metrics(window, [group(rollout(turns))], Reported())
        states.append(window.state())
    got = MetricWindow.values(states)
    assert got["rollout/fork_frac"] == 0.5 and got["rollout/drift_tokens_mean"] == 9 / 4
    assert got["rollout/drift_tokens_max"] == 8


# --- the record ------------------------------------------------------------------------
DRIFT = Drift(6, "the chat template rewrites history", 7, "cave\n", "hello", "bye \x1b[2J")


def test_a_drift_is_on_disk_and_in_the_transcript() -> None:
    say = {"role": "assistant", "content": "so"}
    turns = [WOBBLE[0], TurnRecord([1, 9], [12], [-1.0], say, "stop", drift=DRIFT)]
    played = rollout(turns, messages=[{"role": "user", "content": "x"}, say])
    record = json.loads(json.dumps(episode_to_dict(played)))
    assert record["turns"][1]["drift"] == {
        "at": 6, "why": "the chat template rewrites history", "held": 7, "before": "cave\n", "held_text": "hello",
        "new_text": "bye \x1b[2J",
    }  # fmt: skip
    assert rollout_from_dict(record).turns[1].drift == DRIFT
    lines = transcript_text(record).split("\n")
    at = lines.index("turn 1 starts a new sequence: token 6 of 7 held differs, the chat template rewrites history")
    assert lines[at + 1 : at + 3] == [r"  held after 'cave\n': 'hello'", r"  new  after 'cave\n': 'bye \x1b[2J'"]


def test_a_record_of_an_earlier_version_can_be_read() -> None:
    record = episode_to_dict(rollout([WOBBLE[0], turn([1, 9], [12], Drift(1, "because"))]))
    record["turns"][1]["drift"] = {"at": 1, "why": "because"}
    assert rollout_from_dict(record).turns[1].drift == Drift(1, "because")
    assert "turn 1 starts a new sequence: token 1 differs, because" in transcript_text(record)
