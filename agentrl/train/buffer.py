"""Rollouts between being played and being trained."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING

import torch

from agentrl.train.generation import AdvantageSettings, Cycle, PlayGroups, play_cycle, recorded_log_probs, with_tensors
from agentrl.train.metrics import add_reward_metrics, add_rollout_metrics, prompt_tokens, sampled_tokens
from agentrl.train.rollout_func import play_with_function
from agentrl.train.rows import TrainItem
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
        self._parts = {cycle: parts for cycle, parts in self._parts.items() if cycle >= slices[0].cycle}
        items = [(item, m) for m, one in enumerate(slices) for item in self._parts[one.cycle][one.part]]
        args = self.trainer.args
        return StepBatch(
            tuple(item for item, _ in items), tuple(m for _, m in items), len(slices), args.per_device_train_batch_size
        )

    def _play(self, number: int) -> list[list[TrainItem]]:
        """The cycle's micro-batches of this rank; whole groups stay side by side, in an order of the cycle's own."""
        trainer = self.trainer
        accelerator = trainer.accelerator
        plans = trainer.group_plans(number)
        cycle = play_cycle(plans, self.players(), self.settings, accelerator.process_index, accelerator.num_processes)
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
        ready = iter(self._with_log_probs([item for part in parts for item in part], number))
        return [[next(ready) for _ in part] for part in parts]

    def players(self) -> PlayGroups:
        """What plays groups: the engine, or the user's `rollout_func`."""
        trainer = self.trainer
        if trainer.rollout_func is not None:
            return lambda plans: play_with_function(trainer, plans)
        return lambda plans: trainer.player.play(plans, version=trainer.state.global_step, trainer_state=trainer.state)

    def _with_log_probs(self, items: list[TrainItem], number: int) -> list[TrainItem]:
        """Items with what the loss needs besides the current log-probs, all from before the first update."""
        trainer = self.trainer
        recorded = [recorded_log_probs(item) for item in items]
        items = [with_tensors(item, sampler_N=lp) for item, lp in zip(items, recorded, strict=True)]
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
        """Whether recorded log-probs are those of the trainer's own forward, up to fp32 rounding."""
        trainer = self.trainer
        engine = trainer.player.engine
        if trainer.rollout_func is not None or engine.sampler is not trainer.player.sampler:
            return False
        if not engine.settings.sampling.is_plain:
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
        device = trainer.args.device
        if trainer.reference_forward is not None:
            forward = trainer.reference_forward
            forward.probe()
            with trainer.accelerator.autocast():
                return frozen_log_probs(forward, items, budget, device, lambda row: call(forward.model, row))
        adapter = trainer.accelerator.unwrap_model(trainer.model)
        with adapter.disable_adapter(), trainer.accelerator.autocast():
            forward = trainer.policy_forward
            return frozen_log_probs(forward, items, budget, device, lambda row: call(forward.model, row))

    def _report(self, cycle: Cycle) -> None:
        trainer = self.trainer
        window = trainer.window["train"]
        add_rollout_metrics(window, cycle.groups, has_tools=trainer.has_tools)
        if trainer.accelerator.is_main_process:
            if all(rollout.reward is None for rollout in cycle.shared):
                warnings.warn(
                    "Nobody scored any rollout of a generation batch: nothing is trained on it.", stacklevel=2
                )
            names = self.settings.weights
            add_reward_metrics(
                window,
                [rollout.reward for rollout in cycle.shared],
                {name: [rollout.rewards.get(name) for rollout in cycle.shared] for name in names},
                cycle.advantages.zero_std_N.tolist(),
            )
        rollouts = [rollout for group in cycle.groups for rollout in group.rollouts]
        count = torch.tensor(sum(prompt_tokens(r) + sampled_tokens(r) for r in rollouts), device=trainer.args.device)
        trainer.saw_tokens(int(trainer.accelerator.reduce(count, "sum")))  # type: ignore[arg-type]
        trainer.played(cycle.groups)
