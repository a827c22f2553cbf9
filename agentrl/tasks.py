"""Task rows: where they come from, in which order, with which seed. Deterministic, so that resuming costs nothing."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.errors import ConfigurationError
from agentrl.mixing import Mixture
from agentrl.types import Task

_REMEMBERED = 4096  # tasks of a stream that can be asked for again


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
        environments: Names a row's ``environment`` column may hold; None where one environment plays every row. A dict
            of weights by name (None: 1) mixes them where there is no data; with data, the rows say how many there are.
        prompt_required: Whether a row must have a ``prompt`` (no environment writes it).
        order_seed: Seed of the order alone (the trainer's `data_seed`); None takes `seed`.
        columns: The only columns that a task has; None: all.

    Raises:
        ConfigurationError: Empty data, a missing column, or an unknown environment name (all bad values are listed).
    """

    def __init__(
        self,
        data: Any | None,
        *,
        seed: int,
        shuffle: bool = True,
        environments: Sequence[str] | Mapping[str, float | None] | None = None,
        prompt_required: bool = True,
        order_seed: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._data: Any = data
        self._seed, self._shuffle = seed, shuffle
        self._order_seed = seed if order_seed is None else order_seed
        weights = dict(environments) if isinstance(environments, Mapping) else dict.fromkeys(environments or ())
        self._environments = None if environments is None else list(weights)
        self._prompt_required = prompt_required
        self._chosen = columns
        self.size: int | None = len(self._data) if is_sized(data) else None
        self._order: tuple[int, np.ndarray] | None = None
        self._stream: Iterator[dict[str, Any]] | None = None
        self._stream_at = self._stream_epoch = 0
        self._recent: dict[int, Task] = {}
        _check_kind(data)
        self._mixture: Mixture | None = None
        if data is None and weights:
            self._mixture = Mixture({name: 1.0 if weight is None else weight for name, weight in weights.items()})
        if self.size == 0:
            raise ConfigurationError("The dataset is empty: it has no rows to play.")
        if self.size is not None:
            self._check_columns()

    def task(self, epoch: int, position: int) -> Task:
        """The row at `position` of `epoch`; positions past the end begin the epoch's order again, with new seeds."""
        if self._data is None:
            name = self._mixture.at(position) if self._mixture is not None else None
            return Task(position, epoch, derive_seed(self._seed, epoch, position), environment=name)
        if self.size is None:
            return self._from_stream(position)
        lap, offset = divmod(position, self.size)
        index = int(self._epoch_order(epoch)[offset])
        return self._make(index, epoch, _as_row(self._data[index], f"Row {index}"), lap)

    def _make(self, index: int, epoch: int, row: dict[str, Any], lap: int = 0) -> Task:
        self._check_row(row, index)
        if self._chosen is not None:
            row = {name: row[name] for name in self._chosen if name in row}
        seed = derive_seed(self._seed, epoch, index, lap) if lap else derive_seed(self._seed, epoch, index)
        return Task(index, epoch, seed, row, row.get("environment") if self._environments is not None else None)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            assert self.size is not None
            rng = np.random.default_rng([self._order_seed & 0x7FFFFFFF, epoch])
            self._order = (epoch, rng.permutation(self.size) if self._shuffle else np.arange(self.size))
        return self._order[1]

    def shares(self) -> dict[str, float]:
        """The share of the tasks that is asked for, by environment; empty for a stream, and without names."""
        if self._mixture is not None:
            return self._mixture.shares()
        if self._environments is None or self.size is None:
            return {}
        counts = Counter(_column(self._data, "environment"))
        return {name: counts[name] / self.size for name in self._environments}

    # --- streams ---
    def _from_stream(self, position: int) -> Task:
        """Rows of a stream by their place in the run; only forward, with a short memory for a repeated step."""
        if position in self._recent:
            return self._recent[position]
        if position < self._stream_at:  # a new train() call, or resuming earlier: begin again and skip
            self._rewind()
        while True:
            row = self._next_row()
            at = self._stream_at
            self._stream_at += 1
            if at == position:
                task = self._recent[at] = self._make(at, self._stream_epoch, row)
                if len(self._recent) > _REMEMBERED:
                    del self._recent[next(iter(self._recent))]
                return task

    def _rewind(self) -> None:
        if self._stream_at and iter(self._data) is self._data:
            raise ConfigurationError(
                "The dataset is an iterator that can be read only once, and it has to start again here. Pass something "
                "that can be iterated anew: a datasets.IterableDataset, or a class with __iter__."
            )
        self._stream, self._stream_at, self._stream_epoch, self._recent = None, 0, 0, {}

    def _next_row(self) -> dict[str, Any]:
        for _ in range(2):
            if self._stream is None:
                if hasattr(self._data, "set_epoch"):
                    self._data.set_epoch(self._stream_epoch)
                self._stream = iter(self._data)
            row = next(self._stream, None)
            if row is not None:
                return _as_row(row, f"Row {self._stream_at}")
            if self._stream_at and self._stream is self._data:
                raise ConfigurationError(
                    f"The dataset is an iterator that ended after {self._stream_at} rows, and the run needs more. Pass "
                    "something that can be iterated anew: a datasets.IterableDataset, or a class with __iter__."
                )
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
        known = {repr(name) for name in self._environments}
        bad = sorted({repr(name) for name in _column(self._data, "environment")} - known)
        if bad:
            raise ConfigurationError(self._unknown(bad))

    def _check_row(self, row: dict[str, Any], index: int) -> None:
        check_prompt(row.get("prompt"), index)
        if self._prompt_required and row.get("prompt") is None:
            raise ConfigurationError(f"Row {index} of the dataset has no 'prompt'.")
        if self._environments is not None and row.get("environment") not in self._environments:
            raise ConfigurationError(f"Row {index}: " + self._unknown([repr(row.get("environment"))]))

    def _unknown(self, bad: list[str]) -> str:
        shown = ", ".join(bad[:10]) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        known = ", ".join(self._environments or ())
        return f"Unknown environment name(s) in the dataset's 'environment' column: {shown}. Known: {known}."


def from_frame(data: Any) -> Any:
    """A pandas DataFrame as a `datasets.Dataset`; anything else as it is.

    Raises:
        ConfigurationError: A column that Arrow cannot hold.
    """
    if type(data).__name__ != "DataFrame" or type(data).__module__.split(".")[0] != "pandas":
        return data
    from datasets import Dataset

    try:
        return Dataset.from_pandas(data, preserve_index=False)
    except Exception as error:
        raise ConfigurationError(
            f"The DataFrame cannot be made a dataset: {type(error).__name__}: {error}. Pass its rows instead: "
            "frame.to_dict('records')."
        ) from error


def is_sized(data: Any) -> bool:
    """Rows can be asked for by number; anything else is read as a stream."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _check_kind(data: Any) -> None:
    if data is None or (not isinstance(data, (str, bytes, Mapping)) and (is_sized(data) or hasattr(data, "__iter__"))):
        return
    hint = ""
    if isinstance(data, Mapping) and data:
        hint = f" Did you mean one of its values, as in dataset[{next(iter(data))!r}]?"
    raise ConfigurationError(
        f"A dataset is a list of rows, a datasets.Dataset or an iterable, not a {_kind(data)}.{hint}"
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def _as_row(row: Any, name: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"{name} of the dataset is a {_kind(row)}; a row is a dict of columns.")
    return dict(row)


def _rows(data: Any) -> Iterator[dict[str, Any]]:
    """Every row of a sized dataset, by index: a class with `__getitem__` alone never ends when it is iterated."""
    return (_as_row(data[i], f"Row {i}") for i in range(len(data)))


def check_prompt(prompt: Any, index: int) -> None:
    """The prompt is text, a list of messages with a role each, or missing.

    Raises:
        ConfigurationError: Names the row and what stands there.
    """
    if prompt is None or isinstance(prompt, str):
        return
    shape = 'text or a list of messages such as {"role": "user", "content": "..."}'
    if not isinstance(prompt, (list, tuple)):
        raise ConfigurationError(f"The prompt of row {index} is of type {type(prompt).__name__}; it must be {shape}.")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigurationError(f"The prompt of row {index} holds {message!r:.80}; it must be {shape}.")


def _columns(data: Any) -> set[str]:
    names: Iterable[str] | None = getattr(data, "column_names", None)
    return set(names) if names is not None else {key for row in _rows(data) for key in row}


def _column(data: Any, name: str) -> Iterable[Any]:
    return data[name] if hasattr(data, "column_names") else (row.get(name) for row in _rows(data))
