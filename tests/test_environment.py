"""Tool discovery, what reset gets, and one instance at work."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

from agentrl.environment import Environment, Instance, discover_tools, reset_kwargs
from agentrl.errors import ConfigurationError, EnvironmentFailed, ToolDefinitionError
from agentrl.lane import Lane
from agentrl.tool_schema import build_tool

DOC = "Does it.\n\nArgs:\n    x: It.\n"


class Base:
    def inherited(self, x: int) -> int:
        """Inherited.

        Args:
            x: It.
        """
        return x

    def overridden(self, x: int) -> int:
        """From the base.

        Args:
            x: It.
        """
        return x


class Many(Base, Environment):
    touched = False
    constant = 3
    Nested = dict

    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0

    @property
    def state(self):
        type(self).touched = True
        return "no tool"

    @functools.cached_property
    def lazy(self):
        type(self).touched = True
        return "no tool"

    def overridden(self, x: int) -> int:
        return -x

    @staticmethod
    def fixed(x: int) -> int:
        """Static.

        Args:
            x: It.
        """
        return x + 100

    @classmethod
    def of_class(cls, x: int) -> str:
        """Of the class.

        Args:
            x: It.
        """
        return f"{cls.__name__}{x}"

    def _private(self, x):
        return x

    def done(self, x: int) -> str:  # type: ignore[override]
        """A tool that happens to be called done.

        Args:
            x: It.
        """
        return "ok"


def play(work):
    return asyncio.run(work)


def test_tools_are_the_public_methods_and_no_property_runs():
    env = Many()
    assert list(discover_tools(env)) == ["inherited", "overridden", "fixed", "of_class", "done"]
    assert Many.touched is False
    assert discover_tools(Many)["overridden"].schema["function"]["description"] == "From the base."

    async def calls():
        instance = Instance(env)
        out = [(await instance.call(tool, {"x": 1})).content for tool in instance.tools.values()]
        assert instance.done is False  # a method is not the flag
        return out

    assert play(calls()) == ["1", "-1", "101", "Many1", "ok"]
    assert Many.touched is False


def test_close_is_a_tool_only_where_it_needs_an_argument():
    class WithArgument:
        def reset(self): ...
        def close(self, x: int):
            """Closes a door.

            Args:
                x: It.
            """

    class Without:
        def reset(self): ...
        def close(self, force: bool = False): ...

    class Derived(Environment):
        def reset(self): ...
        def close(self): ...

    assert list(discover_tools(WithArgument)) == ["close"]
    assert discover_tools(Without) == {}
    assert discover_tools(Derived) == {}


def test_a_method_without_types_is_named():
    class Bad:
        def reset(self): ...
        def search(self, place):
            """S.

            Args:
                place: P.
            """

    with pytest.raises(ToolDefinitionError, match=r"Bad\.search: the argument 'place' has no type"):
        discover_tools(Bad)


class Slotted:
    __slots__ = ("done", "total")

    def reset(self):
        self.done, self.total = False, 0

    def add(self, x: int) -> int:
        """Adds.

        Args:
            x: It.
        """
        self.total += x
        self.done = self.total > 2
        return self.total


class Dynamic:
    def reset(self):
        return "go"

    def __getattr__(self, name):
        if name == "done":
            return 1
        raise AttributeError(name)


def test_slots_and_dynamic_attributes():
    async def run():
        instance = Instance(Slotted())
        assert instance.done is False
        await instance.reset({})
        await instance.call(instance.tools["add"], {"x": 2})
        assert instance.done is False
        await instance.call(instance.tools["add"], {"x": 2})
        assert instance.done is True
        assert Instance(Dynamic()).done is True
        assert await Instance(Dynamic()).reward() is None

    play(run())


# --- reset -----------------------------------------------------------------------------
class Takes:
    def __init__(self, signature):
        exec(f"def reset(self, {signature}): return None", scope := {})
        self.__class__ = type("Takes", (), {"reset": scope["reset"]})


@pytest.mark.parametrize(
    ("signature", "row", "expected"),
    [
        ("**kw", {"prompt": "p", "environment": "e", "a": 1}, {"a": 1, "seed": 7}),
        ("a", {"a": 1}, {"a": 1}),
        ("a, seed=None", {"a": 1}, {"a": 1, "seed": 7}),
        ("*, seed", {"seed": 3}, {"seed": 3}),
        ("**kw", {"seed": 3}, {"seed": 3}),
        ("rollout_id", {}, {"rollout_id": "r"}),
        ("rollout_id, **kw", {"rollout_id": "mine"}, {"rollout_id": "mine", "seed": 7}),
        ("a", {"a": 1, "only_for_another_environment": None}, {"a": 1}),
        ("", {}, {}),
    ],
)
def test_F099_reset_gets_columns_seed_and_what_it_names(signature, row, expected):
    assert reset_kwargs(Takes(signature), row, 7, {"rollout_id": "r"}) == expected


def test_reset_and_row_that_do_not_fit_are_named():
    with pytest.raises(ConfigurationError, match="does not take the column 'answer'"):
        reset_kwargs(Takes("a"), {"a": 1, "answer": 2}, 0, {})
    with pytest.raises(ConfigurationError, match=r"needs 'target', .*It has: prompt, a"):
        reset_kwargs(Takes("target, **kw"), {"prompt": "x", "a": 1}, 0, {})


# --- calls -----------------------------------------------------------------------------
class Bad(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Tools(Environment):
    def __init__(self):
        self.threads = []

    def reset(self, what: str = ""):
        self.threads.append(threading.get_ident())
        if what:
            raise ValueError(what)
        return {"start": 1}

    def get_reward(self):
        self.threads.append(threading.get_ident())
        return getattr(self, "score", 0.5)

    def raises(self, kind: str) -> str:
        """Raises.

        Args:
            kind: What.
        """
        self.threads.append(threading.get_ident())
        raise {
            "value": ValueError("no such place"),
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
            "stop": StopIteration("end"),
            "cancel": asyncio.CancelledError(),
            "bad": Bad(),
            "env": EnvironmentFailed("lost the connection"),
        }[kind]

    async def raises_async(self, kind: str) -> str:
        """Raises.

        Args:
            kind: What.
        """
        return self.raises(kind)

    def sleep(self, s: float) -> str:
        """Sleeps.

        Args:
            s: Seconds.
        """
        time.sleep(s)
        return "slept"

    async def sleep_async(self, s: float) -> str:
        """Sleeps.

        Args:
            s: Seconds.
        """
        await asyncio.sleep(s)
        return "slept"

    async def stubborn(self) -> str:
        """Ignores being cancelled."""
        for _ in range(14):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        return "still here"

    def hands_back(self, s: float):
        """A sync function that returns something to await.

        Args:
            s: Seconds.
        """
        return self.sleep_async(s)


class InlineTools(Tools):
    run_inline = True


@pytest.mark.parametrize("cls", [Tools, InlineTools])
@pytest.mark.parametrize("name", ["raises", "raises_async"])
@pytest.mark.parametrize("kind", ["value", "exit", "interrupt", "stop", "cancel", "bad"])
def test_F081_whatever_a_tool_raises_is_text(cls, name, kind):
    on_main = kind == "interrupt" and (cls is InlineTools or name == "raises_async")

    async def run():
        instance = Instance(cls())
        result = await instance.call(instance.tools[name], {"kind": kind}, 5)
        again = await instance.call(instance.tools["sleep_async"], {"s": 0}, 5)
        assert again.content == "slept"
        return result

    if on_main:  # on the main thread that is the user's Ctrl-C
        with pytest.raises(KeyboardInterrupt):
            play(run())
        return
    result = play(run())
    assert result.error == "raised"
    assert result.content.startswith(f"{name} failed: ")
    if kind == "value":
        assert result.content == f"{name} failed: ValueError: no such place"
    if kind == "exit":
        assert "SystemExit: 3" in result.content


@pytest.mark.parametrize("name", ["raises", "raises_async"])
def test_EnvironmentFailed_of_a_tool_is_an_outcome_not_text(name):
    async def run():
        instance = Instance(Tools())
        with pytest.raises(EnvironmentFailed, match="lost the connection") as caught:
            await instance.call(instance.tools[name], {"kind": "env"}, 5)
        assert (caught.value.stage, caught.value.deadline) == ("tool", False)

    play(run())


def test_bad_arguments_do_not_reach_the_tool():
    async def run():
        instance = Instance(Tools())
        result = await instance.call(instance.tools["raises"], {"knd": "value"}, 5)
        assert result.error == "bad_arguments"
        assert instance.env.threads == []

    play(run())


def test_F081_sync_tools_do_not_block_the_loop():
    """8 rollouts that sleep 0.3 s take 0.3 s, and the loop's heartbeat goes on."""

    async def run():
        instances = [Instance(Tools()) for _ in range(8)]
        beats = 0

        async def heart():
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        beating = asyncio.create_task(heart())
        start = time.perf_counter()
        await asyncio.gather(*(i.call(i.tools["sleep"], {"s": 0.3}, 5) for i in instances))
        wall = time.perf_counter() - start
        beating.cancel()
        return wall, beats

    wall, beats = play(run())
    assert wall < 1.2
    assert beats >= 8


def test_all_sync_calls_of_an_instance_share_one_thread():
    async def run(cls):
        instance = Instance(cls())
        await instance.reset({})
        await instance.call(instance.tools["raises"], {"kind": "value"})
        await instance.reward()
        await instance.run(lambda: instance.env.threads.append(threading.get_ident()))
        return set(instance.env.threads)

    threads = play(run(Tools))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert play(run(InlineTools)) == {threading.get_ident()}


@pytest.mark.parametrize("name", ["sleep", "sleep_async", "hands_back"])
def test_deadline_abandons_the_instance(name):
    async def run():
        abandoned = []
        instance = Instance(Tools(), on_abandon=abandoned.append)
        with pytest.raises(EnvironmentFailed, match=rf"Tools\.{name} did not return within 0\.05 s") as caught:
            await instance.call(instance.tools[name], {"s": 0.4}, 0.05)
        assert (caught.value.stage, caught.value.deadline) == ("tool", True)
        assert instance.broken
        with pytest.raises(EnvironmentFailed, match="abandoned"):
            await instance.call(instance.tools["sleep"], {"s": 0}, 1)
        if name == "sleep":
            assert abandoned[0]()
            instance.close_nowait()
            await asyncio.sleep(0.6)
            assert not abandoned[0]()

    play(run())


def test_a_coroutine_that_ignores_cancellation_is_counted():
    async def run():
        abandoned = []
        instance = Instance(Tools(), on_abandon=abandoned.append)
        with pytest.raises(EnvironmentFailed):
            await instance.call(instance.tools["stubborn"], {}, 0.05)
        assert abandoned[0]()

    play(run())


@pytest.mark.parametrize("name", ["sleep", "sleep_async"])
def test_cancelling_a_rollout_breaks_its_instance(name):
    async def run():
        instance = Instance(Tools())
        task = asyncio.create_task(instance.call(instance.tools[name], {"s": 0.3}, 5))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert instance.broken

    play(run())


def test_reset_and_reward_failures_are_typed_and_chained():
    async def run():
        instance = Instance(Tools())
        assert await instance.reset({}) == '{"start": 1}'
        with pytest.raises(EnvironmentFailed, match=r"Tools\.reset\(\) failed: ValueError: boom") as caught:
            await instance.reset({"what": "boom"})
        assert caught.value.stage == "reset"
        assert isinstance(caught.value.__cause__, ValueError)
        assert await instance.reward() == 0.5
        for bad in (None, "1", float("nan"), float("inf"), [1.0]):
            instance.env.score = bad
            with pytest.raises(EnvironmentFailed, match="finite number") as caught:
                await instance.reward()
            assert caught.value.stage == "reward"
        import numpy as np

        for good in (True, 1, np.float32(1.0), np.array(1.0)):
            instance.env.score = good
            assert await instance.reward() == 1.0

    play(run())


def test_async_reset_and_reward_are_awaited():
    class Async:
        async def reset(self):
            return [{"type": "text", "text": "a"}]

        async def get_reward(self):
            return 0.25

    async def run():
        instance = Instance(Async())
        return await instance.reset({}, 1), await instance.reward(1)

    assert play(run()) == ([{"type": "text", "text": "a"}], 0.25)


def test_standalone_tools_run_on_an_instance_without_environment():
    def where(x: int) -> str:
        """W.

        Args:
            x: It.
        """
        return str(threading.get_ident() != main)

    main = threading.get_ident()

    async def run():
        instance = Instance(None)
        assert (instance.name, instance.tools, instance.done) == ("", {}, False)
        assert await instance.reward() is None
        return (await instance.call(build_tool(where), {"x": 1}, 1)).content

    assert play(run()) == "True"


def test_unreadable_content_is_the_environments_failure():
    class Odd:
        def reset(self): ...
        def look(self):
            """L."""
            return [{"type": "video", "video": 1}]

    async def run():
        instance = Instance(Odd())
        with pytest.raises(EnvironmentFailed, match=r"Odd\.look: .*'video'"):
            await instance.call(instance.tools["look"], {}, 1)

    play(run())


# --- close -----------------------------------------------------------------------------
class Closing:
    def __init__(self):
        self.closed = []

    def reset(self): ...

    def close(self):
        self.closed.append(threading.get_ident())


def test_F095_close_runs_once_on_the_environments_thread():
    class Database(Closing):
        def reset(self):
            self.connection = sqlite3.connect(":memory:")

        def close(self):
            self.connection.close()  # raises on any other thread
            super().close()

    async def run():
        instance = Instance(Database())
        await instance.reset({})
        await asyncio.gather(instance.close(), instance.close())
        instance.close_nowait()
        await instance.close()
        return instance.env.closed, instance.close_error

    closed, error = play(run())
    assert len(closed) == 1
    assert error is None


def test_F095_async_close_and_a_failing_close():
    class Async(Closing):
        async def close(self):  # type: ignore[override]
            await asyncio.sleep(0)
            super().close()

    class Failing(Closing):
        def close(self):
            super().close()
            raise OSError("gone")

    async def run():
        first, second = Instance(Async()), Instance(Failing())
        await first.close()
        await first.close()
        await second.close()
        return len(first.env.closed), len(second.env.closed), second.close_error

    assert play(run()) == (1, 1, "OSError: gone")


def test_F095_an_instance_that_nobody_holds_is_closed():
    env = Closing()
    Instance(env)
    until = time.monotonic() + 5
    while not env.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert len(env.closed) == 1


def test_F095_interpreter_exit_closes_what_is_left_once_and_is_not_delayed():
    """One instance idle, one in reset, one that failed in reset, one async, one hung, in a process that just ends."""
    program = textwrap.dedent(
        """
        import asyncio, sys, threading, time
        from agentrl.pool import EnvironmentPool
        class E:
            def __init__(self): self.kind = "idle"
            def reset(self, kind):
                self.kind = kind
                if kind == "fails": raise ValueError
                if kind == "hangs": time.sleep(60)
            def close(self):
                sys.stdout.write(self.kind + "\\n"); sys.stdout.flush()
        class A(E):
            async def close(self): sys.stdout.write("async\\n"); sys.stdout.flush()
        pool, other = EnvironmentPool(E), EnvironmentPool(A)
        async def main():
            ok, bad, hung = await pool.acquire(), await pool.acquire(), await pool.acquire()
            await ok.reset({"kind": "in use"})
            for instance, timeout in ((bad, 1), (hung, 0.1)):
                try: await instance.reset({"kind": "fails" if instance is bad else "hangs"}, timeout)
                except Exception: pool.release(instance, healthy=False)
        asyncio.run(main())
        """
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "async", "fails", "hangs", "in use"]
    assert time.monotonic() - start < 10


def test_a_lane_survives_a_job_that_fails(caplog):
    lane = Lane()
    lane.post(lambda: 1 / 0)
    assert lane.run(lambda: 3) == (True, 3)
    lane.stop()
    assert "ZeroDivisionError" in caplog.text


def test_the_machinery_needs_no_torch():
    program = textwrap.dedent(
        """
        import asyncio, sys
        sys.modules["torch"] = None
        from agentrl.environment import Instance
        from agentrl.registry import make
        async def main():
            instance = Instance(make("agentrl/Hunt-v0"))
            await instance.reset({"seed": 1})
            print((await instance.call(instance.tools["search"], {"place": "cave"})).error)
        asyncio.run(main())
        assert "transformers" not in sys.modules
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


def test_cost_of_a_call():
    """Process CPU per call, five times the targets' measured values so that a busy machine passes."""

    class Cheap(Environment):
        run_inline = True

        def reset(self): ...
        def f(self, x: int) -> str:
            """F.

            Args:
                x: It.
            """
            return "x"

    class Threaded(Cheap):
        run_inline = False

    async def cost(env: Any, n: int) -> float:
        instance = Instance(env)
        tool = instance.tools["f"]
        best = 1.0
        for _ in range(3):
            start = time.process_time()
            for _ in range(n):
                await instance.call(tool, {"x": 1}, 60.0)
            best = min(best, (time.process_time() - start) / n)
        return best * 1e6

    assert play(cost(Cheap(), 500)) < 20
    assert play(cost(Threaded(), 200)) < 150


def test_a_cheap_environment_does_not_make_standalone_tools_run_on_the_event_loop():
    """F081: eight standalone tools that sleep beside a run_inline environment sleep at the same time."""

    class Cheap:
        run_inline = True

        def reset(self):
            return "go"

    def nap() -> str:
        """Sleep a little."""
        time.sleep(0.1)
        return "slept"

    async def main() -> float:
        tool = build_tool(nap)
        instances = [Instance(Cheap()) for _ in range(8)]
        started = time.perf_counter()
        await asyncio.gather(*(instance.call(tool, {}, 5.0) for instance in instances))
        elapsed = time.perf_counter() - started
        for instance in instances:
            await instance.close()
        return elapsed

    assert asyncio.run(main()) < 0.5


def test_a_gymnasium_style_reset_is_named():
    class Wrong:
        def reset(self):
            return "obs", {}

    with pytest.raises(ConfigurationError, match=r"Wrong.reset\(\) returned a tuple; it must return text"):
        asyncio.run(Instance(Wrong()).reset({}, 1.0))
