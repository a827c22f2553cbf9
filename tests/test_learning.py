"""A tiny policy learns two environments in one run; `tests/benchmarks/bench_learning.py` does it at full length."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrl_envs.grid_world import GridWorld
from agentrl_envs.recycle import Recycle

from agentrl import GRPOTrainer, tiny_policy
from agentrl.train.quickstart import config


@pytest.mark.slow
def test_one_policy_learns_two_environments_at_once(tmp_path: Path):
    environments = {"grid_world": GridWorld, "recycle": Recycle}
    policy = tiny_policy(environments, 0, episodes=1000, steps=250, cache=tmp_path)
    trainer = GRPOTrainer(
        policy.model, args=config(tmp_path, 0, batches=40), processing_class=policy.tokenizer,
        environment_factory=environments,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.close()
    for name in environments:
        gained = after[f"eval_env/{name}/reward"] - before[f"eval_env/{name}/reward"]
        assert gained >= 0.3, (name, before[f"eval_env/{name}/reward"], gained)
        assert after[f"eval_mixture/{name}/realised_frac"] == 0.5
