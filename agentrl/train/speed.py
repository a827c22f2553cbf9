"""sample/*, batch/* and perf/*: what a step holds and how long its parts take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from agentrl.train.metrics import MetricWindow

if TYPE_CHECKING:
    from agentrl.train.rows import Row, TrainItem


def add_batch_metrics(
    window: MetricWindow, rows: Sequence[Row], filler: Sequence[int], microbatches: int, world: int, budget: int
) -> tuple[int, int]:
    """sample/* and batch/* of one rank's step; returns its (forwarded, trained) tokens.

    A token that stands for several sequences is forwarded once. A rollout that trains nothing is in no row. Rows that
    are only run forward count, each once, however often it is run. Numbers per step are sums over ranks.

    Args:
        window: Where they go.
        rows: This rank's.
        filler: For each row the positions that are computed besides its tokens.
        microbatches: Of the step.
        world: How many ranks there are.
        budget: Tokens that a row may have.
    """
    samples = [length for row in rows for length in row.sequence_lengths]
    forwarded = [len(row.input_ids_T) for row in rows]
    trained = sum(len(row.targets_N) for row in rows)
    window.add_all("sample/forwarded_tokens_mean", samples)
    if samples:
        window.high("sample/forwarded_tokens_max", max(samples))
        window.add("sample/trained_tokens_mean", trained, len(samples))
        window.high("batch/row_tokens_max", max(forwarded))
        window.add("batch/samples_per_row", len(samples), len(rows))
        window.add("batch/row_tokens_mean", sum(forwarded), len(rows))
        window.add("batch/row_fill_frac", sum(forwarded), budget * len(rows))
        window.add("batch/packing_ratio", sum(samples), sum(forwarded))
        window.add("batch/pad_frac", sum(filler), sum(filler) + sum(forwarded))
        window.add("batch/masked_token_frac", sum(samples) - trained, sum(samples))
    for name, number in (("forwarded_tokens", sum(forwarded)), ("trained_tokens", trained),
                         ("samples", len(samples))):  # fmt: skip
        window.add(f"batch/{name}_per_step", number, 1 / world)
    window.add("batch/microbatches_per_step", microbatches, 1)
    return sum(forwarded), trained


def add_staleness(window: MetricWindow, items: Sequence[TrainItem], updates: Sequence[int]) -> None:
    """sample/staleness_*: updates of the weights between playing a sample and training it."""
    ages = [age for item, age in zip(items, updates, strict=True) if item.trained_tokens for _ in item.sequences]
    window.add_all("sample/staleness_mean", ages)
    if ages:
        window.high("sample/staleness_max", max(ages))


class Stopwatch:
    """Adds up seconds, waiting for the device before and after."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type != "cpu"
        self.seconds = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds += self._now() - started

    def _now(self) -> float:
        if self._waits:
            torch.accelerator.synchronize()
        return time.perf_counter()


class StepClock(TrainerCallback):
    """Times a step between the events of the training loop, and the optimizer's part of it."""

    def __init__(self, window: MetricWindow, world: int) -> None:
        self._window, self._world = window, world
        self._tokens = (0, 0)
        self._step = self._optimizer = 0.0

    def trained(self, tokens: tuple[int, int], seconds: float, forward_s: float) -> None:
        """This rank ran `tokens` (forwarded, trained) through the model in `seconds`, `forward_s` of them forward."""
        self._tokens = tokens
        self._window.add("perf/fwd_bwd_s", seconds)
        self._window.add("perf/fwd_s", forward_s)
        self._window.add("perf/fwd_bwd_forwarded_tokens_per_s", self._world * tokens[0], seconds)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window.clear()  # what an earlier call of train did not log

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step, self._tokens = time.perf_counter(), (0, 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window.add("perf/optimizer_s", time.perf_counter() - self._optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._step
        self._window.add("perf/step_s", seconds)
        for name, number in zip(("forwarded", "trained"), self._tokens, strict=True):
            self._window.add(f"perf/wall_clock_{name}_tokens_per_s", self._world * number, seconds)
