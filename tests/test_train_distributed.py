"""Two processes (gloo) train one step like one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from distributed_worker import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:loss_type='luspo'")]
WORKER = Path(__file__).parent / "distributed_worker.py"
TWO_PASSES = {"max_steps": 2, "num_iterations": 2}
CHECKPOINTING = {"gradient_checkpointing": True}  # DDP then waits for every parameter: no search for unused ones
JOBS: dict[str, dict[str, Any]] = {
    "dapo": {"groups": 2, "size": 4, "truncated": [5], "args": TWO_PASSES},
    "grpo": {"groups": 2, "size": 4, "truncated": [5], "args": {"loss_type": "grpo", **TWO_PASSES}},
    # one group for two ranks, and all of the second rank's rollouts masked
    "few": {"groups": 1, "size": 8, "truncated": [4, 5, 6, 7],
            "args": {"num_generations": 8, "mask_truncated_completions": True, "beta": 0.1, **CHECKPOINTING}},
    "moving reference": {"groups": 2, "size": 4, "reward_model": True,
                         "args": {"beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3,
                                  "gradient_accumulation_steps": 2, "pad_to_multiple_of": 16, **CHECKPOINTING}},
    "adapter": {"groups": 2, "size": 4, "adapter": True,
                "args": {"beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 3,
                         "num_iterations": 2, **CHECKPOINTING}},
    # F137: three groups, and three rows to evaluate on, for two ranks
    "uneven": {"groups": 3, "size": 4, "engine": True, "args": {"max_completion_length": 6}},
    "quiet": {"groups": 2, "size": 4, "quiet": ["question 0: ", "question 1: x"], "args": CHECKPOINTING},
    "half": {"groups": 2, "size": 4, "quiet": ["question 0: "], "args": CHECKPOINTING},
    "engine": {"groups": 4, "size": 2, "engine": True,
               "args": {"gradient_accumulation_steps": 2, "max_completion_length": 6, "max_steps": 2,
                        "num_generations": 2, "num_generations_eval": 2}},
    # what tokens were drawn from crosses ranks with them
    "candidates": {"groups": 2, "size": 4, "engine": True,
                   "args": {"top_k": 5, "num_iterations": 2, "max_steps": 2, "max_completion_length": 6, "beta": 0.1}},
}  # fmt: skip

# --- every loss: two groups of four per rank and micro-batch, lengths 1 to 11, second pass off the policy ---
OVER_THE_STEP = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TWICE = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 3, "learning_rate": 0.03}
IN_TWO = {"groups": 4, "size": 4, "truncated": [5]}
# the second half of each group, which is the second rank's in each micro-batch, is cut off and masked
IDLE = {"groups": 2, "size": 8, "truncated": [4, 5, 6, 7, 12, 13, 14, 15]}
MASKED = {"num_generations": 8, "mask_truncated_completions": True, **CHECKPOINTING}
SEQUENCE = {"importance_sampling_level": "sequence"}
CORRECTED = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1.5}
JOBS |= {f"{loss}, idle rank": {**IDLE, "args": {"loss_type": loss, **TWICE, **MASKED}} for loss in OVER_THE_STEP}
JOBS |= {
    f"{loss}, sequence, KL": {**IN_TWO, "args": {"loss_type": loss, "beta": 0.3, **SEQUENCE, **TWICE}}
    for loss in OVER_THE_STEP
}
JOBS |= {
    "batch scale": {**IN_TWO, "args": {"scale_rewards": "batch", **TWICE}},
    "plain KL": {**IDLE, "args": {"beta": 0.3, "use_bias_correction_kl": False, **TWICE, **MASKED}},
    "delta": {**IN_TWO, "args": {"epsilon": 0.02, "delta": 1.03, "epsilon_high": 0.3, **TWICE}},
    "off-policy": {**IN_TWO, "log_prob": -5.0, "args": {"off_policy_mask_threshold": 0.3, **TWICE}},
    "by token": {**IN_TWO, "log_prob": -5.5,
                 "args": {"vllm_importance_sampling_mode": "token_truncate", **CORRECTED, **TWICE}},
    "by rollout": {**IDLE, "log_prob": -5.5, "args": {"loss_type": "vespo", **CORRECTED, **TWICE, **MASKED}},
    "spread": {**IN_TWO, "args": {"loss_type": "grpo", **TWICE, "num_iterations": 1, "steps_per_generation": 4}},
    # by its definition a rank's micro-batch is one of twice as many: alone, it is accumulated
    "bnpo": {**IN_TWO, "args": {"loss_type": "bnpo", "beta": 0.3, **TWICE},
             "alone": {"gradient_accumulation_steps": 4}},
    "bnpo, idle rank": {**IDLE, "args": {"loss_type": "bnpo", **TWICE, **MASKED},
                        "alone": {"gradient_accumulation_steps": 4}},
}  # fmt: skip

# --- shared beginnings: prompts of 12 to 14 tokens, so that most of a group stands once; rows of 30 tokens or more ---
SHARED = {"groups": 4, "size": 4, "least": [1, 1]}
ALONE = [0, 1, 2, 3, 4, 5, 7]  # the sixth rollout alone is trained, which the second rank has nothing of
JOBS |= {
    "tree": {**SHARED, "args": {"beta": 0.1, **TWICE}},
    "tree, budget": {**SHARED, "args": {"token_budget": 40, **TWICE}},
    "tree, bnpo": {**SHARED, "args": {"loss_type": "bnpo", **TWICE}, "alone": {"gradient_accumulation_steps": 4}},
    "tree, quantile": {**SHARED, "args": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, **TWICE}},
    # one rank fell back to padded rows in the middle of the run
    "tree, one rank": {**SHARED, "least": [1, None], "args": {"beta": 0.1, **TWICE}},
    "tree, one rollout": {"groups": 1, "size": 8, "least": [1, 1], "truncated": ALONE,
                          "args": {"beta": 0.1, **MASKED}},
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes made of all jobs; started once, because starting is what costs."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "jobs.json").write_text(json.dumps(JOBS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    everywhere = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    everywhere |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parent.parent)}
    command = [sys.executable, str(WORKER), str(folder / "jobs.json"), str(folder)]
    started = [
        subprocess.Popen(
            command, env=os.environ | everywhere | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(texts)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_train_like_one(tmp_path: Path, two: list[dict[str, Any]], name: str):
    """The same weights, loss, gradient norm and metrics, with rollouts of different lengths on the two ranks.

    F157: also with fewer groups than ranks, with a rank where nothing is active, and where no rank trains anything.
    """
    job = JOBS[name]
    one = train(job | {"args": job["args"] | job.get("alone", {})}, tmp_path, world=1)
    assert one["moved"] > 1e-2 or name == "quiet"
    for rank in two:
        torch.testing.assert_close(rank[name]["weights"], one["weights"], atol=1e-6, rtol=0)
        assert kit.lasting(rank[name]["eval"]) == pytest.approx(kit.lasting(one["eval"]), abs=1e-6)
    assert torch.equal(two[0][name]["weights"], two[1][name]["weights"])
    for entry, single in zip(two[0][name]["log"], one["log"], strict=True):
        assert set(entry) == set(single)
        keep = kit.lasting(single)
        if "alone" in job:
            keep.pop("batch/microbatches_per_step", None)  # another number of smaller ones
        assert {k: entry[k] for k in keep} == pytest.approx(keep, abs=2e-6, rel=5e-5)


@pytest.mark.parametrize("name", [name for name in JOBS if "least" in JOBS[name]])
def test_F157_ranks_run_as_many_rows_and_train_each_token_once(two: list[dict[str, Any]], name: str):
    first, second = (rank[name]["rows"] for rank in two)
    assert len(first) == len(second) > 0
    steps = [entry["batch/trained_tokens_per_step"] for entry in two[0][name]["log"] if "loss" in entry]
    assert sum(first) + sum(second) == sum(steps)
    if name == "tree, one rollout":
        assert min(sum(first), sum(second)) == 0
    if name == "tree":
        assert all(entry["batch/packing_ratio"] > 1.3 for entry in two[0][name]["log"] if "loss" in entry)


def test_bnpo_depends_on_the_cut_as_documented(tmp_path: Path, two: list[dict[str, Any]]):
    """One micro-batch instead of two smaller ones is another mean."""
    one = train(JOBS["bnpo"], tmp_path, world=1)
    assert (one["weights"] - two[0]["bnpo"]["weights"]).norm() > 1e-2 * one["moved"]


def test_F135_a_group_is_played_whole_on_one_rank(two: list[dict[str, Any]]):
    """Both ranks plan the same groups, and each is asked for its own share of them."""
    assert two[0]["dapo"]["plans"] == two[1]["dapo"]["plans"]
    asked = [rank["dapo"]["calls"] for rank in two]
    assert [len(prompts) for call in asked for prompts in call] == [1, 1]
    assert asked[0] != asked[1]


def test_F157_the_second_rank_had_no_group_to_play(two: list[dict[str, Any]]):
    assert two[1]["few"]["calls"] == []
    assert two[0]["quiet"]["log"][0]["agentrl/no_signal_steps"] == 1.0
