"""Numbers that training cannot use are seen before they reach the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from agentrl.errors import ConfigurationError, RunStopped
from agentrl.objective import Advantages

if TYPE_CHECKING:
    from agentrl.train.trainer import GRPOTrainer

LARGEST_ADVANTAGE = 1e6
"""Advantages are multiplied with ratios and gradients in float32, whose squares end at 1e38."""


def check_advantages(compared: Advantages, scale: str) -> None:
    """No advantage of a generation batch is too large to train on.

    Raises:
        ConfigurationError: Names the largest one, the range of the rewards and `scale_rewards`.
    """
    size_N = compared.advantages_N.abs()
    if bool((size_N <= LARGEST_ADVANTAGE).all()):
        return
    rewards_N = compared.rewards_N[compared.scored_N]
    raise ConfigurationError(
        f"An advantage of {float(size_N.max()):.3g} is too large to train on (at most {LARGEST_ADVANTAGE:.0e}): the "
        f"rewards, times reward_weights, reach from {float(rewards_N.min()):.3g} to {float(rewards_N.max()):.3g} with "
        f"scale_rewards={scale!r}. Return smaller rewards, or set scale_rewards='group'."
    )


def check_step(trainer: GRPOTrainer, norm: Any, loss: torch.Tensor) -> None:
    """The gradient norm and the loss of the step that is about to be taken are finite, on all ranks.

    A GradScaler (fp16) meets such steps as a matter of course, and skips them.

    Raises:
        RunStopped: On every rank, before the optimizer moves the weights.
    """
    accelerator = trainer.accelerator
    if getattr(accelerator, "scaler", None) is not None:
        return
    if accelerator.num_processes > 1:
        loss = accelerator.reduce(loss.clone(), "mean")  # type: ignore[assignment]
    numbers = {"gradient norm": float(norm), "loss": float(loss)}
    wrong = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if not wrong:
        return
    folder = Path(str(trainer.args.output_dir))
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    raise RunStopped(
        f"Optimizer step {trainer.state.global_step + 1} was not taken, because its {' and its '.join(wrong)}: the "
        f"weights are those of step {trainer.state.global_step}, and "
        + (f"the last checkpoint is {last}." if last else f"there is no checkpoint in {folder}.")
    )
