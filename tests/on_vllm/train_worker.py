"""One rank of a run whose rollouts vLLM draws: python train_worker.py FOLDER OUTPUT OPTIONS (JSON)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from agentrl import GRPOConfig, GRPOTrainer


def sum_of_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between rollouts, whatever the model says."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def main(folder: str, output: str, options: str) -> None:
    """Trains two steps and prints what each logged."""
    args = GRPOConfig(
        output_dir=output, per_device_train_batch_size=8, num_generations=4, max_steps=2, max_completion_length=16,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1, gradient_checkpointing=False,
        learning_rate=1e-3, use_vllm=True, use_cpu=True, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=2, num_generations_eval=2, **json.loads(options),
    )  # fmt: skip
    rows = [{"prompt": text} for text in ("Once", "There was a king", "1 2 3 4", "and so on")]
    trainer = GRPOTrainer(model=folder, args=args, reward_funcs=sum_of_ids, train_dataset=rows, eval_dataset=rows[:2])
    try:
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        evaluated = sum("eval_reward" in entry for entry in trainer.state.log_history)
    finally:
        trainer.close()
    worst = max(entry["sampling/sampling_logp_difference/max"] for entry in logs)
    weight = float(sum(parameter.double().sum() for parameter in trainer.model.parameters()))
    said = {"rank": args.process_index, "steps": len(logs), "worst": worst, "evaluated": evaluated, "weight": weight}
    os.write(1, f"RESULT {json.dumps(said)}\n".encode())  # a whole line: two ranks write


if __name__ == "__main__":
    main(*sys.argv[1:])
