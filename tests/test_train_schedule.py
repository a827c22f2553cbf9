"""Which rollout trains when: every rollout of a cycle exactly num_iterations times, from the step's number alone."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.schedule import Schedule, Slice

EVERY = list(product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3)))


@pytest.mark.parametrize(("accumulation", "slices", "iterations"), EVERY)
def test_every_part_of_every_cycle_is_trained_num_iterations_times(accumulation: int, slices: int, iterations: int):
    s = Schedule(accumulation, slices, iterations, prompts=2, rows=None)
    steps = 3 * s.per_cycle  # whole cycles: 3 x accumulation of them
    seen = [part for k in range(steps) for part in s.step(k)]
    assert Counter((x.cycle, x.part) for x in seen) == {
        (cycle, part): iterations for cycle in range(3 * accumulation) for part in range(slices)
    }
    assert set(Counter(seen).values()) == {1}  # each part once in each iteration
    assert all(len(s.step(k)) == accumulation for k in range(steps))


@pytest.mark.parametrize(("accumulation", "slices", "iterations"), EVERY)
def test_a_cycle_is_over_before_the_next_begins(accumulation: int, slices: int, iterations: int):
    s = Schedule(accumulation, slices, iterations, prompts=2, rows=None)
    seen = [(x.cycle, x.iteration, x.part) for k in range(2 * s.per_cycle) for x in s.step(k)]
    assert seen == sorted(seen)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_resume_needs_nothing_but_the_step(accumulation: int, slices: int, iterations: int, start: int):
    """Steps from `start` on are those of a run that began at 0."""
    s = Schedule(accumulation, slices, iterations, prompts=3, rows=7)
    flat = [x for k in range(start + 5) for x in s.step(k)]
    assert [x for k in range(start, start + 5) for x in s.step(k)] == flat[start * accumulation :]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_trains_in_one_step_says_where_an_update_falls_between(accumulation: int, slices: int, iterations: int):
    s = Schedule(accumulation, slices, iterations, prompts=1, rows=None)
    steps: dict[int, set[int]] = {}
    for k in range(4 * s.per_cycle):
        for x in s.step(k):
            steps.setdefault(x.cycle, set()).add(k)
    for cycle in range(4):
        assert s.trains_in_one_step(cycle) == (len(steps[cycle]) == 1)


def test_by_hand_two_slices_two_iterations():
    s = Schedule(accumulation=2, slices=4, iterations=2, prompts=2, rows=None)
    assert s.step(0) == [Slice(0, 0, 0), Slice(0, 1, 0)]
    assert s.step(1) == [Slice(0, 2, 0), Slice(0, 3, 0)]
    assert s.step(2) == [Slice(0, 0, 1), Slice(0, 1, 1)]
    assert s.step(4) == [Slice(1, 0, 0), Slice(1, 1, 0)]
    assert not s.trains_in_one_step(0)
    assert Schedule(4, 4, 1, 2, None).trains_in_one_step(0)
    assert Schedule(8, 2, 2, 2, None).trains_in_one_step(0)  # two cycles in one step


@pytest.mark.parametrize(("rows", "prompts", "cycles"), [(10, 4, 3), (8, 4, 2), (3, 4, 1), (1, 1, 1)])
def test_an_epoch_sees_every_row_and_fills_up_its_last_cycle(rows: int, prompts: int, cycles: int):
    s = Schedule(accumulation=1, slices=2, iterations=1, prompts=prompts, rows=rows)
    assert s.cycles_per_epoch == cycles
    assert s.steps_per_epoch == cycles * 2
    first = [pair for cycle in range(cycles) for pair in s.tasks(cycle)]
    assert first == [(0, i) for i in range(cycles * prompts)]
    assert s.tasks(cycles)[0] == (1, 0)  # the next epoch begins at its own first row


def test_endless_sources_have_one_epoch():
    s = Schedule(accumulation=1, slices=1, iterations=1, prompts=3, rows=None)
    assert s.steps_per_epoch is None
    assert s.tasks(5) == [(0, 15), (0, 16), (0, 17)]
