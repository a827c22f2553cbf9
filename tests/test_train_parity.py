"""One optimizer step beside the PyPI package `trl` (extra ``dev``): the same rollouts, the same weights after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import train_kit as kit

pytestmark = pytest.mark.slow


def other(folder: Path, samples: kit.Fixed, model: Any, **changes: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weights and first log entry of trl's trainer."""
    trl = pytest.importorskip("trl", reason="the oracle of this test; pip install -e '.[dev]'")
    settings = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "max_steps": 1,
        "num_generations": 4, "max_completion_length": 16, "report_to": "none", "save_strategy": "no", "beta": 0.0,
        "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd",
        "max_grad_norm": 0.0, "gradient_checkpointing": False, "shuffle_dataset": False, "log_level": "error",
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, reward_funcs=kit.score, args=trl.GRPOConfig(**(settings | changes)),
        train_dataset=datasets.Dataset.from_list(samples.rows), processing_class=kit.fresh_tokenizer(),
        rollout_func=lambda prompts, trainer: samples(list(dict.fromkeys(prompts)), trainer),  # it may repeat prompts
    )  # fmt: skip
    trainer.train()
    return kit.weights(trainer.model), trainer.state.log_history[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "dapo", "mask_truncated_completions": True},
        {"loss_type": "dapo", "scale_rewards": "batch"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2},
        {"loss_type": "grpo", "temperature": 0.7},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 2},
        {"loss_type": "dapo", "beta": 0.2, "num_iterations": 2, "max_steps": 2},
        {"loss_type": "dapo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    ],
    ids=lambda changes: "-".join(str(v) for v in changes.values()),
)
def test_the_step_is_trls(tmp_path: Path, changes: dict[str, Any]):
    samples, where = kit.fixed(truncated=(1, 6)), str(tmp_path / "model")
    kit.policy().save_pretrained(where)  # as a string: with beta, both load the reference from there
    theirs, their_log = other(tmp_path / "trl", samples, where, **changes)
    trainer = kit.trainer(where, samples, kit.config(tmp_path / "agentrl", **changes))
    trainer.train()
    trainer.close()
    torch.testing.assert_close(kit.weights(trainer.model), theirs, atol=1e-5, rtol=0)
    ours = trainer.state.log_history[0]
    names = ["loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "rewards/score/mean", "num_tokens"]
    names += [f"completions/{name}" for name in ("mean_length", "clipped_ratio", "mean_terminated_length")]
    assert {n: ours[n] for n in names} == pytest.approx({n: their_log[n] for n in names}, abs=2e-5, rel=1e-4)
    assert (kit.weights(kit.policy()) - theirs).abs().max() > 1e-3  # something moved
