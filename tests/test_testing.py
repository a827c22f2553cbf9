"""`agentrl.testing`: one line in a user's test, and the gold episode."""

from __future__ import annotations

import random
import sqlite3
import threading
from typing import Any

import pytest

from agentrl import testing
from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed, SamplerError
from agentrl.types import Outcome


class Steps(Environment):
    """Climb to the top; the stairs are in a database, which may only be used on its own thread."""

    reward_range = (0.0, 1.0)

    def __init__(self, height: int = 3) -> None:
        self.height, self.here = height, threading.get_ident()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE stairs (step INTEGER)")

    def reset(self, seed: int = 0, high: int | None = None, **row: Any) -> str:
        self.top, self.done = high or random.Random(seed).randint(1, self.height), False
        self.database.execute("DELETE FROM stairs")
        return f"Climb {self.top} steps."

    def _steps(self) -> int:
        return self.database.execute("SELECT COUNT(*) FROM stairs").fetchone()[0]

    def climb(self) -> str:
        """Climb a step."""
        self.database.execute("INSERT INTO stairs VALUES (1)")
        self.done = self._steps() == self.top
        return "one step higher"

    def get_reward(self) -> float:
        return self._steps() / self.top

    def _gold(self) -> Any:
        assert threading.get_ident() == self.here and self._steps() < self.top
        return {"content": "Up.", "tool_calls": [{"name": "climb", "arguments": {}}]}

    def close(self) -> None:
        self.database.close()


class Flat(Steps):
    def get_reward(self) -> float:
        return 0.0


def test_one_line_in_a_test_says_everything_that_is_wrong():
    report = testing.assert_environment(Steps)
    assert report.rewards["gold"].mean == 1.0
    with pytest.raises(AssertionError) as caught:
        testing.assert_environment(Flat)
    first, *lines = str(caught.value).split("\n")
    assert first == "Flat does not pass its check."
    assert "error: The gold policy of Flat does not get the top reward" in lines[0]
    assert any(line.startswith("warning: Random calls") for line in lines) and "note" not in str(caught.value)


def test_warnings_may_be_let_through_and_rows_and_gold_are_passed_on():
    class Quiet(Steps):
        def climb(self) -> Any:  # type: ignore[override]
            """Climb a step."""
            super().climb()

    with pytest.raises(AssertionError, match="returned None"):
        testing.assert_environment(Quiet)
    testing.assert_environment(Quiet, warnings=False)
    with pytest.raises(AssertionError, match="top reward"):
        testing.assert_environment(Steps, gold=lambda env, messages: "no")
    with pytest.raises(AssertionError, match="TypeError: unsupported operand"):
        testing.assert_environment(Steps, rows=[{"high": "tall"}])


def test_a_gold_episode_is_an_episode_of_the_engine():
    episode = testing.gold_episode(Steps, row={"prompt": "Now. ", "high": 2}, seed=4)
    assert (episode.reward, episode.outcome) == (1.0, Outcome.ENV_DONE)
    assert episode.prompt == [{"role": "user", "content": "Now. Climb 2 steps."}]
    assert [call.content for call in episode.tool_calls] == ["one step higher"] * 2
    assert episode.messages[1]["content"] == "Up."
    cut = testing.gold_episode(Steps, row={"high": 5}, max_turns=2)
    assert (cut.outcome, cut.reward) == (Outcome.TOOL_LIMIT, 0.4)
    other = testing.gold_episode(Steps, row={"high": 5}, gold=lambda env, messages: f"{env.top} is too high")
    assert (other.completion[0]["content"], other.reward) == ("5 is too high", 0.0)
    assert testing.gold_episode("agentrl/Hunt-v0", gold=lambda env, messages: "no").reward == 0.0


def test_a_ready_instance_stays_open():
    class Open(Steps):
        def __init__(self) -> None:
            self.top = self.count = 0

        def reset(self, seed: int = 0, **row: Any) -> str:
            self.count, self.done = 0, False
            return "Climb."

        def climb(self) -> str:
            """Climb a step."""
            self.count, self.done = 1, True
            return "done"

        def get_reward(self) -> float:
            return float(self.count)

        def _gold(self) -> Any:
            return {"tool_calls": [{"name": "climb", "arguments": {}}]}

        closed = 0

        def close(self) -> None:
            Open.closed += 1

    env = Open()
    assert testing.gold_episode(env).reward == 1.0 and testing.gold_episode(env).reward == 1.0
    assert Open.closed == 0 and testing.gold_episode(Open).reward == 1.0 and Open.closed == 1


def test_what_can_go_wrong_in_a_gold_episode_is_said():
    class NoGold(Steps):
        _gold = None

    class Lost(Steps):
        def _gold(self) -> Any:
            raise LookupError("no stairs")

    class Breaks(Steps):
        def climb(self) -> str:
            """Climb a step."""
            raise EnvironmentFailed("the stairs are gone")

    with pytest.raises(ConfigurationError, match=r"NoGold has no gold policy\. Write a method _gold"):
        testing.gold_episode(NoGold)
    with pytest.raises(SamplerError, match="LookupError: no stairs"):
        testing.gold_episode(Lost)
    with pytest.raises(EnvironmentFailed, match="the stairs are gone"):
        testing.gold_episode(Breaks)
    with pytest.raises(ConfigurationError, match="A turn is text, or a message with tool_calls"):
        testing.gold_episode(Steps, gold=lambda env, messages: 3)
