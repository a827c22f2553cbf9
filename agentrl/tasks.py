"""Task rows: where they come from, in which order, with which seed. Deterministic, so that resuming costs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from agentrl.errors import ConfigurationError
from agentrl.types import Task


def derive_seed(*parts: object) -> int:
    """A 31-bit seed that depends on every part and on nothing else.

    >>> derive_seed(42, 0, 7) == derive_seed(42, 0, 7), derive_seed(42, 0, 7) == derive_seed(42, 1, 7)
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


class TaskSource:
    """Rows of a dataset, of a stream, or (without data) one endless run of empty rows that an environment fills.

    Args:
        data: A sized dataset (``datasets.Dataset``, list of dicts), an iterable one, or None.
        seed: Run seed; orders and task seeds derive from it.
        shuffle: Whether each epoch has its own order. Streams are shuffled by their own `set_epoch`.
        environments: Names a row's ``environment`` column may hold; None where one environment plays every row.
        prompt_required: Whether a row must have a ``prompt`` (no environment writes it).
        order_seed: Seed of the order alone (the trainer's `data_seed`); None takes `seed`.

    Raises:
        ConfigurationError: Empty data, a missing column, or an unknown environment name (all bad values are listed).
    """

    def __init__(
        self,
        data: Any | None,
        *,
        seed: int,
        shuffle: bool = True,
        environments: Sequence[str] | None = None,
        prompt_required: bool = True,
        order_seed: int | None = None,
    ) -> None:
        self._data, self._seed, self._shuffle = data, seed, shuffle
        self._order_seed = seed if order_seed is None else order_seed
        self._environments, self._prompt_required = environments, prompt_required
        self.size: int | None = len(data) if hasattr(data, "__len__") else None
        self._order: tuple[int, np.ndarray] | None = None
        self._stream: Iterator[dict[str, Any]] | None = None
        self._stream_at = self._stream_epoch = 0
        self._recent: dict[int, Task] = {}
        if data is None and environments is not None:
            raise ConfigurationError(
                "Several environments need a train_dataset whose 'environment' column says which one plays each row."
            )
        if self.size == 0:
            raise ConfigurationError("The dataset is empty: it has no rows to play.")
        if self.size is not None:
            self._check_columns()

    def task(self, epoch: int, position: int) -> Task:
        """The row at `position` of `epoch`; positions past the end begin the epoch's order again, with new seeds."""
        if self._data is None:
            return Task(index=position, epoch=epoch, seed=derive_seed(self._seed, epoch, position), row={})
        if self.size is None:
            return self._from_stream(position)
        lap, offset = divmod(position, self.size)
        index = int(self._epoch_order(epoch)[offset])
        row = self._data[index]
        return self._make(index, epoch, dict(row), lap)

    def _make(self, index: int, epoch: int, row: dict[str, Any], lap: int = 0) -> Task:
        self._check_row(row, index)
        seed = derive_seed(self._seed, epoch, index, lap) if lap else derive_seed(self._seed, epoch, index)
        return Task(index, epoch, seed, row, row.get("environment") if self._environments is not None else None)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            assert self.size is not None
            rng = np.random.default_rng([self._order_seed & 0x7FFFFFFF, epoch])
            self._order = (epoch, rng.permutation(self.size) if self._shuffle else np.arange(self.size))
        return self._order[1]

    # --- streams ---
    def _from_stream(self, position: int) -> Task:
        """Rows of a stream by their place in the run; only forward, with a short memory for a repeated step."""
        if position in self._recent:
            return self._recent[position]
        if position < self._stream_at:  # a new train() call, or resuming earlier: begin again and skip
            self._stream, self._stream_at, self._stream_epoch, self._recent = None, 0, 0, {}
        while True:
            row = self._next_row()
            at = self._stream_at
            self._stream_at += 1
            if at == position:
                task = self._make(at, self._stream_epoch, row)
                self._recent[at] = task
                for old in [key for key in self._recent if key < at - 4096]:
                    del self._recent[old]
                return task

    def _next_row(self) -> dict[str, Any]:
        for _ in range(2):
            if self._stream is None:
                if hasattr(self._data, "set_epoch"):
                    self._data.set_epoch(self._stream_epoch)  # type: ignore[union-attr]
                self._stream = iter(self._data)  # type: ignore[arg-type]
            row = next(self._stream, None)
            if row is not None:
                return dict(row)
            self._stream, self._stream_epoch = None, self._stream_epoch + 1
        raise ConfigurationError("The dataset is empty: its iterator gave no row.")

    # --- checks ---
    def _check_columns(self) -> None:
        columns = _columns(self._data)
        if self._prompt_required and "prompt" not in columns:
            raise ConfigurationError(
                f"The dataset has no 'prompt' column (it has: {', '.join(sorted(columns)) or 'none'}). "
                "Add one, or pass an environment_factory whose reset() returns the prompt."
            )
        if self._environments is None:
            return
        if "environment" not in columns:
            raise ConfigurationError("Several environments need an 'environment' column in the dataset; it has none.")
        bad = sorted({repr(name) for name in self._data["environment"]} if hasattr(self._data, "column_names")
                     else {repr(row.get("environment")) for row in self._data})  # fmt: skip
        bad = [name for name in bad if name not in {repr(known) for known in self._environments}]
        if bad:
            raise ConfigurationError(self._unknown(bad))

    def _check_row(self, row: dict[str, Any], index: int) -> None:
        if self._prompt_required and row.get("prompt") is None:
            raise ConfigurationError(f"Row {index} of the dataset has no 'prompt'.")
        if self._environments is not None and row.get("environment") not in self._environments:
            raise ConfigurationError(f"Row {index}: " + self._unknown([repr(row.get("environment"))]))

    def _unknown(self, bad: list[str]) -> str:
        shown = ", ".join(bad[:10]) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        known = ", ".join(self._environments or ())
        return f"Unknown environment name(s) in the dataset's 'environment' column: {shown}. Known: {known}."


def _columns(data: Any) -> set[str]:
    names: Iterable[str] | None = getattr(data, "column_names", None)
    return set(names) if names is not None else {key for row in data for key in row}
