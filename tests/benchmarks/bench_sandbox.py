"""What a sandbox costs: `python tests/benchmarks/bench_sandbox.py [bubblewrap] [docker]` (default: what is here).

Medians of start, exec of Python, exec of `true`, reset and teardown, one at a time; then 64 sandboxes at once, each of
which runs ten commands, and what is left of them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from agentrl.sandbox import Sandbox, SandboxSpec, bubblewrap, open_sandbox, reap
from agentrl.sandbox.open import docker_missing

PYTHON = ["python3", "-I", "-c", "print(42)"]
AT_ONCE, EACH, ROUNDS = 64, 10, 20


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def one_at_a_time(backend: str) -> None:
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        boxes: list[Sandbox] = []
        steps: dict[str, Callable[[], object]] = {
            "start": lambda boxes=boxes: boxes.append(open_sandbox(SandboxSpec(), backend=backend)),
            "exec python": lambda boxes=boxes: boxes[0].exec(PYTHON),
            "exec true": lambda boxes=boxes: boxes[0].exec(["true"]),
            "upload 100 kB": lambda boxes=boxes: boxes[0].upload({"file": b"x" * 100_000}),
            "download 100 kB": lambda boxes=boxes: boxes[0].download("file"),
            "reset": lambda boxes=boxes: boxes[0].reset(),
            "teardown": lambda boxes=boxes: boxes[0].close(),
        }
        for name, step in steps.items():
            times.setdefault(name, []).append(timed(step))
    for name, each in times.items():
        print(f"{backend:12} {name:16} {statistics.median(each):7.1f} ms ({min(each):.1f} to {max(each):.1f})")


def many_at_once(backend: str) -> None:
    def one(index: int) -> int:
        with open_sandbox(SandboxSpec(labels={"episode": str(index)}), backend=backend) as sandbox:
            return sum(sandbox.exec(PYTHON, timeout_s=120).stdout == "42\n" for _ in range(EACH))

    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        right = sum(threads.map(one, range(AT_ONCE)))
    seconds = time.perf_counter() - began
    print(f"{backend:12} {AT_ONCE} at once: {right} of {AT_ONCE * EACH} commands right, {right / seconds:.1f} a second")
    print(f"{backend:12} left behind: {len(reap())} sandboxes")


def main() -> None:
    here = [] if bubblewrap.missing() else ["bubblewrap"]
    here += [] if docker_missing() else ["docker"]
    alone = statistics.median(timed(lambda: subprocess.run(PYTHON, capture_output=True, check=True)) for _ in range(9))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; the command without a sandbox {alone:.1f} ms")
    for backend in sys.argv[1:] or here:
        one_at_a_time(backend)
        many_at_once(backend)


if __name__ == "__main__":
    main()
