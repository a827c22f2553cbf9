"""The objects of a run file: environments, data, functions, and the trainer with its model."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, ConfigurationError, MissingDependency
from agentrl.mixing import EnvironmentSpec
from agentrl.train.run_file import EnvironmentSection, ModelSection, RunFile
from agentrl.train.run_objects import environment_factory, find_modules_in, load_rows, named_function, reward_function
from agentrl.train.run_types import check_keys, check_value

if typing.TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig
    from agentrl.train.trainer import GRPOTrainer


# what [environment] may say beside its id, arguments and share: fields of EnvironmentSpec
SETTINGS = ("max_turns", "max_completion_length", "max_concurrent", "max_failures_in_row", "deadlines")


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run plays and how it scores, without its model."""

    factory: Any  # None, one factory, or a dict of several by name
    train_rows: Any
    eval_rows: Any
    reward_functions: list[Callable[..., Any]]
    reward_weights: list[float] | None
    tools: list[Callable[..., Any]]


def load_parts(run: RunFile) -> RunParts:
    """Everything that the file names, imported and read. Needs no torch.

    Raises:
        ConfigurationError: What cannot be found or read; names the section.
    """
    find_modules_in(Path.cwd(), run.path.parent.resolve())
    factories = {name: _environment(name, one, run.data is None) for name, one in run.environments.items()}
    factory = factories.get(None) if None in factories else (factories or None)
    rows = eval_rows = None
    if run.data is not None:
        data = run.data
        rows = load_rows(run.find(data.path), split=data.split, columns=data.columns, limit=data.limit)
        if data.eval_path is not None:
            eval_rows = load_rows(run.find(data.eval_path), split=data.split, columns=data.columns)
    functions, weights = _rewards(run)
    tools = [named_function(spec, "tool") for spec in run.tools.functions] if run.tools else []
    return RunParts(factory, rows, eval_rows, functions, weights, tools)


def _environment(name: str | None, section: EnvironmentSection, by_share: bool) -> Any:
    """A factory; with the settings of the section, where it has any."""
    factory = environment_factory(section.id, section.kwargs)
    given = {key: value for key in SETTINGS if (value := getattr(section, key)) not in (None, {})}
    where = "environment" if name is None else f"environment.{name}"
    if name is not None and by_share:
        given["weight"] = section.share
    elif section.share != 1:
        raise ConfigurationError(
            f"'{where}.share' is for several environments without [data], whose rows say how many tasks each has."
        )
    try:
        return EnvironmentSpec(factory, **given) if given else factory
    except ConfigurationError as error:
        raise ConfigurationError(f"[{where}]: {error}") from error


def _rewards(run: RunFile) -> tuple[list[Callable[..., Any]], list[float] | None]:
    functions = []
    for entry in run.rewards.functions if run.rewards else []:
        if isinstance(entry, str):
            functions.append(reward_function(entry))
            continue
        check_keys(entry, ["name", "kwargs"], "rewards.functions", {})
        name, kwargs = entry.get("name"), entry.get("kwargs", {})
        if not isinstance(name, str) or not isinstance(kwargs, dict):
            raise ConfigurationError("An entry of rewards.functions is a name, or a table with name and kwargs.")
        functions.append(reward_function(name, kwargs))
    return functions, run.rewards.weights if run.rewards else None


# --- settings --------------------------------------------------------------------------
def grpo_config(run: RunFile, **instead: Any) -> GRPOConfig:
    """The trainer's settings; `instead` goes over what the file says.

    Raises:
        ConfigurationError: An unknown key (with the closest known one), a value of the wrong type or out of range.
    """
    from agentrl.train.config import GRPOConfig

    hints = typing.get_type_hints(GRPOConfig)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(GRPOConfig) if field.init}
    elsewhere = {name: "model" for name in ModelSection.__dataclass_fields__}
    check_keys(run.train, fields, "train", elsewhere)
    values = {name: check_value(value, fields[name], f"train.{name}") for name, value in run.train.items()}
    if run.rewards is not None and run.rewards.weights is not None:
        if "reward_weights" in values:
            raise ConfigurationError("Give the weights once: in [rewards] weights or in [train] reward_weights.")
        values["reward_weights"] = run.rewards.weights
    values.setdefault("output_dir", f"outputs/{run.path.stem}")
    values.setdefault("report_to", "none")
    values.setdefault("disable_tqdm", True)
    try:
        return GRPOConfig(**{**values, **instead})
    except AgentRLError as error:
        raise ConfigurationError(f"[train]: {error}") from error
    except (ValueError, TypeError, ImportError) as error:  # what transformers.TrainingArguments raises
        raise ConfigurationError(f"[train]: {str(error).strip().splitlines()[0]}") from error


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Files can be written in the folder, which exists now.

    Raises:
        ConfigurationError: They cannot; says why.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"Nothing can be written to the output folder '{folder}': {error.strerror or error}. "
            "Choose another one: train.output_dir=FOLDER."
        ) from error


# --- the trainer -----------------------------------------------------------------------
def build_trainer(
    run: RunFile, parts: RunParts, args: GRPOConfig, on_warm_up: Callable[[int, float], None] | None = None
) -> GRPOTrainer:
    """The trainer of the run, its model loaded (and warmed up where the file asks for it).

    Raises:
        ConfigurationError: As `GRPOTrainer`; a model or tokenizer that cannot be loaded.
    """
    from agentrl.train.trainer import GRPOTrainer

    model, tokenizer = _policy(run, parts, args, on_warm_up)
    return GRPOTrainer(
        model=model, reward_funcs=parts.reward_functions or None, args=args, train_dataset=parts.train_rows,
        eval_dataset=parts.eval_rows, processing_class=tokenizer, tools=parts.tools or None,
        environment_factory=parts.factory,
        # a model that was warmed up has its adapter already: what the warm-up learnt is saved with it
        peft_config=None if run.model.warm_up is not None and not run.model.tiny else _peft(run.model),
    )  # fmt: skip


def _policy(
    run: RunFile, parts: RunParts, args: GRPOConfig, on_warm_up: Callable[[int, float], None] | None
) -> tuple[Any, Any]:
    if run.model.tiny:
        from agentrl.train.run_tiny import tiny_parts

        return tiny_parts(parts, args.seed, on_warm_up)
    name, kwargs = model_location(run)
    args.model_init_kwargs = {**_as_dict(args.model_init_kwargs), **kwargs}
    if run.model.dtype is not None:
        args.model_init_kwargs["dtype"] = run.model.dtype
    tokenizer = _tokenizer(run, name)
    if run.model.warm_up is None:
        return name, tokenizer
    from agentrl.train import setup
    from agentrl.train.warm_up import warm_up

    asked = run.model.warm_up
    model = setup.load_model(name, args)
    tokenizer = setup.load_tokenizer(tokenizer, model, args)
    model = setup.wrap_peft(model, _peft(run.model), args.seed)
    args.model_init_kwargs = None  # they have done their work
    warm_up(
        model.to(args.device), tokenizer, parts.factory, dataset=parts.train_rows, tools=parts.tools or None,
        steps=asked.steps, episodes=asked.episodes, batch_size=asked.batch_size, learning_rate=asked.learning_rate,
        seed=args.seed, chat_template=args.chat_template, on_step=on_warm_up,
        chat_template_kwargs=args.chat_template_kwargs,  # type: ignore[arg-type]
    )  # fmt: skip
    return model, tokenizer


def model_location(run: RunFile) -> tuple[str, dict[str, Any]]:
    """The model's folder or hub id, and what `from_pretrained` needs beside it."""
    assert run.model.name is not None
    path = run.find(run.model.name)
    name = str(path) if path.is_dir() else run.model.name
    kwargs = {key: getattr(run.model, key) for key in ("revision", "gguf_file") if getattr(run.model, key) is not None}
    if run.model.gguf_file is not None and path.is_dir() and not (path / run.model.gguf_file).exists():
        found = ", ".join(sorted(file.name for file in path.glob("*.gguf"))) or "none"
        raise ConfigurationError(f"'{path}' holds no file '{run.model.gguf_file}' (GGUF files there: {found}).")
    return name, kwargs


def _tokenizer(run: RunFile, name: str) -> Any:
    """Loaded here where it is not simply the one saved with the model."""
    section = run.model
    if section.tokenizer is None and section.gguf_file is None:
        return None
    from transformers import AutoTokenizer

    if section.tokenizer is not None:
        path = run.find(section.tokenizer)
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else section.tokenizer)
    return AutoTokenizer.from_pretrained(name, gguf_file=section.gguf_file)


def _peft(section: ModelSection) -> Any:
    if section.peft is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingDependency("peft", "peft", "[model] peft") from None
    asked = section.peft
    return LoraConfig(
        r=asked.r, lora_alpha=asked.alpha, lora_dropout=asked.dropout, target_modules=asked.target_modules,
        task_type="CAUSAL_LM",
    )  # fmt: skip


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(json.loads(value) if isinstance(value, str) else value or {})
