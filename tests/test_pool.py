"""The pool: what it accepts, what it reuses, what it throws away."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import threading
import time
from typing import ClassVar

import pytest

from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed, RunStopped, ToolDefinitionError
from agentrl.mixing import EnvironmentSpec
from agentrl.pool import EnvironmentPool


class Env:
    built: ClassVar[list[Env]] = []

    def __init__(self, fail_every: int = 0):
        self.resets = 0
        self.closed = 0
        self.fail_every = fail_every
        Env.built.append(self)

    def reset(self, fail: bool = False, sleep: float = 0.0):
        self.resets += 1
        time.sleep(sleep)
        if fail:
            raise ValueError("boom")
        return "go"

    def get_reward(self):
        return 1.0

    def close(self):
        self.closed += 1


class Inline(Environment):
    run_inline = True

    def __init__(self):
        self.thread = threading.get_ident()

    def reset(self): ...


@pytest.fixture(autouse=True)
def _fresh():
    Env.built = []


def play(work):
    return asyncio.run(work)


@pytest.mark.parametrize(
    "factory",
    [Env, lambda: Env(), functools.partial(Env, fail_every=0), functools.partial(lambda x: Env(x), 0)],
)
def test_factories_of_every_kind(factory):
    pool = EnvironmentPool(factory)
    assert (pool.name, pool.has_reward, pool.tools, pool.built) == ("Env", True, {}, 1)
    assert EnvironmentPool(factory, name="mine").name == "mine"
    play(pool.close())


class NoReset: ...


class ResetIsData:
    reset = 3


class RewardWithArgument:
    def reset(self): ...
    def get_reward(self, completion): ...


class NeedsArgument:
    def __init__(self, path): ...
    def reset(self): ...


class Untyped:
    def reset(self): ...
    def go(self, x): ...


async def async_factory():
    return Env()


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Env(), "got an instance of Env"),
        (3, "must be a class or a function"),
        (NoReset, r"NoReset has no method reset\(\)"),
        (ResetIsData, r"ResetIsData has no method reset\(\)"),
        (RewardWithArgument, "needs 'completion'"),
        (NeedsArgument, r"NeedsArgument failed: TypeError: .*functools\.partial"),
        (lambda: None, "returned None"),
        (lambda: Env, "must return a new environment"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (async_factory, "is async"),
        (functools.partial(EnvironmentSpec, Env), "Pass the spec itself"),
    ],
)
def test_what_cannot_work_fails_at_construction(factory, says):
    with pytest.raises(ConfigurationError, match=says):
        EnvironmentPool(factory)


def test_untyped_tools_fail_at_construction():
    with pytest.raises(ToolDefinitionError, match=r"Untyped\.go"):
        EnvironmentPool(Untyped)


def test_instances_are_reused_and_the_first_is_not_wasted():
    async def run():
        pool = EnvironmentPool(Env)
        for _ in range(5):
            a, b = await pool.acquire(), await pool.acquire()
            assert a is not b
            await a.reset({})
            pool.release(a, healthy=True)
            pool.release(b, healthy=True)
        assert pool.built == len(Env.built) == 2
        await pool.close()

    play(run())
    assert [env.closed for env in Env.built] == [1, 1]


def test_F089_failing_resets_lose_no_instance_and_build_a_bounded_number():
    """100 rollouts, 4 at a time, every third reset raises: each failed instance is closed, the others live on."""

    async def run():
        pool = EnvironmentPool(Env)
        gate = asyncio.Semaphore(4)

        async def rollout(index):
            async with gate:
                instance = await pool.acquire()
                healthy = False
                try:
                    await instance.reset({"fail": index % 3 == 0}, 5)
                    healthy = True
                except EnvironmentFailed as error:
                    assert error.stage == "reset"
                finally:
                    pool.release(instance, healthy=healthy)

        await asyncio.gather(*(rollout(index) for index in range(100)))
        await pool.close()
        return pool

    pool = play(run())
    assert sum(env.resets for env in Env.built) == 100
    assert pool.built <= 4 + 34
    assert {env.closed for env in Env.built} == {1}
    assert pool.abandoned == 0


def test_an_instance_cannot_be_released_twice():
    async def run():
        pool = EnvironmentPool(Env)
        instance = await pool.acquire()
        pool.release(instance, healthy=True)
        with pytest.raises(Exception, match="released before"):
            pool.release(instance, healthy=True)
        await pool.close()

    play(run())


def test_a_singleton_factory_is_refused():
    shared = Env()

    async def run():
        pool = EnvironmentPool(lambda: shared)
        await pool.acquire()
        with pytest.raises(ConfigurationError, match="same object twice"):
            await pool.acquire()

    play(run())


def test_a_factory_that_fails_later_is_an_environment_failure():
    def flaky():
        if Env.built:
            raise OSError("no more ports")
        return Env()

    async def run():
        pool = EnvironmentPool(flaky)
        await pool.acquire()
        with pytest.raises(EnvironmentFailed, match="no more ports") as caught:
            await pool.acquire()
        assert caught.value.stage == "reset"

    play(run())


def test_thread_affine_constructors_work():
    """The constructor runs on the thread on which the methods run."""

    class Database:
        def __init__(self):
            self.connection = sqlite3.connect(":memory:")

        def reset(self):
            return str(self.connection.execute("select 1").fetchone()[0])

    async def run():
        pool = EnvironmentPool(Database)
        a, b = await pool.acquire(), await pool.acquire()
        out = [await a.reset({}), await b.reset({})]
        await pool.close()
        return out

    assert play(run()) == ["1", "1"]


def test_inline_environments_have_no_threads():
    before = set(threading.enumerate())

    async def run():
        pool = EnvironmentPool(Inline)
        instances = [await pool.acquire() for _ in range(10)]
        for instance in instances:
            await instance.reset({})
            assert instance.env.thread == threading.get_ident()
        assert not set(threading.enumerate()) - before
        await pool.close()

    play(run())


def test_threads_end_with_the_pool():
    before = set(threading.enumerate())

    def mine():
        return set(threading.enumerate()) - before

    async def run():
        pool = EnvironmentPool(Env)
        for instance in [await pool.acquire() for _ in range(5)]:
            await instance.reset({})
            pool.release(instance, healthy=True)
        assert len(mine()) == 5
        await pool.close()

    play(run())
    until = time.monotonic() + 5
    while mine() and time.monotonic() < until:
        time.sleep(0.01)
    assert not mine()


def test_abandoned_calls_are_counted_and_bounded():
    async def run():
        pool = EnvironmentPool(Env, max_abandoned=2)
        for _ in range(3):
            instance = await pool.acquire()
            with pytest.raises(EnvironmentFailed) as caught:
                await instance.reset({"sleep": 0.5}, 0.02)
            assert caught.value.deadline
            pool.release(instance, healthy=True)  # the pool knows better
        assert pool.abandoned == 3
        with pytest.raises(RunStopped, match="3 calls of Env"):
            await pool.acquire()
        await asyncio.sleep(0.8)
        assert pool.abandoned == 0
        instance = await pool.acquire()
        assert instance.env.resets == 0
        await pool.close()

    play(run())
    assert {env.closed for env in Env.built} == {1}


def test_F095_cancelled_while_building_still_closes():
    class Slow(Env):
        def __init__(self):
            super().__init__()
            if len(Env.built) > 1:
                time.sleep(0.2)

    async def run():
        pool = EnvironmentPool(Slow)
        await pool.acquire()
        task = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.close()
        await asyncio.sleep(0.4)

    play(run())
    assert [env.closed for env in Env.built] == [1, 1]


def test_F095_a_pool_that_is_dropped_closes_its_instances():
    EnvironmentPool(Env)
    until = time.monotonic() + 5
    while not Env.built[0].closed and time.monotonic() < until:
        time.sleep(0.01)
    assert Env.built[0].closed == 1


def test_F095_close_takes_what_is_in_use_and_async_closes_are_awaited():
    class Async(Env):
        async def close(self):  # type: ignore[override]
            await asyncio.sleep(0.01)
            self.closed += 1

    async def run():
        pool = EnvironmentPool(Async)
        broken, held = await pool.acquire(), await pool.acquire()
        pool.release(broken, healthy=False)
        await pool.close()
        assert [env.closed for env in Env.built] == [1, 1]
        assert held.env.closed == 1
        with pytest.raises(Exception, match="closed"):
            await pool.acquire()

    play(run())


def test_rollouts_without_environment_have_a_thread_for_tools():
    async def run():
        pool = EnvironmentPool(None)
        assert (pool.name, pool.tools, pool.has_reward) == ("", {}, False)
        instance = await pool.acquire()
        assert instance.env is None
        assert await instance.run(threading.get_ident) != threading.get_ident()
        pool.release(instance, healthy=True)
        await pool.close()

    play(run())
