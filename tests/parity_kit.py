"""The same fixed rollouts through agentrl's trainer and through the one of the PyPI package `trl` (extra ``dev``)."""

from __future__ import annotations

import functools
import gc
import random
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from transformers import AutoModelForCausalLM

from agentrl.tasks import derive_seed

FAR = 11  # ends a completion that was cut off


@functools.cache
def folder() -> Path:
    """Gone when the process ends."""
    made = tempfile.TemporaryDirectory(prefix="parity")
    folder.keep = made  # type: ignore[attr-defined]
    return Path(made.name)


@functools.cache
def model_path() -> str:
    """A saved tiny model: with beta, both sides load the reference from there."""
    kit.policy(num_hidden_layers=1, max_position_embeddings=64).save_pretrained(folder() / "model")
    return str(folder() / "model")


@functools.cache
def start() -> torch.Tensor:
    return kit.weights(_first_model())


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Every end of training collects garbage; without this, that takes most of the time."""
    start()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@functools.cache
def in_order(groups: int) -> int:
    """A run seed with which agentrl takes the groups of the first cycles in their order, `groups` in each."""

    def kept(seed: int, cycle: int) -> bool:
        order = list(range(groups))
        random.Random(derive_seed(seed, "order", cycle)).shuffle(order)
        return order == list(range(groups))

    cycles = 6 if groups < 4 else 3
    return next(seed for seed in range(1 << 20) if all(kept(seed, cycle) for cycle in range(cycles)))


@dataclass(frozen=True)
class Member:
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # as a sampler would have recorded them
    score: float | None
    other: float | None


@dataclass(frozen=True)
class Rollouts:
    """`table[prompt]` are the group's completions, the same each time the prompt is played."""

    table: dict[str, tuple[Member, ...]]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        members = [(p, m) for p in dict.fromkeys(prompts) for m in self.table[p]]  # trl repeats prompts
        return {
            "prompt_ids": [prompt_ids(p) for p, _ in members],
            "completion_ids": [list(m.ids) for _, m in members],
            "logprobs": [list(m.log_probs) for _, m in members],
            "score": [m.score for _, m in members],
            "other": [m.other for _, m in members],
        }

    @property
    def rows(self) -> list[dict[str, str]]:
        return [{"prompt": prompt} for prompt in self.table]


def prompt_ids(prompt: str) -> list[int]:
    return kit.tokenizer().encode(prompt, add_special_tokens=False)


@functools.cache
def _first_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


def at_start(prompt: str, ids: Sequence[int]) -> list[float]:
    """Log-probs of a completion before the first step."""
    with torch.no_grad():
        return kit.log_probs(_first_model(), prompt_ids(prompt), ids).tolist()


@functools.cache
def rollouts(groups: int = 2, size: int = 4, *, none: tuple[tuple[int, str], ...] = (), equal: tuple[int, ...] = (),
             truncated: tuple[int, ...] = (1, 6)) -> Rollouts:  # fmt: skip
    """Completions of 1 to 11 tokens; `none` are (place, function) without a reward, `equal` groups of equal rewards."""
    draw = random.Random(5)
    table: dict[str, tuple[Member, ...]] = {}
    for g in range(groups):
        members, question = [], f"question {g}: " + "x" * g
        for m in range(size):
            place = g * size + m
            ids = [draw.randrange(10, 250) for _ in range(draw.choice([0, 2, 3, 5, 8, 10]))]
            ids.append(FAR if place in truncated else kit.stop())
            rewards = {"score": float((3 * m + g) % 4) / 2, "other": draw.choice([-1.0, 0.25, 3.0])}
            if g in equal:
                rewards = {"score": 0.35, "other": 0.35}
            score, other = (None if (place, name) in none else value for name, value in rewards.items())
            recorded = tuple(lp + draw.uniform(-0.4, 0.4) for lp in at_start(question, ids))
            members.append(Member(tuple(ids), recorded, score, other))
        table[question] = tuple(members)
    return Rollouts(table)


def score(score: list[float | None], **kwargs: Any) -> list[float | None]:
    return score


def other(other: list[float | None], **kwargs: Any) -> list[float | None]:
    return other


COMMON: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "max_steps": 3, "num_generations": 4,
    "max_completion_length": 16, "report_to": "none", "save_strategy": "no", "beta": 0.0, "disable_tqdm": True,
    "logging_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
    "gradient_checkpointing": False, "shuffle_dataset": False, "log_level": "error",
    "vllm_importance_sampling_correction": False,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    moved: torch.Tensor  # weights after three steps of plain SGD minus those before
    log: list[dict[str, float]]  # one entry per step


def theirs(
    samples: Rollouts, changes: dict[str, Any], functions: Sequence[Callable[..., Any]] = (score,), *, vllm: bool = True
) -> Run:
    """What trl makes of the rollouts, in their order: its shuffling of a generation batch is off."""
    trl = pytest.importorskip("trl", reason="the oracle of this test; pip install -e '.[dev]'")
    import datasets
    import trl.trainer.grpo_trainer as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "shuffle_sequence_dict", lambda batch: batch)
        trainer = trl.GRPOTrainer(
            model_path(), reward_funcs=list(functions), rollout_func=samples,
            args=trl.GRPOConfig(str(folder() / "trl"), **(COMMON | changes)),
            train_dataset=datasets.Dataset.from_list(samples.rows), processing_class=kit.fresh_tokenizer(),
        )  # fmt: skip
        if vllm and changes.get("vllm_importance_sampling_correction"):
            # it corrects for vLLM alone; the rollouts say what that engine would have recorded
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
        trainer.train()
    return Run(kit.weights(trainer.model) - start(), trainer.state.log_history[:-1])


def ours(samples: Rollouts, changes: dict[str, Any], functions: Sequence[Callable[..., Any]] = (score,)) -> Run:
    """What agentrl makes of the rollouts, in their order."""
    config = functools.partial(kit.config, folder() / "agentrl", **(COMMON | changes))
    size = config()
    args = config(seed=in_order((size.generation_batch_size or 1) // (size.num_generations or 1)))
    trainer = kit.trainer(model_path(), samples, args, reward_funcs=list(functions))  # type: ignore[arg-type]
    trainer.train()
    trainer.close()
    return Run(kit.weights(trainer.model) - start(), trainer.state.log_history[:-1])


def apart(one: Run, two: Run) -> float:
    """Relative difference of the changes of the weights."""
    return float((one.moved.double() - two.moved.double()).norm() / two.moved.double().norm())
