"""Samples from a vLLM server: token ids in, token ids and their log-probs out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import ConfigurationError, RunStopped, SamplerError
from agentrl.sampler.vllm import wire
from agentrl.sampler.vllm.facts import ServerFacts, ServerLoad, check_facts, read_facts, read_load
from agentrl.sampler.vllm.gate import Gate
from agentrl.sampler.vllm.http import ServerClient, ServerRefused, ServerTrouble
from agentrl.sampler.vllm.wire import Drawing
from agentrl.types import SampleOutput, SampleRequest, VersionSpan

_GENERATE = "/inference/v1/generate"
_METRICS_S = 2.0
_FIRST = "default"  # what vLLM calls the weights that it was started with


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server is, and how it is asked."""

    base_url: str  # as "http://127.0.0.1:8000"
    timeout_s: float = 240.0  # for getting ready, for how long a failing request is tried again, for a sign of life
    answer_s: float = 1800.0  # for a turn, as long as the server is alive: it may wait behind many others
    max_connections: int = 512  # requests in flight at a time; more wait here
    model: str | None = None  # served name; None: the one that it serves
    drawing: Drawing = field(default_factory=Drawing)
    ended: Callable[[], str | None] = lambda: None  # why the server is gone for good, where somebody knows

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_connections < 1:
            raise ConfigurationError(
                f"timeout_s is above 0 and max_connections at least 1; got {self.timeout_s} and {self.max_connections}."
            )


class VLLMServerSampler:
    """A policy that a vLLM server serves, in another process or on another machine.

    Requests of all conversations are in flight together and vLLM batches them; its prefix cache keeps a conversation's
    keys and values between turns, so nothing is held here. The same request is answered with the same ids while the
    weights are the same, up to float noise. Successive event loops may use the same sampler.

    `hold`, `open` and `broken` are for weight syncs. Once `open` was called, an answer counts only if every one of its
    tokens was drawn from weights that were published so; before that, the server's first weights are version 0.

    Args:
        options: Where and how.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.version = 0
        self.restore: Callable[[], Awaitable[None]] | None = None
        """Sends the last weights again, to a server that was restarted; set by a sync that can."""
        self.drawing = options.drawing
        self._facts: ServerFacts | None = None
        self._client: ServerClient | None = None
        self._slots = asyncio.Semaphore(options.max_connections)
        self._retries = 0  # of clients on loops that are over
        self._gate = Gate()
        self.run = ""  # what names of weights begin with, where several runs may meet at a server; set by a sync
        self._published: dict[str, int] = {}  # versions of this run by the name that the server has for them
        self._adapter: str | None = None
        self._opened = 0  # how often
        self._restoring: asyncio.Task[None] | None = None

    # --- the door ---
    async def start(self, vocabulary: int | None = None, *, weights: bool = True, log_probs: int = 0) -> ServerFacts:
        """The server is ready and can do what is asked of it.

        Args:
            vocabulary: Ids of the model that is trained.
            weights: Its weights are going to be changed (False: it is only sampled from).
            log_probs: How many log-probs per token requests will ask for.

        Raises:
            ConnectionError: It is not ready after `timeout_s`.
            ConfigurationError: It lacks a flag, or serves another model.
        """
        client = self.client
        await client.wait_ready()
        facts = await read_facts(client, self.options.model)
        check_facts(
            facts, vocabulary=vocabulary, weights=weights, log_probs=log_probs, base_url=self.options.base_url
        )  # fmt: skip
        self._facts = facts
        self.drawing = replace(
            self.options.drawing,
            sampling_mask=self.options.drawing.sampling_mask or facts.return_sampling_mask,
            vocabulary=vocabulary or facts.vocabulary,
            max_logprobs=facts.max_logprobs,
        )
        return facts

    async def sample(self, request: SampleRequest) -> SampleOutput:
        """One turn drawn by the server. Cancelling it makes the server drop it.

        Raises:
            SamplerError: The prompt does not fit the model, the server failed for longer than `timeout_s`, or what it
                answered cannot be trained on.
            ConfigurationError: The server will always refuse such a request.
        """
        prompt, most = self._accepted(request)
        drawing = self.drawing
        body = {"token_ids": prompt, "sampling_params": wire.sampling_params(request, drawing)}
        body["sampling_params"]["max_tokens"] = min(request.max_tokens, most)
        client = self.client
        async with self._slots:
            return await client.retried(lambda: self._attempt(client, request, drawing, body))

    def release(self, conversation_id: str) -> None:
        """Nothing is held here; the server's prefix cache forgets what is not used."""

    async def close(self) -> None:
        """No connection is open; the sampler may be used again."""
        if self._client is not None:
            client, self._client = self._client, None
            self._retries += client.retries
            if client.loop is asyncio.get_running_loop():
                await client.close()
            else:
                client.abandon()

    @property
    def facts(self) -> ServerFacts:
        """What `start` found out."""
        if self._facts is None:
            raise ConfigurationError("This VLLMServerSampler was not started: await sampler.start() first.")
        return self._facts

    @property
    def client(self) -> ServerClient:
        """The server's client on the running event loop."""
        loop = asyncio.get_running_loop()
        client = self._client
        if client is None or client.loop is not loop:
            if client is not None:
                if client.loop.is_running():
                    raise SamplerError("This sampler is at work in another event loop; use one per running loop.")
                client.abandon()
                self._retries += client.retries
            self._client = client = ServerClient(
                self.options.base_url, timeout_s=self.options.timeout_s, ended=self.options.ended
            )
            self._slots = asyncio.Semaphore(self.options.max_connections)
        return client

    @property
    def retries(self) -> int:
        """Requests that were tried again so far."""
        return self._retries + (self._client.retries if self._client is not None else 0)

    async def load(self) -> ServerLoad:
        """What the server is doing now.

        Raises:
            SamplerError: It did not answer.
        """
        return read_load(await self.client.get("/metrics", seconds=_METRICS_S))

    # --- the gate ---
    def hold(self) -> None:
        """Later requests wait here, none is sent; those in flight go on."""
        self._gate.hold()

    def open(self, version: int, adapter: str | None = None) -> None:
        """The server holds the weights `version`, as the adapter of that name where one is given; requests go out."""
        self.version = version
        self._adapter = adapter
        self._published[self.name_of(version)] = version
        self._opened += 1
        self._gate.open()

    def name_of(self, version: int) -> str:
        """What the server calls these weights."""
        return f"{self.run}-{version}" if self.run else str(version)

    def broken(self, why: str) -> None:
        """Nobody knows what weights the server holds: `sample` raises SamplerError(why) until `open`."""
        self._gate.broken(why)

    # --- one request ---
    def _accepted(self, request: SampleRequest) -> tuple[list[int], int]:
        """The prompt, and how many tokens fit behind it."""
        facts, prompt = self.facts, request.prompt_ids
        if request.media:
            raise ConfigurationError(
                f"The prompt holds {len(request.media)} image(s), and VLLMServerSampler sends text only: train models "
                "with vision without use_vllm."
            )
        if not prompt:
            raise SamplerError("VLLMServerSampler needs prompt ids; give the engine a renderer with a tokenizer.")
        if request.max_tokens < 1:
            raise SamplerError(f"max_tokens is {request.max_tokens}; a turn needs at least 1.")
        room = facts.max_model_len - len(prompt)
        if room < 1:
            raise SamplerError(
                f"The prompt has {len(prompt)} tokens and the model's context {facts.max_model_len}: no room for an "
                "answer. Shorten the prompt or the episode, or start vLLM with a larger --max-model-len."
            )
        vocabulary = self.drawing.vocabulary
        if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
            raise ConfigurationError(
                f"The prompt holds an id outside the {vocabulary} of the model; vLLM would die of it. Call "
                "model.resize_token_embeddings(len(tokenizer))."
            )
        return prompt, room

    async def _attempt(
        self, client: ServerClient, request: SampleRequest, drawing: Drawing, body: dict[str, Any]
    ) -> SampleOutput:
        """The request sent once and its answer read, if the weights behind it are known."""
        await self._gate.passed()
        breaks, opened, adapter, version = self._gate.breaks, self._opened, self._adapter, self.version
        try:
            sent = {**body, "model": adapter or self.facts.model}
            answer = await client.patient(_GENERATE, sent, self.options.answer_s)
        except ServerRefused as error:
            if adapter is not None and error.status == 404:  # a server that was restarted has no adapters
                await self._restarted(opened)
            raise
        if self._gate.breaks != breaks:
            raise SamplerError(self._gate.why or "The weights in the vLLM server changed in an unknown way meanwhile.")
        try:
            if adapter is not None:
                self._check_base(answer)
            spans = () if adapter is not None else await self._spans(answer, opened)
            raw = wire.read_json(answer, spans=spans, tops=body["sampling_params"]["logprobs"] > 0)
        except wire.BadAnswer as error:
            raise ServerTrouble(f"{_GENERATE}: the answer cannot be read ({error})") from error
        return wire.read_output(raw, request, drawing, version)

    def _check_base(self, answer: Any) -> None:
        """The weights under the adapter are those that the server was started with."""
        choice = answer["choices"][0] if isinstance(answer, dict) and answer.get("choices") else {}
        names = {str(span.get("version")) for span in choice.get("weight_versions") or ()}
        if names - {_FIRST}:
            raise RunStopped(
                f"Another run sends its weights to the vLLM server at {self.options.base_url}, under the adapter of "
                "this one: give each run a server of its own."
            )

    async def _spans(self, answer: Any, opened: int) -> tuple[VersionSpan, ...]:
        """Which published weights drew the answer; empty before any were published."""
        if not self._published:
            return ()
        try:
            found = [
                (str(s["version"]), int(s["start"]), int(s["end"])) for s in answer["choices"][0]["weight_versions"]
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise wire.BadAnswer(f"no weight versions: {error!r}") from error
        if self.run and any(name not in self._published and name != _FIRST for name, _, _ in found):
            raise RunStopped(
                f"Another run sends its weights to the vLLM server at {self.options.base_url}, and turns of this one "
                "were drawn from them: give each run a server of its own."
            )
        if found and found[-1][0] not in self._published:
            await self._restarted(opened)
        if not all(name in self._published for name, _, _ in found):
            raise ServerTrouble("The answer began before the weights of this run arrived")
        return tuple(VersionSpan(self._published[name], start, end) for name, start, end in found)

    async def _restarted(self, opened: int) -> None:
        """The last weights were sent again, once for all requests that wait; then the request is to be sent again.

        Raises:
            ServerTrouble: They are there again.
            SamplerError: They cannot be sent.
        """
        if opened == self._opened:  # else new weights arrived after the request was sent
            if self.restore is None:
                raise SamplerError(
                    "The vLLM server was restarted and holds its first weights; turns wait for the next weight sync."
                )
            if self._restoring is None or self._restoring.done():
                self._restoring = asyncio.create_task(self._restore(self.restore), name="agentrl-restore")
            await asyncio.shield(self._restoring)
        raise ServerTrouble("The vLLM server was restarted; its weights were sent again")

    async def _restore(self, restore: Callable[[], Awaitable[None]]) -> None:
        try:
            await restore()
        except Exception as error:
            why = f"The vLLM server was restarted and its weights could not be sent again: {error}"
            self.broken(why)
            raise SamplerError(why) from error
