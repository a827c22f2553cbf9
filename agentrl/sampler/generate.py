"""Samples with transformers' own `generate`: for its cache implementations, in batches that end together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.generation_kwargs import Processors, read_kwargs
from agentrl.sampler.hold import hold
from agentrl.sampler.runner import ModelRunner
from agentrl.sampler.slots import Turn
from agentrl.sampler.transformers import TransformersSampler
from agentrl.types import SampleOutput, SampleRequest

CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized")
PROBE_ROWS = (9, 4, 6)  # lengths of the sequences that an engine's forwards are compared on, before its first turn


class TextSampler(TransformersSampler):
    """A sampler of a model in this process whose turns are drawn by an engine of transformers."""

    default = "TransformersSampler (no cache_implementation, no generation_kwargs, no continuous batching)"

    def __init__(
        self, model: Any, tokenizer: Any, *, kwargs: Mapping[str, Any] | None, generate: bool, **more: Any
    ) -> None:
        super().__init__(model, tokenizer, **more)
        self.kwargs = read_kwargs(kwargs or {}, generate=generate)
        self.base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.processors = Processors(self.kwargs.processors, self.runner.device)
        self.exact = not self.processors
        self._batch: list[Turn] = []  # turns that are being drawn and are in no list of an engine
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigurationError(f"{type(self).__name__} has no prompt learning; use {self.default}.")

    def _accept(self, request: SampleRequest) -> Turn:
        if request.media:
            raise ConfigurationError(
                f"{type(self).__name__} reads text only, and the prompt holds images; use {self.default}."
            )
        if self.kwargs.max_new_tokens is not None and request.max_tokens > self.kwargs.max_new_tokens:
            request = dataclasses.replace(request, max_tokens=self.kwargs.max_new_tokens)
        turn = super()._accept(request)
        low, high = min(turn.held), max(turn.held)
        if low < 0 or high >= self.runner.vocabulary:
            wrong = low if low < 0 else high
            raise SamplerError(f"The prompt has id {wrong}, outside the model's {self.runner.vocabulary} ids.")
        return turn

    def release(self, conversation_id: str) -> None:
        """Nobody waits for a turn of this conversation any more; nothing else is held under its name."""
        turns = [turn for turn in self._turns() if turn.request.conversation_id == conversation_id]
        self._fail(turns, f"Conversation '{conversation_id}' was released while it was sampled.")

    def _turns(self) -> list[Turn]:
        return [*self._batch, *self._waiting]

    def _answer(self, turn: Turn, reason: Any) -> None:
        """Whoever waits for the turn has it."""
        ids = turn.held[turn.prompt_length :]
        if not turn.future.done():
            turn.future.set_result(SampleOutput(ids, turn.log_probs, reason, turn.version, None, turn.sets, turn.tops))

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """No gradients, the run's precision, and an attention that reads `generate`'s masks, whatever training uses."""
        dtype, config = self.runner.autocast_dtype, self.runner.config
        autocast = nullcontext() if dtype is None else torch.autocast(self.runner.device.type, dtype)
        before = config._attn_implementation
        if not str(before).startswith("flash"):
            config._attn_implementation = self.runner._attention(before)
        try:
            with torch.no_grad(), autocast:
                yield
        finally:
            config._attn_implementation = before

    def _probe(self, seen: list[torch.Tensor], rows: list[list[int]]) -> float:
        """The mean difference of log-probs between an engine's two forwards of the rows and plain ones."""
        forwards = self.runner.forwards
        longer = [[*row, int(best)] for row, best in zip(rows, seen[0].argmax(-1), strict=True)]
        with self.runner._forwarding():
            wanted = [self.runner._recompute(some).log_softmax(-1) for some in (rows, longer)]
        self.runner.forwards = forwards
        gaps = [(a.log_softmax(-1) - b).abs() for a, b in zip(seen, wanted, strict=True)]
        return torch.cat(gaps).nan_to_num(0.0).mean().item()  # NaN is the weights' fault, and said where one is drawn

    def _probe_rows(self) -> list[list[int]]:
        return [[(7 * i + 3 * k) % self.runner.vocabulary for i in range(n)] for k, n in enumerate(PROBE_ROWS)]

    def _bound(self) -> float:
        exact = self.base.dtype == torch.float32 and self.runner.autocast_dtype is None
        return 1e-4 if exact else 0.2


class GenerateSampler(TextSampler):
    """A policy that is a transformers model in this process, its turns drawn together by `model.generate`.

    Turns that arrive while a batch is drawn wait for the next batch, and nothing is kept between batches: each turn
    feeds its whole prompt. It is for what `generate` alone has (`cache_implementation`) and for `generation_kwargs`;
    `TransformersSampler` is quicker. Ids, log-probs, candidates and seeds are those of `TransformersSampler`: they do
    not depend on what else is in the batch, up to float noise.

    Args:
        model: As for `TransformersSampler`; text only.
        tokenizer: Or processor; only its length is checked.
        kwargs: `generation_kwargs`, without those that `SamplingParams` hold.
        cache_implementation: One of `CACHES`; None: what `generate` takes by itself.
        max_context: Longest sequence; default: what the model's config says.
        max_slots: Most rows of a batch.
        autocast_dtype: Forwards run under `torch.autocast` of this dtype.
        version: Of the weights at first.

    Attributes:
        exact: Log-probs are those of a plain forward of the model, up to rounding. Not with logits processors, and not
            with a quantized cache.

    Raises:
        ConfigurationError: An unknown cache, a kwarg that does nothing here, or a model that cannot be sampled from.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        cache_implementation: str | None = None,
        max_context: int | None = None,
        max_slots: int = 1024,
        autocast_dtype: torch.dtype | None = None,
        version: int = 0,
    ) -> None:
        super().__init__(
            model, tokenizer, kwargs=kwargs, generate=True, max_context=max_context, max_slots=max_slots,
            autocast_dtype=autocast_dtype, version=version,
        )  # fmt: skip
        self._options = {"cache_implementation": cache_implementation} | dict(self.kwargs.cache)
        name = self._options["cache_implementation"]
        if name is not None and name not in CACHES:
            close = difflib.get_close_matches(str(name), CACHES, 1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigurationError(f"cache_implementation={name!r} is none of {', '.join(CACHES)}.{hint}")
        if name is not None and "offloaded" in name and self.runner.device.type == "cpu":
            raise ConfigurationError(
                f"cache_implementation={name!r} moves keys from a GPU to the CPU, and this model is on the CPU; use "
                f"'{'static' if 'static' in name else 'dynamic'}'."
            )
        if name == "quantized":
            self.exact = False
        if self.runner.device.type == "cpu" and self._options.get("compile_config") is None:
            self._options["disable_compile"] = True
        if isinstance(compiling := self._options.get("compile_config"), dict):
            self._options["compile_config"] = transformers.CompileConfig(**compiling)
        self._tried = False

    async def _round(self) -> bool:
        self._stale = None  # nothing is kept between batches
        self._waiting = [turn for turn in self._waiting if not turn.cancelled]
        if not self._waiting:
            return False
        most = self.runner.max_slots
        self._batch, self._waiting = self._waiting[:most], self._waiting[most:]
        batch = self._batch
        over: list[tuple[Turn, str]] = []
        loop = asyncio.get_running_loop()
        try:
            await self._steps.in_thread(lambda: self._generate(batch, over, loop), cancelled=self._end_batch)
        except Exception as error:
            self._give_up(batch, f"generate failed: {type(error).__name__}: {error}", error)
        await asyncio.sleep(0)  # answers that the thread has sent are given
        for turn, reason in over:
            self._answer(turn, reason)
        left = [turn for turn in batch if not turn.future.done() and not turn.cancelled]
        self._waiting = left + self._waiting  # new weights came in between: these go on under them
        self._batch = []
        return True

    def _abandon(self) -> None:
        self._waiting, self._batch = self._turns(), []
        super()._abandon()

    def _end_batch(self) -> None:
        self._stale = "reset"  # after its next token: the model is the thread's until then

    # --- on the sampler's thread ---
    def _generate(self, batch: list[Turn], over: list[tuple[Turn, str]], loop: asyncio.AbstractEventLoop) -> None:
        """Every turn is drawn to its end, unless `_stale` is set on the way, and answered or stands in `over`.

        The last one waits there until this thread has left the model: whoever has all answers may train it.
        """
        if not self._tried:
            self._try()
            self._tried = True

        def ended(turn: Turn, reason: str) -> None:
            if all(one in drawing.done or one.cancelled for one in batch):
                over.append((turn, reason))
            else:
                with contextlib.suppress(RuntimeError):  # the loop is over
                    loop.call_soon_threadsafe(self._answer, turn, reason)

        drawing = _Drawing(self.runner, self.processors, batch, ended)
        self.runner.prefilled_tokens += sum(len(turn.held) for turn in batch)
        begin = sum(len(turn.held) for turn in batch)
        self._call(
            [turn.held for turn in batch], max(turn.end - len(turn.held) for turn in batch), drawing,
            lambda: [turn.cancelled or self._stale is not None or turn in drawing.done for turn in batch],
        )  # fmt: skip
        self.decoded_tokens += sum(len(turn.held) for turn in batch) - begin

    def _call(
        self,
        rows: list[list[int]],
        most: int,
        processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        over: Callable[[], list[bool]],
    ) -> None:
        """`generate` has run over the left-padded rows, its ids those that `processor` leaves possible."""
        width, device = max(map(len, rows)), self.runner.device
        ids_BW = torch.tensor([[row[0]] * (width - len(row)) + row for row in rows], device=device)
        mask_BW = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)

        class Over(transformers.StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
                return torch.tensor(over(), device=input_ids.device)

        def counted(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.runner.forwards += 1
            return processor(input_ids, scores)

        # do_sample is off: what the processor leaves has one id, and transformers' own filters stay away.
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=most, **self._options)
        before = self.base.generation_config  # what it sets and ours does not, `generate` would heed
        self.base.generation_config = transformers.GenerationConfig()
        try:
            with self._forwarding():
                self.base.generate(
                    ids_BW,
                    attention_mask=mask_BW,
                    generation_config=config,
                    logits_processor=transformers.LogitsProcessorList([counted]),
                    stopping_criteria=transformers.StoppingCriteriaList([Over()]),
                )
        finally:
            self.base.generation_config = before

    def _try(self) -> None:
        """The model's padded, cached forwards in `generate` equal its plain ones, and the options work.

        Raises:
            ConfigurationError: They do not.
        """
        rows, seen = self._probe_rows(), []

        def look(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores.clone())
            return scores

        try:
            self._call(rows, 2, look, lambda: [False] * len(rows))
        except (ValueError, TypeError, ImportError, NotImplementedError, AttributeError, KeyError) as error:
            raise ConfigurationError(
                f"generate does not run with {type(self.base).__name__} and {self._said()}: {error}"
            ) from error
        gap = self._probe(seen, rows)
        self.runner.forwards -= 2
        if self.exact and gap > self._bound():
            raise ConfigurationError(
                f"{type(self.base).__name__} gives other log-probs in generate's padded batches (they differ by "
                f"{gap:.2g}); use {self.default}."
            )

    def _said(self) -> str:
        return (
            ", ".join(f"{name}={value!r}" for name, value in self._options.items() if value is not None) or "defaults"
        )


class _Drawing:
    """The last logits processor: draws each row's id from its turn's own stream, and leaves that id alone possible."""

    def __init__(
        self, runner: ModelRunner, processors: Processors, turns: list[Turn], ended: Callable[[Turn, str], None]
    ) -> None:
        self._runner, self._processors, self._turns, self._ended = runner, processors, turns, ended
        self.done: set[Turn] = set()

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        index = [i for i, turn in enumerate(self._turns) if turn not in self.done and not turn.cancelled]
        only_BV = torch.full_like(scores_BV, -torch.inf)
        only_BV[:, 0] = 0.0  # of rows that are over
        if not index:
            return only_BV
        turns = [self._turns[i] for i in index]
        drawn = self._runner._draw(self._processors(scores_BV[index], turns), turns)
        for n, (i, turn) in enumerate(zip(index, turns, strict=True)):
            reason = hold(turn, (), drawn, n)
            only_BV[i, 0] = -torch.inf
            only_BV[i, drawn.ids[n]] = 0.0
            if reason is not None:
                self.done.add(turn)
                self._ended(turn, reason)
        return only_BV
