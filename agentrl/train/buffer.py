"""Rollouts between being played and being trained."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from accelerate.utils import broadcast_object_list

from agentrl.errors import RunStopped
from agentrl.train.correction import applies
from agentrl.train.generation import AdvantageSettings, Cycle, PlayGroups, play_cycle, recorded_log_probs, with_tensors
from agentrl.train.metrics import add_reward_metrics, add_rollout_metrics, add_speed, prompt_tokens, sampled_tokens
from agentrl.train.pack import share_out
from agentrl.train.rollout_func import play_with_function
from agentrl.train.rows import TrainItem
from agentrl.train.speed import add_staleness
from agentrl.train.step import StepBatch, call, frozen_log_probs, row_budget

if TYPE_CHECKING:
    from agentrl.train.trainer import GRPOTrainer


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch of all ranks, and what this rank trains of it."""

    items: tuple[TrainItem, ...]  # [R] this rank's
    places: tuple[int, ...]  # [R] where they stand in the micro-batch
    tokens: tuple[int, ...]  # trained ones of every rollout of the micro-batch, by the rank that it is of


class RolloutBuffer:
    """Plays a cycle when a step first needs it and hands out this rank's micro-batches.

    Nothing of it is saved: a run that resumes in the middle of a cycle plays that cycle again.
    """

    def __init__(self, trainer: GRPOTrainer, settings: AdvantageSettings) -> None:
        self.trainer, self.settings = trainer, settings
        self._parts: dict[int, list[Part]] = {}  # cycle: slices of this rank
        self._played_at: dict[int, int] = {}  # cycle: step
        self._next_step = 0

    def batch(self, step: int) -> StepBatch:
        """What this rank trains at optimizer step `step`."""
        if step != self._next_step:  # a new train() call, or resuming
            self._parts.clear()
        self._next_step = step + 1
        slices = self.trainer.schedule.step(step)
        for cycle in sorted({one.cycle for one in slices}):
            if cycle not in self._parts:
                self._parts[cycle] = self._play(cycle)
                self._played_at[cycle] = step
        self._parts = {cycle: parts for cycle, parts in self._parts.items() if cycle >= slices[0].cycle}
        self._played_at = {cycle: self._played_at[cycle] for cycle in self._parts}
        parts = [self._parts[one.cycle][one.part] for one in slices]
        items = tuple(item for part in parts for item in part.items)
        args, window = self.trainer.args, self.trainer.window["train"]
        ages = [step - self._played_at[one.cycle] for one, part in zip(slices, parts, strict=True) for _ in part.items]
        add_staleness(window, items, ages)
        window.add("batch/groups_per_step", self.trainer.schedule.groups(step))
        window.add("perf/rollout_wait_s", 0.0)  # one measurement per step; what it waited is added where it waits
        size, starts = args.per_device_train_batch_size, [0]
        for part in parts:
            starts.append(starts[-1] + len(part.tokens))
        return StepBatch(
            items,
            tuple(m for m, part in enumerate(parts) for _ in part.items),
            len(slices),
            size,
            tuple((n, place // size * len(slices) + m) for m, part in enumerate(parts)
                  for place, n in enumerate(part.tokens)),
            tuple(start + place for start, part in zip(starts, parts, strict=False) for place in part.places),
        )  # fmt: skip

    def _play(self, number: int) -> list[Part]:
        """The cycle's micro-batches of this rank; whole groups stay side by side, in an order of the cycle's own."""
        trainer = self.trainer
        accelerator = trainer.accelerator
        plans = trainer.group_plans(number)
        started, world = time.perf_counter(), accelerator.num_processes
        each = self.ranks_per_engine()
        cycle = play_cycle(plans, self.players(), self.settings, accelerator.process_index, world, each)
        waited = time.perf_counter() - started
        trainer.window["train"].add("perf/rollout_wait_s", waited, 0)
        add_speed(trainer.window["train"], cycle.groups, waited, world)
        self._report(cycle)
        size = len(cycle.items) // len(plans)
        order = list(range(len(plans)))
        random.Random(trainer.shuffle_seed(number)).shuffle(order)
        queue = [cycle.items[group * size + member] for group in order for member in range(size)]
        queue = self._within_budget(queue)
        per_slice = trainer.args.per_device_train_batch_size * world
        cut = [queue[s * per_slice : (s + 1) * per_slice] for s in range(trainer.schedule.slices)]
        least = self._least(queue)
        places = [self._mine(items, least) for items in cut]
        mine = [items[place] for items, chosen in zip(cut, places, strict=True) for place in chosen]
        ready = iter(self._with_log_probs(mine, number, corrected=self._corrects(cycle)))
        return [
            Part(tuple(next(ready) for _ in chosen), tuple(chosen), tuple(item.trained_tokens for item in items))
            for items, chosen in zip(cut, places, strict=True)
        ]

    def _least(self, items: Sequence[TrainItem]) -> int | None:
        """What sharing is worth to the first rank: one that stopped packing must not cut the work in another way."""
        least = [self.trainer.policy_forward.least_for(items)]
        return broadcast_object_list(least)[0] if self.trainer.accelerator.num_processes > 1 else least[0]

    def _mine(self, items: Sequence[TrainItem], least: int | None) -> list[int]:
        """Which rollouts of a micro-batch of all ranks this rank trains: those that make the ranks' work alike.

        A load-balancing loss is one of a rank's own micro-batch, so it is not moved, nor what is not trained.
        """
        trainer = self.trainer
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        size = trainer.args.per_device_train_batch_size
        home = list(range(rank * size, min((rank + 1) * size, len(items))))
        if world == 1 or trainer.step_runner.router_coef:
            return home
        trained = [place for place, item in enumerate(items) if item.trained_tokens]
        parts = share_out([items[place] for place in trained], world, least)
        return sorted([trained[i] for i in parts[rank]] + [place for place in home if not items[place].trained_tokens])

    def _within_budget(self, items: list[TrainItem]) -> list[TrainItem]:
        """Rollouts without the sequences that no row of `token_budget` tokens holds, each of which is counted.

        Raises:
            RunStopped: That is all of them.
        """
        budget, trainer = self.trainer.args.token_budget, self.trainer
        if budget is None:
            return items
        long = [(i, s) for i, item in enumerate(items) for s in item.sequences if len(s.input_ids) > budget]
        if trainer.accelerator.is_main_process:
            trainer.window["train"].count("batch/dropped_oversize_count", len(long))
        if long:
            most, which = max((len(sequence.input_ids), items[i].index) for i, sequence in long)
            total = sum(len(item.sequences) for item in items)
            text = f"samples are longer than token_budget={budget} (the longest, of rollout {which}, has {most} tokens)"
            advice = "Raise token_budget, or shorten prompts or max_completion_length."
            if len(long) == total:
                raise RunStopped(f"All {total} {text}: nothing of a generation batch can be trained. {advice}")
            warnings.warn(f"{len(long)} of {total} {text} and are not trained. {advice}", stacklevel=2)
        for i in {i for i, _ in long}:
            kept = tuple(s for s in items[i].sequences if len(s.input_ids) <= budget)
            items[i] = replace(items[i], sequences=kept)
        return items

    def players(self) -> PlayGroups:
        """What plays groups: the engine, or the user's `rollout_func`."""
        trainer = self.trainer
        if trainer.rollout_func is not None:
            return lambda plans: play_with_function(trainer, plans)
        version, window = trainer.state.global_step, trainer.window["train"]
        return lambda plans: trainer.player.play(plans, version=version, trainer_state=trainer.state, window=window)

    def ranks_per_engine(self) -> int:
        """How many ranks play together: those of one engine; a `rollout_func` is called on every rank."""
        return 1 if self.trainer.rollout_func is not None else self.trainer.player.policy.ranks

    def _corrects(self, cycle: Cycle) -> bool:
        """Whether the loss makes up for another engine: its log-probs are on record, and are not the trainer's own."""
        trainer = self.trainer
        if trainer.step_runner.correction is None or self._sampler_is_exact():
            return False
        return applies(cycle.items, truncated=trainer.player.engine.settings.sampling.truncates)

    def _with_log_probs(self, items: list[TrainItem], number: int, *, corrected: bool) -> list[TrainItem]:
        """Items with what the loss needs besides the current log-probs, all from before the first update."""
        trainer = self.trainer
        recorded = [recorded_log_probs(item) for item in items]
        items = [replace(item, sampler_N=lp, corrected=corrected) for item, lp in zip(items, recorded, strict=True)]
        trained = [i for i, item in enumerate(items) if item.trained_tokens]
        chosen = [items[i] for i in trained]
        budget = row_budget(chosen, trainer.args.per_device_train_batch_size, trainer.args.token_budget)
        if not trainer.schedule.trains_in_one_step(number):
            old = [recorded[i] for i in trained] if self._sampler_is_exact() else self._old(chosen, budget)
            for i, log_probs in zip(trained, old, strict=True):
                items[i] = with_tensors(items[i], old_N=log_probs.cpu())
        if trainer.args.beta > 0:
            for i, log_probs in zip(trained, self._reference(chosen, budget), strict=True):
                items[i] = with_tensors(items[i], ref_N=log_probs.cpu())
        return items

    def _sampler_is_exact(self) -> bool:
        """Whether recorded log-probs are those of the trainer's own forward, up to fp32 rounding.

        Those of top-k, top-p and min-p are: the sampler records what each token was drawn from.
        """
        trainer = self.trainer
        player = trainer.player
        if trainer.rollout_func is not None or player.engine.sampler is not player.sampler:
            return False
        return player.policy.exact

    def _old(self, items: list[TrainItem], budget: int) -> list[torch.Tensor]:
        trainer = self.trainer
        forward = trainer.policy_forward
        with trainer.accelerator.autocast():
            return frozen_log_probs(forward, items, budget, trainer.args.device, lambda row: call(forward.model, row))

    def _reference(self, items: list[TrainItem], budget: int) -> list[torch.Tensor]:
        trainer = self.trainer
        assert trainer.reference is not None
        with trainer.reference.in_place():
            return self._old(items, budget)

    def _report(self, cycle: Cycle) -> None:
        trainer = self.trainer
        window = trainer.window["train"]
        add_rollout_metrics(window, cycle.groups, trainer.reported)
        if trainer.accelerator.is_main_process:
            if all(rollout.reward is None for rollout in cycle.shared):
                warnings.warn(
                    "Nobody scored any rollout of a generation batch: nothing is trained on it.", stacklevel=2
                )
            add_reward_metrics(window, cycle.shared, cycle.advantages, trainer.reported)
        rollouts = [rollout for group in cycle.groups for rollout in group.rollouts]
        count = torch.tensor(sum(prompt_tokens(r) + sampled_tokens(r) for r in rollouts), device=trainer.args.device)
        trainer.saw_tokens(int(trainer.accelerator.reduce(count, "sum")))  # type: ignore[arg-type]
        trainer.played(cycle.groups)
