"""Forward and backward of an optimizer step's rows: padded, packed, and with shared beginnings, side by side.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_tree.py             # tiny model and SmolLM2-135M's shape
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_tree.py --model tiny

Random weights: what is measured does not depend on them. `smollm2/3` has 3 of SmolLM2-135M's 30 layers. The three ways
take turns; a figure is the quickest of its turns, in CPU seconds of this process. `unpacked/packed` is tokens before
and after sharing (batch/packing_ratio), and `of it` is the speed-up as a share of that. Peak memory is of one process
per way, above what it had before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.train.log_probs import PolicyForward
from agentrl.train.rows import Row, TrainItem, make_row
from agentrl.types import TrainingSequence

WAYS = ("padded", "packed", "shared")
TARGET, PLAIN_TARGET, MEMORY_TARGET = 0.85, 0.95, 0.5
BUILD_TARGET = {"tiny": 0.10, "smollm2": 0.02}


def model_of(name: str, layers: int | None) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "tiny":
        return Qwen3ForCausalLM(Qwen3Config(
            vocab_size=640, hidden_size=64, num_hidden_layers=layers or 2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, intermediate_size=192, tie_word_embeddings=True, max_position_embeddings=8192,
        ))  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=layers or 30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, tie_word_embeddings=True, max_position_embeddings=8192,
    ))  # fmt: skip


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 600) for _ in range(count)]


def group(shared: int, own: int, size: int) -> list[TrainItem]:
    """Rollouts of one prompt; with `shared` 0, of a prompt each."""
    rng = random.Random(0)
    prompt = ids(rng, shared)
    items = []
    for n in range(size):
        begin = prompt or ids(rng, 64)
        rest = ids(rng, own)
        mask = [False] * len(begin) + [True] * own
        sequence = TrainingSequence(begin + rest, mask, [0.0] * len(mask))
        items.append(TrainItem(n, (sequence,), 1.0 if n % 2 else -1.0, True))
    return items


def forks(turns: int) -> list[TrainItem]:
    """One rollout whose template drops earlier reasoning: each turn is a sequence, and shares what others kept."""
    rng = random.Random(0)
    history, sequences = ids(rng, 64), []
    for _ in range(turns):
        reasoning, call, result = ids(rng, 48), ids(rng, 16), ids(rng, 24)
        mask = [False] * len(history) + [True] * 64
        sequences.append(TrainingSequence(history + reasoning + call, mask, [0.0] * len(mask)))
        history = history + call + result
    return [TrainItem(0, tuple(sequences), 1.0, True)]


CASES: dict[str, Any] = {
    "prompt 512, completion 128, G=8": lambda: group(512, 128, 8),
    "nothing shared, 8 x 192": lambda: group(0, 128, 8),
    "forks, 8 turns": lambda: forks(8),
    "forks, 32 turns": lambda: forks(32),
}


DEEP = "forks, 32 turns"
FEW = 3  # layers of SmolLM2-135M there: padded, 32 turns of all 30 take more memory than a laptop has


class Side:
    """One way through the model."""

    def __init__(self, policy: PolicyForward, way: str, items: Sequence[TrainItem]) -> None:
        self.policy, self.way, self.items = policy, way, items
        self.build_s, self.run_s, self.tokens = float("inf"), float("inf"), 0

    def once(self) -> Row:
        least = self.policy.least_shared if self.way == "shared" else None
        before = time.process_time()
        row = make_row(self.items, torch.device("cpu"), least)
        built = time.process_time()
        packs, self.policy.packs = self.policy.packs, self.way != "padded"
        with self.policy.context(row):
            out = self.policy.run(row)
            (out.log_probs_N * row.per_token([item.advantage for item in self.items])).sum().backward()
        self.policy.packs = packs
        self.build_s, self.run_s = min(self.build_s, built - before), min(self.run_s, time.process_time() - built)
        self.tokens = len(row.input_ids_T)
        self.policy.model.zero_grad(set_to_none=True)
        return row


def compare(policy: PolicyForward, items: Sequence[TrainItem], turns: int) -> dict[str, Side]:
    sides = {way: Side(policy, way, items) for way in WAYS}
    for turn in range(turns):
        for way in WAYS if turn % 2 else reversed(WAYS):
            gc.collect()
            sides[way].once()
    return sides


def report(model: str, layers: int | None, case: str, sides: dict[str, Side]) -> bool:
    padded, packed, shared = (sides[way] for way in WAYS)
    ratio = packed.tokens / shared.tokens
    speed = padded.run_s / (shared.run_s + shared.build_s)
    build = shared.build_s / (shared.run_s + shared.build_s)
    line = (
        f"{model:8s} {case:32s} {padded.run_s:8.3f} {packed.run_s:8.3f} {shared.run_s:8.3f}   {ratio:6.2f} {speed:7.2f}"
    )
    plain = packed.run_s / (shared.run_s + shared.build_s)
    if ratio > 1.0:
        fine = speed >= TARGET * ratio
        print(
            f"{line} {speed / ratio:7.2f}   {build:7.2%}  {'' if fine else f'below {TARGET} of the ratio'}", flush=True
        )
    else:
        fine = plain >= PLAIN_TARGET
        print(f"{line}       -   {build:7.2%}  {plain:.2f} of plain packing", flush=True)
    return fine and build < BUILD_TARGET[model]


def memory(model: str, case: str, layers: int | None) -> bool:
    """Peak memory of the shared way and the padded way, each in a process of its own, above what it had before."""
    peaks = {}
    for way in ("padded", "shared"):
        command = [sys.executable, __file__, "--model", model, "--peak", case, "--way", way]
        command += ["--layers", str(layers)] if layers else []
        peaks[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    share = peaks["shared"] / peaks["padded"]
    print(f"{model:9s} {case:32s} peak {peaks['padded']:.0f} MiB padded, {peaks['shared']:.0f} MiB shared: {share:.2f}")
    return share <= MEMORY_TARGET


def peak(model: str, case: str, way: str, layers: int | None) -> float:
    policy = PolicyForward(model_of(model, layers), 1.0)
    policy.probe()
    group_of_two = group(8, 4, 2)
    Side(policy, way, group_of_two).once()  # gradients and kernels have their memory
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is in use now
    before = _resident("VmHWM")
    Side(policy, way, CASES[case]()).once()
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    """MiB of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=("tiny", "smollm2"))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a quick look")
    parser.add_argument("--turns", type=int, help="of each way; by default 24 for the tiny model, 2 for SmolLM2-135M")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--peak", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.peak:
        print(json.dumps(peak(options.model, options.peak, options.way, options.layers)))
        return 0
    print(f"{'':42s} {'CPU seconds, forward and backward':>28s}   unpacked/")
    print(f"{'model':9s} {'case':32s} {'padded':>8s} {'packed':>8s} {'shared':>8s}   packed  faster   of it  row built")
    fine = []
    for name in [options.model] if options.model else ["tiny", "smollm2"]:
        for case in [options.case] if options.case else CASES:
            layers = options.layers or (FEW if name == "smollm2" and case == DEEP else None)
            policy = PolicyForward(model_of(name, layers), 1.0)
            policy.probe()
            assert policy.packs and policy.least_shared
            turns = options.turns or (24 if name == "tiny" else 2)
            fine.append(report(name, layers, case, compare(policy, CASES[case](), turns)))
        if options.case in (None, DEEP):
            fine.append(memory(name, DEEP, options.layers or (FEW if name == "smollm2" else None)))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
