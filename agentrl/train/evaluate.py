"""Evaluation: the same engine, no training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigurationError
from agentrl.rollout.group import GroupPlan
from agentrl.tasks import TaskSource, derive_seed, from_frame, is_sized
from agentrl.train.generation import compare, gather_groups, share_of
from agentrl.train.metrics import MetricWindow, add_reward_metrics, add_rollout_metrics, add_speed
from agentrl.train.setup import task_source

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig
    from agentrl.train.trainer import GRPOTrainer


def evaluate(trainer: GRPOTrainer, dataset: Any, prefix: str) -> dict[str, float]:
    """Plays and scores every row; the metrics carry `prefix`. A dict of datasets is evaluated one by one.

    Without data (an environment that writes its prompts), `per_device_eval_batch_size` x processes episodes are played,
    the same start states each time.

    Raises:
        ConfigurationError: No data and no environment, or no evaluation set of the name that was given.
    """
    dataset = trainer.eval_dataset if dataset is None else dataset
    if isinstance(dataset, str):
        sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {}
        if dataset not in sets:
            raise ConfigurationError(f"There is no evaluation set '{dataset}'; eval_dataset has: {sorted(sets)}.")
        dataset = {dataset: sets[dataset]}
    if isinstance(dataset, Mapping):
        metrics: dict[str, float] = {}
        for name, part in dataset.items():
            metrics |= _one(trainer, part, f"{prefix}_{name}", str(name))
    else:
        metrics = _one(trainer, dataset, prefix)
    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    return metrics


def _one(trainer: GRPOTrainer, dataset: Any, prefix: str, name: str = "") -> dict[str, float]:
    plans = _plans(trainer, dataset, name)
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    started = time.perf_counter()
    each = trainer.buffer.ranks_per_engine()
    groups = trainer.buffer.players()(share_of(plans, rank, world, each))
    shared = gather_groups(groups, plans, rank, world, each)
    seconds = time.perf_counter() - started
    window = trainer.window["eval"]
    window.clear()
    add_rollout_metrics(window, groups, trainer.reported)
    add_speed(window, groups, seconds, world)
    flat = [rollout for group in shared for rollout in group]
    if trainer.accelerator.is_main_process:
        reported = replace(trainer.reported, asked=_shares(plans))
        add_reward_metrics(window, flat, compare(flat, trainer.buffer.settings), reported)
        window.add("runtime", seconds)
        window.add("samples_per_second", len(flat), seconds)
    states = [window.state()]
    if world > 1:
        from accelerate.utils import gather_object

        states = gather_object(states)
    metrics = {f"{prefix}_{name}": value for name, value in MetricWindow.values(states).items()}
    window.clear()
    trainer.log(dict(metrics))
    return metrics


def prepare_eval_data(dataset: Any, factory: Any, args: GRPOConfig) -> Any:
    """The data, which can now be read as often as it is evaluated. It can be played, as far as it shows before it is.

    Raises:
        ConfigurationError: Empty data, a missing column, an unknown environment; evaluation is asked for without any
            data, and there is no environment to write its prompts.
    """
    if dataset is None and args.eval_strategy != "no":
        _source(None, factory, args)
    if isinstance(dataset, Mapping):
        _check_best(dataset, args)
        return type(dataset)({name: _prepared(part, factory, args) for name, part in dataset.items()})  # type: ignore[call-arg]
    return _prepared(dataset, factory, args)


def _check_best(sets: Mapping[str, Any], args: GRPOConfig) -> None:
    """With several evaluation sets, the metric that is the best model's is one of theirs."""
    wanted = args.metric_for_best_model
    if wanted is None or not (args.load_best_model_at_end or args.save_strategy == "best"):
        return
    if not any(wanted.removeprefix("eval_").startswith(f"{name}_") for name in sets):
        names = ", ".join(f"'eval_{name}_reward'" for name in sets)
        raise ConfigurationError(
            f"metric_for_best_model={wanted!r} is not measured: with several evaluation sets a metric is named "
            f"eval_{{set}}_{{metric}}. Set it to one of {names}, or to another metric of one of these sets."
        )


def _prepared(part: Any, factory: Any, args: GRPOConfig) -> Any:
    part = from_frame(part)
    if hasattr(part, "__next__"):  # could be read once
        part = list(part)
    if part is not None and is_sized(part):
        _source(part, factory, args)
    return part


def _source(dataset: Any, factory: Any, args: GRPOConfig, name: str = "") -> TaskSource:
    if dataset is None and factory is None:
        raise ConfigurationError("There is nothing to evaluate on: pass eval_dataset.")
    dataset = from_frame(dataset)
    if dataset is not None and not is_sized(dataset):
        dataset = list(dataset)
    of_set = (name,) if name else ()  # row 3 of one set and row 3 of another begin differently
    return task_source(dataset, factory, args, seed=derive_seed(args.seed, "evaluation", *of_set))


def _shares(plans: Sequence[GroupPlan]) -> dict[str, float]:
    """The share of each environment."""
    counts = Counter(plan.task.environment for plan in plans)
    return {name: count / len(plans) for name, count in counts.items() if name is not None}


def _plans(trainer: GRPOTrainer, dataset: Any, name: str) -> list[GroupPlan]:
    args = trainer.args
    source = _source(dataset, trainer.environment_factory, args, name)
    size = args.num_generations_eval or args.num_generations or 1
    episodes = args.per_device_eval_batch_size * args.world_size
    count = source.size if source.size is not None else max(1, episodes // size)
    run = f"eval{trainer.state.global_step}{f'.{name}' if name else ''}"
    return [GroupPlan(f"{run}.{i}", source.task(0, i), size) for i in range(count)]
