"""Evaluation: the same engine, no training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigurationError
from agentrl.rollout.group import GroupPlan
from agentrl.tasks import TaskSource, derive_seed
from agentrl.train.generation import gather_groups
from agentrl.train.metrics import MetricWindow, add_reward_metrics, add_rollout_metrics
from agentrl.train.setup import task_source

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig
    from agentrl.train.trainer import GRPOTrainer


def evaluate(trainer: GRPOTrainer, dataset: Any, prefix: str) -> dict[str, float]:
    """Plays and scores every row; the metrics carry `prefix`. A dict of datasets is evaluated one by one.

    Without data (an environment that writes its prompts), `per_device_eval_batch_size` x processes episodes are played,
    the same start states each time.

    Raises:
        ConfigurationError: No data and no environment.
    """
    dataset = trainer.eval_dataset if dataset is None else dataset
    if isinstance(dataset, str):
        prefix, dataset = f"{prefix}_{dataset}", trainer.eval_dataset[dataset]  # type: ignore[index]
    if isinstance(dataset, Mapping):
        metrics: dict[str, float] = {}
        for name, part in dataset.items():
            metrics |= _one(trainer, part, f"{prefix}_{name}")
    else:
        metrics = _one(trainer, dataset, prefix)
    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    return metrics


def _one(trainer: GRPOTrainer, dataset: Any, prefix: str) -> dict[str, float]:
    plans = _plans(trainer, dataset)
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    groups = trainer.buffer.players()(plans[rank::world])
    window = trainer.window["eval"]
    window.clear()
    add_rollout_metrics(window, groups, has_tools=trainer.has_tools)
    shared = gather_groups(groups, plans, rank, world)
    flat = [rollout for group in shared for rollout in group]
    if trainer.accelerator.is_main_process:
        equal = [len({r.reward for r in group if r.reward is not None}) <= 1 for group in shared for _ in group]
        by_source = {name: [r.rewards.get(name) for r in flat] for name in trainer.buffer.settings.weights}
        add_reward_metrics(window, [r.reward for r in flat], by_source, equal)
    states = [window.state()]
    if world > 1:
        from accelerate.utils import gather_object

        states = gather_object(states)
    metrics = {f"{prefix}_{name}": value for name, value in MetricWindow.values(states).items()}
    window.clear()
    trainer.log(dict(metrics))
    return metrics


def check_eval_data(dataset: Any, factory: Any, args: GRPOConfig) -> None:
    """Evaluation can be played, as far as its data shows before it is.

    Raises:
        ConfigurationError: Empty data, a missing column, an unknown environment; evaluation is asked for without any
            data, and there is no environment to write its prompts or none that every row shares.
    """
    if dataset is None and args.eval_strategy != "no":
        _source(None, factory, args)
    parts = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    for part in parts:
        if part is not None and hasattr(part, "__len__"):
            _source(part, factory, args)


def _source(dataset: Any, factory: Any, args: GRPOConfig) -> TaskSource:
    if dataset is None and factory is None:
        raise ConfigurationError("There is nothing to evaluate on: pass eval_dataset.")
    if dataset is not None and not hasattr(dataset, "__len__"):
        dataset = list(dataset)
    return task_source(dataset, factory, args, seed=derive_seed(args.seed, "evaluation"))


def _plans(trainer: GRPOTrainer, dataset: Any) -> list[GroupPlan]:
    args = trainer.args
    source = _source(dataset, trainer.environment_factory, args)
    size = args.num_generations_eval or args.num_generations or 1
    episodes = args.per_device_eval_batch_size * args.world_size
    count = source.size if source.size is not None else max(1, episodes // size)
    step = trainer.state.global_step
    return [GroupPlan(f"eval{step}.{i}", source.task(0, i), size) for i in range(count)]
