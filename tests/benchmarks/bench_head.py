"""Peak memory and CPU seconds of a loss over trained tokens: chunked from hidden states, beside full logits.

    python tests/benchmarks/bench_head.py

Forward and backward of -sum(advantage x log-prob) - bonus x entropy through a linear output layer, each way in a fresh
process, so that the peak of its resident memory is its own. `rest` is what a process has before it starts: Python,
torch and its libraries, hidden states and the layer's weights. Losses and gradients of the two ways are compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.train.log_probs import Wanted, score_tokens


def full(hidden: Tensor, targets: Tensor, head: torch.nn.Linear, bonus: float) -> tuple[Tensor, Tensor | None]:
    """The plain way, without anything that it does not need."""
    log_probs = torch.log_softmax(head(hidden).float(), -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1) if bonus else None
    return log_probs.gather(-1, targets[:, None])[:, 0], entropy


def chunked(hidden: Tensor, targets: Tensor, head: torch.nn.Linear, bonus: float) -> tuple[Tensor, Tensor | None]:
    """What training uses. The entropies, which are logged, come with it in any case."""
    out = score_tokens(hidden, targets, head, 1.0, Wanted(entropy_gradient=bool(bonus)))
    return out.log_probs_N, out.entropy_N


def peak() -> int:
    """The highest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the process that started this one had
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def measure(way: str, vocabulary: int, tokens: int, hidden_size: int, bonus: float) -> dict[str, Any]:
    """One forward and backward in this process, after a tiny one that loads what the first one loads."""
    if vocabulary > 64:
        measure(way, 64, 2000, 8, bonus)
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden_size, vocabulary, bias=False)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    targets, advantages = torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens)
    rest, cpu, wall = peak(), time.process_time(), time.perf_counter()
    log_probs, entropy = {"full": full, "chunked": chunked}[way](hidden, targets, head, bonus)
    loss = -(advantages * log_probs).mean()
    if bonus:
        assert entropy is not None
        loss = loss - bonus * entropy.mean()
    loss.backward()
    cpu, wall, top = time.process_time() - cpu, time.perf_counter() - wall, peak()
    assert hidden.grad is not None and head.weight.grad is not None
    return {"rest": rest, "peak": top, "more": top - rest, "cpu_s": cpu, "wall_s": wall, "loss": loss.item(),
            "hidden_gradient": sampled(hidden.grad), "head_gradient": sampled(head.weight.grad)}  # fmt: skip


def sampled(gradient: Tensor) -> list[float]:
    """The gradient's norm and a few of its numbers, from all over it."""
    flat = gradient.reshape(-1)
    return [gradient.norm().item(), *flat[:: max(1, flat.numel() // 64)].tolist()]


def in_one_process(ways: str, vocabulary: int, tokens: int, hidden_size: int, bonus: float) -> dict[str, Any]:
    """The ways in this order (with commas between them) in a fresh process; the least hungry one must come first."""
    numbers = [str(n) for n in (vocabulary, tokens, hidden_size, bonus)]
    done = subprocess.run(
        [sys.executable, __file__, "--ways", ways, "--numbers", *numbers], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of losses and gradients, relative to the largest number of its kind."""
    worst = abs(one["loss"] - other["loss"]) / abs(one["loss"])
    for name in ("hidden_gradient", "head_gradient"):
        (a_norm, *a), (b_norm, *b) = one[name], other[name]
        off = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(map(abs, a))
        worst = max(worst, off, abs(a_norm - b_norm) / a_norm)
    return worst


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--vocabulary", type=int, default=150_000)
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--hidden", type=int, default=256)
    arguments.add_argument("--ways", help=argparse.SUPPRESS)
    arguments.add_argument("--numbers", nargs=4, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.ways:
        vocabulary, tokens, hidden_size = map(int, given.numbers[:3])
        bonus = float(given.numbers[3])
        done = {way: measure(way, vocabulary, tokens, hidden_size, bonus) for way in given.ways.split(",")}
        print(json.dumps(done))
        return
    print(f"vocabulary {given.vocabulary}, {given.tokens} trained tokens, hidden {given.hidden}, fp32")
    for bonus in (0.0, 0.01):
        sizes = given.vocabulary, given.tokens, given.hidden
        out = in_one_process("full", *sizes, bonus) | in_one_process("chunked", *sizes, bonus)
        print(f"entropy bonus {bonus}:")
        for way, one in out.items():
            print(
                f"  {way:8} peak {one['peak'] / 2**20:7.0f} MiB (rest {one['rest'] / 2**20:.0f}, more "
                f"{one['more'] / 2**20:.0f})  CPU {one['cpu_s']:.1f} s  wall {one['wall_s']:.1f} s"
            )
        a, b = out["full"], out["chunked"]
        print(
            f"  chunked / full: peak {b['peak'] / a['peak']:.3f}, above rest {b['more'] / a['more']:.3f}, "
            f"CPU {b['cpu_s'] / a['cpu_s']:.2f}; losses and gradients differ by {difference(a, b):.0e}"
        )


if __name__ == "__main__":
    main()
