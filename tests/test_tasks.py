"""Rows: order, seeds, streams, and what is wrong with a dataset said early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
import pytest

from agentrl.errors import ConfigurationError
from agentrl.tasks import TaskSource, derive_seed

ROWS = [{"prompt": f"p{i}", "level": i} for i in range(10)]


def levels(source: TaskSource, epoch: int, count: int = 10, start: int = 0) -> list[int]:
    return [source.task(epoch, position).row["level"] for position in range(start, start + count)]


class Stream:
    """An iterable dataset that shuffles itself by epoch and counts how often it is read."""

    def __init__(self, count: int = 5) -> None:
        self.count, self.epoch, self.read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.count):
            self.read += 1
            yield {"prompt": f"p{i}", "level": (i * 2 + self.epoch) % self.count}


class Procedural:
    """A map-style dataset whose items never end: iterating it instead of indexing would hang."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": str(index), "level": index}


# --- order -----------------------------------------------------------------------------
def test_f115_f131_each_epoch_has_its_own_order_and_holds_every_row_once():
    """F115, F131: the order is a function of seed and epoch: another object, asked midway, says the same."""
    source = TaskSource(ROWS, seed=3)
    epochs = [levels(source, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != levels(TaskSource(ROWS, seed=4), 0)
    resumed = TaskSource(ROWS, seed=3)
    assert levels(resumed, 1, 4, start=6) == epochs[1][6:] and levels(resumed, 0) == epochs[0]
    assert levels(TaskSource(ROWS, seed=4, order_seed=3), 0) == epochs[0]


def test_f133_without_shuffling_the_order_is_kept():
    """F133: a curriculum stays one, in every epoch."""
    source = TaskSource(ROWS, seed=3, shuffle=False)
    assert levels(source, 0) == levels(source, 5) == list(range(10))


def test_past_the_end_the_order_begins_again_with_new_seeds():
    source = TaskSource(ROWS, seed=3)
    lap = [source.task(0, position) for position in range(25)]
    assert [t.index for t in lap[10:20]] == [t.index for t in lap[:10]] and lap[24].index == lap[4].index
    assert len({t.seed for t in lap}) == 25


def test_seeds_name_run_epoch_and_row():
    source, other = TaskSource(ROWS, seed=3), TaskSource(ROWS, seed=4)
    tasks = [source.task(epoch, position) for epoch in range(2) for position in range(10)]
    seeds = {(task.epoch, task.index): task.seed for task in tasks}
    assert len(set(seeds.values())) == 20 and seeds[1, 7] == derive_seed(3, 1, 7)
    unshuffled = TaskSource(ROWS, seed=3, shuffle=False)
    assert all(unshuffled.task(0, p).seed == seeds[0, p] for p in range(10))  # of the row, not of its place
    assert other.task(0, 0).seed not in seeds.values()
    assert all(0 <= seed < 2**31 for seed in seeds.values())


def test_without_data_rows_are_empty_and_endless():
    source = TaskSource(None, seed=1, prompt_required=False)
    tasks = [source.task(0, position) for position in (0, 1, 10**6)]
    assert source.size is None and [t.row for t in tasks] == [{}] * 3 and len({t.seed for t in tasks}) == 3
    assert source.task(0, 1) == tasks[1]


@pytest.mark.parametrize("data", [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS)])
def test_lists_tuples_and_datasets_are_the_same(data):
    source = TaskSource(data, seed=3)
    assert source.size == 10 and levels(source, 2) == levels(TaskSource(ROWS, seed=3), 2)
    task = source.task(0, 0)
    task.row["level"] = 99  # a task's row is its own
    assert 99 not in levels(source, 0)


def test_a_class_with_len_and_getitem_is_enough():
    assert sorted(levels(TaskSource(Procedural(), seed=0), 0, 4)) == [0, 1, 2, 3]


# --- streams ---------------------------------------------------------------------------
def test_f131_a_stream_is_reshuffled_each_time_it_begins_again():
    """F131: `set_epoch` reaches the data itself, and the seeds go on."""
    source = TaskSource(Stream(), seed=3)
    tasks = [source.task(0, position) for position in range(12)]
    assert [t.row["level"] for t in tasks] == [0, 2, 4, 1, 3, 1, 3, 0, 2, 4, 2, 4]
    assert [t.epoch for t in tasks] == [0] * 5 + [1] * 5 + [2] * 2 and len({t.seed for t in tasks}) == 12


def test_f115_a_stream_resumes_where_it_stood():
    """F115: a fresh source asked for a later place gives what the first one gave, and nothing is skipped after it."""
    whole = [TaskSource(Stream(), seed=3).task(0, p) for p in range(12)]
    resumed = TaskSource(Stream(), seed=3)
    assert [resumed.task(0, p) for p in range(7, 12)] == whole[7:]
    again = TaskSource(Stream(), seed=3)
    assert [again.task(0, p) for p in (8, 2, 3, 9, 0)] == [whole[p] for p in (8, 2, 3, 9, 0)]


def test_a_repeated_step_does_not_read_the_stream_again():
    stream = Stream(100)
    source = TaskSource(stream, seed=3)
    for position in [*range(6), *range(6), 3, 5]:
        assert source.task(0, position).index == position
    assert stream.read == 6


def test_a_long_stream_is_remembered_in_part():
    stream = Stream(5000)
    source = TaskSource(stream, seed=3)
    for position in range(5000):
        source.task(0, position)
    assert source.task(0, 5000 - 4096).index == 904 and stream.read == 5000
    assert source.task(0, 903).index == 903 and stream.read == 5000 + 904  # begun again, and skipped to


def test_datasets_streams():
    rows = datasets.Dataset.from_list(ROWS).to_iterable_dataset().shuffle(seed=1, buffer_size=10)
    source = TaskSource(rows, seed=3)
    first, second = levels(source, 0), levels(source, 0, start=10)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert levels(TaskSource(rows, seed=3), 0, 4, start=9) == [first[9], *second[:3]]


def test_an_iterator_that_can_be_read_once_is_told_from_a_stream():
    source = TaskSource(iter(ROWS), seed=3)
    assert levels(source, 0) == list(range(10))
    with pytest.raises(ConfigurationError, match="ended after 10 rows"):
        source.task(0, 10)
    source = TaskSource(({"prompt": str(i)} for i in itertools.count()), seed=3)
    source.task(0, 7)
    with pytest.raises(ConfigurationError, match="read only once"):
        source.task(0, 2)


def test_an_empty_stream_is_a_clear_error():
    for empty in (Stream(0), iter([])):
        with pytest.raises(ConfigurationError, match="empty: its iterator gave no row"):
            TaskSource(empty, seed=0).task(0, 0)


# --- bad data --------------------------------------------------------------------------
def test_f091_unknown_environment_names_are_all_listed_at_construction():
    """F091: typos, None and missing values, each once, with the names that exist."""
    names = ["a", "b", "c", None, "c", "B"]
    rows = [{"prompt": "x", "environment": name} for name in names] + [{"prompt": "x"}]
    for data in (rows, datasets.Dataset.from_list(rows)):
        with pytest.raises(ConfigurationError, match=r"'B', 'c', None\. Known: a, b\."):
            TaskSource(data, seed=0, environments=["a", "b"])
    fine = TaskSource(
        [{"environment": "a"}, {"environment": "b"}], seed=0, environments=["a", "b"], prompt_required=False
    )
    assert {fine.task(0, p).environment for p in range(2)} == {"a", "b"}
    many = [{"prompt": "x", "environment": f"e{i:02}"} for i in range(30)]
    with pytest.raises(ConfigurationError, match=r"'e09' and 20 more"):
        TaskSource(many, seed=0, environments=["a"])


def test_f091_in_a_stream_the_first_unknown_name_is_a_clear_error():
    """F091: streams cannot be checked before; the row is named."""
    rows = [{"prompt": "x", "environment": "a"}, {"prompt": "x", "environment": "z"}]
    source = TaskSource(iter(rows), seed=0, environments=["a", "b"])
    source.task(0, 0)
    with pytest.raises(ConfigurationError, match=r"Row 1: .*'z'\. Known: a, b"):
        source.task(0, 1)


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ([], {}, "empty"),
        ([{"question": "x"}], {}, r"no 'prompt' column \(it has: question\)"),
        (datasets.Dataset.from_list([{"q": 1}]), {}, r"no 'prompt' column \(it has: q\)"),
        ([{"prompt": "x"}], {"environments": ["a"]}, "'environment' column"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), {}, r"dataset\['train'\]"),
        ({"prompt": ["x"]}, {}, "not a dict"),
        ("trl-lib/zen", {}, "not a str"),
        (7, {}, "not a int"),
        (["x", "y"], {}, "Row 0 of the dataset is a str"),
    ],
)
def test_bad_data_is_one_clear_sentence(data, options, says):
    with pytest.raises(ConfigurationError, match=says):
        TaskSource(data, seed=0, **options)


def test_a_row_without_prompt_is_named_when_it_comes():
    source = TaskSource([{"prompt": "x"}, {"prompt": None}], seed=0, shuffle=False)
    source.task(0, 0)
    with pytest.raises(ConfigurationError, match="Row 1 of the dataset has no 'prompt'"):
        source.task(0, 1)
    with pytest.raises(ConfigurationError, match="Row 0 of the dataset is a int"):
        TaskSource(iter([3]), seed=0).task(0, 0)


@pytest.mark.parametrize("prompt", [5, ["hi"], [{"content": "no role"}], {"role": "user"}])
def test_a_prompt_of_another_shape_is_named_with_its_row(prompt):
    with pytest.raises(ConfigurationError, match="row 0"):
        TaskSource([{"prompt": prompt}], seed=0).task(0, 0)
