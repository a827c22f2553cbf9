"""Trains on rows with and without pictures, alone or as one process of two; used by test_vision_trainer.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import train_kit as kit
from tiny_vision import qwen3_vl_model
from torch import distributed

from agentrl import GRPOTrainer
from tests.tiny_processors import picture, qwen3_vl

ROWS = [
    {"prompt": [{"role": "user", "content": "What is it?"}], "images": [picture(64, 64, 1), picture(40, 90, 2)]},
    {"prompt": [{"role": "user", "content": "Nothing to see."}], "images": []},
]


def judge(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(folder: Path, world: int) -> dict[str, Any]:
    """Two steps, with pictures on the first rank and text on the second."""
    processor = qwen3_vl()
    model = qwen3_vl_model(processor)
    before = kit.weights(model)
    args = {"per_device_train_batch_size": 8 // world, "gradient_checkpointing": True, "max_completion_length": 6,
            "max_steps": 2, "num_iterations": 2, "learning_rate": 0.003}  # fmt: skip
    trainer = GRPOTrainer(model, judge, kit.config(folder, **args), ROWS, processing_class=processor)
    trainer.train()
    weights = kit.weights(model)
    trainer.close()
    return {"weights": weights, "moved": float((weights - before).norm()), "log": trainer.state.log_history}


def main() -> None:
    """Argument: the folder for `<rank>.pt`."""
    folder = Path(sys.argv[1])
    torch.save(train(folder, world=2), folder / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
