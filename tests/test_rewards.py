"""The ready-made reward functions, on plain strings and on conversations."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from agentrl.errors import ConfigurationError, MissingDependency
from agentrl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)


def said(content, **more):
    return [{"role": "assistant", "content": content, **more}]


THINK = [
    ("<think>\nsix times seven\n</think>\n42", 1.0),
    ("\n <think>x</think>", 1.0),
    ("<think></think>42", 1.0),
    ("42", 0.0),
    ("", 0.0),
    ("first <think>x</think>42", 0.0),
    ("<think>x", 0.0),
    ("x</think>42", 0.0),
    ("</think><think>", 0.0),
    ("<think>a</think>b<think>c</think>d", 0.0),
    ("<think>a<think>b</think>c", 0.0),
    ("<think>a</think>b</think>", 0.0),
]


@pytest.mark.parametrize(("text", "expected"), THINK)
def test_think_format(text, expected):
    assert think_format_reward([text, said(text)], prompts=["p", "p"]) == [expected, expected]


def test_think_format_reads_reasoning_that_was_split_off_and_the_last_assistant_message():
    assert think_format_reward([said("42", reasoning_content="six times seven")]) == [1.0]
    assert think_format_reward([said("42", reasoning_content=None)]) == [0.0]
    assert think_format_reward([said("4</think>2", reasoning_content="x")]) == [0.0]
    call = {"role": "assistant", "content": "<think>look</think>", "tool_calls": []}
    result = {"role": "tool", "content": "<think>no</think>"}
    assert think_format_reward([[call, result, *said("42")]]) == [0.0]
    assert think_format_reward([[*said("hm"), result, *said("<think>x</think>42")]]) == [1.0]
    blocks = [{"type": "image", "image": None}, {"type": "text", "text": "<think>x</think>"}]
    assert think_format_reward([said(blocks), [], [result]]) == [1.0, 0.0, 0.0]


def test_repetition_penalty_by_hand():
    penalty = get_repetition_penalty_reward(ngram_size=3, max_penalty=-2.0)
    text = "a b c A  B\nC d"  # abc bca cab abc bcd: 4 distinct of 5
    assert penalty([text, said(text)]) == pytest.approx([-0.4, -0.4])
    assert penalty(["a b", "", "a b c"]) == [0.0, 0.0, 0.0]
    assert penalty(["a " * 103])[0] == pytest.approx(-2 * (1 - 1 / 101))
    one = get_repetition_penalty_reward(ngram_size=1, max_penalty=-1.0)
    assert one(["x x"]) == [-0.5]


def test_repetition_penalty_counts_the_models_own_words_over_all_turns():
    penalty = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    tool = {"role": "tool", "content": "go north go north"}
    silent = {"role": "assistant", "content": None, "tool_calls": []}
    assert penalty([[*said("go north"), tool, silent, *said("go north")]]) == [-0.5]
    assert penalty([[*said("north"), tool, *said("go north")]]) == [0.0]  # no n-gram spans two turns
    assert penalty([said("go north", reasoning_content="go north")]) == [pytest.approx(-1 / 3)]


def test_soft_overlong_punishment_by_hand():
    punish = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    rewards = punish(completions=["x"] * 6, completion_ids=[[1] * n for n in (0, 6, 7, 9, 10, 11)])
    assert rewards == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    hard = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=0)
    assert hard(completion_ids=[[1] * 10, [1] * 11]) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_repetition_penalty_reward(0, -1.0), "ngram_size"),
        (lambda: get_repetition_penalty_reward(2, 1.0), "max_penalty"),
        (lambda: get_soft_overlong_punishment(10, 11), "soft_punish_cache"),
        (lambda: get_soft_overlong_punishment(0, 0), "max_completion_len"),
        (lambda: get_cosine_scaled_reward(0), "max_len"),
        (lambda: get_cosine_scaled_reward(9, min_value_wrong=0.0), r"min_value_wrong \(0.0\) must not be above"),
        (lambda: get_cosine_scaled_reward(9, max_value_correct=0.1), "max_value_correct"),
    ],
)
def test_impossible_numbers_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_cosine_scaled_reward_by_hand():
    """At 0, 1/3, 1/2 and all of the length c is 1, 3/4, 1/2 and 0; beyond it stays 0."""
    pytest.importorskip("math_verify")
    reward = get_cosine_scaled_reward(max_len=12)
    ids = [[1] * n for n in (0, 4, 6, 12, 99)]
    right = reward(completions=["$4$"] * 5, solution=["4"] * 5, completion_ids=ids, prompts=["2+2"] * 5)
    assert right == pytest.approx([1.0, 0.875, 0.75, 0.5, 0.5])
    wrong = reward(completions=[said("$5$")] * 5, solution=["4"] * 5, completion_ids=ids)
    assert wrong == pytest.approx([-1.0, -0.875, -0.75, -0.5, -0.5])
    other = get_cosine_scaled_reward(10, -10.0, 0.0, 1.0, 2.0)
    half = other(["$4$", "$5$", "4"], ["4", "4", None], [[1] * 5] * 3)
    assert half == [pytest.approx(1.5), pytest.approx(-5.0), None]
    assert reward.__name__ == "cosine_scaled_reward"


def test_the_makers_give_functions_with_readable_names():
    assert get_repetition_penalty_reward(2, -1.0).__name__ == "repetition_penalty_reward"
    assert get_soft_overlong_punishment(10, 2).__name__ == "soft_overlong_punishment_reward"


def test_accuracy_against_math_verify():
    pytest.importorskip("math_verify")
    completions = [r"so \boxed{\frac{1}{2}}", said("It is $0.5$."), "$x = 3$", "no number", said(None), "1/2"]
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, None]
    solutions = [r"$\frac{1}{2}$"] * 5 + [""]
    assert accuracy_reward(completions, solutions) == expected
    assert accuracy_reward(["4", "4"], [None, 4]) == [None, 1.0]
    with pytest.raises(ConfigurationError, match="1 solutions for 2 completions"):
        accuracy_reward(["1", "2"], ["1"])
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(accuracy_reward(completions, solutions)))
    thread.start()
    thread.join()
    assert seen == expected


def test_accuracy_without_math_verify_names_the_extra_and_rewards_need_no_torch():
    code = """
import sys
sys.modules["torch"] = sys.modules["math_verify"] = None
from agentrl.rewards import accuracy_reward, think_format_reward
assert think_format_reward(["<think>x</think>y"]) == [1.0]
try:
    accuracy_reward(["1"], ["1"])
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(MissingDependency.__name__)
    assert "accuracy_reward" in done.stdout and "[math]" in done.stdout
