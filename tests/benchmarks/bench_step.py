"""An optimizer step of 64 episodes, agentrl beside the PyPI package `trl`: CPU and wall seconds, and their ratio.

    python tests/benchmarks/bench_step.py            # about two minutes; needs the dev extra

Same model, tokenizer, chat template, start states and sampling; learning rate 0 on both sides, so that every step plays
the same policy. Each side runs in its own process with one thread; the two take turns, one step at a time, so that
what else the machine does hits both alike. A step is everything between two begins of a step: playing, scoring,
forward, backward, optimizer, logging (and, for agentrl, the episode records on disk).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GROUPS, GROUP_SIZE = 8, 8
EPISODES = GROUPS * GROUP_SIZE
SIDES = ("agentrl", "trl")
TARGET = 2.5


# --- one side, in its own process ---
class Watch:
    """A reward function that gives nothing and counts turns and tokens, the same way on both sides."""

    __name__ = "watch"

    def __init__(self) -> None:
        self.turns, self.tokens, self.episodes = 0, 0, 0

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.episodes += len(completions)
        self.turns += sum(message["role"] == "assistant" for completion in completions for message in completion)
        self.tokens += sum(map(len, completion_ids))
        return [0.0] * len(completions)

    def take(self) -> dict[str, float]:
        counts = {"turns": self.turns / max(1, self.episodes), "tokens": self.tokens / max(1, self.episodes)}
        self.__init__()
        return counts


class Baton:
    """Waits for the parent's word before each step and reports the step when the next one begins."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.channel = watch, os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print is no part of the channel
        self.began: tuple[float, float] | None = None
        self.logs: dict[str, float] = {}

    def border(self) -> None:
        if self.began is not None:
            cpu, wall = time.process_time() - self.began[0], time.perf_counter() - self.began[1]
            counts = self.watch.take() | {"sampled": self.logs.get("completions/mean_length", 0.0)}
            self.channel.write(json.dumps({"cpu": cpu, "wall": wall} | counts) + "\n")
        else:
            self.channel.write("ready\n")
        sys.stdin.readline()
        self.began = (time.process_time(), time.perf_counter())


def callback(baton: Baton) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            baton.border()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            baton.logs.update(logs or {})

    return Steps()


def settings(folder: str, steps: int) -> dict[str, Any]:
    """What both trainers are told."""
    return {
        "output_dir": folder, "seed": 0, "max_steps": steps, "learning_rate": 0.0, "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": EPISODES, "gradient_accumulation_steps": 1, "max_completion_length": 256,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip


def start_states(steps: int) -> Any:
    """One row per group: an empty user message, to which `reset` adds the first clue, and the seed of the chain."""
    from datasets import Dataset

    prompt = [{"role": "user", "content": ""}]
    return Dataset.from_list([{"prompt": prompt, "seed": seed} for seed in range(GROUPS * steps)])


def hunt_for_trl() -> type:
    """Hunt as trl takes environments: every public method is a tool there, so nothing else may be public."""
    from agentrl_envs.hunt import Hunt, Place

    class HuntForTrl:
        def __init__(self) -> None:
            self._hunt = Hunt()

        def reset(self, seed: int = 0, **row: Any) -> str:
            return self._hunt.reset(seed)

        def get_reward(self) -> float:
            return self._hunt.get_reward()

        def search(self, place: str) -> str:
            return "the episode is over" if self._hunt.done else self._hunt.search(place)  # type: ignore[arg-type]

    # no return type, and no description of it: trl would show both, and the warm model has never seen such a prompt
    HuntForTrl.search.__doc__ = str(Hunt.search.__doc__).split("Returns:")[0].rstrip()
    HuntForTrl.search.__annotations__ = {"place": Place}
    return HuntForTrl


def run_side(side: str, warm: Path, steps: int, rounds: int, folder: str) -> None:
    """Trains `steps` steps, each on the parent's word."""
    watch = Watch()
    baton = Baton(watch)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Qwen3ForCausalLM.from_pretrained(warm)
    tokenizer = transformers.AutoTokenizer.from_pretrained(warm)
    common = {
        "model": model,
        "reward_funcs": watch,
        "train_dataset": start_states(steps),
        "processing_class": tokenizer,
    }
    if side == "agentrl":
        from agentrl_envs.hunt import Hunt

        from agentrl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(**common, args=GRPOConfig(**settings(folder, steps)), environment_factory=Hunt)
    else:
        import trl

        args = trl.GRPOConfig(  # type: ignore[reportPrivateImportUsage]
            **settings(folder, steps), use_cpu=True, bf16=False, max_tool_calling_iterations=rounds
        )  # fmt: skip
        trainer = trl.GRPOTrainer(**common, args=args, environment_factory=hunt_for_trl())  # type: ignore[arg-type]
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(callback(baton))
    trainer.train()
    baton.border()


# --- the parent ---
def warm_policy() -> Path:
    """The folder of a warm model and its tokenizer, with the chat template under which trl knows the call format."""
    import agentrl_envs  # noqa: F401  (registers Hunt)
    import torch
    import trl

    from agentrl.registry import resolve
    from agentrl.train.tiny import tiny_policy

    torch.set_num_threads(1)
    policy = tiny_policy(resolve("agentrl/Hunt-v0"), 0)
    folder = Path(tempfile.mkdtemp(prefix="agentrl-bench-"))
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    policy.tokenizer.chat_template = template.read_text()
    policy.tokenizer.padding_side = "left"
    policy.tokenizer.save_pretrained(folder)
    policy.model.save_pretrained(folder)
    return folder


def measure(warm: Path, steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every step of both sides, taken in turns; the first of each warms up and is left out."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    children = {}
    for side in SIDES:
        folder = tempfile.mkdtemp(prefix=f"agentrl-bench-{side}-")
        command = [
            sys.executable,
            __file__,
            "--side",
            side,
            "--warm",
            str(warm),
            "--steps",
            str(steps + 1),
            "--rounds",
            str(rounds),
        ]
        children[side] = subprocess.Popen(
            [*command, "--folder", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    for side, child in children.items():
        answer(child, side)
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for step in range(steps + 1):
        for side in SIDES if step % 2 else reversed(SIDES):
            child = children[side]
            child.stdin.write("go\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
            line = json.loads(answer(child, side))
            if step:
                taken[side].append(line)
                print(f"step {step:2d} {side:8s}" + "".join(f"  {key} {value:.3f}" for key, value in line.items()))
    for child in children.values():
        child.communicate("end\n", timeout=60)
    return taken


def answer(child: subprocess.Popen[str], side: str) -> str:
    line = child.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise SystemExit(f"The {side} side stopped; its error stands above.")
    return line


def report(taken: dict[str, list[dict[str, float]]]) -> bool:
    """Medians, ratios, and whether both sides did the same work; True when the target is met."""
    middle = {
        side: {key: statistics.median(line[key] for line in lines) for key in lines[0]} for side, lines in taken.items()
    }
    print(f"\nAn optimizer step of {EPISODES} Hunt episodes, medians of {len(taken['trl'])} steps, one thread each:")
    print(f"{'':10s}{'CPU s':>9s}{'wall s':>9s}{'turns':>8s}{'completion tokens':>20s}{'logged mean length':>20s}")
    for side, m in middle.items():
        print(f"{side:10s}{m['cpu']:9.3f}{m['wall']:9.3f}{m['turns']:8.2f}{m['tokens']:20.1f}{m['sampled']:20.1f}")
    ours, theirs = middle["agentrl"], middle["trl"]
    cpu, wall = theirs["cpu"] / ours["cpu"], theirs["wall"] / ours["wall"]
    best = min(line["cpu"] for line in taken["trl"]) / min(line["cpu"] for line in taken["agentrl"])
    print(f"ratio: {cpu:.2f} by CPU, {wall:.2f} by wall, {best:.2f} by the quickest steps (target {TARGET})")
    print(
        "trl has no `done`: it stops at --rounds instead. With 3 it plays the 4 turns after which Hunt ends itself,\n"
        "but the last turn's call is not run; with 4 that call is run and a fifth turn follows. After an early\n"
        "treasure its policy goes on and is told that the episode is over."
    )
    same = all(abs(ours[key] / theirs[key] - 1) <= 0.1 for key in ("turns", "tokens"))
    print(
        "same work: turns and completion tokens agree within 10%" if same else "NOT THE SAME WORK: compare the columns"
    )
    return same and cpu >= TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each side")
    rounds = "rounds of tool calls that trl may run: 3 gives it the same turns as Hunt's end, 4 the same calls"
    parser.add_argument("--rounds", type=int, default=3, help=rounds)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=Path, help="a folder with a warm model and tokenizer, instead of making them")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.warm, options.steps, options.rounds, options.folder)
        return 0
    return 0 if report(measure(options.warm or warm_policy(), options.steps, options.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
