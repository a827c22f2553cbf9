"""The contract of an environment: each clause with an environment that breaks it, and nothing left open."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from typing import Any, Literal

import pytest
from PIL import Image

from agentrl.check import check_environment, examine_environment
from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed, ToolArgumentError


class Dial(Environment):
    """Turn to the number behind the seed. Subclasses break one promise each."""

    reward_range: Any = (0.0, 1.0)
    run_inline = True
    limit = 4

    def reset(self, seed: int = 0, **row: Any) -> Any:
        self.goal, self.at, self.turns, self.done = random.Random(seed).randrange(1, 5), 0, 0, False
        return f"Turn to a number {'above' if self.goal > 2 else 'up to'} 2."

    def turn(self, to: Literal[0, 1, 2, 3, 4]) -> Any:
        """Turn it.

        Args:
            to: Where to.
        """
        self.at = to
        self.turns += 1
        self.done = self.turns == self.limit
        return f"it is at {to}"

    def get_reward(self) -> Any:
        return float(self.at == self.goal)

    def _gold(self) -> Any:
        return "done" if self.at == self.goal else {"tool_calls": [{"name": "turn", "arguments": {"to": self.goal}}]}


def levels(env: Any, **options: Any) -> list[str]:
    return [str(finding) for finding in check_environment(env, **options)]


def found(env: Any, level: str, says: str, **options: Any) -> str:
    """The one finding of this level that says so."""
    said = levels(env, **options)
    (hit,) = [line for line in said if line.startswith(f"{level}: ") and says in line] or ["\n".join(said)]
    assert hit.startswith(level) and says in hit, hit
    return hit


def test_a_sound_environment_has_notes_only_and_is_checked_in_less_than_two_seconds():
    started = time.perf_counter()
    report = examine_environment(Dial)
    assert time.perf_counter() - started < 2.0
    assert [f for f in report.findings if f.level != "note"] == []
    assert report.rewards["gold"].least == 1.0 and report.rewards["gold"].episodes == 5
    assert report.rewards["no-op"].most == 0.0 and 0.0 < report.rewards["random"].mean < 1.0
    assert report.tokens is not None and report.tokens.tokenizer.startswith("byte-level")


# --- gold, nothing, chance -------------------------------------------------------------
class GoldFallsShort(Dial):
    def _gold(self) -> Any:
        return {"tool_calls": [{"name": "turn", "arguments": {"to": 9}}]}

    limit = 1


class GoldNeverEnds(Dial):
    def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
        """Turn it.

        Args:
            to: Where to.
        """
        return "nothing happens"


class GoldCrashes(Dial):
    def _gold(self) -> Any:
        return {}["no such plan"]


class GoldIsNoTurn(Dial):
    def _gold(self) -> Any:
        return 3


class GoldCallsNoTool(Dial):
    def _gold(self) -> Any:
        return {"tool_calls": [{"name": "trun", "arguments": {}}]}


class NothingIsBest(Dial):
    def get_reward(self) -> float:
        return float(self.turns == 0 or self.at == self.goal)


class NothingIsSometimesBest(Dial):
    def get_reward(self) -> float:
        return float(self.at == self.goal or (self.turns == 0 and self.goal == 1))


class ChanceIsAsGood(Dial):
    def get_reward(self) -> float:
        return float(self.turns > 0)

    limit = 1


class OnlyGoldScores(Dial):
    def get_reward(self) -> float:
        return float(self.turns == 1 and self.told)

    def reset(self, seed: int = 0, **row: Any) -> Any:
        self.told = False
        return super().reset(seed)

    def _gold(self) -> Any:
        self.told = True
        return "done" if self.turns else super()._gold()


class OutOfRange(Dial):
    def get_reward(self) -> float:
        return super().get_reward() - 0.25 * (self.turns > 1)


class BadRange(Dial):
    reward_range = (1.0, 0.0)


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        (
            GoldFallsShort,
            "error",
            "does not get the top reward, 1, in 5 of 5 episodes, but 0 (a call was refused: turn",
        ),
        (GoldNeverEnds, "error", "(it was still playing after 2000 turns)"),
        (GoldCrashes, "error", "The gold policy of GoldCrashes failed: KeyError: 'no such plan'"),
        (GoldIsNoTurn, "error", "The gold policy returned 3"),
        (GoldCallsNoTool, "error", "it called 'trun', which is no tool"),
        (NothingIsBest, "error", "Doing nothing in NothingIsBest gets the top reward, 1, in 4 of 4 episodes"),
        (NothingIsSometimesBest, "warning", "in 1 of 4 episodes"),
        (ChanceIsAsGood, "warning", "Random calls in ChanceIsAsGood get as much as the gold policy"),
        (OnlyGoldScores, "warning", "random episodes of OnlyGoldScores got what doing nothing gets"),
        (OutOfRange, "error", "gave -0.25 for random calls, outside of its reward_range (0, 1)"),
        (BadRange, "error", "BadRange.reward_range is (1.0, 0.0); it must be two numbers"),
    ],
)
def test_what_the_rewards_of_three_policies_say(env, level, says):
    found(env, level, says)


def test_a_gold_policy_may_be_passed_and_is_missed_where_there_is_none():
    class Plain(Dial):
        _gold = None
        reward_range = None

    found(Plain, "note", "Plain has no gold policy")

    async def gold(env, messages):
        assert messages[0]["role"] == "user" and (len(messages) == 1 or messages[-1]["role"] == "tool")
        arguments = f'{{"to": {env.goal}}}'
        return "done" if env.at == env.goal else {"tool_calls": [{"name": "turn", "arguments": arguments}]}

    report = examine_environment(Plain, gold=gold)
    assert report.rewards["gold"].least == 1.0
    assert any("what the gold policy should get is not known" in f.what for f in report.findings)
    assert not [f for f in report.findings if f.level != "note"]
    assert "top reward, 1, in 5 of 5" in "\n".join(levels(Dial, gold=lambda env, messages: "I give up."))


# --- many at once ----------------------------------------------------------------------
class SharesFromTheThirdOn(Dial):
    """Only a crowd sees it: five instances and more use one board."""

    count, boards = 0, [[0] for _ in range(5)]

    def __init__(self) -> None:
        self.number = SharesFromTheThirdOn.count % 5
        SharesFromTheThirdOn.count += 1

    def reset(self, seed: int = 0, **row: Any) -> Any:
        self.boards[self.number][0] = 0
        return super().reset(seed)

    def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
        """Turn it.

        Args:
            to: Where to.
        """
        self.boards[self.number][0] += 1
        return f"turn {self.boards[self.number][0]}"


class OneAtATime(Dial):
    """Its global connection refuses a second user."""

    run_inline = False
    user = threading.Lock()

    def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
        """Turn it.

        Args:
            to: Where to.
        """
        if not self.user.acquire(blocking=False):
            raise EnvironmentFailed("the connection is busy")
        try:
            time.sleep(0.002)
            return super().turn(to)
        finally:
            self.user.release()


def test_sixteen_instances_at_once_play_what_one_plays_alone():
    found(SharesFromTheThirdOn, "error", "while 15 other instances were playing: they share something")
    found(OneAtATime, "error", "the connection is busy")


# --- given up in the middle ------------------------------------------------------------
class LeavesALock(Dial):
    """An async tool that is cancelled between acquire and release."""

    lock: Any = None

    def reset(self, seed: int = 0, **row: Any) -> Any:
        LeavesALock.lock = LeavesALock.lock or asyncio.Lock()
        return super().reset(seed)

    async def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
        """Turn it.

        Args:
            to: Where to.
        """
        await self.lock.acquire()
        await asyncio.sleep(0.001)
        self.lock.release()
        return super().turn(to)


class HoldsOn(Dial):
    """Swallows its cancellation."""

    async def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
        """Turn it.

        Args:
            to: Where to.
        """
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            await asyncio.sleep(2.5)
        return super().turn(to)


def test_calls_that_are_given_up_in_the_middle_leave_nothing_taken():
    said = found(LeavesALock, "error", "after LeavesALock.turn had been given up in the middle", timeout=0.4)
    assert "turn did not return within 0.4 s" in said
    LeavesALock.lock = None
    found(HoldsOn, "warning", "goes on for more than 0.3 s after the call was given up", timeout=0.3)


def test_a_slow_sync_tool_is_given_up_and_its_instance_closed_after_it():
    events: list[str] = []

    class Slow(Dial):
        run_inline = False

        def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
            """Turn it.

            Args:
                to: Where to.
            """
            time.sleep(0.003)
            events.append(f"ran {id(self)}")
            return super().turn(to)

        def close(self) -> None:
            events.append(f"closed {id(self)}")

    assert [line for line in levels(Slow) if not line.startswith("note")] == []
    closed = [event.split()[1] for event in events if event.startswith("closed")]
    assert len(closed) > 16
    for number, event in enumerate(events):  # close() waits for the call that was given up
        if event.startswith("closed"):
            assert f"ran {event.split()[1]}" not in events[number + 1 :] or closed.count(event.split()[1]) > 1


# --- bad arguments ---------------------------------------------------------------------
class Trusting(Dial):
    """Takes text and does something with it."""

    def turn(self, to: str) -> Any:  # type: ignore[override]
        """Turn it.

        Args:
            to: Where to.
        """
        return self.trust(to)

    def trust(self, to: str) -> Any:
        """Trust it.

        Args:
            to: What.
        """
        self.turns += 1
        if len(to) > 1000:
            raise EnvironmentFailed("the terminal hung up")
        return "fine"

    def _gold(self) -> Any:
        self.at = self.goal
        return "done"


class RefusesTooLate(Trusting):
    def trust(self, to: str) -> Any:
        """Trust it.

        Args:
            to: What.
        """
        self.at = self.goal if to == "" else self.at
        if not to.isdigit():
            raise ToolArgumentError("'to' must be a number.")
        return "fine"

    _gold = None
    reward_range = None


class RaisesTooLate(RefusesTooLate):
    def trust(self, to: str) -> Any:
        """Trust it.

        Args:
            to: What.
        """
        self.done = True
        return {"7": "fine"}[to]


class Stained(Trusting):
    """Hostile text stays where reset() does not clean."""

    stain = ""

    def trust(self, to: str) -> Any:
        """Trust it.

        Args:
            to: What.
        """
        self.stain = self.stain or ("!" if "\x00" in to else "")
        return "fine" + self.stain


def test_bad_arguments_are_answered_in_text_and_change_nothing():
    said = found(Trusting, "error", "Trusting.trust broke on arguments that a model can write")
    assert "the terminal hung up" in said and "raise ToolArgumentError" in said
    found(RefusesTooLate, "error", "RefusesTooLate.trust refused")
    found(RaisesTooLate, "warning", "RaisesTooLate.trust did not survive")
    found(Stained, "error", "in an instance whose tools had been called with bad arguments")


def test_arguments_of_a_model_reach_no_tool_that_they_do_not_fit():
    ran: list[Any] = []

    class Typed(Dial):
        def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
            """Turn it.

            Args:
                to: Where to.
            """
            ran.append(to)
            return super().turn(to)

    assert [line for line in levels(Typed) if not line.startswith("note")] == []
    assert set(ran) == {0, 1, 2, 3, 4} and all(type(to) is int for to in ran)


# --- what is returned ------------------------------------------------------------------
def returning(value: Any, *, sort: str = "tool") -> type[Dial]:
    class Returns(Dial):
        def reset(self, seed: int = 0, **row: Any) -> Any:
            text = super().reset(seed)
            return value if sort == "reset" else text

        def turn(self, to: Literal[0, 1, 2, 3, 4]) -> Any:
            """Turn it.

            Args:
                to: Where to.
            """
            super().turn(to)
            return value if sort == "tool" else "fine"

        def get_reward(self) -> Any:
            return value if sort == "reward" else super().get_reward()

    return Returns


@pytest.mark.parametrize(
    ("value", "sort", "level", "says"),
    [
        (b"caf\xc3\xa9", "tool", "warning", "Returns.turn returned bytes"),
        (None, "tool", "warning", "Returns.turn returned None, and the model reads 'None'"),
        (float("nan"), "tool", "warning", "Returns.turn returned nan"),
        (object(), "tool", "warning", "returned an object that the model reads as '<object object at 0x"),
        ({"board": object()}, "tool", "warning", "returned an object that the model reads as"),
        ("x" * 200_000, "tool", "warning", "Returns.turn returned 200,000 characters"),
        (Image.new("RGB", (0, 3)), "tool", "error", "Returns.turn returned an image that cannot be shown: it is 0 x 3"),
        (Image.new("RGB", (0, 3)), "reset", "error", "Returns.reset() returned an image that cannot be shown"),
        ([{"type": "image", "image": 7}], "tool", "error", "cannot be shown: it is a int"),
        ([{"type": "audio", "audio": b""}], "tool", "error", "content block of type 'audio'"),
        ((1, 2), "reset", "error", "returned a tuple"),
        (float("nan"), "reward", "error", "get_reward() returned nan"),
        (float("inf"), "reward", "error", "get_reward() returned inf"),
        (None, "reward", "error", "get_reward() returned None"),
        ("1.0", "reward", "error", "get_reward() returned '1.0'"),
    ],
)
def test_what_an_environment_should_not_return(value, sort, level, says):
    found(returning(value, sort=sort), level, says)


# --- crashes and hangs -----------------------------------------------------------------
def crash() -> None:
    raise OSError("no display")  # the line that is shown


def crashing(where: str, error: Any = crash) -> type[Dial]:
    class Crashes(Dial):
        run_inline = False
        open: set[int] = set()  # noqa: RUF012

        def __init__(self) -> None:
            if where == "__init__":
                error()
            self.open.add(id(self))

        def reset(self, seed: int = 0, **row: Any) -> Any:
            if where == "reset":
                error()
            return super().reset(seed)

        def turn(self, to: Literal[0, 1, 2, 3, 4]) -> Any:
            """Turn it.

            Args:
                to: Where to.
            """
            if where == "turn":
                error()
            return super().turn(to)

        def get_reward(self) -> Any:
            if where == "get_reward":
                error()
            return super().get_reward()

        def close(self) -> None:
            self.open.remove(id(self))

    return Crashes


def exits() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("error", [crash, exits])
@pytest.mark.parametrize("where", ["__init__", "reset", "get_reward"])
def test_a_crash_is_one_error_with_the_line_of_the_environment(where, error):
    env = crashing(where, error)
    errors = [line for line in levels(env) if line.startswith("error")]
    assert len(errors) == 1, errors
    name = {crash: "OSError: no display", exits: "SystemExit: 3"}[error]
    line = f"test_check_contract.py:{error.__code__.co_firstlineno + 1}, in {error.__name__}: raise"
    assert name in errors[0] and line in errors[0]
    assert env.open == set()


def test_a_tool_that_always_crashes_is_one_warning_with_its_line():
    env = crashing("turn")
    said = found(env, "warning", "Crashes.turn raised on")
    assert "in crash: raise OSError" in said and "The model reads: 'turn failed: OSError: no display'" in said
    assert env.open == set()


class OddClass:
    """Everything about it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("do not look at me")


ODD = [lambda: OddClass, OddClass, lambda: None, lambda: 7, list, lambda: "x:y", str, object]


@pytest.mark.parametrize("make", ODD)  # pytest would look at the objects themselves
def test_the_check_itself_never_crashes(make):
    given = make()
    errors = [line for line in levels(given) if line.startswith("error")]
    assert len(errors) == 1, errors


def wait_long() -> None:
    time.sleep(8.0)


@pytest.mark.parametrize("where", ["__init__", "reset", "turn", "get_reward"])
def test_what_hangs_is_found_in_bounded_time(where):
    started = time.monotonic()
    errors = [line for line in levels(crashing(where, wait_long), timeout=0.2) if line.startswith("error")]
    assert time.monotonic() - started < 6.0
    assert len(errors) == 1 and "within 0.2 s" in errors[0], errors
    assert ("was abandoned" in errors[0]) is (where != "__init__")  # by its own deadline, not because all stood still


def test_a_tool_that_blocks_the_loop_is_found_in_bounded_time():
    class Blocks(Dial):
        def turn(self, to: Literal[0, 1, 2, 3, 4]) -> Any:
            """Turn it.

            Args:
                to: Where to.
            """
            until = time.monotonic() + 8.0
            while time.monotonic() < until:
                pass

    started = time.monotonic()
    found(Blocks, "error", "Blocks.turn did not return within 0.2 s, and nothing else could run meanwhile", timeout=0.2)
    assert time.monotonic() - started < 6.0
    with pytest.raises(ConfigurationError, match="more than 0 seconds"):
        check_environment(Dial, timeout=0.0)


def test_ctrl_c_ends_the_check_and_closes_what_it_built(monkeypatch):
    env = crashing("turn", lambda: time.sleep(1.5))
    waits = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: interrupted(self, timeout))
    asked: list[float] = []

    def interrupted(event: threading.Event, timeout: float | None) -> bool:
        if timeout == 0.05:  # the check's own wait
            asked.append(timeout)
            if len(asked) > 2 and len(env.open) == 3:
                raise KeyboardInterrupt
        return waits(event, timeout)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check_environment(env)
    assert time.monotonic() - started < 1.2  # not when the tool has returned
    until = time.monotonic() + 5.0
    while env.open and time.monotonic() < until:
        time.sleep(0.01)
    assert env.open == set()


# --- to other processes ----------------------------------------------------------------
class Stopped(Dial):
    """Without clocks, the check itself would never end."""

    def reset(self, seed: int = 0, **row: Any) -> Any:
        time.monotonic = lambda: 0.0
        time.sleep = lambda seconds: None
        return super().reset(seed)


class Reseeded(Dial):
    def reset(self, seed: int = 0, **row: Any) -> Any:
        random.random = lambda: 0.5
        return super().reset(seed)


class Shallow(Dial):
    def turn(self, to: Literal[0, 1, 2, 3, 4]) -> Any:
        sys.setrecursionlimit(100)
        return super().turn(to)

    turn.__doc__ = Dial.turn.__doc__


class Elsewhere(Dial):
    def reset(self, seed: int = 0, **row: Any) -> Any:
        os.chdir("/")
        return super().reset(seed)


class Mute(Dial):
    def get_reward(self) -> Any:
        sys.stdout = None
        return super().get_reward()


class Homeless(Dial):
    def reset(self, seed: int = 0, **row: Any) -> Any:
        os.environ.pop("HOME", None)
        os.environ["SET_BY_A_LIBRARY"] = "1"
        return super().reset(seed)


class Threaded(Dial):
    stop = threading.Event()

    def reset(self, seed: int = 0, **row: Any) -> Any:
        threading.Thread(target=self.stop.wait, daemon=True).start()
        return super().reset(seed)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (Stopped, "replaces time.monotonic"),
        (Reseeded, "replaces random.random"),
        (Shallow, "sets the recursion limit to 100"),
        (Elsewhere, "goes into the folder /"),
        (Mute, "replaces sys.stdout"),
        (Homeless, "changes variables of the environment (HOME)"),
        (Threaded, "threads running"),
    ],
)
def test_what_an_environment_changes_for_the_whole_process_is_said_and_put_back(env, says, monkeypatch):
    Threaded.stop.clear()
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SET_BY_A_LIBRARY", "0")  # so that it is gone after the test
    monkeypatch.delenv("SET_BY_A_LIBRARY")
    before = (time.monotonic, time.sleep, random.random, sys.getrecursionlimit(), os.getcwd(), sys.stdout)
    try:
        said = levels(env)
    finally:
        Threaded.stop.set()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(before[3])  # else a red run would make every later test red
    assert [line for line in said if says in line and line.endswith("other environments and the trainer share it.")], (
        said
    )
    assert (time.monotonic, time.sleep, random.random, limit, os.getcwd(), sys.stdout) == before
    assert os.environ["HOME"] == "/home/somebody"


def test_a_factory_that_cannot_be_sent_to_a_process_is_an_error():
    lock = threading.Lock()

    def factory() -> Dial:
        assert lock is not None
        return Dial()

    found(factory, "error", "cannot be sent to another process, not even by cloudpickle (TypeError")
    found(lambda: Dial(), "note", "The factory of Dial cannot be pickled")


# --- seeds -----------------------------------------------------------------------------
class Hidden(Dial):
    def reset(self, seed: int = 0, **row: Any) -> Any:
        super().reset(seed)
        return "Turn it."


class HiddenFromChance(Hidden):
    """Random calls are always answered alike, but the gold policy goes another way with another seed."""


class TurnsEachOther(Hidden):
    def turn(self, to: Literal[0, 1, 2, 3, 4]) -> str:
        """Turn it.

        Args:
            to: Where to.
        """
        super().turn(to)
        return "higher" if to < self.goal else "not higher"

    _gold = None


class OneTask(Hidden):
    def reset(self, seed: int = 0, **row: Any) -> Any:
        return super().reset(1)


def test_seeds_may_make_a_difference_that_the_start_does_not_show():
    assert "same start" not in "\n".join(levels(HiddenFromChance) + levels(TurnsEachOther))
    found(OneTask, "note", "shows the same start for 4 different seeds")
