"""Which names `log_metric` may not take: those that the trainer logs itself."""

from __future__ import annotations

import math
from typing import Any

from agentrl.errors import ConfigurationError

TAKEN = frozenset({
    "loss", "grad_norm", "learning_rate", "epoch", "step", "step_time", "num_tokens", "num_input_tokens_seen",
    "total_flos", "runtime", "samples_per_second", "steps_per_second", "reward", "reward_std", "reward_group_std",
    "reward_kept", "reward_dropped", "frac_reward_zero_std", "entropy", "entropy_coef", "policy_loss", "kl",
    "aux_loss", "clip_ratio", "cispo_clip_ratio",
})  # fmt: skip
TAKEN_PREFIXES = (
    "rewards/", "completions/", "tools/", "rollout/", "env/", "mixture/", "sampling/", "sample/", "batch/", "perf/",
    "clip_ratio/", "vespo/", "agentrl/", "eval_", "train_",
)  # fmt: skip


def check_metric(name: Any, value: Any) -> float:
    """The value of a metric that a reward function logs.

    >>> check_metric("answers/short", True)
    1.0

    Raises:
        ConfigurationError: A name that the trainer logs itself, or a value that is no finite number.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"log_metric({name!r:.80}, ...): the name must be text.")
    if name in TAKEN or name.startswith(TAKEN_PREFIXES):
        raise ConfigurationError(
            f"log_metric('{name}', ...): the trainer logs metrics under that name itself; choose another, such as "
            f"'custom/{name}'."
        )
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several elements: RuntimeError
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"log_metric('{name}', {value!r:.80}): the value must be a finite number.")
    return number
