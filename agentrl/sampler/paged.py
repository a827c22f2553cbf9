"""transformers' continuous batching, driven step by step: its paged cache and scheduler, and nothing of its thread.

Its background thread would batch by the clock: the same seed would give other batches, and now and then other ids.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import cb_logits_processors as processors
from transformers.generation.continuous_batching import continuous_api

from agentrl.sampler.slots import Turn

_PAGE = 32  # tokens; what a turn feeds again is at most one page
_MASK_TOKENS = 65536  # most tokens in the cache where attention needs a dense mask, of a column for each of them
_MASK_ROWS = 1024  # and a row for each token of a step
Picker = Callable[[torch.Tensor, list[Turn]], list[int]]


class _Pick(processors.ContinuousBatchingLogitsProcessor):
    """Leaves one id possible in each row: the one that `pick` draws for its turn."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 as transformers declares it
    ignored_kwargs = ()

    def __init__(self, turns: Mapping[str, Turn], pick: Picker) -> None:
        self._turns, self._pick = turns, pick
        self.asked: list[Turn] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        self.asked = [self._turns[request.state.request_id] for request in requests_with_new_token]
        return torch.empty(0, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> Any:
        only_BV = torch.zeros_like(scores)
        count = len(self.asked)  # rows behind them are of prompts that are fed in parts
        if count:
            ids = torch.tensor(self._pick(scores[:count], self.asked), device=scores.device)
            only_BV[torch.arange(count, device=scores.device), ids] = 1.0
        return only_BV


class PagedEngine:
    """The paged cache of one model, and the turns that are drawn from it.

    Args:
        model: A transformers causal language model, in eval mode.
        config: Of `transformers.ContinuousBatchingConfig`, checked.
        attention: What the model attends with while it steps: "sdpa", "eager" or a flash attention.
        room: Tokens that all conversations together may need; the cache is no larger where `num_blocks` is not set.
        pick: Draws the next ids of turns from their logits [B, V].

    Raises:
        ValueError, MemoryError: transformers refuses the model or the config.
    """

    def __init__(self, model: Any, config: Mapping[str, Any], attention: str, room: int, pick: Picker) -> None:
        self.model = model
        self.turns: dict[str, Turn] = {}
        self._names: dict[Turn, str] = {}
        self._count = itertools.count()
        self._pick = _Pick(self.turns, pick)
        self._configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
        self._attention = attention
        dense = not attention.startswith("flash") and not config["auto_switch_to_flash"]
        sized = _sized(config, room) if dense else dict(config)
        while True:
            try:
                self._manager = self._start(sized)
                break
            except MemoryError:  # more than max_memory_percent
                if not dense or "num_blocks" in config or sized["num_blocks"] < 2:
                    raise
                sized["num_blocks"] //= 2

    def _start(self, config: Mapping[str, Any]) -> Any:
        with self._paged():
            manager = continuous_api.ContinuousBatchingManager(
                self.model, transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
                transformers.ContinuousBatchingConfig(**config),
            )  # fmt: skip
            self._attention = self.model.config._attn_implementation  # paged eager, or flash
            made = processors.ContinuousBatchingLogitsProcessorList(transformers.LogitsProcessorList([self._pick]))  # pyright: ignore[reportArgumentType]
            made.tensors_required = 1
            manager.logit_processor = made
            manager.warmup()  # without graphs it only makes the cache
        return manager

    @property
    def cache(self) -> Any:
        return self._manager.batch_processor.cache

    @property
    def page(self) -> int:
        """Tokens in one page, the unit in which prompts are shared; 0 where they are not."""
        return self._manager.continuous_batching_config.page_size if self.cache.use_prefix_sharing else 0

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that fit."""
        return self.cache.num_blocks * self._manager.continuous_batching_config.page_size

    def add(self, turn: Turn) -> None:
        """The turn is drawn from the next step on."""
        name = str(next(self._count))
        self.turns[name], self._names[turn] = turn, name
        self._manager.add_request(
            turn.held, name, max_new_tokens=turn.end - len(turn.held), eos_token_id=list(turn.request.stop_ids) or -1
        )

    def drop(self, turns: Sequence[Turn]) -> None:
        """The turns are drawn no further; what they fed stays for others."""
        processor = self._manager.batch_processor
        for turn in turns:
            name = self._names.pop(turn, None)
            if name is not None:
                del self.turns[name]
                processor.scheduler.set_request_cancellation(name)
        for state in processor.scheduler.clear_cancelled_requests():
            processor.offloading_manager.free_request_cpu_cache(state)

    def forget(self) -> None:
        """No keys of earlier forwards are used again: the weights are other ones."""
        self.drop(list(self._names))
        self.cache.reset()

    def step(self) -> list[tuple[Turn, int]]:
        """One forward, of prompts and of one token for each turn beyond its prompt; `pick` has seen what it gave.

        Returns:
            The turns in it, and how many tokens of each were fed; empty where there was nothing to do.
        """
        processor = self._manager.batch_processor
        with torch.no_grad(), self._paged():
            if not processor.prepare_next_batch():
                return []
            inputs = processor.inputs_and_outputs
            fed = [(self.turns[one.state.request_id], one.query_length) for one in inputs.requests_in_batch]
            processor.model_runner.compute_batch(self.model, inputs.get_model_kwargs(use_padding=False))
            inputs.retrieve_device_outputs()
            processor.update_batch()
            while not self._manager.output_router.output_queue.empty():
                self._manager.output_router.output_queue.get_nowait()  # `pick` knows them
        return fed

    def close(self) -> None:
        """Its memory is given back."""
        self._manager.batch_processor = None
        self._manager.destroy()

    @contextmanager
    def _paged(self) -> Iterator[None]:
        """The model attends to the pages; afterwards as before, for training."""
        before = [(config, config._attn_implementation) for config in self._configs]
        self.model.config._attn_implementation = self._attention
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # transformers' own, of transformers
                yield
        finally:
            for config, name in before:
                config._attn_implementation = name


def _sized(config: Mapping[str, Any], room: int) -> dict[str, Any]:
    """The config for attention with a dense mask: a cache of what the turns can need, not of half the memory."""
    page = config.get("block_size") or config.get("page_size") or _PAGE
    blocks = -(-min(room, _MASK_TOKENS) // page)
    rows = max(_MASK_ROWS, config["max_requests_per_batch"])
    return {"page_size": page, "num_blocks": blocks, "max_batch_tokens": rows, **config}
