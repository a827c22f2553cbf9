"""Samples with transformers' continuous batching: a paged cache, whose pages conversations share."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from agentrl.errors import ConfigurationError
from agentrl.sampler.generate import TextSampler
from agentrl.sampler.generation_kwargs import batching_config
from agentrl.sampler.hold import hold
from agentrl.sampler.slots import Turn
from agentrl.types import SampleRequest, SamplingParams


class ContinuousSampler(TextSampler):
    """A policy that is a transformers model in this process, drawn by transformers' continuous batching.

    Turns start and end in any forward, and a page of tokens that the cache holds is not fed again, whose ever it was:
    a turn feeds its new tokens and at most one page. The cache has a fixed size; where it is full, turns are fed again
    later. It is made for flash attention on a GPU. Elsewhere each forward attends with a dense mask over the pages of
    all conversations, and `TransformersSampler` is quicker.

    Ids are drawn from streams named by `SampleRequest.seed`, as by `TransformersSampler`: what else is in the batch
    does not change them, up to float noise. The steps are the sampler's own, so that requests of the same order give
    the same batches.

    Args:
        model: As for `TransformersSampler`; text only, and layers of plain attention only.
        tokenizer: Or processor; only its length is checked.
        config: Keys of `transformers.ContinuousBatchingConfig`; `max_memory_percent` is 0.5 by default. Without flash
            attention, `page_size` is 32, `num_blocks` is what `max_slots` turns can fill, at most 65536 tokens, and
            `max_batch_tokens` is 1024.
        kwargs: `generation_kwargs`, without those that `SamplingParams` hold.
        max_context: Longest sequence; default: what the model's config says.
        max_slots: Most turns in a forward.
        autocast_dtype: Refused where the weights have another type: the pages are of the weights' type.
        version: Of the weights at first.

    Attributes:
        exact: Log-probs are those of a plain forward of the model, up to rounding. Not with logits processors.

    Raises:
        ConfigurationError: An unknown or impossible key of `config` or `kwargs`, or a model that cannot be sampled
            this way.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        max_context: int | None = None,
        max_slots: int = 256,
        autocast_dtype: torch.dtype | None = None,
        version: int = 0,
    ) -> None:
        super().__init__(
            model, tokenizer, kwargs=kwargs, generate=False, max_context=max_context, max_slots=max_slots,
            autocast_dtype=autocast_dtype, version=version,
        )  # fmt: skip
        self._config = batching_config(config or {}, max_slots)
        if not self.runner.cached:
            raise ConfigurationError(
                f"{type(self.base).__name__} has layers that are not plain attention, which continuous batching does "
                f"not know; use {self.default}."
            )
        if autocast_dtype not in (None, self.base.dtype):
            raise ConfigurationError(
                "Continuous batching keeps keys in the type of the weights, so it does not run under mixed precision: "
                f"load the model in {str(autocast_dtype).removeprefix('torch.')}, or use {self.default}."
            )
        self._engine: Any = None
        self._tried = self._warned = False
        self._begun: dict[Turn, int] = {}  # turns in the engine -> tokens that were held when they came in
        self._over: list[tuple[Turn, Any]] = []  # turns that the last step ended
        self._seen: dict[Turn, list[torch.Tensor]] | None = None  # set while the engine is tried

    # --- the loop's one task ---
    async def _round(self) -> bool:
        if self._stale is not None:
            self._invalidate(self._stale, now=True)
        gone = [turn for turn in self._begun if turn.cancelled]
        if gone:
            self._leave(gone)
        self._waiting = [turn for turn in self._waiting if not turn.cancelled]
        if not self._waiting and not self._begun:
            return False
        fed = 0
        try:
            if self._engine is None:
                await self._run("start", 1, self._start)
            fed = self._submit()
            if self._begun:
                await self._run("feed" if fed else "decode", max(1, fed), self._draw_once)
        except Exception as error:
            turns = self._turns() if isinstance(error, ConfigurationError) else list(self._begun)
            self._begun.clear()
            self._drop_engine()
            self._give_up(turns or self._turns(), f"The model's forward failed: {type(error).__name__}: {error}", error)
            return True
        over, self._over = self._over, []
        self._leave([turn for turn, _ in over])
        for turn, reason in over:
            self._answer(turn, reason)
        return True

    def _submit(self) -> int:
        """Waiting turns are in the engine, but those whose whole prompt another is still feeding."""
        page, later, tokens = self._engine.page, [], 0
        feeding = {tuple(turn.held) for turn, held in self._begun.items() if len(turn.held) == held}
        for turn in self._waiting:
            prompt = tuple(turn.held)
            if page and len(prompt) > page and prompt in feeding:
                later.append(turn)
                continue
            if len(prompt) >= self._engine.capacity:
                self._fail(
                    [turn],
                    f"The prompt has {len(prompt)} tokens and the whole cache {self._engine.capacity}; raise "
                    "num_blocks (or max_memory_percent) in transformers_continuous_batching_config.",
                )
                continue
            if turn.end > self._engine.capacity:
                self._warn_of_room()
                turn.end = self._engine.capacity
            feeding.add(prompt)
            self._engine.add(turn)
            self._begun[turn] = len(prompt)
            tokens += len(prompt)
            self.shared_tokens += len(prompt)
        self._waiting = later
        return tokens

    def _warn_of_room(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The cache of continuous batching holds {self._engine.capacity} tokens, so longer conversations are "
                "cut: raise num_blocks (or max_memory_percent) in transformers_continuous_batching_config.",
                stacklevel=2,
            )

    def _leave(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._begun.pop(turn, None)
        if self._engine is not None:
            self._engine.drop(turns)

    def _turns(self) -> list[Turn]:
        return [*self._begun, *self._waiting]

    # --- on the loop's thread or the sampler's ---
    def _start(self) -> None:
        before = self.base.config._attn_implementation
        attention = before if str(before).startswith("flash") else self.runner._attention(before)
        room = self.runner.max_slots * (self.runner.context or 4096)
        try:
            from agentrl.sampler.paged import PagedEngine  # of transformers' inner names, which other versions lack

            self._engine = PagedEngine(self.base, self._config, attention, room, self._pick)
            if not self._tried:
                self._try()
                self._tried = True
        except (
            ImportError,
            ValueError,
            TypeError,
            AttributeError,
            NotImplementedError,
            KeyError,
            MemoryError,
        ) as error:
            self._drop_engine()
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"Continuous batching of transformers {transformers.__version__} does not run "
                f"{type(self.base).__name__} here ({type(error).__name__}: {error}); use {self.default}, or change "
                "transformers_continuous_batching_config."
            ) from error

    def _draw_once(self) -> None:
        for turn, count in self._engine.step():
            before = self._begun[turn]
            if count > 1 or len(turn.held) <= before + 1:  # else the token that was drawn last
                self.runner.prefilled_tokens += count
                self.shared_tokens -= count
        self.runner.forwards += 1

    def _pick(self, logits_BV: torch.Tensor, turns: list[Turn]) -> list[int]:
        if self._seen is not None:
            for turn, logits_V in zip(turns, logits_BV, strict=True):
                self._seen[turn].append(logits_V)
            return logits_BV.argmax(-1).tolist()
        drawn = self.runner._draw(self.processors(logits_BV, turns), turns)
        for n, turn in enumerate(turns):
            reason = hold(turn, (), drawn, n)
            if reason is not None:
                self._over.append((turn, reason))
        self.decoded_tokens += len(turns)
        return drawn.ids

    def _try(self) -> None:
        """The model's paged forwards equal its plain ones.

        Raises:
            ConfigurationError: They do not.
        """
        rows, self._seen = self._probe_rows(), {}
        for row in rows:
            request = SampleRequest([], [], row, 2, SamplingParams(), (), "")
            turn = Turn(request, asyncio.Future(loop=self._loop), row, len(row), len(row) + 2, iter(()), 0)
            self._seen[turn] = []
            self._engine.add(turn)
        try:
            while self._engine.step():
                pass
            seen = [torch.stack(logits) for logits in zip(*self._seen.values(), strict=True)]
            gap = self._probe(seen, rows)
        finally:
            self._seen = None
            self._engine.forget()
        if gap > self._bound():
            raise ConfigurationError(
                f"{type(self.base).__name__} gives other log-probs with continuous batching (they differ by "
                f"{gap:.2g}); use {self.default}."
            )

    # --- states ---
    def _invalidate(self, why: str, *, now: bool = False) -> None:
        busy = self._task is not None and not self._task.done()
        super()._invalidate(why, now=now)
        if busy and not now:
            return
        again = [turn for turn in self._begun if not turn.future.done()]
        self._begun.clear()
        self._waiting = again + self._waiting
        if why == "reset":
            self._drop_engine()
        elif self._engine is not None:
            self._engine.forget()

    def _abandon(self) -> None:
        self._waiting = self._turns()
        self._begun.clear()
        self._drop_engine()
        super()._abandon()

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._over = []
