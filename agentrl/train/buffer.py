"""Rollouts between being played and being trained."""

from __future__ import annotations

import random
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from agentrl.train.correction import applies
from agentrl.train.generation import AdvantageSettings, Cycle, PlayGroups, play_cycle, recorded_log_probs, with_tensors
from agentrl.train.metrics import add_reward_metrics, add_rollout_metrics, add_speed, prompt_tokens, sampled_tokens
from agentrl.train.rollout_func import play_with_function
from agentrl.train.rows import TrainItem
from agentrl.train.speed import add_staleness
from agentrl.train.step import StepBatch, call, frozen_log_probs

if TYPE_CHECKING:
    from agentrl.train.trainer import GRPOTrainer


class RolloutBuffer:
    """Plays a cycle when a step first needs it and hands out this rank's micro-batches.

    Nothing of it is saved: a run that resumes in the middle of a cycle plays that cycle again.
    """

    def __init__(self, trainer: GRPOTrainer, settings: AdvantageSettings) -> None:
        self.trainer, self.settings = trainer, settings
        self._parts: dict[int, list[list[TrainItem]]] = {}  # cycle: slices of this rank
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
        items = [(item, m) for m, one in enumerate(slices) for item in self._parts[one.cycle][one.part]]
        args, window = self.trainer.args, self.trainer.window["train"]
        ages = [step - self._played_at[one.cycle] for one in slices for _ in self._parts[one.cycle][one.part]]
        add_staleness(window, [item for item, _ in items], ages)
        window.add("batch/groups_per_step", self.trainer.schedule.groups(step))
        window.add("perf/rollout_wait_s", 0.0)  # one measurement per step; what it waited is added where it waits
        return StepBatch(
            tuple(item for item, _ in items), tuple(m for _, m in items), len(slices), args.per_device_train_batch_size
        )

    def _play(self, number: int) -> list[list[TrainItem]]:
        """The cycle's micro-batches of this rank; whole groups stay side by side, in an order of the cycle's own."""
        trainer = self.trainer
        accelerator = trainer.accelerator
        plans = trainer.group_plans(number)
        started, world = time.perf_counter(), accelerator.num_processes
        cycle = play_cycle(plans, self.players(), self.settings, accelerator.process_index, world)
        waited = time.perf_counter() - started
        trainer.window["train"].add("perf/rollout_wait_s", waited, 0)
        add_speed(trainer.window["train"], cycle.groups, waited, world)
        self._report(cycle)
        size = len(cycle.items) // len(plans)
        order = list(range(len(plans)))
        random.Random(trainer.shuffle_seed(number)).shuffle(order)
        queue = [cycle.items[group * size + member] for group in order for member in range(size)]
        per_rank = trainer.args.per_device_train_batch_size
        per_slice = per_rank * accelerator.num_processes
        start = per_rank * accelerator.process_index
        parts = [
            queue[s * per_slice + start : s * per_slice + start + per_rank] for s in range(trainer.schedule.slices)
        ]
        corrected = self._corrects(cycle)
        ready = iter(self._with_log_probs([item for part in parts for item in part], number, corrected=corrected))
        return [[next(ready) for _ in part] for part in parts]

    def players(self) -> PlayGroups:
        """What plays groups: the engine, or the user's `rollout_func`."""
        trainer = self.trainer
        if trainer.rollout_func is not None:
            return lambda plans: play_with_function(trainer, plans)
        return lambda plans: trainer.player.play(plans, version=trainer.state.global_step, trainer_state=trainer.state)

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
        budget = max((items[i].tokens for i in trained), default=1) * trainer.args.per_device_train_batch_size
        chosen = [items[i] for i in trained]
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
        engine = trainer.player.engine
        if trainer.rollout_func is not None or engine.sampler is not trainer.player.sampler:
            return False
        if engine.settings.sampling.repetition_penalty != 1.0:
            return False
        fp32 = next(trainer.policy_forward.model.parameters()).dtype == torch.float32
        return fp32 and not trainer.args.bf16 and not trainer.args.fp16

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
