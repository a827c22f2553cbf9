"""Every documented metric has its name in the log of some run, and the table of completions has a history."""

from __future__ import annotations

import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import train_kit as kit
from rich.console import Console
from test_fork_metrics import group, rollout, turn
from train_kit import Door, Lamp, length, make

from agentrl.train.printing import completion_table, log_completions
from agentrl.types import Outcome


def trained(samples: kit.Fixed, folder: Path, **args: Any) -> Any:
    made = kit.trainer(kit.policy(), samples, kit.config(folder, **args))
    made.train()
    made.close()
    return made


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


# --- every documented name -------------------------------------------------------------
DOCUMENTED = json.loads((Path(__file__).parent / "data" / "metrics.json").read_text())
NOT_LOGGED = {
    # a queue of samples between players and a trainer that run at the same time
    **dict.fromkeys(
        ("rollout/score_queue_size", "rollout/queue_size", "rollout/score_wait_s", "rollout/score_block_s",
         "rollout/backpressure_s", "sample/time_in_queue_s", "sample/dropped_stale_count"), "async",
    ),
    # groups with equal rewards are kept here, so that there are none that were kept or dropped
    "reward_kept": "async", "reward_dropped": "async",
    # the asynchronous loss: tokens outside the bounds are dropped; score centering
    "sampling/masked_mean": "async", "sampling/sampler_mass": "async",
    "rollout/concurrency_cap": "async",
    # a vLLM server's load, and weights that travel to it: tests/on_vllm/test_training.py
    **dict.fromkeys(
        ("rollout/vllm_retry_count", "rollout/vllm_kv_cache_usage_frac",
         "rollout/vllm_running_requests", "rollout/vllm_queued_requests", "rollout/vllm_preemption_count",
         "perf/weight_sync_s", "perf/weight_sync_pause_s", "perf/weight_sync_barrier_s",
         "perf/weight_sync_transfer_s"), "vllm",
    ),
    # a table of every device's peak
    "perf/fwd_bwd_mfu": "device", "perf/wall_clock_mfu": "device",
}  # fmt: skip


@pytest.fixture(scope="module")
def every_log(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names that runs of each kind log."""
    folder = tmp_path_factory.mktemp("names")
    rows = [{"prompt": "a door", "environment": "door"}, {"prompt": "a lamp", "environment": "lamp"}]

    def script(request: Any) -> Any:
        if request.messages[-1]["role"] == "tool":
            return "done"
        return call("switch") if "lamp" in str(request.messages) else call("push", times=2)

    played = make(folder, script, train_dataset=rows, environment_factory={"door": Door, "lamp": Lamp},
                  eval_dataset={"few": rows[:1], "both": rows}, reward_funcs=length,
                  args={"max_completion_length": 300, "entropy_coef": 0.1, "beta": 0.1})  # fmt: skip
    played.train()
    names = {"played": set(played.state.log_history[0]), "eval": set(played.evaluate())}
    played.close()
    for loss_type in ("cispo", "vespo"):
        names[loss_type] = set(trained(kit.fixed(), folder, loss_type=loss_type).state.log_history[0])
    names["budget"] = set(trained(kit.fixed(), folder, token_budget=64).state.log_history[0])
    corrected = trained(kit.fixed(), folder, vllm_importance_sampling_correction=True)
    names["another sampler"] = set(corrected.state.log_history[0])
    ends = {"vocab_size": len(kit.tokenizer()), "eos_token_id": kit.stop(), "max_position_embeddings": 2048}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    experts = kit.trainer(kit.build("Qwen3Moe", **ends, **mixture), kit.fixed(), kit.config(folder))
    experts.train()
    names["experts"] = set(experts.state.log_history[0])
    return names


def fits(pattern: str, names: set[str]) -> bool:
    wanted = re.compile(re.escape(pattern).replace(r"\{name\}", "[^/]+"))
    return any(wanted.fullmatch(name) for name in names)


@pytest.mark.parametrize("name", dict.fromkeys(DOCUMENTED["GRPOTrainer"] + DOCUMENTED["AsyncGRPOTrainer"]))
def test_every_documented_name_is_logged_or_listed_with_its_reason(every_log: dict[str, set[str]], name: str):
    found = [kind for kind, names in every_log.items() if fits(name, names)]
    assert bool(found) != (name in NOT_LOGGED), (name, found)
    if name in DOCUMENTED["GRPOTrainer"]:
        assert found  # the synchronous trainer's own are all there


def test_each_kind_of_run_logs_its_own_names(every_log: dict[str, set[str]]):
    assert "cispo_clip_ratio" in every_log["cispo"] and "clip_ratio/low_mean" not in every_log["cispo"]
    assert "vespo/phi_seq_mean" in every_log["vespo"] and "clip_ratio/low_mean" not in every_log["vespo"]
    assert {"aux_loss"} <= every_log["experts"] and not {"kl", "entropy_coef", "policy_loss"} & every_log["experts"]
    dropped = "batch/dropped_oversize_count"  # without a budget nothing is dropped
    assert dropped in every_log["budget"] and dropped not in every_log["played"] | every_log["cispo"]
    for prefix in ("eval_few_", "eval_both_"):
        for name in ("reward", "reward_std", "completions/mean_length", "tools/call_frequency", "rewards/Door/mean",
                     "env/reset_s", "env/door/reward", "env/door/completions/mean_length", "runtime"):  # fmt: skip
            assert prefix + name in every_log["eval"]
    assert "eval_few_env/lamp/reward" not in every_log["eval"] and "eval_both_env/lamp/reward" in every_log["eval"]
    assert not [name for name in every_log["eval"] if "loss" in name or "perf/" in name]


def test_mixed_environments_in_a_run(every_log: dict[str, set[str]]):
    for name in ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio", "rollout/turns_mean",
                 "tools/call_frequency", "tools/failure_frequency", "rollout/failed_frac", "rollout_frac"):  # fmt: skip
        assert {f"env/door/{name}", f"env/lamp/{name}"} <= every_log["played"]
    assert not [name for name in every_log["cispo"] if name.startswith("env/")]


# --- the completions table -------------------------------------------------------------
class Board(types.ModuleType):
    """A tracker that keeps the latest value of each key, as trackers do."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.shown: dict[str, Any] = {}

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
        return columns, data

    def log(self, values: dict[str, Any], commit: bool = True) -> None:
        assert not commit  # it goes out with the step's numbers
        self.shown |= values


def test_F171_tables_of_all_steps_can_be_viewed_and_every_row_has_every_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    board, args = Board(), kit.config(tmp_path, log_completions=True)
    monkeypatch.setitem(sys.modules, "wandb", board)
    args.report_to = ["wandb"]
    forked = rollout([turn([1], [2]), turn([3], [4])], 1.0, extra={"golden": 7}, advantage=0.5)
    failed = rollout([], outcome=Outcome.RESET_FAILED, sequences=())
    printed = io.StringIO()
    for step in (1, 2, 3):
        log_completions([group(forked, failed)], args, step, Console(file=printed, width=200))
    assert set(board.shown) == {"completions/step_1", "completions/step_2", "completions/step_3"}
    columns, rows = board.shown["completions/step_2"]
    assert columns == ["Prompt", "Completion", "score", "golden", "Advantage", "Outcome"]
    assert rows == [["x", "", 1.0, "7", 0.5, "finished"], ["x", "", None, "", None, "reset_failed"]]
    assert all(f"Step {step}" in printed.getvalue() for step in (1, 2, 3))
    args.report_to = []
    board.shown.clear()
    log_completions([group(forked)], args, 4, Console(file=printed, width=200))
    assert not board.shown


def test_completion_tables_are_cut_as_asked(tmp_path: Path):
    members = [rollout([turn([1], [2])], float(n), n) for n in range(3)]
    groups = [group(*members), group(*members)]
    assert len(completion_table(groups, kit.config(tmp_path, num_completions_to_print=4))[1]) == 4
    assert len(completion_table(groups, kit.config(tmp_path, log_unique_prompts=True))[1]) == 2
