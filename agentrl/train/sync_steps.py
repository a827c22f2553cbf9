"""The steps that every weight sync with a vLLM server goes through, on one rank or many, and what their failure means.

While weights change no request is admitted and the server is paused; if a step fails nobody knows what the server
holds, so the sampler stays broken until a whole sync has come through.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import AgentRLError, ConfigurationError, RunStopped
from agentrl.sampler.vllm.http import ServerTrouble
from agentrl.sampler.vllm.server import VLLMServerSampler

Run = Callable[[Callable[[], Any]], Any]
"""Runs a coroutine function to its end on the loop that the sampler lives on, as `Player.run` does."""
_POLL_S = 0.05
_STOP_S = 5.0  # for the pause after a failure


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """What a weight sync took, in seconds."""

    way: str  # "file", "nccl", "lora" or "direct"
    total_s: float
    pause_s: float  # while the sampler was held
    transfer_s: float  # from the trainer's weights to the sampler's
    barrier_s: float  # waiting for other ranks
    steps: Mapping[str, float]  # each by its name, in order


class Clock:
    """Seconds by step."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self.began = time.perf_counter()
        self._held: float | None = None
        self.current = ""  # the step that is running, or that failed

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.current = name
        began = time.perf_counter()
        yield
        self.steps[name] = self.steps.get(name, 0.0) + time.perf_counter() - began

    def held(self) -> None:
        """No request is admitted from now on."""
        self._held = time.perf_counter()

    def times(self, way: str) -> SyncTimes:
        transfer = sum(s for name, s in self.steps.items() if name in TRANSFER)
        now = time.perf_counter()
        pause = 0.0 if self._held is None else now - self._held
        return SyncTimes(way, now - self.began, pause, transfer, self.steps.get(RANKS, 0.0), self.steps)


GATHER, RANKS = "gather the weights", "wait for the other ranks"
TRANSFER = frozenset({
    GATHER, "write the weights", "connect", "start the update", "load the weights", "finish the update",
    "load the adapter", "transfer",
})  # fmt: skip


class Session:
    """Calls to a server that share one deadline; each is a step, timed, and named where it fails."""

    def __init__(self, sampler: VLLMServerSampler, timeout_s: float) -> None:
        self.sampler, self.clock = sampler, Clock()
        self.end = time.monotonic() + timeout_s

    def left(self) -> float:
        return max(0.001, self.end - time.monotonic())

    async def post(self, step: str, path: str, body: Any = None, **params: Any) -> Any:
        with self.clock.step(step):
            return await self.sampler.client.post(path, body, timeout_s=self.left(), **params)

    async def repeated(self, step: str, path: str, **params: Any) -> Any:
        """The answer to a call that may as well be made twice: made again until the deadline if the server fails."""
        with self.clock.step(step):
            while True:
                try:
                    return await self.sampler.client.post(path, timeout_s=self.left(), **params)
                except ServerTrouble:
                    if self.left() < 4 * _POLL_S:
                        raise
                    await asyncio.sleep(_POLL_S)

    async def pause(self) -> None:
        await self.repeated("pause", "/pause", mode="keep")

    async def start_update(self) -> None:
        """The server takes weights; an update that a failed sync left open was ended first."""
        try:
            await self.post("start the update", "/start_weight_update")
        except AgentRLError as error:
            if "already" not in str(error):
                raise
            await anyhow(self.sampler, "/finish_weight_update", self.left())
            await self.post("start the update", "/start_weight_update")

    async def forget_prefixes(self) -> None:
        """No key or value of the old weights is used again."""
        while True:
            answer = await self.repeated("reset the prefix cache", "/reset_prefix_cache", reset_running_requests=True)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            if self.left() < _POLL_S:
                raise TimeoutError("it still uses keys and values of the old weights")
            await asyncio.sleep(_POLL_S)

    async def resume(self) -> None:
        await self.repeated("resume", "/resume")


async def anyhow(sampler: VLLMServerSampler, path: str, timeout_s: float, **params: Any) -> None:
    """The call was made, whatever came of it.

    Made again if it fails: behind an error vLLM closes the connection, and this call may have taken it before that.
    """
    for _ in range(2):
        with contextlib.suppress(Exception):
            await sampler.client.post(path, timeout_s=timeout_s, **params)
            return


class Ranks:
    """The processes that train together; one of them talks to the server."""

    def __init__(self, accelerator: Any = None) -> None:
        self.accelerator = accelerator
        self.number = accelerator.process_index if accelerator is not None else 0
        self.count = accelerator.num_processes if accelerator is not None else 1

    @property
    def main(self) -> bool:
        return self.number == 0

    def agreed(self, value: str) -> str:
        """The main rank's value, on every rank."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        values = [value]
        broadcast_object_list(values)
        return values[0]

    def first_error(self, error: str | None) -> str | None:
        """The error of the first rank that has one, on every rank, once all of them are here."""
        if self.count == 1:
            return error
        from accelerate.utils import gather_object

        return next((e for e in gather_object([error]) if e), None)


class ServerSync(ABC):
    """A server's weights follow the trainer's. `publish` is collective: every rank calls it.

    Args:
        sampler: Of this rank, started.
        run: Runs a coroutine function on the sampler's loop.
        ranks: All of them.
        timeout_s: A sync that takes longer has failed.
    """

    way = ""

    def __init__(self, sampler: VLLMServerSampler, run: Run, ranks: Ranks, timeout_s: float) -> None:
        self.sampler, self.ranks, self.timeout_s = sampler, ranks, timeout_s
        self._run = run
        self.busy = asyncio.Lock()  # one conversation about weights with the server at a time

    def publish(self, version: int) -> SyncTimes:
        """The server samples from the trainer's weights of now, and calls them `version`.

        Raises:
            RunStopped: A step failed on some rank, on all of them; `sample` fails until a later sync has come through.
            ConfigurationError: These weights cannot be sent at all.
        """
        session = Session(self.sampler, self.timeout_s)
        for work in (self.collect, self.send, self.release):
            self._phase(session, version, work)
        return session.clock.times(self.way)

    @abstractmethod
    def close(self) -> None:
        """What was kept for the server is gone."""

    # --- what the ways differ in ---
    @abstractmethod
    def collect(self, session: Session, version: int) -> None:
        """Every rank gave its share of the weights; the main one has all of them."""

    @abstractmethod
    def send(self, session: Session, version: int) -> None:
        """The server holds the new weights and is still paused."""

    def release(self, session: Session, version: int) -> None:
        """Requests are admitted on every rank, then the server goes on.

        In the other order an answer could arrive whose version nobody knows yet.
        """

        async def go_on() -> None:
            self.sampler.open(version)
            if self.ranks.main:
                await session.resume()

        self.on_loop(session, go_on)

    def hold(self, session: Session) -> None:
        session.clock.held()
        self.sampler.hold()

    def on_loop(self, session: Session, work: Callable[[], Awaitable[None]]) -> None:
        """The work is done, on the sampler's loop and in time."""

        async def limited() -> None:
            async with asyncio.timeout(session.left()), self.busy:
                await work()

        self._run(limited)

    def _phase(self, session: Session, version: int, work: Callable[[Session, int], None]) -> None:
        """The work is done on every rank, or none goes on."""
        error: Exception | None = None
        try:
            work(session, version)
        except Exception as raised:
            error = raised
        except BaseException:  # Ctrl-C
            self.sampler.broken(f"The sync of weights {version} with the vLLM server was interrupted.")
            raise
        step = session.clock.current
        why = None if error is None else self._why(version, step, error)
        with session.clock.step(RANKS):
            found = self.ranks.first_error(why)
        if found is None:
            return
        self.sampler.broken(found)
        if self.ranks.main:
            self.stop()
        if isinstance(error, ConfigurationError) and step == GATHER:
            raise error
        raise RunStopped(found) from error

    def _why(self, version: int, step: str, error: Exception) -> str:
        said = str(error).rstrip(".") or type(error).__name__
        if isinstance(error, TimeoutError) and not str(error):
            said = f"not done after {self.timeout_s:g} s"
        return (
            f"Weights {version} did not reach the vLLM server at {self.sampler.options.base_url}: the step '{step}' "
            f"failed ({said}). Nothing is sampled until a whole sync has come through."
        )

    def stop(self) -> None:
        """After a failure the server is paused and what it was drawing is dropped, if it still listens."""

        async def stop() -> None:
            await anyhow(self.sampler, "/pause", _STOP_S, mode="abort")

        with contextlib.suppress(Exception):
            self._run(stop)
