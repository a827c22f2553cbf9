"""A server that speaks vLLM's HTTP, in a thread of the test's process: what it answers, a test decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

VOCABULARY = 100
MODEL_LENGTH = 64

Reply = Callable[[web.Request, dict[str, Any]], Any]  # a Response, or a coroutine of one


def choice(body: dict[str, Any], version: str = "default") -> dict[str, Any]:
    """What vLLM answers to a request: ids that follow from its seed."""
    params = body["sampling_params"]
    count, seed, asked = params["max_tokens"], params["seed"], params["logprobs"]
    ids = [(seed >> (i % 50)) % VOCABULARY for i in range(count)]

    def entry(i: int) -> dict[str, Any]:
        tops = [{"token_id": i, "logprob": -0.5, "rank": 1}]
        tops += [{"token_id": (i + j) % VOCABULARY, "logprob": -1.0 - j, "rank": 1 + j} for j in range(1, asked)]
        return {"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": tops}

    return {
        "index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": ids, "sampling_mask": None,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "logprobs": {"content": [entry(i) for i in ids]},
    }  # fmt: skip


def answer(body: dict[str, Any], version: str = "default", **changes: Any) -> web.Response:
    """A good answer, with fields of its choice changed."""
    return web.json_response({"choices": [{**choice(body, version), **changes}]})


class FakeVLLM:
    """`with FakeVLLM() as fake:` a server listens at `fake.url`; its fields may be changed at any time."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []  # to the next calls of generate, in order; then `usual`
        self.usual: Reply = lambda request, body: answer(body, self.version)
        self.version = "default"  # of the weights
        self.bodies: list[dict[str, Any]] = []  # of all calls of generate
        self.in_flight = self.most_in_flight = self.dropped = 0
        self.health: Callable[[], web.Response] = web.Response
        self.healthy_calls = 0
        self.info: dict[str, Any] | None = {
            "vllm_config": {
                "model_config": {
                    "dtype": "torch.float32", "max_logprobs": -1, "logprobs_mode": "processed_logprobs",
                    "return_sampling_mask": False,
                },
                "cache_config": {"block_size": 32},
                "device_config": {"device": "cpu"},
                "scheduler_config": {"enable_chunked_prefill": False},
                "weight_transfer_config": {"backend": "agentrl"},
                "lora_config": None,
            },
            "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
        }  # fmt: skip
        self.models = [{"id": "policy", "root": "/models/tiny", "parent": None, "max_model_len": MODEL_LENGTH}]
        self.scale_out = True
        self.metrics = ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return refusal(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        body = await request.json()
        out = [i for i in map(int, body["sampling_params"].get("logit_bias") or {}) if i >= VOCABULARY]
        if out:
            return refusal(
                400, f"token_id(s) {out} in logit_bias contain out-of-vocab ids. Vocabulary size: {VOCABULARY}"
            )
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = (self.replies.pop(0) if self.replies else self.usual)(request, body)
            return await reply if asyncio.iscoroutine(reply) else reply
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            self.in_flight -= 1

    async def _health(self, request: web.Request) -> web.Response:
        self.healthy_calls += 1
        return self.health()

    async def _info(self, request: web.Request) -> web.Response:
        return (
            web.json_response({"detail": "Not Found"}, status=404)
            if self.info is None
            else web.json_response(self.info)
        )

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", _says(lambda: {"version": "0.32.0"}))
        app.router.add_get("/v1/models", _says(lambda: {"data": self.models}))
        app.router.add_get("/get_world_size", _says(lambda: {"world_size": 1}))
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    def __enter__(self) -> FakeVLLM:
        self.listen(0)
        return self

    def listen(self, port: int) -> None:
        """It answers; `port` 0: any that is free."""
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve() -> None:
            # Without handler_cancellation aiohttp goes on with a request that nobody waits for; vLLM drops it.
            self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=1024)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            ready.set()

        def work() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.create_task(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def refusal(status: int, message: str) -> web.Response:
    """An error in vLLM's words."""
    return web.json_response({"error": {"message": message, "type": "x", "code": status}}, status=status)


def _says(what: Callable[[], Any]) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(what())

    return handler
