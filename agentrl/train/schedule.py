"""Which rollouts train at which optimizer step: arithmetic on the step's number, so that resuming needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """One micro-batch: a part of a generation cycle, for the nth time."""

    cycle: int
    part: int  # 0..slices-1
    iteration: int  # 0..iterations-1


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run cut into generation cycles, micro-batches and optimizer steps.

    A cycle plays `prompts` groups; its rollouts are cut into `slices` micro-batches, each trained `iterations` times;
    `accumulation` micro-batches make an optimizer step.

    >>> s = Schedule(accumulation=1, slices=2, iterations=2, prompts=4, rows=10)
    >>> [(x.cycle, x.part, x.iteration) for k in range(5) for x in s.step(k)]
    [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)]
    >>> s.steps_per_epoch, s.tasks(2), s.tasks(3)
    (12, [(0, 8), (0, 9), (0, 10), (0, 11)], [(1, 0), (1, 1), (1, 2), (1, 3)])
    """

    accumulation: int
    slices: int
    iterations: int
    prompts: int
    rows: int | None  # of the dataset; None: endless
    group: int = 1  # rollouts per prompt
    drop_last: bool = False  # an epoch ends before a cycle that its rows would not fill

    @property
    def per_cycle(self) -> int:
        """Micro-batches that one cycle feeds."""
        return self.slices * self.iterations

    @property
    def cycles_per_epoch(self) -> int | None:
        """Cycles that see every row at least once; the last one is filled up from the epoch's beginning.

        With `drop_last`, those that see no row twice, but at least one.
        """
        if self.rows is None:
            return None
        return max(1, self.rows // self.prompts) if self.drop_last else math.ceil(self.rows / self.prompts)

    @property
    def steps_per_epoch(self) -> int | None:
        cycles = self.cycles_per_epoch
        return None if cycles is None else math.ceil(cycles * self.per_cycle / self.accumulation)

    def step(self, number: int) -> list[Slice]:
        """The micro-batches of optimizer step `number` (from 0)."""
        first = number * self.accumulation
        return [self._slice(m) for m in range(first, first + self.accumulation)]

    def _slice(self, micro: int) -> Slice:
        cycle, at = divmod(micro, self.per_cycle)
        iteration, part = divmod(at, self.slices)
        return Slice(cycle, part, iteration)

    def groups(self, number: int) -> int:
        """Groups, of all ranks, that optimizer step `number` has rollouts of.

        >>> Schedule(accumulation=1, slices=4, iterations=1, prompts=3, rows=None, group=4).groups(1)  # 3..5 of 0..11
        2
        """
        size = self.prompts * self.group // self.slices  # rollouts of a micro-batch
        touched = {
            (one.cycle, place // self.group)
            for one in self.step(number)
            for place in range(one.part * size, (one.part + 1) * size)
        }
        return len(touched)

    def trains_in_one_step(self, cycle: int) -> bool:
        """True where no weight update falls between the first and the last use of the cycle's rollouts."""
        first = cycle * self.per_cycle
        return first // self.accumulation == (first + self.per_cycle - 1) // self.accumulation

    def tasks(self, cycle: int) -> list[tuple[int, int]]:
        """(epoch, position in its order) of the cycle's prompts; endless sources have one epoch."""
        cycles = self.cycles_per_epoch
        epoch, at = (0, cycle) if cycles is None else divmod(cycle, cycles)
        return [(epoch, at * self.prompts + i) for i in range(self.prompts)]
