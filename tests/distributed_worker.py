"""Trains on fixed rollouts, alone or as one process of several; used by test_train_distributed.py."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import train_kit as kit
from peft import LoraConfig, get_peft_model
from torch import distributed


def judge(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(job: dict[str, Any], folder: Path, world: int) -> dict[str, Any]:
    """What a run comes to: weights, log, prompts that this process was asked for, evaluation.

    A job has `groups`, `size`, `truncated` (places), `quiet` (prompts whose rewards are equal), `engine` (the real
    sampler instead of fixed rollouts), `log_prob` (as recorded for each token), `reward_model` (one beside the fixed
    rewards), `adapter` (a ready one is trained), `least` (tokens that a shared beginning saves; on each rank) and
    `args` (changes of the config).
    """
    samples = kit.fixed(job["groups"], job["size"], truncated=job.get("truncated", ()))
    table = dict(samples.table)
    for prompt in job.get("quiet", ()):
        table[prompt] = [(ids, 1.0) for ids, _ in table[prompt]]
    samples = kit.Fixed(table, job.get("log_prob", -1.0), calls=[])
    engine = {"rollout_func": None, "reward_funcs": judge, "eval_dataset": samples.rows} if job.get("engine") else {}
    accumulation = job["args"].get("gradient_accumulation_steps", 1)
    batch = {"per_device_train_batch_size": job["groups"] * job["size"] // (world * accumulation)}
    model = kit.policy()
    if job.get("reward_model"):
        engine = {"reward_funcs": [kit.score, kit.judge()], "reward_processing_classes": [None, kit.fresh_tokenizer()]}
    if job.get("adapter"):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    before = kit.weights(model)
    trainer = kit.trainer(model, samples, kit.config(folder, **batch, **job["args"]), **engine)
    if "least" in job:
        trainer.policy_forward.probe()
        trainer.policy_forward.least_shared = job["least"][trainer.accelerator.process_index]
    rows = _count_rows(trainer)
    trainer.train()
    out = {
        "weights": kit.weights(model), "moved": float((kit.weights(model) - before).norm()),
        "log": trainer.state.log_history, "calls": samples.calls,
        "eval": trainer.evaluate() if job.get("engine") else {}, "plans": [plan.id for plan in trainer.group_plans(0)],
        "rows": rows,
    }  # fmt: skip
    trainer.close()
    return out


def _count_rows(trainer: Any) -> list[int]:
    """Trained tokens of each row that will be run forward and backward."""
    rows: list[int] = []
    plain = trainer.step_runner._train

    def count(model: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(row.targets_N))
        return plain(model, row, *args, **kwargs)

    trainer.step_runner._train = count
    return rows


def main() -> None:
    """Arguments: a JSON file of jobs by name, and the folder for `<rank>.pt`."""
    jobs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    gc.freeze()  # the end of training collects garbage: not among what was imported
    out = {name: train(job, folder, world=2) for name, job in jobs.items()}
    torch.save(out, folder / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
