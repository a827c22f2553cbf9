"""`check_environment` finds what would harm a training run."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.check import RewardSpread, check_environment, examine_environment, random_arguments, token_cost
from agentrl.environment import Environment
from agentrl.tool_schema import build_tool


class Good(Environment):
    def reset(self, seed=0, **row):
        self.goal = random.Random(seed).randrange(1000)
        self.total = 0
        self.done = False
        return f"add up to {self.goal}"

    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        self.total += x
        self.done = self.total > 20
        return self.total

    def get_reward(self):
        return float(self.total == self.goal)


counter = itertools.count()


class Unseeded(Good):
    def reset(self, **row):
        super().reset()
        return f"start {next(counter)}"


class NeverDone(Good):
    def reset(self, seed=0, **row):
        text = super().reset(seed)
        self.done = True
        return text


class RewardMoves(Good):
    def get_reward(self):
        self.total += 1
        return self.total


class RewardNeedsCalls(Good):
    def reset(self, seed=0, **row):
        self.answers = []
        return str(random.Random(seed).random())

    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        self.answers.append(x)
        return 0

    def get_reward(self):
        return float(self.answers[-1])


class RandomTool(Good):
    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        return next(counter)


class Slow(Good):
    run_inline = True

    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        time.sleep(0.004)
        self.done = True
        return 0


class ResetFails(Good):
    def reset(self, seed=0, **row):
        raise OSError("no display")


class CloseFails(Good):
    def close(self):
        raise OSError("gone")


class TwoBadTools:
    def reset(self): ...
    def one(self, x): ...
    def two(self, x: int):
        """Two."""


class Raises(Good):
    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        raise KeyError("oops")


class Leaks(Good):
    """Totals of earlier episodes stay."""

    def __init__(self):
        self.total = 0

    def reset(self, seed=0, **row):
        self.goal = random.Random(seed).randrange(1000)
        self.done = False
        return f"add up to {self.goal}"


class LeaksAfterAnEpisode(Good):
    """Only an episode that went far enough leaves something behind."""

    far = False

    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        answer = super().add(x) + 1000 * self.far
        if self.done:
            self.far = True
        return answer


class KeepsItsFirstTask(Good):
    """Chooses a task for the first episode only."""

    goal = None

    def reset(self, seed=0, **row):
        self.goal = self.goal or random.Random(seed).randrange(1, 1000)
        self.total = 0
        self.done = False
        return f"add up to {self.goal}"


class Shares(Good):
    board: list[int] = []  # noqa: RUF012

    def reset(self, seed=0, **row):
        self.board.clear()
        return super().reset(seed)

    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        self.board.append(x)
        self.total += x
        self.done = self.total > 20
        return sum(self.board)


class OneTask(Good):
    def reset(self, seed=0, **row):
        return super().reset(0)


class Flat(Good):
    def get_reward(self):
        return 0.5


class RefusesPickling(Good):
    def __init__(self):
        self.view = (x for x in ())


class NoTools:
    def reset(self): ...


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        (Unseeded, "warning", "started differently twice"),
        (NeverDone, "error", "done is still true after reset()"),
        (RewardMoves, "warning", "gave two numbers for one episode"),
        (RewardNeedsCalls, "error", "IndexError"),
        (RandomTool, "warning", "RandomTool.add answered differently"),
        (Slow, "warning", "sets run_inline, but add takes"),
        (ResetFails, "error", "ResetFails.reset() failed: OSError: no display"),
        (CloseFails, "error", "CloseFails.close() failed: OSError: gone"),
        (TwoBadTools, "error", "TwoBadTools.one"),
        (TwoBadTools, "error", "TwoBadTools.two"),
        (Raises, "warning", "It raised each of"),
        (Leaks, "error", "something is left over from the last episode"),
        (LeaksAfterAnEpisode, "error", "LeaksAfterAnEpisode.add answered differently in an instance that had played"),
        (KeepsItsFirstTask, "error", "KeepsItsFirstTask.reset() started differently in an instance that had played"),
        (Shares, "error", "while 15 other instances were playing"),
        (OneTask, "note", "shows the same start for 4 different seeds"),
        (Flat, "note", "Every random episode of Flat got the same reward"),
        (Flat, "note", "Doing nothing in Flat gets reward mean 0.5"),
        (RefusesPickling, "note", "An instance of RefusesPickling cannot be pickled"),
        (NoTools, "warning", "has no tools"),
        (NoTools, "note", "no get_reward()"),
        (Good(), "note", "ms per call"),
        (lambda: 3, "error", "no method reset()"),
        ("no/Such-v0", "error", "No environment is registered"),
    ],
)
def test_each_fault_is_found(env, level, says):
    findings = check_environment(env)
    assert any(f.level == level and says in f.what for f in findings), "\n".join(map(str, findings))


def test_a_good_environment_has_no_warnings_and_its_instance_stays_open():
    class Open(Good):
        built = closed = 0

        def __init__(self):
            type(self).built += 1

        def close(self):
            type(self).closed += 1

    assert [f for f in check_environment(Open) if f.level != "note"] == []
    before = Open.closed
    assert before == Open.built > 16  # several were built, to tell what one leaves behind from chance
    env = Open()
    assert [f for f in check_environment(env) if f.level != "note"] == []
    assert Open.closed == before and Open.built == before + 1


def test_rows_reach_reset_and_misfits_are_errors():
    class Target(Good):
        def reset(self, target, seed=0):  # type: ignore[override]
            return super().reset(seed) + str(target + 1)

    assert [f for f in check_environment(Target, rows=[{"prompt": "p", "target": 3}]) if f.level != "note"] == []
    (finding,) = check_environment(Target, rows=[{"prompt": "p"}])
    assert "needs 'target'" in finding.what
    (finding,) = check_environment(Target, rows=[{"target": 1, "answer": 2}])
    assert "does not take the column 'answer'" in finding.what


def test_it_runs_inside_a_running_loop():
    async def notebook():
        return check_environment(Good)

    assert all(f.level == "note" for f in asyncio.run(notebook()))


@given(st.randoms(use_true_random=False))
def test_random_arguments_fit_their_schema(rng):
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 5, "maximum": 6},
            "b": {"enum": ["x"]},
            "c": {"type": ["boolean", "null"]},
            "d": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["a", "b", "c", "d"],
    }
    drawn = random_arguments(schema, rng)
    assert drawn["a"] in (5, 6)
    assert drawn["b"] == "x"
    assert drawn["c"] in (True, False, None)
    assert 1 <= len(drawn["d"]) <= 2
    assert all(isinstance(x, float) for x in drawn["d"])


def test_the_numbers_behind_the_findings():
    report = examine_environment(Flat, episodes=9)
    assert report.name == "Flat" and report.observation.startswith("add up to")
    assert report.rewards == {"no-op": RewardSpread(4, 0.5, 0.5, 0.5), "random": RewardSpread(9, 0.5, 0.5, 0.5)}
    assert set(report.milliseconds) == {"reset", "get_reward", "add"}
    assert report.count("error") == 0


def test_token_costs_by_hand():
    """ChatML, one token per byte: <|im_start|>user, newline, go<|im_end|>, newline, <|im_start|>assistant, newline."""
    cost = token_cost([], [{"role": "user", "content": "go"}])
    assert (cost.prompt, cost.tools) == (1 + 5 + 2 + 1 + 1 + 1 + 10, 0)
    tools = [build_tool(Good.add, owner="Good", on_instance=True).schema]
    with_tools = token_cost(tools, [{"role": "user", "content": "go"}])
    assert with_tools.prompt - with_tools.tools == cost.prompt and with_tools.tools > 100
