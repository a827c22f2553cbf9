"""Samples from a transformers model in this process: continuous batching, and a cache that lives between turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.render.images import tokenizer_and_processor
from agentrl.sampler.admission import Feed, admit
from agentrl.sampler.drafts import Drafts, worthwhile
from agentrl.sampler.draw import uniforms
from agentrl.sampler.hold import hold
from agentrl.sampler.runner import Drawn, ModelRunner
from agentrl.sampler.slots import Row, SlotTable, Turn
from agentrl.sampler.steps import Steps
from agentrl.types import SampleOutput, SampleRequest

_T = TypeVar("_T")
_MAX_WAIT = 32  # decode steps after which a waiting turn is admitted however many others decode


class TransformersSampler:
    """A policy that is a transformers causal language model in this process.

    Requests of all conversations share each forward. A conversation's keys and values are kept until `release`, so a
    turn feeds only the tokens that are new since its last turn; identical first prompts are fed once. Ids are drawn
    from streams named by `SampleRequest.seed`: what else is in the batch does not change them (up to float noise).

    Forwards run on the event loop while they are quicker than `inline_below_s`, else on one thread of the sampler's.
    Successive event loops may use the same sampler. The caller does not change weights while a turn is in flight on
    that thread, and calls `publish` after changing them.

    Args:
        model: A causal language model, or a `peft` model around one. Where its layers are not plain attention (linear
            attention, state spaces, ALiBi), nothing is cached and every token is a forward of whole sequences. The
            same holds from the first prompt with an image on.
        tokenizer: Or processor: accepted for the same call as other samplers; only the tokenizer's length is checked
            against the model.
        max_slots: Most conversations in the cache. More that decode at once wait; idle ones make room, oldest first.
        inline_below_s: Seconds a forward may hold up the event loop.
        admit_fraction: While N rows decode, new turns wait until there are `admit_fraction * N` of them.
        max_forward_tokens: Most tokens in one forward, padding included; longer prompts are fed in parts.
        max_context: Longest sequence; default: what the model's config says.
        autocast_dtype: Forwards run under `torch.autocast` of this dtype.
        version: Of the weights at first.

    Raises:
        ConfigurationError: The model cannot be sampled from here.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_slots: int = 1024,
        inline_below_s: float = 0.02,
        admit_fraction: float = 0.25,
        max_forward_tokens: int = 8192,
        max_context: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        version: int = 0,
    ) -> None:
        if max_slots < 1 or max_forward_tokens < 1:
            raise ConfigurationError(
                f"max_slots and max_forward_tokens are at least 1; got {max_slots} and {max_forward_tokens}."
            )
        self.runner = ModelRunner(model, max_slots, max_forward_tokens, max_context, autocast_dtype)
        tokenizer, _ = tokenizer_and_processor(tokenizer)
        if tokenizer is not None and len(tokenizer) > self.runner.vocabulary:
            raise ConfigurationError(
                f"The tokenizer has {len(tokenizer)} ids and the model's embedding {self.runner.vocabulary}; call "
                "model.resize_token_embeddings(len(tokenizer))."
            )
        self.model = model
        self.inline_below_s = inline_below_s
        self.admit_fraction = admit_fraction
        self.version = version
        self.shared_tokens = 0  # prompt tokens copied from another conversation instead of fed
        self.decoded_tokens = 0  # ids drawn
        self._table = SlotTable(max_slots)
        self._drafts = Drafts()
        self._waiting: list[Turn] = []
        self._active: list[Row] = []  # in slot order: the row at i is in slot i
        self._stale: str | None = None  # "publish" or "reset": what the next step does first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task | None = None
        self._steps = Steps("agentrl-sampler")

    # --- the door ---
    async def sample(self, request: SampleRequest) -> SampleOutput:
        """One turn drawn from the model.

        Raises:
            SamplerError: The prompt does not fit the model, or the forward failed (its error is the cause).
        """
        turn = self._accept(request)
        self._waiting.append(turn)
        if self._task is None or self._task.done():
            self._task = turn.future.get_loop().create_task(self._drive(), name="agentrl-sampler")
        try:
            return await turn.future
        finally:
            turn.cancelled = True  # done, or nobody waits for it any more

    async def quiet(self) -> None:
        """No thread of the sampler's is at work in the model, once nobody waits for a turn: it may be trained."""
        if self._task is not None and self._loop is asyncio.get_running_loop():
            await asyncio.wait([self._task])

    def release(self, conversation_id: str) -> None:
        """Nothing is held for this conversation any more."""
        row = self._table.by_conversation.get(conversation_id)
        if row is None:
            return
        if row.turn is None:
            self._table.drop(row)
        else:
            self._fail([row.turn], f"Conversation '{conversation_id}' was released while it was sampled.")

    def publish(self, version: int) -> None:
        """The weights are new: later ids are drawn from them alone, and turns that start now carry `version`.

        A turn in flight is fed again under the new weights and keeps its older version.
        """
        self.version = version
        self._invalidate("publish")

    def reset(self) -> None:
        """No conversation is cached, and the cache's memory is given back. Turns in flight go on."""
        self._invalidate("reset")

    def close(self) -> None:
        """The sampler's thread is gone and its memory given back; it may be used again."""
        self._abandon()
        self._steps.close()
        self.runner.free()

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens fed to the model so far, padding not counted."""
        return self.runner.prefilled_tokens

    @property
    def forwards(self) -> int:
        """Forwards of the model so far."""
        return self.runner.forwards

    def _accept(self, request: SampleRequest) -> Turn:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_running() and self._task is not None and not self._task.done():
                raise SamplerError("This sampler is at work in another event loop; use one sampler per running loop.")
            self.close()  # an earlier loop ended; nobody waits for its turns
            self._loop = loop
        if request.media and not self.runner.placeholders:
            raise ConfigurationError(
                f"The prompt holds {len(request.media)} image(s), and {type(self.model).__name__} reads text only: use "
                "a model with vision, or describe them as text."
            )
        prompt = request.prompt_ids
        if not prompt:
            raise SamplerError("TransformersSampler needs prompt ids; give the engine a renderer with a tokenizer.")
        if request.max_tokens < 1:
            raise SamplerError(f"max_tokens is {request.max_tokens}; a turn needs at least 1.")
        if (context := self.runner.context) is not None and len(prompt) >= context:
            raise SamplerError(
                f"The prompt has {len(prompt)} tokens and the model's context {context}: no room for an answer. "
                "Shorten the prompt or the episode."
            )
        end = len(prompt) + request.max_tokens
        end = end if context is None else min(end, context)
        turn = Turn(request, loop.create_future(), list(prompt), len(prompt), end, uniforms(request.seed), self.version)
        turn.place = self._drafts.root
        turn.sets = [] if request.params.truncates else None
        turn.tops = [] if request.num_sampler_logprobs else None
        return turn

    # --- the loop's one task ---
    async def _drive(self) -> None:
        """Rounds until nobody waits."""
        try:
            with self._evaluating():
                while await self._round():
                    # Inline tools answer, and their conversations come back, before the next round.
                    for _ in range(3):
                        await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._task is asyncio.current_task():  # else a newer loop has taken over
                self._abandon()
            raise
        except Exception as error:  # a fault of ours: nobody may wait for ever
            self._give_up(self._turns(), f"The sampler stopped: {type(error).__name__}: {error}", error)
            self._abandon()

    async def _round(self) -> bool:
        """Turns were admitted, and one token drawn for every active row; False where nobody waits for any."""
        self._tidy()
        if not self._waiting and not self._active:
            return False
        if feeds := self._admit():
            await self._step("feed", sum(len(feed.new) for feed in feeds), feeds)
        if self._active:
            await self._step("decode", 1, None)
        return True

    def _turns(self) -> list[Turn]:
        """Those that somebody waits for."""
        return self._waiting + [row.turn for row in self._active if row.turn is not None]

    def _give_up(self, turns: list[Turn], message: str, error: Exception) -> None:
        """The turns fail: with the error itself where it is a setting's fault, which no second try mends."""
        if not isinstance(error, ConfigurationError):
            return self._fail(turns, message, error)
        for turn in turns:
            turn.cancelled = True
            if not turn.future.done():
                turn.future.set_exception(ConfigurationError(str(error)))

    async def _step(self, kind: str, units: int, feeds: list[Feed] | None) -> None:
        """One forward's worth: tokens are drawn and handed out."""
        rows = self._active if feeds is None else [feed.row for feed in feeds]
        turns = [row.turn for row in rows if row.turn is not None]
        guesses = self._guesses(turns, feeds)
        moves = self._table.take_moves()
        try:
            if feeds is None:
                drawn = await self._run(kind, units, lambda: self.runner.decode(turns, guesses, moves))
            else:
                drawn = await self._run(kind, units, lambda: self.runner.feed(feeds, moves))
        except Exception as error:
            self._fail(turns, f"The model's forward failed: {type(error).__name__}: {error}", error)
            self._invalidate("reset", now=True)  # rows may be half moved, and memory may be what was missing
            return
        if feeds is not None:
            self._active = self._active + rows
            guesses = [feed.guess for feed in feeds]
        self._absorb(rows, turns, guesses, drawn)

    def _guesses(self, turns: list[Turn], feeds: list[Feed] | None) -> list[list[int]]:
        """For each turn the tokens that the next forward checks beside drawing one; those of feeds are in them."""
        if not self.runner.cached:
            return [[] for _ in turns]
        guesses = [turn.guessed(self._drafts) for turn in turns]
        if not any(guesses):
            return guesses
        most = worthwhile(map(len, guesses))
        guesses = [guess[:most] for guess in guesses]
        for feed, guess in zip(feeds or (), guesses, strict=False):
            feed.guess = guess if feed.leader is None else guess and feed.leader.guess
        return guesses

    def _absorb(self, rows: list[Row], turns: list[Turn], guesses: list[list[int]], drawn: Drawn) -> None:
        """Every turn holds its new tokens; those that ended are answered and their rows rest."""
        begin, ended = 0, False
        for row, turn, guess in zip(rows, turns, guesses, strict=True):
            before = len(turn.held)
            reason = hold(turn, guess, drawn, begin)
            begin += len(guess) + 1
            row.length = len(turn.held) - 1  # the last one was never fed
            self.decoded_tokens += len(turn.held) - before
            if reason is None:
                continue
            ended = True
            ids = turn.held[turn.prompt_length :]
            if not turn.future.done():
                turn.future.set_result(
                    SampleOutput(ids, turn.log_probs, reason, turn.version, None, turn.sets, turn.tops)
                )
            self._drafts.learn(ids)
            self._table.rest(row)
        if ended:
            self._active = self._table.compact(len(self._active))

    def _tidy(self) -> None:
        """Published weights are heeded, and turns that nobody waits for are gone."""
        if self._stale is not None:
            self._invalidate(self._stale, now=True)
        if any(turn.cancelled for turn in self._waiting):
            self._waiting = [turn for turn in self._waiting if not turn.cancelled]
        gone = [row for row in self._active if row.turn is not None and row.turn.cancelled]
        if gone:
            for row in gone:
                row.turn = None
                self._table.drop(row)
            self._active = self._table.compact(len(self._active))

    def _admit(self) -> list[Feed]:
        """The turns that start now, their rows in place behind the active ones; empty when it is better to wait."""
        active = len(self._active)
        if not self._waiting:
            return []
        if active:
            enough = len(self._waiting) >= max(1, int(self.admit_fraction * active))
            self._waiting[0].waited += 1
            if not enough and self._waiting[0].waited < _MAX_WAIT:
                return []
        admission = admit(self._waiting, active, self._table, self.runner.vocabulary)
        self._waiting = admission.later
        for turn, why in admission.refused:
            self._fail([turn], why)
        self.shared_tokens += admission.shared_tokens
        return admission.feeds

    # --- states ---
    def _invalidate(self, why: str, *, now: bool = False) -> None:
        """Nothing cached is used any more; turns in flight wait to be fed again."""
        if not now and self._task is not None and not self._task.done():
            self._stale = "reset" if "reset" in (why, self._stale) else why
            return
        self._stale = None
        again = [row.turn for row in self._active if row.turn is not None and not row.turn.future.done()]
        self._active = []
        self._table.clear()
        self._drafts.clear()  # else a run that was resumed here would draw in other batches, to other rounding
        self._waiting = again + self._waiting
        if why == "reset":
            self.runner.free()

    def _fail(self, turns: list[Turn], message: str, cause: Exception | None = None) -> None:
        for turn in turns:
            turn.cancelled = True
            if not turn.future.done():
                error = SamplerError(message)
                error.__cause__ = cause
                turn.future.set_exception(error)

    def _abandon(self) -> None:
        """Nobody is answered, and nothing is cached: the loop that waited is over."""
        turns = self._waiting + [row.turn for row in self._active if row.turn is not None]
        for turn in turns:
            if not turn.future.done() and not turn.future.get_loop().is_closed():
                turn.future.cancel()
        self._waiting, self._active, self._task, self._stale = [], [], None, None
        self._table.clear()

    async def _run(self, kind: str, units: int, work: Callable[[], _T]) -> _T:
        return await self._steps.run(kind, units, work, self.inline_below_s)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model is in eval mode, each module back in its own mode afterwards."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
