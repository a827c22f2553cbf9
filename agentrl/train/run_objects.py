"""What run files and the command line name in words: environments, functions, rows. Nothing here needs torch."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl import rewards as ready_rewards
from agentrl.errors import AgentRLError, ConfigurationError
from agentrl.registry import ConversationalEntry, gymnasium_spec, load, resolve

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def find_modules_in(*folders: Path) -> None:
    """Modules in these folders can be imported, after those that are installed."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the closest of the known names, or nothing.

    >>> did_you_mean("learning_rat", ["learning_rate", "seed"])
    " Did you mean 'learning_rate'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


# --- environments ----------------------------------------------------------------------
def environment_factory(spec: str, kwargs: Mapping[str, Any] | None = None) -> Callable[..., object]:
    """What builds environments of this id or "module:Class", with these keyword arguments.

    Raises:
        ConfigurationError: No such environment (close ones are named), a module that cannot be imported, or an
            argument that the environment does not take.
    """
    if spec.endswith(".py") or ".py:" in spec:
        raise ConfigurationError(
            f"'{spec}' is a file; name it as a module: '{_module_of(spec)}:ClassName', in the folder that holds it."
        )
    factory = resolve(spec)
    if not kwargs:
        return factory
    _check_arguments(spec, _target_of(spec, factory), kwargs)
    return functools.partial(factory, **kwargs)


def _module_of(spec: str) -> str:
    return Path(spec.partition(":")[0]).stem


def _target_of(spec: str, factory: Any) -> Any:
    """The class or function that the arguments are for."""
    if getattr(factory, "func", None) is None:
        return factory
    entry = gymnasium_spec(spec).entry_point
    return load(entry.entry_point) if isinstance(entry, ConversationalEntry) else factory


def _check_arguments(spec: str, target: Any, kwargs: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # builtins and proxies
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    for name in kwargs:
        if name not in known:
            takes = f"It takes: {', '.join(known)}." if known else "It takes none."
            raise ConfigurationError(f"'{spec}' takes no argument '{name}'.{did_you_mean(name, known)} {takes}")


# --- functions -------------------------------------------------------------------------
def named_function(spec: str, what: str) -> Callable[..., Any]:
    """The function that "module:function" names; `what` it is for is in the error."""
    module, colon, path = spec.partition(":")
    if not colon or not module or not path:
        raise ConfigurationError(f"The {what} '{spec}' must look like 'module:function'.")
    return load(spec)


def reward_function(spec: str, kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A reward function by its name in `agentrl.rewards` or as "module:function".

    With `kwargs`, the name is of a function that makes it (`get_soft_overlong_punishment`, say).
    """
    if ":" in spec:
        found = named_function(spec, "reward function")
    elif spec in ready_rewards.__all__:
        found = getattr(ready_rewards, spec)
    else:
        known = ", ".join(ready_rewards.__all__)
        raise ConfigurationError(
            f"There is no reward function '{spec}'.{did_you_mean(spec, ready_rewards.__all__)} "
            f"Ready ones: {known}; your own: 'module:function'."
        )
    makes_one = spec.rpartition(":")[2].startswith("get_")
    if not kwargs:
        if makes_one and ":" not in spec:
            names = ", ".join(inspect.signature(found).parameters)
            raise ConfigurationError(f"'{spec}' makes a reward function and needs kwargs: {names}.")
        return found
    if not makes_one:
        raise ConfigurationError(f"'{spec}' is a reward function and takes no kwargs; only functions named get_* do.")
    _check_arguments(spec, found, kwargs)
    return found(**kwargs)


# --- rows ------------------------------------------------------------------------------
def load_rows(path: Path, *, split: str = "train", columns: Mapping[str, str] | None = None, limit: int | None = None):
    """The rows of a file, read by the package `datasets`.

    Args:
        path: A json, jsonl, csv, tsv or parquet file, or a folder written by `Dataset.save_to_disk`.
        split: Which part, where the data has several.
        columns: New names of columns: what the file calls it -> what rewards and `reset` call it.
        limit: Only so many rows from the start.

    Raises:
        ConfigurationError: No such file or column, a format that is not known, or content that cannot be read.
    """
    if not path.exists():
        raise ConfigurationError(f"There is no data file '{path}'.")
    import datasets

    datasets.utils.logging.disable_progress_bar()
    try:
        if path.is_dir():
            data = datasets.load_from_disk(str(path))
            data = data[split] if isinstance(data, Mapping) else data
        else:
            kind = FORMATS.get(path.suffix.lower())
            if kind is None:
                raise ConfigurationError(f"'{path}' has no known format; these are: {', '.join(FORMATS)}.")
            extra: dict[str, Any] = {"sep": "\t"} if path.suffix == ".tsv" else {}
            data = datasets.load_dataset(kind, data_files={split: str(path)}, split=split, **extra)
    except AgentRLError:
        raise
    except Exception as error:  # pyarrow, pandas and datasets have errors of their own
        cause = error.__cause__ or error
        raise ConfigurationError(f"'{path}' cannot be read: {type(cause).__name__}: {str(cause)[:200]}.") from error
    names: list[str] = list(data.column_names)  # type: ignore[arg-type]
    for old, new in (columns or {}).items():
        if old not in names:
            raise ConfigurationError(
                f"'{path}' has no column '{old}'.{did_you_mean(old, names)} It has: {', '.join(names)}."
            )
        data = data.rename_column(old, new)
    if limit is not None and limit < len(data):
        data = data.select(range(limit))
    return data


# --- values ----------------------------------------------------------------------------
def read_value(text: str) -> Any:
    """A value from the command line: TOML where it is TOML, else the text itself.

    >>> [read_value(text) for text in ("1e-6", "true", "[1, 2]", "'3'", "grpo", "{r = 8}")]
    [1e-06, True, [1, 2], '3', 'grpo', {'r': 8}]
    """
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def read_assignments(words: Iterable[str], what: str) -> dict[str, Any]:
    """Words of the form name=value as a dict.

    >>> read_assignments(["hops=2", "name=cave"], "argument")
    {'hops': 2, 'name': 'cave'}
    """
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise ConfigurationError(f"The {what} '{word}' must look like name=value.")
        found[name] = read_value(value)
    return found
