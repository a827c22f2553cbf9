"""Learning curves of the embedded tiny policy on a CPU: grid_world alone, and grid_world mixed with recycle.

    python tests/benchmarks/bench_learning.py                 # both runs, three seeds each
    python tests/benchmarks/bench_learning.py --runs mixed --seeds 0 --batches 60

Each run makes its policy anew (a warm-up on random play, which shows no good action), plays held-out episodes before
and after training, and prints the reward of each environment at the start, along the way and at the end. One thread,
so that CPU seconds are seconds on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from agentrl_envs.grid_world import GridWorld
from agentrl_envs.recycle import Recycle

from agentrl import GRPOTrainer, tiny_policy
from agentrl.train.quickstart import config
from agentrl.train.short_log import ShortPrinter

RUNS: dict[str, dict[str, Any]] = {
    "alone": {"grid_world": GridWorld},
    "mixed": {"grid_world": GridWorld, "recycle": Recycle},
}
BATCHES = {"alone": 60, "mixed": 80}


@dataclass(frozen=True, slots=True)
class Learnt:
    """What became of one environment's reward in one run."""

    start: float  # over held-out episodes, before the first update
    end: float  # over the same ones, after the last
    curve: list[float]  # mean reward of each generation batch of 64 episodes


def learn(environments: dict[str, Any], seed: int, batches: int) -> tuple[dict[str, Learnt], dict[str, float], float]:
    """The rewards by environment, the share of each in what was trained, and the CPU seconds of the whole run."""
    started = time.process_time()
    factory = environments if len(environments) > 1 else next(iter(environments.values()))
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny_policy(factory, seed, cache=Path(folder))
        args = config(Path(folder), seed, batches)
        args.record_episodes = False
        trainer = GRPOTrainer(policy.model, args=args, processing_class=policy.tokenizer, environment_factory=factory)
        trainer.remove_callback(ShortPrinter)
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        trainer.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    names = {name: f"env/{name}/reward" if len(environments) > 1 else "reward" for name in environments}
    learnt = {
        name: Learnt(before[f"eval_{key}"], after[f"eval_{key}"], [entry[key] for entry in logs if key in entry])
        for name, key in names.items()
    }
    shares = {
        name: sum(entry[key] for entry in logs) / len(logs)
        for name in environments
        if (key := f"mixture/{name}/realised_frac") in logs[0]
    }
    return learnt, shares, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, help="of 64 episodes; by default 60 alone, 80 mixed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for run in asked.runs:
        for seed in asked.seeds:
            learnt, shares, seconds = learn(RUNS[run], seed, asked.batches or BATCHES[run])
            for name, one in learnt.items():
                along = " ".join(f"{value:.2f}" for value in one.curve[9::10])
                share = f", {shares[name]:.0%} of what was trained" if name in shares else ""
                print(
                    f"{run:>5} seed {seed} {name:>10}: {one.start:.2f} -> {one.end:.2f} "
                    f"(batch 10, 20, ...: {along}; {seconds:.0f} s of CPU{share})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
