"""One optimizer step: weights fixed, rollouts packed into rows, rows run forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from agentrl.objective import LossConfig, LossTerms, clip_metrics, policy_loss, token_weights
from agentrl.train.log_probs import PolicyForward, RowLogProbs
from agentrl.train.metrics import MetricWindow
from agentrl.train.rows import Row, TrainItem, make_row, plan_rows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank trains in one optimizer step."""

    items: tuple[TrainItem, ...]  # [R]
    microbatch: tuple[int, ...]  # [R] which of the rank's micro-batches
    accumulation: int
    batch_size: int  # rollouts per micro-batch


def step_weights(batch: StepBatch, config: LossConfig, max_completion_length: int | None, world: int) -> list[float]:
    """[R] weight per trained token, such that the loss of the whole step is the sum over all ranks of weight x L_t."""
    lengths = [item.trained_tokens for item in batch.items]
    totals = gather_object([(sum(lengths), len(lengths))]) if world > 1 else [(sum(lengths), len(lengths))]
    return token_weights(
        torch.tensor(lengths),
        torch.tensor(batch.microbatch),
        loss_type=config.loss_type,
        num_rollouts_total=sum(rollouts for _, rollouts in totals),
        trained_tokens_total=sum(tokens for tokens, _ in totals),
        num_microbatches_total=batch.accumulation * world,
        max_completion_length=max_completion_length,
    ).tolist()


class StepRunner:
    """Trains batches on one rank; gradients add up in the model, the caller steps the optimizer."""

    def __init__(
        self, policy: PolicyForward, accelerator: Accelerator, config: LossConfig, max_completion_length: int | None
    ) -> None:
        self.policy, self.accelerator, self.config = policy, accelerator, config
        self.max_completion_length = max_completion_length
        self.world = accelerator.num_processes

    def run(self, model: torch.nn.Module, batch: StepBatch, window: MetricWindow) -> Tensor:
        """This rank's part of the loss times the number of ranks, so that the mean over ranks is the step's loss."""
        weights = step_weights(batch, self.config, self.max_completion_length, self.world)
        trained = [(item, w) for item, w in zip(batch.items, weights, strict=True) if item.trained_tokens]
        moving = [(item, w) for item, w in trained if item.advantage != 0.0 or self.config.beta > 0]
        still = [(item, w) for item, w in trained if not (item.advantage != 0.0 or self.config.beta > 0)]
        budget = self._budget(batch)
        rows = self._rows([item for item, _ in moving], budget)
        rows = self._same_number(rows, batch)
        window.add("agentrl/no_signal_steps", float(not rows), 1)
        if not rows and getattr(self.accelerator, "scaler", None) is not None:
            rows = [_empty_row(self.accelerator.device)]  # a GradScaler steps only after a backward pass
        weight_of = {id(item): w for item, w in trained}
        total = torch.zeros((), device=self.accelerator.device)
        for n, row in enumerate(rows):
            last = n == len(rows) - 1
            self.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model), self.policy.context(row):
                out = call(model, row)
                loss, terms = self._loss(row, out, weight_of)
                scale = self.world * self.accelerator.gradient_accumulation_steps
                self.accelerator.backward(loss * scale)
            total += loss.detach() * self.world
            self._measure(row, out, terms, window)
        # Nothing moves here, but metrics over all completions cover it; not through DDP, whose ranks may have none.
        with torch.no_grad(), self.accelerator.autocast():
            for row in self._rows([item for item, _ in still], budget):
                with self.policy.context(row):
                    out = call(self.policy.model, row)
                self._measure(row, out, self._loss(row, out, weight_of)[1], window)
        return total

    def _budget(self, batch: StepBatch) -> int:
        """Tokens of a row: what a padded micro-batch of the longest rollout would take."""
        return max((item.tokens for item in batch.items), default=1) * batch.batch_size

    def _rows(self, items: Sequence[TrainItem], budget: int) -> list[Row]:
        plan = plan_rows([item.tokens for item in items], budget)
        return [make_row([items[i] for i in row], self.accelerator.device) for row in plan]

    def _same_number(self, rows: list[Row], batch: StepBatch) -> list[Row]:
        """As many rows as the rank with the most has; the added ones train nothing but keep the ranks in step."""
        if self.world == 1:
            return rows
        most = max(gather_object([len(rows)]))
        return rows + [_empty_row(self.accelerator.device) for _ in range(most - len(rows))]

    def _loss(self, row: Row, out: RowLogProbs, weight_of: dict[int, float]) -> tuple[Tensor, LossTerms | None]:
        if not len(row.targets_N):
            return out.log_probs_N.sum() * 0.0, None
        old = row.gathered("old_N")
        terms = policy_loss(
            out.log_probs_N,
            out.log_probs_N.detach() if old is None else old,
            row.per_token([item.advantage for item in row.items]),
            row.rollout_N,
            self.config,
            ref_log_probs_T=row.gathered("ref_N"),
            sampler_log_probs_T=row.gathered("sampler_N"),
            num_rollouts=len(row.items),
        )
        weights_N = row.per_token([weight_of[id(item)] for item in row.items])
        return (weights_N * terms.loss_T).sum().float(), terms

    def _measure(self, row: Row, out: RowLogProbs, terms: LossTerms | None, window: MetricWindow) -> None:
        if terms is None:
            return
        window.add("entropy", float(out.entropy_N.sum()), len(out.entropy_N))
        if terms.kl_T is not None:
            window.add("kl", float(terms.kl_T.sum()), len(terms.kl_T))
        # counted on the CPU: in float64, which MPS does not have
        extras = {name: tensor.cpu() for name, tensor in terms.extras.items()}
        flags = replace(terms, low_T=terms.low_T.cpu(), high_T=terms.high_T.cpu(), extras=extras)
        window.parts.append(clip_metrics(flags, row.rollout_N.cpu(), num_rollouts=len(row.items)))


def call(model: torch.nn.Module, row: Row) -> RowLogProbs:
    """The row through the (possibly wrapped) model's forward."""
    out: Any = model(agentrl_row=row)
    return RowLogProbs(out["log_probs_N"], out["entropy_N"])


def _empty_row(device: torch.device) -> Row:
    zero, none = torch.zeros(2, dtype=torch.long, device=device), torch.zeros(0, dtype=torch.long, device=device)
    return Row(zero, torch.arange(2, device=device), (2,), none, none, none, ())


@torch.no_grad()
def frozen_log_probs(
    policy: PolicyForward, items: Sequence[TrainItem], budget: int, device: torch.device,
    forward: Callable[[Row], RowLogProbs],
) -> list[Tensor]:  # fmt: skip
    """[N] log-probs of each item's trained tokens under `policy` as it is now, without gradient."""
    out: list[Tensor | None] = [None] * len(items)
    for plan in plan_rows([item.tokens for item in items], budget):
        row = make_row([items[i] for i in plan], device)
        with policy.context(row):
            log_probs_N = forward(row).log_probs_N
        for place, i in enumerate(plan):
            out[i] = log_probs_N[row.rollout_N == place]
    return [part for part in out if part is not None]
