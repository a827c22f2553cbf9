"""Two ranks train while vLLM draws: a server for both, an engine on each, one engine of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_kit

WORKER = Path(__file__).with_name("train_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"vllm_mode": "server", "vllm_server_base_url": "auto", "vllm_server_timeout": 300.0},
        {},
        {"vllm_tensor_parallel_size": 2},
    ],
    ids=["server", "an engine each", "one engine of both"],
)  # fmt: skip
def test_two_ranks_train_on_what_vllm_draws(folder: Path, tmp_path: Path, options: dict[str, Any]):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*launch, str(vllm_kit.free_port()), str(WORKER), str(folder), str(tmp_path), json.dumps(options)],
        capture_output=True, text=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    first, second = sorted(results, key=lambda result: result["rank"])
    assert (first["rank"], second["rank"]) == (0, 1) and first["steps"] == 2 and first["evaluated"] == 2
    assert first["worst"] < 3e-5, first
    assert first["weight"] == second["weight"]  # both ranks took the same steps
    episodes = [json.loads(line) for file in tmp_path.glob("episodes*.jsonl") for line in file.read_text().splitlines()]
    assert len(episodes) == 2 * 16 and len({episode["id"] for episode in episodes}) == 32
    drawn = [tuple(token for turn in episode["turns"] for token in turn["output_ids"]) for episode in episodes]
    assert len(set(drawn)) > 28  # no rank draws copies of another's
