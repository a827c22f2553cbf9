"""Environments by name, on Gymnasium's own registry.

`gymnasium.make` refuses entry points that do not build a `gymnasium.Env`, so `register` stores an entry that keeps
ours and `make` unwraps it. Gymnasium is imported when a name is first looked up, not before.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigurationError

_ID = re.compile(r"^[\w:.-]+/[\w:.-]+-v\d+$")

EnvironmentSpec = str | Callable[..., object]


@dataclass(frozen=True, slots=True)
class ConversationalEntry:
    """The entry point that Gymnasium's registry holds for an environment of ours."""

    id: str
    entry_point: EnvironmentSpec

    def build(self, **kwargs: Any) -> object:
        """A new conversational environment."""
        return load(self.entry_point)(**kwargs)

    def __call__(self, **kwargs: Any) -> Any:
        raise ConfigurationError(
            f"'{self.id}' is a conversational environment, which has no gymnasium.Env yet. "
            f"Build it with agentrl.make('{self.id}')."
        )


def register(id: str, entry_point: EnvironmentSpec, **kwargs: Any) -> None:
    """The environment can be built by its id, `namespace/Name-v0`.

    Args:
        id: As in Gymnasium, with a namespace and a version.
        entry_point: A class, a function that builds an environment, or "package.module:Name", imported when needed.
        **kwargs: Given to the entry point each time.
    """
    if not isinstance(id, str) or not _ID.match(id):
        raise ConfigurationError(f"The id {id!r} must look like 'namespace/Name-v0'.")
    if isinstance(entry_point, str):
        if not _is_path(entry_point):
            raise ConfigurationError(f"The entry point {entry_point!r} of '{id}' must look like 'package.module:Name'.")
    elif not callable(entry_point):
        raise ConfigurationError(f"The entry point of '{id}' must be a class or a function, not {entry_point!r:.80}.")
    gymnasium = _gymnasium()
    existing = gymnasium.registry.get(id)
    if existing is not None:
        old = existing.entry_point
        if isinstance(old, ConversationalEntry) and old.entry_point == entry_point and existing.kwargs == kwargs:
            return  # an import that ran twice
    gymnasium.register(
        id=id,
        entry_point=ConversationalEntry(id, entry_point),
        disable_env_checker=True,
        order_enforce=False,
        kwargs=kwargs,
    )


def make(id: str, **kwargs: Any) -> Any:
    """A new environment of this id; `kwargs` go over those it was registered with.

    An id that is not registered yet is looked for in the package `<namespace>_envs`.
    """
    return _factory(id)(**kwargs)


def resolve(spec: EnvironmentSpec | Any) -> Callable[..., object]:
    """A function that builds environments, from a class or function, a registered id, or "package.module:Name".

    Raises:
        ConfigurationError: nothing has that name (close ones are listed), or it is an instance.
    """
    if isinstance(spec, str):
        if _is_path(spec):
            return load(spec)
        return _factory(spec)
    if not isinstance(spec, type) and hasattr(type(spec), "reset"):
        name = type(spec).__name__
        raise ConfigurationError(
            f"Got an instance of {name} where a factory is expected. Pass the class {name} itself, or a function."
        )
    if not callable(spec):
        raise ConfigurationError(
            f"An environment is given as a class, a function, an id or 'package.module:Name', not {spec!r:.80}."
        )
    return spec


def load(entry_point: EnvironmentSpec) -> Callable[..., object]:
    """The object that "package.module:Name" names; callables as they are."""
    if not isinstance(entry_point, str):
        return entry_point
    module_name, _, path = entry_point.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module is there, something that it imports is not
        raise ConfigurationError(f"There is no module '{module_name}' (from '{entry_point}').") from error
    for part in path.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigurationError(f"'{module_name}' has no '{path}'.{_did_you_mean(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(f"'{entry_point}' is not a class or a function, but {found!r:.80}.")
    return found


def _is_path(text: str) -> bool:
    module, colon, name = text.partition(":")
    return (
        bool(colon)
        and all(p.isidentifier() for p in module.split("."))
        and all(p.isidentifier() for p in name.split("."))
    )


def _factory(id: str) -> Callable[..., object]:
    gymnasium = _gymnasium()
    if id not in gymnasium.registry:
        _import_namespace(id)
    spec = gymnasium.registry.get(id)
    ours = [name for name, known in gymnasium.registry.items() if isinstance(known.entry_point, ConversationalEntry)]
    if spec is None:
        listed = f" Registered: {', '.join(sorted(ours))}." if ours else ""
        raise ConfigurationError(f"No environment is registered as '{id}'.{_did_you_mean(id, ours)}{listed}")
    entry = spec.entry_point
    if not isinstance(entry, ConversationalEntry):
        raise ConfigurationError(
            f"'{id}' is a Gymnasium environment, not a conversational one. Build it with gymnasium.make."
        )
    return functools.partial(_build, entry, dict(spec.kwargs))


def _build(entry: ConversationalEntry, registered: Mapping[str, Any], **kwargs: Any) -> object:
    return entry.build(**{**registered, **kwargs})


def _import_namespace(id: str) -> None:
    """By convention the environments of a namespace live in the package `<namespace>_envs`, which registers them."""
    package = f"{id.partition('/')[0]}_envs"
    if "/" not in id or not package.isidentifier():
        return
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise


def _did_you_mean(name: str, known: list[str]) -> str:
    by_fold = {candidate.lower(): candidate for candidate in known}
    by_tail = {candidate.lower().rpartition("/")[2]: candidate for candidate in known}
    for table in (by_fold, by_tail):
        close = difflib.get_close_matches(
            name.lower().rpartition("/")[2] if table is by_tail else name.lower(), table, n=1
        )
        if close:
            return f" Did you mean '{table[close[0]]}'?"
    return ""


def _gymnasium() -> Any:
    import gymnasium  # takes a while, and `agentrl --help` does not need it

    return gymnasium
