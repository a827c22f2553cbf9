"""Several environments in one run: what belongs to each of them, and whose turn it is."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.types import Deadlines

_STAGES = tuple(stage.name for stage in dataclasses.fields(Deadlines))


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """One environment with settings of its own; what is left out is as in the rest of the run.

    Goes wherever an `environment_factory` does, alone or as a value of the dict.

    Args:
        factory: A class, a function that builds an environment, or a registered id.
        weight: Share of the tasks relative to the other environments' weights (1 where left out), in runs without a
            dataset. With one, its rows say how many there are.
        max_turns: Turns whose tool calls are run.
        max_completion_length: Tokens of a completion. The smaller of this and the run's counts.
        max_concurrent: Episodes of this environment at a time; a server or a licence may not take more.
        max_failures_in_row: Failed rollouts of this environment in a row that stop the run.
        deadlines: Seconds by stage, those of `Deadlines`: ``{"tool_s": 5.0}``; None is no limit.

    Raises:
        ConfigurationError: A number out of range, or a stage that there is not.

    >>> EnvironmentSpec("agentrl/Hunt-v0", weight=2, deadlines={"tool_s": 5.0}).all_deadlines(Deadlines()).tool_s
    5.0
    """

    factory: Any
    _: KW_ONLY
    weight: float | None = None
    max_turns: int | None = None
    max_completion_length: int | None = None
    max_concurrent: int | None = None
    max_failures_in_row: int | None = None
    deadlines: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.factory, EnvironmentSpec | Mapping) or self.factory is None:
            raise ConfigurationError(f"EnvironmentSpec is of one environment, not of {type(self.factory).__name__}.")
        if self.weight is not None and not _positive(self.weight):
            raise ConfigurationError(f"weight must be a number above 0, not {self.weight!r:.80}.")
        counts = {"max_turns": 0, "max_completion_length": 1, "max_concurrent": 1, "max_failures_in_row": 1}
        for name, least in counts.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigurationError(f"{name} must be a whole number from {least} on, not {value!r:.80}.")
        if not isinstance(self.deadlines, Mapping):
            raise ConfigurationError('deadlines is a dict of seconds by stage, such as {"tool_s": 5.0}.')
        for stage, seconds in self.deadlines.items():
            if stage not in _STAGES:
                raise ConfigurationError(f"There is no deadline {stage!r:.80}; there are: {', '.join(_STAGES)}.")
            if seconds is not None and not _positive(seconds):
                raise ConfigurationError(f"deadlines[{stage!r}] must be above 0, or None, not {seconds!r:.80}.")
        object.__setattr__(self, "deadlines", MappingProxyType(dict(self.deadlines)))

    def all_deadlines(self, of_the_run: Deadlines) -> Deadlines:
        """The run's deadlines, with this environment's over them."""
        return dataclasses.replace(of_the_run, **self.deadlines)


def _positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def specs_of(environment_factory: Any) -> dict[str | None, EnvironmentSpec]:
    """The environments of a run by name; the key None is the only one of a run without names.

    Raises:
        ConfigurationError: An empty dict, or a name that is no text.

    >>> list(specs_of({"easy": "agentrl/Hunt-v0"})), list(specs_of("agentrl/Hunt-v0")), specs_of(None)
    (['easy'], [None], {})
    """
    if environment_factory is None:
        return {}
    if not isinstance(environment_factory, Mapping):
        return {None: _spec(environment_factory)}
    if not environment_factory:
        raise ConfigurationError("environment_factory is an empty dict; it must map names to environment classes.")
    for name in environment_factory:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"environment_factory has the name {name!r:.80}; a name must be text.")
    return {name: _spec(one) for name, one in environment_factory.items()}


def _spec(factory: Any) -> EnvironmentSpec:
    return factory if isinstance(factory, EnvironmentSpec) else EnvironmentSpec(factory)


def weights_of(environment_factory: Any) -> dict[str, float | None] | None:
    """The weight of each environment by name, None where it was not given; None for a run without names."""
    if not isinstance(environment_factory, Mapping):
        return None
    return {str(name): one.weight for name, one in specs_of(environment_factory).items()}


def check_weights(environment_factory: Any, dataset: Any) -> None:
    """Weights are given only where they say something: without a dataset.

    Raises:
        ConfigurationError: Both are there.
    """
    weighted = [name for name, weight in (weights_of(environment_factory) or {}).items() if weight is not None]
    if weighted and dataset is not None:
        raise ConfigurationError(
            f"The environment '{weighted[0]}' has a weight, and there is a train_dataset, whose rows say how many "
            "tasks each environment has. Leave out one of the two."
        )


class Mixture:
    """Environments in turns, so that every stretch of tasks has each in proportion to its weight.

    >>> turns = Mixture({"hunt": 2, "courier": 1})
    >>> [turns.at(i) for i in range(6)], turns.shares()["courier"]
    (['hunt', 'courier', 'hunt', 'hunt', 'courier', 'hunt'], 0.3333333333333333)
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        self._counts = dict.fromkeys(weights, 0)
        self._order: list[str] = []

    def shares(self) -> dict[str, float]:
        """What each environment's share of the tasks is."""
        return dict(self._shares)

    def at(self, position: int) -> str:
        """The environment of the task at this position: the one that lags most behind its share, the first of equals.

        Found anew from the first task on, so that a resumed run goes on with the same order.
        """
        while len(self._order) <= position:
            due = len(self._order) + 1
            name = max(self._shares, key=lambda one: round(self._shares[one] * due - self._counts[one], 9))
            self._counts[name] += 1
            self._order.append(name)
        return self._order[position]
