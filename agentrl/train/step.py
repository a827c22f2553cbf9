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

from agentrl.objective import LossConfig, LossTerms, clip_metrics, entropy_bonus, policy_loss, token_weights
from agentrl.train.correction import SamplerCorrection, fill_missing
from agentrl.train.entropy import EntropyControl, EntropySettings, Kept, keep_top
from agentrl.train.log_probs import PLAIN, PolicyForward, RowLogProbs, Wanted
from agentrl.train.metrics import MetricWindow
from agentrl.train.pack import attention_pairs, plan_rows
from agentrl.train.rows import Row, TrainItem, make_row
from agentrl.train.speed import Stopwatch, add_batch_metrics


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank trains in one optimizer step."""

    items: tuple[TrainItem, ...]  # [R]
    microbatch: tuple[int, ...]  # [R] which of the step's micro-batches
    accumulation: int
    batch_size: int  # rollouts per micro-batch
    everyone: tuple[tuple[int, int], ...] | None = None  # of all ranks' rollouts: trained tokens, and in which of all
    # micro-batches, by rank and number; None: the items are all there are
    places: tuple[int, ...] = ()  # [R] where the items stand among them


def step_weights(batch: StepBatch, config: LossConfig, max_completion_length: int | None, world: int) -> list[float]:
    """[R] weight per trained token, such that the loss of the whole step is the sum over all ranks of weight x L_t.

    They follow from who sampled what, whichever rank trains it.
    """
    own = tuple(zip((item.trained_tokens for item in batch.items), batch.microbatch, strict=True))
    everyone = own if batch.everyone is None else batch.everyone
    weights = token_weights(
        torch.tensor([tokens for tokens, _ in everyone]),
        torch.tensor([microbatch for _, microbatch in everyone]),
        loss_type=config.loss_type,
        num_rollouts_total=len(everyone),
        trained_tokens_total=sum(tokens for tokens, _ in everyone),
        num_microbatches_total=batch.accumulation * world,
        max_completion_length=max_completion_length,
    ).tolist()
    return weights if batch.everyone is None else [weights[place] for place in batch.places]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What must be known before the first backward pass of a step."""

    weight_of: dict[int, float]  # id(item): weight of its trained tokens
    kept: Kept | None  # None: all of them
    kept_total: int  # trained tokens that are kept, over all ranks; counted where there is a bonus
    entropy_coef: float
    router_weight: float  # of one micro-batch's load-balancing loss; 0: none


class StepRunner:
    """Trains batches on one rank; gradients add up in the model, the caller steps the optimizer."""

    def __init__(
        self, policy: PolicyForward, accelerator: Accelerator, config: LossConfig, max_completion_length: int | None,
        entropy: EntropyControl | None = None, router_coef: float = 0.0, correction: SamplerCorrection | None = None,
        token_budget: int | None = None,
    ) -> None:  # fmt: skip
        self.correction, self.token_budget = correction, token_budget
        self.policy, self.accelerator, self.config = policy, accelerator, config
        self.max_completion_length = max_completion_length
        self.entropy = EntropyControl(EntropySettings()) if entropy is None else entropy
        self.router_coef = router_coef
        self.world = accelerator.num_processes
        self.forward = Stopwatch(accelerator.device)
        self.tokens = (0, 0)  # (forwarded, trained) by this rank in the last step

    def run(self, model: torch.nn.Module, batch: StepBatch, window: MetricWindow) -> Tensor:
        """This rank's part of the loss times the number of ranks, so that the mean over ranks is the step's loss."""
        weights = step_weights(batch, self.config, self.max_completion_length, self.world)
        weight_of = {id(item): w for item, w in zip(batch.items, weights, strict=True)}
        moving, still = self._split(batch)
        budget = row_budget(batch.items, batch.batch_size, self.token_budget)
        rows = self._rows_by_microbatch(batch) if self.router_coef else self._rows(moving, budget)
        # Nothing moves here, but metrics over all completions cover it; not through DDP, whose ranks may have none.
        seen = [(row, self._look(row)) for row in self._rows(still, budget)]
        kept = self._keep(batch, [*seen, *((row, self._look(row)) for row in rows)]) if self.entropy.selects else None
        plan = StepPlan(
            weight_of, kept, self._kept_total(batch, kept), self.entropy.active,
            self.router_coef / (batch.accumulation * self.world),
        )  # fmt: skip
        everything = [*(row for row, _ in seen), *rows]
        filler = [self.policy.filler(row) for row in everything]
        self.tokens = add_batch_metrics(window, everything, filler, batch.accumulation, self.world, budget)
        rows = self._same_number(rows, window)
        window.add("agentrl/no_signal_steps", float(not rows), 1)
        if not rows and getattr(self.accelerator, "scaler", None) is not None:
            rows = [_empty_row(self.accelerator.device)]  # a GradScaler steps only after a backward pass
        tally = _Tally(window, self.correction)
        for row, out in seen:
            tally.add(row, out, self._terms(row, out, plan), plan)
        total = torch.zeros((), device=self.accelerator.device)
        for n, row in enumerate(rows):
            total += self._train(model, row, plan, tally, last=n == len(rows) - 1) * self.world
        self.entropy.measured(tally.entropy, tally.kept, self.world)
        if self.entropy.regularises:
            window.add("policy_loss", tally.policy_loss, 1 / self.world)
            window.add("entropy_coef", self.entropy.coef, 1)
        return total

    def _train(self, model: torch.nn.Module, row: Row, plan: StepPlan, tally: _Tally, *, last: bool) -> Tensor:
        """The row's part of the loss, which was run backward."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        wanted = Wanted(entropy_gradient=plan.entropy_coef != 0.0, router_loss=plan.router_weight != 0.0)
        with contextlib.nullcontext() if last else self.accelerator.no_sync(model), self.policy.context(row):
            with self.forward():
                out = call(model, row, wanted)
            terms = self._terms(row, out, plan)
            loss = self._loss(row, out, terms, plan)
            self.accelerator.backward(loss * (self.world * self.accelerator.gradient_accumulation_steps))
        tally.add(row, out, terms, plan)
        return loss.detach()

    def _split(self, batch: StepBatch) -> tuple[list[TrainItem], list[TrainItem]]:
        """Trained rollouts that have a gradient, and those that have none."""
        trained = [item for item in batch.items if item.trained_tokens]
        if self.config.beta > 0 or self.entropy.active or self.router_coef:
            return trained, []
        return [i for i in trained if i.advantage != 0.0], [i for i in trained if i.advantage == 0.0]

    @torch.no_grad()
    def _look(self, row: Row) -> RowLogProbs:
        with self.accelerator.autocast(), self.policy.context(row), self.forward():
            return call(self.policy.model, row)

    def _keep(self, batch: StepBatch, seen: Sequence[tuple[Row, RowLogProbs]]) -> Kept:
        entropy_of = {
            id(item): out.entropy_N[row.rollout_N == place].float().cpu()
            for row, out in seen
            for place, item in enumerate(row.items)
        }
        quantile = self.entropy.settings.top_quantile
        return keep_top(batch.items, batch.microbatch, batch.accumulation, entropy_of, quantile, self.world)

    def _kept_total(self, batch: StepBatch, kept: Kept | None) -> int:
        """What the bonus is divided by; 0 where there is no bonus."""
        if not self.entropy.active:
            return 0
        if kept is not None:
            return kept.total
        mine = sum(item.trained_tokens for item in batch.items)
        return sum(gather_object([mine])) if self.world > 1 else mine

    def _rows_by_microbatch(self, batch: StepBatch) -> list[Row]:
        """One row for each micro-batch: a load-balancing loss is no sum over tokens, so its tokens stay together."""
        pairs = [(item, m) for item, m in zip(batch.items, batch.microbatch, strict=True) if item.trained_tokens]
        parts = [[item for item, m in pairs if m == n] for n in range(batch.accumulation)]
        least = self.policy.least_for(batch.items)
        return [make_row(part, self.accelerator.device, least) for part in parts if part]

    def _rows(self, items: Sequence[TrainItem], budget: int) -> list[Row]:
        least = self.policy.least_for(items)
        plan = plan_rows(items, budget, least)
        return [make_row([items[i] for i in row], self.accelerator.device, least) for row in plan]

    def _same_number(self, rows: list[Row], window: MetricWindow) -> list[Row]:
        """As many rows as the rank with the most has; the added ones train nothing but keep the ranks in step."""
        mine = [attention_pairs(row.lengths, row.parents) for row in rows]
        everyone = gather_object([mine]) if self.world > 1 else [mine]
        costs = [cost for rank in everyone for cost in rank]
        if costs:  # the same on every rank, so it counts once for each
            window.add("batch/row_imbalance", max(costs) * len(costs) / sum(costs), 1)
        return rows + [_empty_row(self.accelerator.device) for _ in range(max(map(len, everyone)) - len(mine))]

    def _terms(self, row: Row, out: RowLogProbs, plan: StepPlan) -> LossTerms | None:
        if not len(row.targets_N):
            return None
        old = _old(row, out.log_probs_N.detach())
        correction = None if self.correction is None else self.correction.weights(row, old)
        terms = policy_loss(
            out.log_probs_N,
            old,
            row.per_token([item.advantage for item in row.items]),
            row.rollout_N,
            self.config,
            ref_log_probs_T=row.gathered("ref_N"),
            sampler_log_probs_T=fill_missing(row.gathered("sampler_N"), old),
            correction_T=correction,
            correction_level="token" if self.correction is None else self.correction.level,
            keep_T=_kept(row, plan),
            num_rollouts=len(row.items),
        )
        if correction is not None:
            terms.extras.update(correction_T=correction, old_T=old)  # for the metrics
        return terms

    def _loss(self, row: Row, out: RowLogProbs, terms: LossTerms | None, plan: StepPlan) -> Tensor:
        """The row's part: policy and KL, minus the entropy bonus, plus the load-balancing loss."""
        if terms is None:
            nothing = out.log_probs_N.sum() * 0.0
            return nothing if out.router_loss is None else nothing + out.router_loss * 0.0
        loss = _weighted(row, terms, plan)
        if plan.entropy_coef:
            loss = loss + entropy_bonus(out.entropy_N, _kept(row, plan), plan.entropy_coef, plan.kept_total)
        if out.router_loss is not None:
            loss = loss + plan.router_weight * out.router_loss
        return loss


class _Tally:
    """Adds up what a step measures. Everything here is without gradient."""

    def __init__(self, window: MetricWindow, correction: SamplerCorrection | None) -> None:
        self.window, self.correction = window, correction
        self.policy_loss = self.entropy = 0.0
        self.kept = 0

    def add(self, row: Row, out: RowLogProbs, terms: LossTerms | None, plan: StepPlan) -> None:
        if terms is None:
            return
        window, entropy_N, keep_N = self.window, out.entropy_N.detach(), _kept(row, plan)
        self.policy_loss += float(_weighted(row, terms, plan).detach())
        self.entropy += float((entropy_N if keep_N is None else entropy_N[keep_N]).sum())
        self.kept += len(entropy_N) if keep_N is None else int(keep_N.sum())
        window.add("entropy", float(entropy_N.sum()), len(entropy_N))
        if terms.kl_T is not None:
            window.add("kl", float(terms.kl_T.sum()), len(terms.kl_T))
        if out.router_loss is not None:
            window.add("aux_loss", float(out.router_loss.detach()), 1)
        if self.correction is not None and "correction_T" in terms.extras:
            self.correction.measure(window, row, terms.extras["old_T"], terms.extras["correction_T"])
        # counted on the CPU: in float64, which MPS does not have
        extras = {name: tensor.cpu() for name, tensor in terms.extras.items()}
        flags = replace(terms, low_T=terms.low_T.cpu(), high_T=terms.high_T.cpu(), extras=extras)
        window.parts.append(clip_metrics(flags, row.rollout_N.cpu(), num_rollouts=len(row.items)))


def _old(row: Row, now_N: Tensor) -> Tensor:
    """[N] the frozen log-probs; the current ones for rollouts that no update came between, which may share a row."""
    parts = now_N.split([item.trained_tokens for item in row.items])
    return torch.cat([part if i.old_N is None else i.old_N.to(part) for i, part in zip(row.items, parts, strict=True)])


def _weighted(row: Row, terms: LossTerms, plan: StepPlan) -> Tensor:
    return (row.per_token([plan.weight_of[id(item)] for item in row.items]) * terms.loss_T).sum().float()


def _kept(row: Row, plan: StepPlan) -> Tensor | None:
    """[N] bool, or None where every token is kept."""
    if plan.kept is None:
        return None
    return torch.cat([plan.kept.mask_of[id(item)] for item in row.items]).to(row.targets_N.device)


def row_budget(items: Sequence[TrainItem], batch_size: int, token_budget: int | None) -> int:
    """Tokens of a row: `token_budget`, or what a padded micro-batch of the longest sequence would take."""
    longest = max((len(sequence.input_ids) for item in items for sequence in item.sequences), default=1)
    return max(1, longest * batch_size) if token_budget is None else token_budget


def call(model: torch.nn.Module, row: Row, wanted: Wanted = PLAIN) -> RowLogProbs:
    """The row through the (possibly wrapped) model's forward."""
    out: Any = model(agentrl_row=row, agentrl_wanted=wanted)
    return RowLogProbs(**out)


def _empty_row(device: torch.device) -> Row:
    zero, none = torch.zeros(2, dtype=torch.long, device=device), torch.zeros(0, dtype=torch.long, device=device)
    return Row(
        zero, torch.arange(2, device=device), (2,), (-1,), (2,), torch.arange(2, device=device), none, none, none, ()
    )


@torch.no_grad()
def frozen_log_probs(
    policy: PolicyForward, items: Sequence[TrainItem], budget: int, device: torch.device,
    forward: Callable[[Row], RowLogProbs],
) -> list[Tensor]:  # fmt: skip
    """[N] log-probs of each item's trained tokens under `policy` as it is now, without gradient."""
    out: list[Tensor | None] = [None] * len(items)
    least = policy.least_for(items)
    for plan in plan_rows(items, budget, least):
        row = make_row([items[i] for i in plan], device, least)
        with policy.context(row):
            log_probs_N = forward(row).log_probs_N
        for place, i in enumerate(plan):
            out[i] = log_probs_N[row.rollout_N == place]
    return [part for part in out if part is not None]
