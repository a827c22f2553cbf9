"""Samples from a vLLM engine in this process: turns of all conversations are batched, and prefixes are kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.steps import Steps
from agentrl.sampler.vllm.build import ColocateOptions, build, close
from agentrl.sampler.vllm.local import Command, Counts, Refusal, Turn, abort_all, hand_over, on_its_loop, raw_turn
from agentrl.sampler.vllm.wire import read_output, sampling_params
from agentrl.types import SampleOutput, SampleRequest

__all__ = ["ColocateOptions", "VLLMSampler"]


class VLLMSampler:
    """A policy that is a vLLM engine in this process.

    Requests of all conversations share each step. Prefixes are cached by content, so a turn feeds what is new since its
    last turn, and at most one block more; nothing is held per conversation. Each turn's ids come from its own
    generator, seeded by `SampleRequest.seed`; what else is in the batch changes them only by float noise.

    Steps run on the event loop while they are quicker than `inline_below_s`, else on one thread of the sampler's.
    Successive event loops may use the same sampler. `load`, `sleep` and `wake` may be called from any thread: they wait
    for the step in progress.

    With `tensor_parallel_size` above 1 the first rank of each engine samples; the others call `follow` meanwhile, until
    it calls `dismiss`. All of them call `load`, `sleep`, `wake` and `close` together.

    Args:
        options: What is built.
        inline_below_s: Seconds a step may hold up the event loop.

    Raises:
        MissingDependency: vLLM is not installed.
        ConfigurationError: The engine cannot be built, or this process has one already.
    """

    _open: VLLMSampler | None = None  # vLLM's parallel state is one per process

    def __init__(self, options: ColocateOptions, *, inline_below_s: float = 0.02) -> None:
        if VLLMSampler._open is not None:
            raise ConfigurationError(
                "This process has a vLLM engine already; close it (trainer.close()) before another is built."
            )
        self.options = options
        self.inline_below_s = inline_below_s
        self.llm, self._group = build(options)
        VLLMSampler._open = self
        config = self.llm.llm_engine.model_config
        self._on_cpu: bool = self.llm.llm_engine.vllm_config.device_config.device_type == "cpu"
        self.max_model_len: int = config.max_model_len
        self.vocabulary: int = config.get_vocab_size()
        self.version = 0
        self.drawing = replace(options.drawing, vocabulary=self.vocabulary, max_logprobs=-1)
        self._counts = Counts()
        self._asleep = False
        self._why_not: str | None = None  # why nothing may be sampled now
        if options.sleep and self._on_cpu:
            warnings.warn(
                "vLLM cannot give memory back on a CPU: vllm_enable_sleep_mode=True only says when it may be sampled.",
                stacklevel=2,
            )
        self._lock = threading.RLock()  # whoever holds it uses the engine
        self._number = 0
        self._waiting: list[Turn] = []
        self._running: dict[str, Turn] = {}
        self._gone: list[str] = []  # turns that the engine still draws and nobody waits for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._steps = Steps("agentrl-vllm")
        self._peers = None
        if options.tensor_parallel_size > 1:
            from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

            self._peers = get_tp_group()
        self.llm.llm_engine.set_weight_version("0")

    # --- the door ---
    async def sample(self, request: SampleRequest) -> SampleOutput:
        """One turn drawn from the engine. Cancelling the task aborts it there.

        Raises:
            SamplerError: The engine failed, or holds no weights it may be sampled with.
            ConfigurationError: The request can never be served.
        """
        turn = self._accept(request)
        self._waiting.append(turn)
        if self._task is None or self._task.done():
            self._task = turn.future.get_loop().create_task(self._drive(), name="agentrl-vllm")
        try:
            return await turn.future
        finally:
            turn.cancelled = True

    def release(self, conversation_id: str) -> None:
        """Nothing is held for this conversation any more: its turn in flight, if any, fails."""
        turns = [t for t in (*self._waiting, *self._running.values()) if t.request.conversation_id == conversation_id]
        self._fail(turns, f"Conversation '{conversation_id}' was released while it was sampled.")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        """The engine holds `weights`, and turns that start now carry `version`.

        Turns in flight go on with the new weights, their prompts fed again, and their output says which ids were drawn
        from which. A sequence of weights is checked before any of it is loaded.

        Args:
            weights: All of them, under the names of a checkpoint; a tied head is left out.
            version: Of these weights.

        Returns:
            Seconds by stage: `transfer` and `reset` (of the prefix cache).

        Raises:
            SamplerError: They are not this model's. After a refused sequence the old weights are in place; after
                anything else nothing is sampled until a later `load` succeeds.
        """
        from agentrl.sampler.vllm.engine import offered

        if self._asleep:
            raise SamplerError("The vLLM engine sleeps: wake() it before weights are loaded.")
        with self._lock, offered(weights) as handle:
            before, began = self._why_not, time.perf_counter()
            self._why_not = "The vLLM engine's weights are incomplete: an update failed. Load all of them again."
            try:
                self.llm.collective_rpc("start_weight_update")
                self.llm.collective_rpc("update_weights", args=({"handle": handle},))
                self.llm.collective_rpc("finish_weight_update")
            except ValueError as error:
                if isinstance(weights, Sequence):
                    self._why_not = before
                raise SamplerError(f"Weights for version {version} were not loaded into vLLM. {error}") from error
            transferred = time.perf_counter()
            self._reset()
            self.llm.llm_engine.set_weight_version(str(version))
            self.version, self._why_not = version, None
            return {"transfer": transferred - began, "reset": time.perf_counter() - transferred}

    def sleep(self) -> None:
        """The engine's memory, weights included, is given back where the device can do that. Turns in flight fail."""
        if self._asleep:
            return
        if not self.options.sleep:
            raise ConfigurationError("This vLLM engine was built without sleep mode; set vllm_enable_sleep_mode=True.")
        with self._lock:
            self._asleep, self._why_not = True, "The vLLM engine sleeps; wake() it and load() weights first."
            self._fail([*self._waiting, *self._running.values()], self._why_not)
            abort_all(self.llm.llm_engine)
            if self._on_cpu:
                self._reset()
            else:
                self.llm.sleep(level=2)

    def wake(self) -> None:
        """The engine has its memory again, and waits for weights: the ones it had are lost."""
        if not self._asleep:
            return
        with self._lock:
            if not self._on_cpu:
                self.llm.wake_up()
            self._asleep, self._why_not = False, "The vLLM engine was asleep and lost its weights; load() them first."

    def close(self) -> None:
        """The engine and its thread are gone, and so is the process group where the engine made it."""
        if VLLMSampler._open is not self:
            return
        self._abandon()
        self._steps.close()
        with self._lock:
            self._why_not = "This sampler was closed."
            close(self.llm, self._group)
            del self.llm
            VLLMSampler._open = None
        gc.collect()

    def counts(self) -> dict[str, float]:
        """So far: prompt tokens, those of them found in the cache, ids drawn, steps, turns; and turns in flight."""
        return {**asdict(self._counts), "running": len(self._running), "waiting": len(self._waiting)}

    # --- ranks of one engine ---
    def follow(self) -> None:
        """This rank did its part in every step of the leader, who has called `dismiss`."""
        if self._peers is None or self._peers.is_first_rank:
            raise ConfigurationError(
                "follow() is for the further ranks of an engine with tensor_parallel_size above 1."
            )
        while (commands := self._peers.broadcast_object(None, src=0)) is not None:
            with self._lock:
                hand_over(self.llm.llm_engine, commands)
                _step(self.llm.llm_engine)

    def dismiss(self) -> None:
        """Ranks that `follow` this one go on with what they do next."""
        if self._peers is not None:
            if (commands := self._commands()[0]) and self._why_not is None:
                self._step(commands)
            self._peers.broadcast_object(None, src=0)

    # --- turns ---
    def _accept(self, request: SampleRequest) -> Turn:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_running() and self._task is not None and not self._task.done():
                raise SamplerError("This sampler is at work in another event loop; use one sampler per running loop.")
            self._abandon()  # an earlier loop ended; nobody waits for its turns
            self._loop = loop
        if self._why_not is not None:
            raise SamplerError(self._why_not)
        if self._peers is not None and not self._peers.is_first_rank:
            raise ConfigurationError("Only the first rank of a vLLM engine samples; the others call follow().")
        if request.media:
            raise ConfigurationError("vLLM in this process reads text only; use the transformers sampler for images.")
        if not request.prompt_ids:
            raise SamplerError("VLLMSampler needs prompt ids; give the engine a renderer with a tokenizer.")
        if request.max_tokens < 1:
            raise SamplerError(f"max_tokens is {request.max_tokens}; a turn needs at least 1.")
        if len(request.prompt_ids) >= self.max_model_len:
            raise SamplerError(
                f"The prompt has {len(request.prompt_ids)} tokens and vLLM was built for {self.max_model_len}: no room "
                "for an answer. Raise vllm_max_model_length, or shorten the prompt or the episode."
            )
        if max(request.prompt_ids) >= self.vocabulary or min(request.prompt_ids) < 0:
            raise ConfigurationError(
                f"The prompt holds an id outside the {self.vocabulary} of '{self.options.model}': the tokenizer is "
                "another model's."
            )
        self._number += 1
        return Turn(str(self._number), request, sampling_params(request, self.drawing), loop.create_future())

    async def _drive(self) -> None:
        """Steps until nobody waits: hand over what is new, then one token for every turn."""
        try:
            while True:
                commands, new_tokens = self._commands()
                if not commands and not self._running:
                    return
                kind, units = ("feed", new_tokens) if new_tokens else ("decode", 1)
                try:
                    outputs = await self._steps.run(
                        kind, units, lambda commands=commands: self._step(commands), self.inline_below_s
                    )
                except Exception as error:
                    self._recover(error)
                    continue
                ended = sum(self._absorb(output) for output in outputs)
                # Inline tools answer, and their conversations come back, before the next step.
                for _ in range(3 if ended else 1):
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._task is asyncio.current_task():  # else a newer loop has taken over
                self._abandon()
            raise

    def _commands(self) -> tuple[list[Command], int]:
        """What the engine must hear before its next step, and how many prompt tokens come with it."""
        for id in [id for id, turn in self._running.items() if turn.cancelled]:
            del self._running[id]
            self._gone.append(id)
        commands: list[Command] = [("abort", self._gone)] if self._gone else []
        self._gone = []
        new_tokens = 0
        for turn in self._waiting:
            if turn.cancelled:
                continue
            self._running[turn.id] = turn
            prompt = turn.request.prompt_ids or []
            new_tokens += len(prompt)
            commands.append(("add", turn.id, prompt, turn.fields))
        self._waiting = []
        return commands, new_tokens

    def _step(self, commands: list[Command]) -> list[Any]:
        """One step of the engine, on whatever thread; answers the turns that ended, and those that were refused."""
        with self._lock:
            if self._why_not is not None:
                raise SamplerError(self._why_not)
            if self._peers is not None:
                self._peers.broadcast_object(commands, src=0)
            refused = hand_over(self.llm.llm_engine, commands)
            self._counts.steps += 1
            return [*refused, *_step(self.llm.llm_engine)]

    def _absorb(self, output: Any) -> bool:
        """The turn has its answer. False where nobody waits for it."""
        turn = self._running.pop(output.request_id, None)
        if turn is None or turn.future.done():
            return False
        try:
            if isinstance(output, Refusal):
                raise ConfigurationError(f"vLLM refuses the request: {output.error}") from output.error
            self._counts.prefix_queries += len(output.prompt_token_ids)
            self._counts.prefix_hits += output.num_cached_tokens or 0
            raw = raw_turn(output.outputs[0])
            self._counts.decoded += len(raw.ids)
            self._counts.turns += 1
            turn.future.set_result(read_output(raw, turn.request, self.drawing, self.version))
        except Exception as error:  # whatever it is, it is this turn's, and someone waits for it
            turn.future.set_exception(error)
        return True

    # --- when things go wrong ---
    def _recover(self, error: Exception) -> None:
        """A step failed: its turns fail, and the engine starts again from nothing."""
        turns = list(self._running.values())
        self._running.clear()
        message = str(error) if isinstance(error, SamplerError) else f"vLLM failed: {type(error).__name__}: {error}"
        self._fail(turns, message, error)
        with self._lock:
            if self._asleep:
                return
            try:
                abort_all(self.llm.llm_engine)
                self._reset()
            except Exception as second:
                self._why_not = f"vLLM failed and cannot go on: {type(second).__name__}: {second}"

    def _reset(self) -> None:
        """No prefix is cached; turns in flight are fed again."""
        engine = self.llm.llm_engine
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not give up its prefix cache.")
        engine.reset_encoder_cache()

    def _fail(self, turns: Iterable[Turn], message: str, cause: Exception | None = None) -> None:
        for turn in turns:
            turn.cancelled = True
            if not turn.future.done():
                error = SamplerError(message)
                error.__cause__ = cause
                on_its_loop(turn.future, turn.future.set_exception, error)

    def _abandon(self) -> None:
        """Nobody is answered: the loop that waited is over."""
        turns = [*self._waiting, *self._running.values()]
        for turn in turns:
            if not turn.future.done() and not turn.future.get_loop().is_closed():
                on_its_loop(turn.future, turn.future.cancel)
        self._gone += self._running  # not aborted here: other ranks must hear of it in the same step
        self._waiting, self._running, self._task = [], {}, None


def _step(engine: Any) -> list[Any]:
    # A new thread takes over torch's number of threads when it is first asked for; in the middle of a step on a CPU
    # vLLM's attention would find another number than it planned with.
    torch.get_num_threads()
    state = torch.get_rng_state()  # on a CPU vLLM draws from torch's own generator too, and overwrites what it drew
    try:
        return engine.step()
    finally:
        torch.set_rng_state(state)
