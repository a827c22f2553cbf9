"""Packages that register environments in Gymnasium when they are imported, and what keeps them quiet."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from agentrl.errors import MissingDependency


@dataclass(frozen=True, slots=True)
class Package:
    """Where ids that begin with `prefix` come from."""

    prefix: str
    module: str
    package: str  # its name on PyPI
    extra: str


_PACKAGES = (
    Package("ALE/", "ale_py", "ale-py", "atari"),
    Package("MiniGrid-", "minigrid", "minigrid", "minigrid"),
    Package("BabyAI-", "minigrid", "minigrid", "minigrid"),
)


def import_package_of(id: str) -> bool:
    """The package that registers ids like this one is imported; False where none is known.

    Raises:
        MissingDependency: it is not installed.

    >>> import_package_of("CartPole-v1")
    False
    """
    for known in _PACKAGES:
        if id.startswith(known.prefix):
            try:
                importlib.import_module(known.module)
            except ModuleNotFoundError as error:
                if error.name != known.module:
                    raise
                raise MissingDependency(known.package, known.extra, f"'{id}'") from error
            return True
    return False


def keep_quiet() -> None:
    """Packages that are in use do not print: no banner for each console, no line for each level that BabyAI rejects."""
    ale = sys.modules.get("ale_py")
    if ale is not None:
        ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
    levels = sys.modules.get("minigrid.envs.babyai.core.roomgrid_level")
    if levels is not None:
        vars(levels)["print"] = _no_print  # it has no switch, and redirecting stdout would silence other threads


def _no_print(*args: object, **kwargs: object) -> None:
    """Nothing is printed."""
