"""Calls to a vLLM server: what may help is tried again, what the server will always refuse is said at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agentrl.errors import ConfigurationError, MissingDependency, RunStopped, SamplerError

_T = TypeVar("_T")
log = logging.getLogger(__name__)
_AGAIN = frozenset({408, 425, 429})  # beside all of 5xx
_KEEP_ALIVE_S = 3.0  # vLLM closes idle connections after 5; one that is reused at that moment is a failed request
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
_SILENT_S = 5.0  # after which it is said that a server is waited for
_HEALTH_S = 10.0  # for one answer of /health
_PLAIN = ("/health", "/metrics", "/version", "/v1/models", "/v1/completions")  # routes that every server has


class ServerTrouble(SamplerError):
    """The server did not answer, or not with what can be read; it may if it is asked again."""


class ServerRefused(ConfigurationError):
    """The server will always refuse this request. `status` is HTTP's, `said` the server's own words."""

    def __init__(self, path: str, status: int, said: str) -> None:
        super().__init__(f"vLLM refused {path} ({status}): {said}{_remedy(path, status, said)}")
        self.status = status
        self.said = said


class ServerClient:
    """One server, called from one event loop. Connections are kept; no proxy is ever used.

    Args:
        base_url: As "http://127.0.0.1:8000".
        timeout_s: For the server to get ready, for each answer, and for how long a failing request is tried again.
        ended: Why the server is gone for good, where somebody knows: nothing is tried again then.

    Raises:
        MissingDependency: aiohttp is not installed.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float = 240.0, ended: Callable[[], str | None] = lambda: None
    ) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependency("aiohttp", "vllm-client", "A vLLM server") from error
        if not base_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"vllm_server_base_url is '{base_url}'; it looks like 'http://localhost:8000'.")
        self.base_url = base_url.rstrip("/")
        self.timeout_s, self.ended = timeout_s, ended
        self.retries = 0  # so far
        self.loop = asyncio.get_running_loop()
        self._aiohttp = aiohttp
        self._jitter = random.Random()  # the user's own random numbers stay as they are
        # No limit on connections: a pause must get through while every request that is allowed is in flight.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=True)
        self._left = weakref.finalize(self, _let_go, self._session)  # also when the interpreter exits

    async def wait_ready(self) -> None:
        """The server says that it is healthy.

        Raises:
            ConnectionError: It did not within `timeout_s`; the message holds what it said last.
        """
        began, said = self.loop.time(), False
        end = began + self.timeout_s
        delay = _FIRST_DELAY_S
        while True:
            left = max(0.05, end - self.loop.time())
            try:
                await self._call("GET", "/health", None, {}, min(_HEALTH_S, left))
                return
            except (ServerTrouble, ServerRefused) as error:
                last = error
            if not said and self.loop.time() > began + _SILENT_S:
                said = True
                log.warning("Waiting up to %g s for a vLLM server at %s (%s).", self.timeout_s, self.base_url, last)
            if self.loop.time() + delay > end:
                raise ConnectionError(
                    f"No vLLM server was ready at {self.base_url} within {self.timeout_s:g} s ({last}). Start one "
                    "(agentrl serve MODEL), or set vllm_server_base_url and vllm_server_timeout."
                ) from last
            await asyncio.sleep(delay)
            delay = min(2 * delay, 1.0)

    async def patient(self, path: str, body: Any, answer_s: float) -> Any:
        """As `post`; the answer may take `answer_s`, as long as the server is healthy every `timeout_s`."""
        call = asyncio.ensure_future(self.post(path, body, timeout_s=answer_s))
        try:
            while not (await asyncio.wait({call}, timeout=self.timeout_s))[0]:
                await self._call("GET", "/health", None, {}, min(_HEALTH_S, self.timeout_s))
            return call.result()
        finally:
            call.cancel()

    async def get(self, path: str, *, seconds: float | None = None, **params: Any) -> Any:
        """What the server answers: decoded where it is JSON, else text.

        Raises:
            ServerTrouble: It did not answer within `timeout_s`, or with an error of its own.
            ServerRefused: It refused.
        """
        return await self._call("GET", path, None, params, self.timeout_s if seconds is None else seconds)

    async def post(
        self, path: str, body: Any = None, *, timeout_s: float | None = None, retry: bool = False, **params: Any
    ) -> Any:
        """As `get`, with a JSON body; `retry`: tried again as in `retried`."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        if retry:
            return await self.retried(lambda: self._call("POST", path, data, params, seconds))
        return await self._call("POST", path, data, params, seconds)

    async def retried(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """The first result of `attempt`; each ServerTrouble is followed by another, with growing pauses.

        Raises:
            SamplerError: `timeout_s` have passed since the first failure.
            RunStopped: The server is gone for good.
        """
        first: float | None = None
        delay, attempts = _FIRST_DELAY_S, 0
        while True:
            try:
                return await attempt()
            except ServerTrouble as error:
                if (why := self.ended()) is not None:
                    raise RunStopped(f"{why}.") from error
                attempts += 1
                now = self.loop.time()
                first = now if first is None else first
                pause = delay * self._jitter.uniform(0.5, 1.5)
                if now + pause - first > self.timeout_s:
                    raise SamplerError(
                        f"The vLLM server at {self.base_url} failed {attempts} time(s) in {now - first:.0f} s; last: "
                        f"{error}"
                    ) from error
                self.retries += 1
                await asyncio.sleep(pause)
                delay = min(2 * delay, _LONGEST_DELAY_S)

    async def close(self) -> None:
        """No connection is open."""
        await self._session.close()

    def abandon(self) -> None:
        """Its connections are let go of, from outside of its loop, which is over."""
        self._left()

    async def _call(self, method: str, path: str, data: bytes | None, params: dict[str, Any], seconds: float) -> Any:
        """One attempt. Cancelling it closes its connection, at which vLLM drops the request."""
        aiohttp = self._aiohttp
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(30.0, seconds), sock_read=seconds)
        headers = None if data is None else {"content-type": "application/json"}
        query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in params.items()}
        try:
            async with self._session.request(
                method, self.base_url + path, data=data, headers=headers, params=query or None, timeout=timeout
            ) as response:
                raw = await response.read()
                status, kind = response.status, response.content_type
        except TimeoutError as error:
            raise ServerTrouble(f"{path} was not answered within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerTrouble(f"{path}: {type(error).__name__}: {error}") from error
        if status >= 500 or status in _AGAIN:
            raise ServerTrouble(f"{path} ({status}): {_said(raw)}")
        if status >= 400:
            raise ServerRefused(path, status, _said(raw))
        if kind != "application/json":
            return raw.decode(errors="replace")
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerTrouble(f"{path}: the answer is no JSON ({len(raw)} bytes: {_said(raw)})") from error


def _let_go(session: Any) -> None:
    if session.closed:
        return
    closing = session.close()
    with contextlib.suppress(StopIteration, RuntimeError):
        closing.send(None)  # all that can be done without the loop is done before it first waits
    closing.close()


def _said(raw: bytes) -> str:
    """The server's own words in an answer."""
    text = raw.decode(errors="replace").strip()
    try:
        body = json.loads(raw)
        error = body.get("error", body.get("detail", body.get("message", text)))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return text[:500] or "no message"


def _remedy(path: str, status: int, said: str) -> str:
    """What to do about it, where that is known."""
    if status == 401:
        return ". Start the server without --api-key."
    if "max allowed" in said and "logprobs" in said:
        return ". Start the server with --max-logprobs -1."
    if status != 404 or "does not exist" in said:
        return ""
    if path.startswith("/inference/"):
        return ". Start the server with --enable-scale-out."
    if "lora_adapter" in path:
        return ". Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora."
    if path not in _PLAIN:
        return ". Start the server with VLLM_SERVER_DEV_MODE=1."
    return f". Is it a vLLM server that listens there? It has no {path}."
