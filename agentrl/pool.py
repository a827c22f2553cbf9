"""One environment instance for each concurrent rollout, built once and reset many times."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from agentrl.environment import Instance, close_method, discover_tools
from agentrl.errors import AgentRLError, ConfigurationError, EnvironmentFailed, RunStopped
from agentrl.lane import Closer, Lane, Outcome
from agentrl.mixing import EnvironmentSpec, specs_of
from agentrl.registry import resolve
from agentrl.tool_schema import Tool, is_async_callable

_CLOSE_S = 10.0  # for close() of instances that were thrown away


class EnvironmentPool:
    """Instances of one environment: idle ones are handed out again, broken ones are closed and never come back.

    Args:
        factory: A class or a function without required arguments that builds one environment; None for rollouts
            without an environment (their instances give standalone tools a thread).
        name: Instead of the class name of what the factory builds.
        max_abandoned: Calls that may hang at the same time (each holds a thread) before the run stops.
        owned: Whether the environments are the pool's to close.
        spec: Settings of this environment alone, which the engine that plays it reads.

    Raises:
        ConfigurationError: the factory is not one, fails, or builds something without `reset`.
        ToolDefinitionError: a method lacks types or documentation.
    """

    def __init__(
        self,
        factory: Callable[[], object] | None,
        *,
        name: str | None = None,
        max_abandoned: int = 64,
        owned: bool = True,
        spec: EnvironmentSpec | None = None,
    ) -> None:
        _check_factory(factory)
        self._factory = factory
        self._max_abandoned = max_abandoned
        self._owned = owned
        self.spec = spec
        self._inline = getattr(factory, "run_inline", False) is True
        self._idle: list[Instance] = []
        self._in_use: set[Instance] = set()
        self._stuck: list[Callable[[], bool]] = []
        self._closing: set[asyncio.Future[Any]] = set()  # futures that close what was thrown away
        self._closed = False
        self.built = 0  # how often the factory has been called with success
        first = self._first()
        self._idle.append(first)
        self._inline = first.inline
        self.name: str = name or first.name
        self.tools: dict[str, Tool] = first.tools
        self.has_reward: bool = callable(getattr(first.env, "get_reward", None))

    @property
    def abandoned(self) -> int:
        """Calls that were given up and are still running, each on a thread of its own."""
        self._stuck[:] = [alive for alive in self._stuck if alive()]
        return len(self._stuck)

    async def acquire(self) -> Instance:
        """An instance that nobody else has; give it back with `release`.

        Raises:
            EnvironmentFailed: the factory raised (stage "reset").
            RunStopped: more than `max_abandoned` calls hang.
        """
        if self._closed:
            raise AgentRLError(f"The pool of {self.name} is closed.")
        if self._stuck and self.abandoned > self._max_abandoned:
            raise RunStopped(
                f"{len(self._stuck)} calls of {self.name or 'tools'} are hanging on abandoned threads. "
                "Make them return, or raise the deadlines."
            )
        instance = self._idle.pop() if self._idle else await self._build()
        self._in_use.add(instance)
        return instance

    def release(self, instance: Instance, *, healthy: bool) -> None:
        """The instance is idle again, or on its way to being closed if it is not healthy or the pool is closed."""
        if instance not in self._in_use:
            raise AgentRLError(f"This instance of {self.name} was not acquired from this pool, or was released before.")
        self._in_use.discard(instance)
        if healthy and not instance.broken and not self._closed:
            self._idle.append(instance)
        else:
            self._discard(instance)

    async def close(self) -> None:
        """Every instance is closed or, where a call hangs, will be; those in use as well."""
        self._closed = True
        left, self._idle, self._in_use = [*self._idle, *self._in_use], [], set()
        here = [f for f in self._closing if f.get_loop() is asyncio.get_running_loop()]  # others' loops are gone
        await asyncio.gather(*(instance.close() for instance in left), return_exceptions=True)
        if here:
            await asyncio.wait(here, timeout=_CLOSE_S)

    def _first(self) -> Instance:
        """The instance that shows what the environment is. Waits for it: this is construction, not a rollout."""
        if self._factory is None:
            self.built += 1
            return Instance(None, on_abandon=self._stuck.append)
        lane = Lane()
        ok, env = _attempt_here(self._factory) if self._inline else lane.run(self._factory)
        if not ok:
            lane.stop()
            if isinstance(env, AgentRLError) or not isinstance(env, Exception):
                raise env
            missing = isinstance(env, TypeError) and "argument" in str(env)
            hint = " Pass functools.partial(...) with its arguments." if missing else ""
            said = str(env).rstrip(".")
            raise ConfigurationError(
                f"Building an environment with {_name(self._factory)} failed: {type(env).__name__}: {said}.{hint}"
            ) from env
        validate_environment(env, self._factory)
        self.built += 1
        return Instance(env, lane=lane, owned=self._owned, on_abandon=self._stuck.append)

    async def _build(self) -> Instance:
        factory = self._factory
        if factory is None:
            self.built += 1
            return Instance(None, on_abandon=self._stuck.append)
        lane = Lane()
        ok, env = _attempt_here(factory) if self._inline else await self._build_on(lane, factory)
        if not ok:
            lane.stop()
            raise EnvironmentFailed(
                f"Building an environment with {_name(factory)} failed: {type(env).__name__}: {env}.", stage="reset"
            ) from env
        if any(env is other.env for other in (*self._idle, *self._in_use)):
            lane.stop()
            raise ConfigurationError(
                f"{_name(factory)} returned the same object twice. Build a new one each time: rollouts share nothing."
            )
        validate_environment(env, factory)
        self.built += 1
        return Instance(env, lane=lane, owned=self._owned, on_abandon=self._stuck.append)

    async def _build_on(self, lane: Lane, factory: Callable[[], object]) -> Outcome:
        built: list[object] = []

        def build() -> object:
            built.append(factory())
            return built[0]

        future = lane.submit(build)
        try:
            return await future
        except asyncio.CancelledError:  # nobody waits for it any more: close it as soon as it is there
            lane.post(lambda: Closer(close_method(built[0]), lane, inline=True).close_here() if built else None)
            lane.stop()
            self._stuck.append(lambda: lane.alive)
            raise

    def _discard(self, instance: Instance) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return instance.close_nowait()
        waiting = instance.start_close()
        if waiting is not None:
            self._closing.add(waiting)
            waiting.add_done_callback(self._closing.discard)


def make_pools(environment_factory: Any) -> dict[str | None, EnvironmentPool]:
    """One pool per environment: of a class, a factory, a registered id, an `EnvironmentSpec`, or a dict of these."""
    specs = specs_of(environment_factory)
    if not specs:
        return {None: EnvironmentPool(None)}
    return {name: EnvironmentPool(resolve(spec.factory), spec=spec) for name, spec in specs.items()}


def _check_factory(factory: Any) -> None:
    if factory is None:
        return
    if not isinstance(factory, type) and hasattr(type(factory), "reset"):
        name = type(factory).__name__
        raise ConfigurationError(
            f"environment_factory got an instance of {name}. Pass the class itself, or a function that builds one."
        )
    if not callable(factory):
        raise ConfigurationError(
            f"environment_factory must be a class or a function that builds an environment, not {factory!r:.80}."
        )
    if is_async_callable(factory):
        raise ConfigurationError(f"{_name(factory)} is async. Build the environment in a plain function.")


def validate_environment(env: Any, factory: Any) -> None:
    """What the factory built is an environment: `reset`, a `get_reward` without arguments, documented tools."""
    if env is None or isinstance(env, type):
        raise ConfigurationError(f"{_name(factory)} returned {env!r}. It must return a new environment.")
    if isinstance(env, EnvironmentSpec):
        raise ConfigurationError(
            f"{_name(factory)} returned an EnvironmentSpec. Pass the spec itself, not what makes it."
        )
    name = type(env).__name__
    for method, needed in (("reset", True), ("get_reward", False)):
        found = getattr(env, method, None)
        if found is None and not needed:
            continue
        if not callable(found):
            raise ConfigurationError(f"{name} has no method {method}(). Write one: it starts an episode from a row.")
    reward = getattr(env, "get_reward", None)
    if reward is not None:
        needed_arguments = [
            p.name
            for p in inspect.signature(reward).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed_arguments:
            raise ConfigurationError(
                f"{name}.get_reward() is called without arguments, but needs '{needed_arguments[0]}'. "
                "Keep it on self in reset()."
            )
    discover_tools(env)


def _name(factory: Any) -> str:
    while hasattr(factory, "func"):
        entry = factory.args[0] if getattr(factory, "args", ()) else None
        name = getattr(entry, "id", None)  # of an entry of the registry: says more than the function
        if isinstance(name, str):
            return name
        factory = factory.func
    return getattr(factory, "__qualname__", None) or repr(factory)


def _attempt_here(factory: Callable[[], object]) -> Outcome:
    try:
        return True, factory()
    except Exception as error:
        return False, error
