"""From losses per token to one number: the weight that each trained token carries.

The weights are fixed before anything is packed, so that loss = sum of weight x L_t and padding, packing or the number
of rows cannot change it. "mean over ranks" is inside: a trainer whose gradients are averaged over W ranks multiplies
its local sum by W.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def check_loss_type(loss_type: str) -> None:
    """The loss type is known; otherwise a ConfigurationError lists the choices."""
    if loss_type not in get_args(LossType):
        raise ConfigurationError(f"Unknown loss_type {loss_type!r}; choose one of {', '.join(get_args(LossType))}.")


def token_weights(
    lengths_R: Tensor,
    microbatch_R: Tensor,
    *,
    loss_type: LossType,
    num_rollouts_total: int,
    trained_tokens_total: int,
    num_microbatches_total: int,
    max_completion_length: int | None,
) -> Tensor:
    """[R] float64 weights: what each trained token of a rollout counts in the loss of the optimizer step.

    `lengths_R` are *trained* tokens per rollout (masked rollouts are 0 and stay in the list), `microbatch_R` the index
    of each rollout's micro-batch. A micro-batch is never split between calls. The totals are over the whole optimizer
    step and all ranks: rollouts, trained tokens, micro-batches (accumulation steps x ranks).

    - grpo, sapo: mean over the micro-batch's rollouts of the mean over their tokens; a micro-batch counts 1/number of
      micro-batches. The same for every cut into micro-batches of equal size.
    - bnpo: mean over the micro-batch's tokens, 1/number of micro-batches each. Depends on the cut, by definition.
    - dr_grpo (arXiv 2503.20783): 1 / (rollouts x max_completion_length).
    - dapo (arXiv 2503.14476), cispo, vespo: 1 / trained tokens of the step.
    - luspo: 1 / rollouts of the step.

    A rollout without trained tokens has weight 0, so nothing is ever divided by 0. Raises ConfigurationError for
    dr_grpo without `max_completion_length`, ValueError for totals smaller than what was passed.

    >>> token_weights(torch.tensor([4, 0]), torch.tensor([0, 0]), loss_type="dapo", num_rollouts_total=2,
    ...               trained_tokens_total=4, num_microbatches_total=1, max_completion_length=None)
    tensor([0.2500, 0.0000], dtype=torch.float64)
    >>> token_weights(torch.tensor([4, 0]), torch.tensor([0, 0]), loss_type="grpo", num_rollouts_total=2,
    ...               trained_tokens_total=4, num_microbatches_total=1, max_completion_length=None)
    tensor([0.1250, 0.0000], dtype=torch.float64)
    """
    check_loss_type(loss_type)
    if lengths_R.shape != microbatch_R.shape or lengths_R.dim() != 1:
        raise ValueError(
            f"lengths_R {tuple(lengths_R.shape)} and microbatch_R {tuple(microbatch_R.shape)} must be flat and alike."
        )
    lengths_R = lengths_R.double()
    _, microbatch_R = microbatch_R.unique(return_inverse=True)
    _check_totals(lengths_R, microbatch_R, num_rollouts_total, trained_tokens_total, num_microbatches_total)
    trained_R = (lengths_R > 0).double()
    if loss_type in ("grpo", "sapo"):
        rollouts_M = torch.bincount(microbatch_R)
        divisor_R = rollouts_M[microbatch_R] * lengths_R * num_microbatches_total
    elif loss_type == "bnpo":
        tokens_M = torch.bincount(microbatch_R, weights=lengths_R)
        divisor_R = tokens_M[microbatch_R] * num_microbatches_total
    elif loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ConfigurationError("loss_type='dr_grpo' divides by max_completion_length; set it to a number.")
        divisor_R = torch.full_like(lengths_R, float(num_rollouts_total) * max_completion_length)
    elif loss_type == "luspo":
        divisor_R = torch.full_like(lengths_R, float(num_rollouts_total))
    else:
        divisor_R = torch.full_like(lengths_R, float(trained_tokens_total))
    return trained_R / divisor_R.clamp(min=1.0)


def _check_totals(lengths_R: Tensor, microbatch_R: Tensor, rollouts: int, tokens: int, microbatches: int) -> None:
    seen_microbatches = int(microbatch_R.max()) + 1 if microbatch_R.numel() else 0
    for name, total, seen in (
        ("num_rollouts_total", rollouts, lengths_R.numel()),
        ("trained_tokens_total", tokens, int(lengths_R.sum())),
        ("num_microbatches_total", microbatches, seen_microbatches),
    ):
        if total < seen:
            raise ValueError(f"{name} is {total} but {seen} were passed; totals are over the whole optimizer step.")
