"""An optimizer step, agentrl beside the PyPI package `trl`: CPU and wall seconds, and their ratio.

    python tests/benchmarks/bench_step.py                  # 64 episodes of Hunt, as the quickstart's
    python tests/benchmarks/bench_step.py --task prompt    # 4 prompts of 512 tokens, 8 completions of 128 each

About two minutes each; needs the dev extra.

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
PROMPTS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 512, 128
SIDES = ("agentrl", "trl")
TARGETS = {"hunt": 4.0, "prompt": 3.0}


# --- one side, in its own process ---
class Watch:
    """A reward function that gives nothing and counts turns and tokens, the same way on both sides."""

    __name__ = "watch"

    def __init__(self) -> None:
        self.turns, self.tokens, self.episodes = 0, 0, 0

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.episodes += len(completions)
        for completion in completions:
            self.turns += 1 if isinstance(completion, str) else sum(m["role"] == "assistant" for m in completion)
        self.tokens += sum(map(len, completion_ids))
        if isinstance(completions[0], str):
            return [float(sum(ids) % 97) for ids in completion_ids]  # as good as random: every group has a gradient
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


def settings(folder: str, steps: int, task: str = "hunt") -> dict[str, Any]:
    """What both trainers are told."""
    episodes = EPISODES if task == "hunt" else PROMPTS * GROUP_SIZE
    return {
        "output_dir": folder, "seed": 0, "max_steps": steps, "learning_rate": 0.0, "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": episodes, "gradient_accumulation_steps": 1,
        "max_completion_length": 256 if task == "hunt" else COMPLETION_TOKENS,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip


def start_states(steps: int) -> Any:
    """One row per group: an empty user message, to which `reset` adds the first clue, and the seed of the chain."""
    from datasets import Dataset

    prompt = [{"role": "user", "content": ""}]
    return Dataset.from_list([{"prompt": prompt, "seed": seed} for seed in range(GROUPS * steps)])


def long_prompts(steps: int, tokenizer: Any) -> Any:
    """Texts of `PROMPT_TOKENS` tokens, each another one."""
    import random

    from datasets import Dataset

    words = [w for w in ("cave", "forest", "lake", "mill", "shrine", "tower") if len(tokenizer.encode(" " + w)) < 4]
    rows = []
    for n in range(PROMPTS * steps):
        rng = random.Random(n)
        text = " ".join(rng.choice(words) for _ in range(PROMPT_TOKENS))
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:PROMPT_TOKENS])
        rows.append({"prompt": text})
    return Dataset.from_list(rows)


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


def run_side(side: str, warm: Path, steps: int, rounds: int, folder: str, task: str) -> None:
    """Trains `steps` steps, each on the parent's word."""
    watch = Watch()
    baton = Baton(watch)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Qwen3ForCausalLM.from_pretrained(warm)
    tokenizer = transformers.AutoTokenizer.from_pretrained(warm)
    if task == "prompt":  # random weights hardly ever end a completion, the warm policy soon does
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(model.config)
    common = {
        "model": model,
        "reward_funcs": watch,
        "train_dataset": start_states(steps) if task == "hunt" else long_prompts(steps, tokenizer),
        "processing_class": tokenizer,
    }
    if side == "agentrl":
        from agentrl_envs.hunt import Hunt

        from agentrl import GRPOConfig, GRPOTrainer

        factory = Hunt if task == "hunt" else None
        trainer = GRPOTrainer(**common, args=GRPOConfig(**settings(folder, steps, task)), environment_factory=factory)
    else:
        import trl

        args = trl.GRPOConfig(  # type: ignore[reportPrivateImportUsage]
            **settings(folder, steps, task), use_cpu=True, bf16=False,
            max_tool_calling_iterations=rounds if task == "hunt" else None,
        )  # fmt: skip
        factory = hunt_for_trl() if task == "hunt" else None
        trainer = trl.GRPOTrainer(**common, args=args, environment_factory=factory)  # type: ignore[arg-type]
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


def measure(warm: Path, steps: int, rounds: int, task: str) -> dict[str, list[dict[str, float]]]:
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
            "--task",
            task,
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


def report(taken: dict[str, list[dict[str, float]]], task: str) -> bool:
    """Medians, ratios, and whether both sides did the same work; True when the target is met."""
    middle = {
        side: {key: statistics.median(line[key] for line in lines) for key in lines[0]} for side, lines in taken.items()
    }
    what = f"{EPISODES} Hunt episodes"
    if task == "prompt":
        what = f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens with {GROUP_SIZE} completions of {COMPLETION_TOKENS} each"
    print(f"\nAn optimizer step of {what}, medians of {len(taken['trl'])} steps, one thread each:")
    print(f"{'':10s}{'CPU s':>9s}{'wall s':>9s}{'turns':>8s}{'completion tokens':>20s}{'logged mean length':>20s}")
    for side, m in middle.items():
        print(f"{side:10s}{m['cpu']:9.3f}{m['wall']:9.3f}{m['turns']:8.2f}{m['tokens']:20.1f}{m['sampled']:20.1f}")
    ours, theirs = middle["agentrl"], middle["trl"]
    cpu, wall = theirs["cpu"] / ours["cpu"], theirs["wall"] / ours["wall"]
    best = min(line["cpu"] for line in taken["trl"]) / min(line["cpu"] for line in taken["agentrl"])
    print(f"ratio: {cpu:.2f} by CPU, {wall:.2f} by wall, {best:.2f} by the quickest steps (target {TARGETS[task]})")
    if task == "hunt":
        print(
            "trl has no `done`: it stops at --rounds instead. With 3 it plays the 4 turns after which Hunt ends,\n"
            "but the last turn's call is not run; with 4 that call is run and a fifth turn follows. After an early\n"
            "treasure its policy goes on and is told that the episode is over."
        )
    same = all(abs(ours[key] / theirs[key] - 1) <= 0.1 for key in ("turns", "tokens"))
    print(
        "same work: turns and completion tokens agree within 10%" if same else "NOT THE SAME WORK: compare the columns"
    )
    return same and cpu >= TARGETS[task]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each side")
    rounds = "rounds of tool calls that trl may run: 3 gives it the same turns as Hunt's end, 4 the same calls"
    parser.add_argument("--rounds", type=int, default=3, help=rounds)
    parser.add_argument("--task", choices=TARGETS, default="hunt")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=Path, help="a folder with a warm model and tokenizer, instead of making them")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.warm, options.steps, options.rounds, options.folder, options.task)
        return 0
    taken = measure(options.warm or warm_policy(), options.steps, options.rounds, options.task)
    return 0 if report(taken, options.task) else 1


if __name__ == "__main__":
    sys.exit(main())
