"""Run files: a training run in TOML or YAML. Reading one needs no torch; its objects are made by `run_build`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.train.run_objects import read_value
from agentrl.train.run_types import check_keys, read_section

VERSION = 1


@dataclass(frozen=True, slots=True)
class PeftSection:
    """A LoRA adapter instead of the whole model."""

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True, slots=True)
class WarmUpSection:
    """Supervised steps on random tool use before the first episode."""

    steps: int = 100
    episodes: int = 500
    batch_size: int = 8
    learning_rate: float = 1e-4


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Which policy is trained."""

    name: str | None = None  # a hub id, or a folder: beside the run file or from the current folder
    tiny: bool = False  # a tiny policy made here for the environment
    tokenizer: str | None = None  # instead of the model's own
    dtype: str | None = None  # float32 if not said
    revision: str | None = None
    gguf_file: str | None = None  # the weights' file name in the model's folder
    peft: PeftSection | None = None
    warm_up: WarmUpSection | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentSection:
    """One environment."""

    id: str  # registered, or "module:Class"
    kwargs: dict[str, Any] = field(default_factory=dict)
    share: int = 1  # of several environments without data: how many of the tasks, relative to the others
    max_turns: int | None = None  # this one and those below as in `agentrl.EnvironmentSpec`
    max_completion_length: int | None = None
    max_concurrent: int | None = None
    max_failures_in_row: int | None = None
    deadlines: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataSection:
    """Rows to train on."""

    path: str
    split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)  # the file's name of a column -> the name it gets
    limit: int | None = None
    eval_path: str | None = None


@dataclass(frozen=True, slots=True)
class RewardsSection:
    """Reward functions beside the environment's own reward."""

    functions: list[str | dict[str, Any]]  # names, or tables with `name` and `kwargs`
    weights: list[float] | None = None


@dataclass(frozen=True, slots=True)
class ToolsSection:
    """Tools beside those of the environment."""

    functions: list[str]


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run as its file describes it, checked as far as that goes without torch."""

    path: Path
    model: ModelSection
    environments: dict[str | None, EnvironmentSection]  # one with the key None, or several by name
    data: DataSection | None
    rewards: RewardsSection | None
    tools: ToolsSection | None
    train: dict[str, Any]  # fields of GRPOConfig, checked by `run_build.grpo_config`
    table: dict[str, Any]  # the whole, overrides included

    def find(self, name: str) -> Path:
        """A path of the file: beside it, else from the current folder."""
        beside = self.path.parent / name
        return beside if beside.exists() else Path(name)


def read_run_file(path: str | Path, overrides: Iterable[str] = ()) -> RunFile:
    """The run that a file describes.

    Args:
        path: A .toml, .yaml or .yml file.
        overrides: Words such as "train.learning_rate=1e-5", which win over the file.

    Raises:
        ConfigurationError: No such file, a syntax error (with its line), another version, an unknown key (with the
            closest known one), or a value of the wrong type.
    """
    path = Path(path)
    table = _read(path)
    for word in overrides:
        _override(table, word)
    try:
        return _run(path, table)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _run(path: Path, table: dict[str, Any]) -> RunFile:
    _check_version(table)
    sections: dict[str, Any] = {
        "model": ModelSection,
        "environment": EnvironmentSection,
        "data": DataSection,
        "rewards": RewardsSection,
        "tools": ToolsSection,
        "train": None,
    }
    check_keys(table, ["version", *sections], "", {})
    elsewhere = {key: name for name, cls in sections.items() if cls is not None for key in cls.__dataclass_fields__}
    read = {
        name: read_section(cls, table[name], name, elsewhere)
        for name, cls in sections.items()
        if name in table and name not in ("environment", "train")
    }
    if "model" not in read:
        raise ConfigurationError("There is no [model]: give its name, or tiny = true.")
    model: ModelSection = read["model"]
    if (model.name is None) != model.tiny:
        raise ConfigurationError("[model] needs either a name or tiny = true.")
    given = [
        key for key in ("tokenizer", "dtype", "revision", "gguf_file", "warm_up") if getattr(model, key) is not None
    ]
    if model.tiny and given:
        raise ConfigurationError(
            f"[model] {given[0]} does nothing with tiny = true, whose policy is made and warmed up here. Leave it out."
        )
    environments = _environments(table.get("environment"))
    if not environments and "data" not in read:
        raise ConfigurationError("There is nothing to play: give an [environment], [data], or both.")
    if model.tiny and not environments:
        raise ConfigurationError("[model] tiny = true is made for an environment: give an [environment].")
    train = table.get("train", {})
    if not isinstance(train, dict):
        raise ConfigurationError("'train' must be a table.")
    return RunFile(
        path, model, environments, read.get("data"), read.get("rewards"), read.get("tools"), dict(train), table
    )  # fmt: skip


def _check_version(table: Mapping[str, Any]) -> None:
    if "version" not in table:
        raise ConfigurationError(f"Say which version of run files this is: version = {VERSION} at the top.")
    if table["version"] != VERSION or isinstance(table["version"], bool):
        raise ConfigurationError(
            f"This file is written for version {table['version']!r} of run files; this agentrl reads version "
            f"{VERSION}. Install the agentrl that it was written for, or change it to version {VERSION}."
        )


def _environments(table: Any) -> dict[str | None, EnvironmentSection]:
    """One section, or a table of several by name."""
    if table is None:
        return {}
    if isinstance(table, str):
        return {None: EnvironmentSection(table)}
    if not isinstance(table, dict) or not table:
        raise ConfigurationError("'environment' must be an id, a table with an id, or a table of several by name.")
    if "id" in table or not all(isinstance(value, (dict, str)) for value in table.values()):
        return {None: read_section(EnvironmentSection, table, "environment")}
    if "kwargs" in table:
        raise ConfigurationError("'environment' lacks the key 'id'.")
    several: dict[str | None, EnvironmentSection] = {}
    for name, one in table.items():
        where = f"environment.{name}"
        several[name] = read_section(EnvironmentSection, {"id": one} if isinstance(one, str) else one, where)
        if several[name].share < 1:
            raise ConfigurationError(f"'{where}.share' must be at least 1.")
    return several


# --- files -----------------------------------------------------------------------------
def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() not in (".toml", ".yaml", ".yml"):
        raise ConfigurationError(f"'{path}' is no run file: its name must end in .toml, .yaml or .yml.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file '{path}'.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"'{path}' is not UTF-8 text (byte {error.start}).") from None
    if path.suffix.lower() != ".toml":
        from agentrl.train.run_yaml import read_yaml

        return read_yaml(text, str(path))
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"'{path}' is not TOML: {error}.") from None


def _override(table: dict[str, Any], word: str) -> None:
    """The value that "key.sub=value" names is set in the table."""
    name, sign, text = word.partition("=")
    keys = name.strip().split(".")
    if not sign or not all(keys):
        raise ConfigurationError(f"The override '{word}' must look like section.key=value.")
    place = table
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"The override '{word}' goes into '{key}', which is not a table.")
        place = inner
    place[keys[-1]] = read_value(text.strip())
