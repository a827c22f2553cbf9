"""One readable line per log on the terminal; every number still goes to the log history and to the trackers."""

from __future__ import annotations

import re
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

# (metric, how it is shown); what was not measured is left out
SHOWN = (
    ("reward", "reward {:.3f}"), ("reward_std", "(std {:.2f})"), ("loss", "loss {:.4f}"), ("kl", "kl {:.4f}"),
    ("entropy", "entropy {:.2f}"), ("completions/mean_length", "length {:.0f}"),
    ("completions/clipped_ratio", "cut {:.0%}"), ("tools/call_frequency", "calls {:.1f}"),
    ("tools/failure_frequency", "failing {:.0%}"), ("frac_reward_zero_std", "no signal {:.0%}"),
    ("rollout/failed_frac", "broken {:.0%}"), ("step_time", "{:.2f} s/step"),
)  # fmt: skip
TRAINED = (("loss", "loss {:.4f}"), ("kl", "kl {:.4f}"), ("entropy", "entropy {:.2f}"), ("grad_norm", "grad {:.3f}"))
QUIET_AT_ZERO = frozenset({"rollout/failed_frac", "completions/clipped_ratio", "kl"})


def short_line(logs: dict[str, Any], step: int, of: int) -> str:
    """What a person looks at first.

    >>> short_line({"reward": 0.5, "loss": 0.01, "rollout/failed_frac": 0.0, "step_time": 0.2}, 10, 40)
    'step 10/40  reward 0.500  loss 0.0100  0.20 s/step'
    >>> short_line({"loss": 0.01, "grad_norm": 0.5, "perf/step_s": 0.2}, 11, 40)
    'step 11/40  loss 0.0100  grad 0.500'
    >>> short_line({"eval_reward": 0.5, "epoch": 1.0}, 10, 40)
    'step 10/40  eval_reward 0.500'
    >>> mixed = {"env/hunt/reward": 0.4, "mixture/hunt/realised_frac": 0.66, "mixture/hunt/asked_frac": 0.5}
    >>> short_line({"reward": 0.5} | mixed, 10, 40)
    'step 10/40  reward 0.500  hunt 0.400 (66%, asked 50%)'
    """
    parts = []
    for prefix in _prefixes(logs):
        for name, form in SHOWN:
            value = logs.get(prefix + name)
            if isinstance(value, (int, float)) and not (name in QUIET_AT_ZERO and not value):
                parts.append((prefix if form[0] not in "({" else "") + form.format(value))
        parts += _mixture(logs, prefix)
    if not parts:  # a step on rollouts that were reported before, or what a callback logs
        parts = [form.format(logs[name]) for name, form in TRAINED if isinstance(logs.get(name), (int, float))]
    if not parts:
        parts = [
            f"{key} {value:.4g}" for key, value in logs.items() if isinstance(value, (int, float)) and key != "epoch"
        ]
    return "  ".join([f"step {step}/{of}", *parts])


def _mixture(logs: dict[str, Any], prefix: str) -> list[str]:
    """The reward of each environment of several, and its share of what was trained beside the share asked for."""
    found = (re.fullmatch(f"{re.escape(prefix)}mixture/(.+)/realised_frac", key) for key in logs)
    parts = []
    for name in (match[1] for match in found if match):
        reward = logs.get(f"{prefix}env/{name}/reward")
        asked = logs.get(f"{prefix}mixture/{name}/asked_frac")
        shown = (
            f"{name} {'-' if reward is None else f'{reward:.3f}'} ({logs[f'{prefix}mixture/{name}/realised_frac']:.0%}"
        )
        parts.append(shown + (")" if asked is None else f", asked {asked:.0%})"))
    return parts


def _prefixes(logs: dict[str, Any]) -> list[str]:
    """What stands before "reward" in the names: nothing for training, ``eval_`` or more for evaluation."""
    return [key[: -len("reward")] for key in logs if key == "reward" or key.endswith("_reward")]


class ShortPrinter(PrinterCallback):
    """Prints the short line where there is no progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs:
            self.say(short_line(logs, state.global_step, state.max_steps))

    def say(self, text: str) -> None:
        """The line is on the terminal."""
        print(text, flush=True)


class ShortProgress(ProgressCallback):
    """Prints the short line above the progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self.say(short_line(logs, state.global_step, state.max_steps))

    def say(self, text: str) -> None:
        """The line is above the bar, where there is one."""
        if self.training_bar is not None:
            self.training_bar.write(text)


def say(trainer: Trainer, text: str) -> None:
    """The line is where the logs of the run are printed; nowhere if they are not."""
    for callback in trainer.callback_handler.callbacks:
        if callable(line := getattr(callback, "say", None)):
            line(text)


def shorten(trainer: Trainer) -> None:
    """transformers' own printers are replaced; callbacks of the user's are left alone."""
    replacements = {
        "PrinterCallback": ShortPrinter,
        "ProgressCallback": ShortProgress,
        "NotebookProgressCallback": ShortPrinter,  # its table shows the loss alone
    }
    for callback in list(trainer.callback_handler.callbacks):
        new = replacements.get(type(callback).__name__)
        if new is not None and type(callback).__module__.startswith("transformers."):
            trainer.remove_callback(callback)
            trainer.add_callback(new)
