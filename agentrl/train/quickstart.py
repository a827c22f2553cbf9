"""The main job: a tiny policy learns to use tools over several turns, on a laptop CPU, in about two minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import TrainerCallback

from agentrl.record import episode_to_dict
from agentrl.registry import resolve
from agentrl.rollout.group import GroupPlan
from agentrl.tasks import derive_seed
from agentrl.train.config import GRPOConfig
from agentrl.train.short_log import ShortPrinter
from agentrl.train.tiny import tiny_policy
from agentrl.train.trainer import GRPOTrainer
from agentrl.types import Rollout, Task
from agentrl.view.curve import curve_text, write_png, write_svg
from agentrl.view.transcript import transcript_text

GROUPS, GROUP_SIZE, UPDATES = 8, 8, 4  # a batch: 64 episodes, trained on in 4 optimizer steps
MAX_BATCHES, TARGET, TAIL = 150, 0.95, 10
HELD_OUT = 256


def config(output_dir: Path, seed: int, batches: int) -> GRPOConfig:
    """The recipe: 8 groups of 8, two passes of two micro-batches each.

    The learning rate is ramped over ten batches and then falls to 0: kept constant, it can destroy a finished policy.
    """
    return GRPOConfig(
        output_dir=str(output_dir), seed=seed, max_steps=batches * UPDATES, num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUPS * GROUP_SIZE // 2, steps_per_generation=2, num_iterations=2,
        learning_rate=1.5e-3, lr_scheduler_type="linear", warmup_steps=10 * UPDATES, adam_beta2=0.95,
        max_completion_length=128, max_tool_calling_iterations=8, gradient_checkpointing=False,
        per_device_eval_batch_size=HELD_OUT, num_generations_eval=1, logging_steps=UPDATES, save_strategy="no",
        report_to="none", disable_tqdm=True, log_level="error",
    )  # fmt: skip


def run(
    environment: str = "hunt", seed: int = 0, max_batches: int | None = None, output_dir: str | Path | None = None
) -> dict[str, Any]:
    """Trains, shows what was learnt and writes it to `output_dir` (default: outputs/quickstart-<environment>).

    Args:
        environment: A ready environment (hunt, recycle, grid_world), a registered id, or "package.module:Class".
        seed: Names all random numbers of the run.
        max_batches: Batches of 64 episodes; by default up to 150, fewer where the policy has learnt the task.
        output_dir: Gets episodes.jsonl, reward.svg, reward.png.

    Returns:
        start and end reward over 256 held-out episodes, the mean of the last 10 batches, the curve, files, seconds.
    """
    started = time.perf_counter()
    factory = resolve(environment if "/" in environment or ":" in environment else _ready(environment))
    folder = Path(output_dir or Path("outputs") / f"quickstart-{environment.replace('/', '-').replace(':', '-')}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # for matrices of this size, a second thread only waits
    console = Console(highlight=False)
    console.print(f"A tiny Qwen3-style policy learns [bold]{environment}[/bold] (seed {seed}).")
    live = LiveLine(console)
    policy = tiny_policy(factory, seed, on_step=lambda step, loss: live.warm_up(step, loss))
    live.end("read from the cache" if policy.cached else "made")
    batches = max_batches or MAX_BATCHES
    trainer = GRPOTrainer(
        model=policy.model, args=config(folder, seed, batches), processing_class=policy.tokenizer,
        environment_factory=factory,
    )  # fmt: skip
    try:
        return _train_and_show(trainer, live, console, folder, started, stop_early=max_batches is None)
    finally:
        live.close()
        trainer.close()


def _ready(name: str) -> str:
    return f"agentrl/{''.join(part.capitalize() for part in name.split('_'))}-v0"


def _train_and_show(
    trainer: GRPOTrainer, live: LiveLine, console: Console, folder: Path, started: float, *, stop_early: bool
) -> dict[str, Any]:
    trainer.remove_callback(ShortPrinter)
    task, start = _task(trainer), trainer.evaluate()["eval_reward"]
    before = _record(trainer, task)
    console.print(f"Before training: mean reward {start:.2f} over {HELD_OUT} held-out episodes.")
    progress = Progress(live, stop_early)
    trainer.add_callback(progress)
    trainer.train()
    live.close()  # what follows is printed in full
    after, end = _record(trainer, task), trainer.evaluate()["eval_reward"]
    rewards = progress.rewards
    if progress.learnt:
        console.print(f"The last {TAIL} batches have a mean reward of {TARGET} or more: learnt, so the run ends early.")
    console.print("\nOne task before training:\n")
    console.print(transcript_text(before), markup=False)
    console.print("\nThe same task after training:\n")
    console.print(transcript_text(after), markup=False)
    console.print()
    console.print(curve_text(rewards, title="mean reward per batch"), markup=False)
    files = {
        "curve_svg": folder / "reward.svg",
        "curve_png": folder / "reward.png",
        "episodes": folder / "episodes.jsonl",
    }
    write_svg(files["curve_svg"], rewards, title="mean reward", ylabel="reward")
    write_png(files["curve_png"], rewards, title="mean reward", ylabel="reward")
    tail = rewards[-TAIL:]
    seconds = time.perf_counter() - started
    console.print(
        f"Mean reward on held-out episodes: {start:.2f} before, {end:.2f} after "
        f"{len(rewards)} batches of {GROUPS * GROUP_SIZE} episodes; {seconds:.0f} s in all."
    )
    console.print(
        f"Curve: {files['curve_svg']}, {files['curve_png']}. Read episodes: agentrl show {files['episodes']}",
        soft_wrap=True,
    )
    return {
        "start_reward": start, "end_reward": end, "last_batches_reward": sum(tail) / len(tail), "rewards": rewards,
        "batches": len(rewards), "seconds": seconds, "files": {name: str(path) for name, path in files.items()},
    }  # fmt: skip


def _task(trainer: GRPOTrainer) -> Task:
    """A task that the policy of now fails, if one of the first sixteen is such."""
    tasks = [Task(index=i, epoch=0, seed=derive_seed(trainer.args.seed, "shown", i)) for i in range(16)]
    return next((task for task in tasks if (_play(trainer, task).reward or 0.0) < 0.5), tasks[0])


def _play(trainer: GRPOTrainer, task: Task) -> Rollout:
    """One episode under the policy of now; the same draws each time."""
    plan = GroupPlan(f"shown{task.index}", task, 1)
    (group,) = trainer.player.play([plan], version=trainer.state.global_step)
    return group.rollouts[0]


def _record(trainer: GRPOTrainer, task: Task) -> dict[str, Any]:
    return episode_to_dict(_play(trainer, task), step=trainer.state.global_step)


class LiveLine:
    """One line that is rewritten on a terminal; elsewhere now and then a new one."""

    def __init__(self, console: Console) -> None:
        self.console, self.started = console, time.perf_counter()
        self._status = console.status("") if console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def _show(self, text: str, *, also_plain: bool) -> None:
        if self._status is not None:
            self._status.update(text)
        elif also_plain:
            self.console.print(text)

    def warm_up(self, step: int, loss: float) -> None:
        self._show(
            f"warm-up on random tool use: step {step}, loss {loss:.3f}, {self._seconds()} s", also_plain=step % 100 == 0
        )

    def batch(self, number: int, of: int, reward: float, tail: float) -> None:
        text = f"step {number}/{of}  reward {reward:.2f}  mean of last {TAIL} {tail:.2f}  {self._seconds()} s"
        self._show(text, also_plain=number % 5 == 0 or number == 1)

    def end(self, how: str) -> None:
        self.console.print(f"Warm policy {how} after {self._seconds()} s: it knows the call format, not the task.")

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()

    def _seconds(self) -> int:
        return int(time.perf_counter() - self.started)


class Progress(TrainerCallback):
    """Feeds the live line; ends the run when the policy has learnt the task."""

    def __init__(self, live: LiveLine, stop_early: bool) -> None:
        self.live, self.stop_early = live, stop_early
        self.rewards: list[float] = []
        self.learnt = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "reward" not in logs:
            return
        self.rewards.append(logs["reward"])
        tail = self.rewards[-TAIL:]
        mean = sum(tail) / len(tail)
        self.live.batch(len(self.rewards), args.max_steps // UPDATES, logs["reward"], mean)
        if self.stop_early and len(self.rewards) >= TAIL and mean >= TARGET:
            self.learnt = control.should_training_stop = True
