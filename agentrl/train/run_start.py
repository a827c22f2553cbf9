"""A run from its file: built, trained, saved; Ctrl-C once finishes the step, twice stops at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import transformers
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from agentrl.errors import AgentRLError, ConfigurationError
from agentrl.train.run_build import RunParts, build_trainer, check_writable, grpo_config, load_parts
from agentrl.train.run_file import RunFile
from agentrl.train.short_log import short_line

Say = Callable[[str], None]


def start(run: RunFile, *, resume: bool | str = False, say: Say = print, warn: Say = print) -> dict[str, Any]:
    """The run has been trained to its end, or to the step at which it was interrupted, and is saved.

    Args:
        run: The run file.
        resume: True continues from the last checkpoint in the output folder; a path from that one.
        say: Shows a line of progress.
        warn: Shows a line that a person must see.

    Returns:
        `speaks` (this process is the first), `interrupted`, `steps`, `seconds`, `output_dir`, `checkpoint` (where
        interrupted) and `rewards` as logged.
    """
    started = time.perf_counter()
    parts = load_parts(run)
    args = grpo_config(run)
    if args.process_index > 0:  # one process speaks for all
        say = warn = _silent
    check_writable(str(args.output_dir))
    checkpoint = _checkpoint(str(args.output_dir), resume)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    trainer = _built(run, parts, args, say)
    progress, stop = Progress(say), Interruption(warn)
    for one in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(one)
    trainer.add_callback(progress)
    stop.trainer = trainer
    trainer.add_callback(stop)
    try:
        with stop:
            trainer.train(resume_from_checkpoint=checkpoint)
        if not stop.asked:
            trainer.save_model(str(args.output_dir))
        trainer.save_state()
    finally:
        trainer.close()
    result: dict[str, Any] = {
        "speaks": args.process_index == 0,
        "interrupted": stop.asked,
        "steps": trainer.state.global_step,
        "seconds": time.perf_counter() - started,
        "output_dir": str(args.output_dir),
        "rewards": progress.rewards,
    }
    if stop.asked:
        result["checkpoint"] = get_last_checkpoint(str(args.output_dir))
    return result


def _silent(line: str) -> None:
    """Another process says it."""


def _built(run: RunFile, parts: RunParts, args: Any, say: Say) -> Any:
    last = [0.0]

    def on_warm_up(step: int, loss: float) -> None:
        if time.perf_counter() - last[0] > 5:
            last[0] = time.perf_counter()
            say(f"warm-up on random tool use: step {step}, loss {loss:.3f}")

    try:
        return build_trainer(run, parts, args, on_warm_up)
    except AgentRLError:
        raise
    except (OSError, ValueError) as error:  # transformers: a name that is nowhere, a folder without weights, no network
        text = str(error).strip().split("\n")[0]
        what = "tiny policy" if run.model.tiny else f"model '{run.model.name}'"
        raise ConfigurationError(f"The {what} cannot be loaded: {text}") from error


def _checkpoint(folder: str, resume: bool | str) -> str | None:
    if resume is False:
        return None
    if resume is True:
        found = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        if found is None:
            raise ConfigurationError(f"There is no checkpoint in '{folder}' to resume from; start without --resume.")
        return found
    if not (Path(resume) / "trainer_state.json").is_file():
        raise ConfigurationError(f"'{resume}' is no checkpoint: it has no trainer_state.json.")
    return str(resume)


class Interruption(TrainerCallback):
    """SIGINT while training: the first ends the run after the step and saves it, the second stops at once."""

    def __init__(self, warn: Say) -> None:
        self.warn = warn
        self.asked = False
        self.trainer: Any = None
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.warn("Interrupted: this step is finished and saved, then the run ends. Ctrl-C again stops at once.")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._all_agree(args):
            control.should_training_stop = control.should_save = True

    def _all_agree(self, args: Any) -> bool:
        """Ranks get the signal at different moments, but must stop at the same step."""
        if args.world_size > 1 and self.trainer is not None:
            import torch

            flag = torch.tensor(int(self.asked), device=args.device)
            self.asked = bool(self.trainer.accelerator.reduce(flag, "sum").item())
        return self.asked


class Progress(TrainerCallback):
    """One line for each log."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.rewards: list[float] = []
        self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or not state.is_world_process_zero:
            return
        evaluated = [f"{name} {value:.3f}" for name, value in logs.items() if name == "eval_reward"]
        if evaluated:
            self.say(f"step {state.global_step}/{state.max_steps}  {evaluated[0]}")
        if "reward" not in logs:
            return
        self.rewards.append(logs["reward"])
        self.say(f"{short_line(logs, state.global_step, state.max_steps)}  {time.perf_counter() - self._started:.0f} s")
