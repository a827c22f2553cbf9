"""Environments by name, on Gymnasium's own registry.

`gymnasium.make` refuses entry points that do not build a `gymnasium.Env`, so `register` stores an entry that builds the
adapter `agentrl.gym.AgentEnv`, and `make` unwraps it. Other ids of Gymnasium become conversational environments by
`agentrl.gym.GymnasiumEnvironment`. Gymnasium is imported when a name is first looked up, not before.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import AgentRLError, ConfigurationError

_ID = re.compile(r"^[\w:-]+/[\w:.-]+-v\d+$")
_PLUGINS = "agentrl.environments"  # entry point group: a namespace, and the module or function that registers its ids

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
        """The environment as a `gymnasium.Env`, for `gymnasium.make`.

        Options of the adapter (`max_turns`, `rows`, ...) are told from the environment's own arguments by name; where
        both have one, it is the environment's.
        """
        from agentrl.gym import AgentEnv

        factory = load(self.entry_point)
        own = _named_arguments(factory)
        options = {name for name in _named_arguments(AgentEnv) if name != "environment" and name not in own}
        for_adapter = {name: value for name, value in kwargs.items() if name in options}
        for_environment = {name: value for name, value in kwargs.items() if name not in options}
        return AgentEnv(functools.partial(factory, **for_environment), **for_adapter)


def _named_arguments(function: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def register(id: str, entry_point: EnvironmentSpec, **kwargs: Any) -> None:
    """The environment can be built by its id, `namespace/Name-v0`: by `make`, and by `gymnasium.make` as a Gym one.

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
        nondeterministic=not isinstance(entry_point, str) and not takes_seed(entry_point),
        disable_env_checker=True,
        order_enforce=False,
        kwargs=kwargs,
    )


def takes_seed(environment: Any) -> bool:
    """True where `reset` takes a seed, and where that cannot be known from a function that builds the environment.

    >>> class Dice:
    ...     def reset(self): ...
    >>> takes_seed(Dice), takes_seed(lambda: Dice())
    (False, True)
    """
    while isinstance(environment, functools.partial):
        environment = environment.func
    reset = getattr(environment, "reset", None)
    if reset is None:
        return True
    parameters = inspect.signature(reset).parameters.values()
    return any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)


def make(id: str, **kwargs: Any) -> Any:
    """A new conversational environment of this id; `kwargs` go over those it was registered with.

    An id of Gymnasium's own ("CartPole-v1") gives a `GymnasiumEnvironment` around it. An id that is not registered yet
    is looked for in installed packages that announce its namespace (entry points of the group
    "agentrl.environments"), then in the package `<namespace>_envs`; "package:namespace/Name-v0" imports the package
    first.
    """
    return _factory(id)(**kwargs)


def resolve(spec: EnvironmentSpec | Any) -> Callable[..., object]:
    """A function that builds environments, from a class or function, a registered id, or "package.module:Name".

    Ids and classes of Gymnasium are made conversational by `GymnasiumEnvironment`.

    Raises:
        ConfigurationError: nothing has that name (close ones are listed), or it is an instance.
    """
    if isinstance(spec, str):
        if _is_path(spec):
            return load(spec)
        return _factory(spec)
    gymnasium = sys.modules.get("gymnasium")  # where it is not imported, nothing can be one of its environments
    if gymnasium is not None and isinstance(spec, gymnasium.Env):
        raise ConfigurationError(
            f"Got the Gymnasium object {spec} where a factory is expected. Pass its id, its class, or a function that "
            "returns agentrl.gym.GymnasiumEnvironment(...) around a new one."
        )
    if gymnasium is not None and isinstance(spec, type) and issubclass(spec, gymnasium.Env):
        from agentrl.gym import GymnasiumEnvironment

        return functools.partial(GymnasiumEnvironment, spec)
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
    found: Any = _imported(module_name, entry_point)
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


def gymnasium_spec(id: str) -> Any:
    """What Gymnasium's registry holds for an id, after looking where it could come from.

    Raises:
        ConfigurationError: nothing has that name (a close one is proposed), or its package cannot be imported.
        MissingDependency: the package of MiniGrid's or Atari's ids is not installed.
    """
    registry = _gymnasium().registry
    module, colon, name = id.rpartition(":")
    if colon and all(part.isidentifier() for part in module.split(".")):
        _imported(module, id)
    else:
        name = id
    if name not in registry:
        from agentrl.gym.packages import import_package_of

        if not import_package_of(name):
            _import_namespace(name.partition("/")[0] if "/" in name else "")
    spec = registry.get(name)
    if spec is None:
        ours = sorted(one for one, known in registry.items() if isinstance(known.entry_point, ConversationalEntry))
        listed = ", ".join(ours[:6])
        if ours:
            listed = f" Registered: {listed}, ... (agentrl env list)." if len(ours) > 6 else f" Registered: {listed}."
        proposal = _did_you_mean(name, [*ours, *sorted(set(registry) - set(ours), reverse=True)])
        raise ConfigurationError(f"No environment is registered as '{id}'.{proposal}{listed}")
    return spec


def _factory(id: str) -> Callable[..., object]:
    spec = gymnasium_spec(id)
    entry = spec.entry_point
    if isinstance(entry, ConversationalEntry):
        return functools.partial(_build, entry, dict(spec.kwargs))
    from agentrl.gym import GymnasiumEnvironment

    return functools.partial(GymnasiumEnvironment, spec.id)


def _build(entry: ConversationalEntry, registered: Mapping[str, Any], **kwargs: Any) -> object:
    return entry.build(**{**registered, **kwargs})


def _imported(module_name: str, wanted_for: str) -> Any:
    """The module; a `ConfigurationError` where it is not there or does not import, with the cause chained."""
    try:
        return importlib.import_module(module_name)
    except AgentRLError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(missing + ".")):
            raise ConfigurationError(f"There is no module '{module_name}' (from '{wanted_for}').") from error
        raise ConfigurationError(
            f"Importing '{module_name}' (from '{wanted_for}') failed{_place(error)}: {type(error).__name__}: {error}"
        ) from error


def _place(error: Exception) -> str:
    """Where in somebody's file it happened, as far as that is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    outside = [frame for frame in frames if frame.filename != __file__]
    return f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def _import_namespace(namespace: str) -> None:
    """What an installed package announces for the namespace is registered, else what `<namespace>_envs` registers."""
    if not namespace:
        return
    announced = importlib.metadata.entry_points(group=_PLUGINS, name=namespace)
    for plugin in announced:
        _imported(plugin.module, f"{namespace}/...")
        if plugin.attr:
            load(f"{plugin.module}:{plugin.attr}")()
    package = f"{namespace}_envs"
    if announced or not package.isidentifier():
        return
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            _imported(package, f"{namespace}/...")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The closest name, with or without its namespace; of equally close ones the first."""
    name, best, score = name.lower(), None, 0.6
    tail = name.rpartition("/")[2]
    for candidate in known:
        folded = candidate.lower()
        pairs = ((name, folded), (tail, folded.rpartition("/")[2]))
        # the whole name counts a little more, or 'phys2d/CartPole-v1' would be as close as 'CartPole-v1'
        close = max(difflib.SequenceMatcher(None, *pair).ratio() - 0.01 * i for i, pair in enumerate(pairs))
        if close > score:
            best, score = candidate, close
    return f" Did you mean '{best}'?" if best else ""


def _gymnasium() -> Any:
    import gymnasium  # takes a while, and `agentrl --help` does not need it

    return gymnasium
