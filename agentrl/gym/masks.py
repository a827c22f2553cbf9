"""Which actions an environment allows now: from `info`, from the observation, or from its `action_masks()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl.errors import ConfigurationError, EnvironmentFailed, ToolArgumentError

KEY = "action_mask"
_SAID = 64  # valid actions that are listed, at most


def find_mask(env: gymnasium.Env[Any, Any], observation: Any, info: Any) -> Any:
    """The environment's mask as it gives it, None where it gives none.

    `info["action_mask"]` comes first, then the key of a Dict observation, then `env.action_masks()`.
    """
    if isinstance(info, dict) and info.get(KEY) is not None:
        return info[KEY]
    if isinstance(observation, dict) and observation.get(KEY) is not None:
        return observation[KEY]
    try:
        method: Callable[[], Any] = env.get_wrapper_attr("action_masks")
    except AttributeError:
        return None
    return method()


@dataclass(frozen=True, slots=True)
class Valid:
    """The actions of a Discrete space that are possible now.

    >>> valid = Valid.of(np.array([1, 0, 1]), spaces.Discrete(3), ["left", "stay", "right"])
    >>> valid.said
    'left, right'
    >>> valid.check(1)
    Traceback (most recent call last):
    ...
    agentrl.errors.ToolArgumentError: No step was taken: 'stay' is not possible now. Possible actions: left, right.
    """

    start: int
    allowed: tuple[bool, ...]
    words: tuple[str, ...]  # what the model writes for each

    @classmethod
    def of(cls, mask: Any, space: spaces.Discrete, names: Sequence[str] | None) -> Valid:
        """The mask, read.

        Raises:
            EnvironmentFailed: it has another length than the space, or forbids everything.
        """
        flat, size, start = np.asarray(mask).reshape(-1).astype(bool), int(space.n), int(space.start)
        if len(flat) != size or not flat.any():
            why = "allows no action" if len(flat) == size else f"has {len(flat)} entries for {size} actions"
            raise EnvironmentFailed(f"The environment's action mask {why}.", stage="tool")
        words = tuple(names) if names is not None else tuple(str(start + index) for index in range(size))
        return cls(start, tuple(flat.tolist()), words)

    def allows(self, value: Any) -> bool:
        """True for a value of the space that is possible now."""
        return self.allowed[int(value) - self.start]

    @property
    def said(self) -> str:
        """What the model may write."""
        words = [word for word, allowed in zip(self.words, self.allowed, strict=True) if allowed]
        more = f", ... ({len(words)} in all)" if len(words) > _SAID else ""
        return ", ".join(words[:_SAID]) + more

    def check(self, value: Any) -> None:
        """Nothing happens where the value is possible.

        Raises:
            ToolArgumentError: it is not; written for the model.
        """
        if not self.allows(value):
            word = self.words[int(value) - self.start]
            raise ToolArgumentError(f"No step was taken: '{word}' is not possible now. Possible actions: {self.said}.")


def check_can_mask(space: spaces.Space[Any]) -> None:
    """A mask can say which actions of the space are possible.

    Raises:
        ConfigurationError: the space is not Discrete.
    """
    if not isinstance(space, spaces.Discrete):
        raise ConfigurationError(f"action_mask=True needs a Discrete action space, and this one is {space}.")
