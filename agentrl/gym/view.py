"""What a model sees of a Gymnasium environment: its observation, what it renders, and what is known beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl.errors import ConfigurationError
from agentrl.gym import known
from agentrl.gym.build import MODES, Observation, is_wrapped_by
from agentrl.gym.observations import check_readable, is_picture, parts_of, picture

_MOST_PIXELS = 4096  # of a picture's longer side
_SYMBOLIC = frozenset({"FullyObsWrapper", "ViewSizeWrapper"})  # MiniGrid's: another part of the grid, encoded alike


@dataclass(frozen=True, slots=True)
class View:
    """How observations are shown. Holds no environment, so that a closed one is free."""

    observed: bool  # the observation is shown
    rendered: bool  # what the environment renders as a picture is shown
    pictures: bool  # observations that are pictures are shown as such
    size: int | None  # of a picture's longer side
    labels: tuple[str, ...]
    state: Callable[[Any, Any], str] | None
    beside: Callable[[Any], str] | None

    def parts(self, env: gymnasium.Env[Any, Any], observation: Any) -> list[Any]:
        """Lines of text and PIL images, in order."""
        parts: list[Any] = []
        if env.render_mode == "ansi":
            text: Any = env.render()
            parts.append(known.plain(text if isinstance(text, str) else str(text)))
        if self.observed and self.state is not None:
            parts.append(self.state(env.unwrapped, observation))
        elif self.observed:
            parts += parts_of(env.observation_space, observation, self.labels, pictures=self.pictures, size=self.size)
        if self.rendered:
            parts.append(picture(env.render(), self.size))
        beside = self.beside(env.unwrapped) if self.beside is not None else ""
        return [*parts, beside] if beside else parts


def check_settings(observation: Any, image_size: Any) -> None:
    """The settings are ones that there are.

    Raises:
        ConfigurationError: naming the one that is not.
    """
    if observation not in MODES:
        said = ", ".join(repr(mode) for mode in MODES[:-1])
        raise ConfigurationError(f"observation must be {said} or {MODES[-1]!r}, not {observation!r}.")
    whole = isinstance(image_size, int) and not isinstance(image_size, bool)
    if image_size is not None and not (whole and 1 <= image_size <= _MOST_PIXELS):
        raise ConfigurationError(
            f"image_size must be the pixels of a picture's longer side, from 1 to {_MOST_PIXELS}, not {image_size!r}."
        )


def view_of(
    env: gymnasium.Env[Any, Any], observation: Observation, names: Sequence[str] | None, image_size: int | None
) -> View:
    """How this environment is shown.

    Raises:
        ConfigurationError: it cannot be shown so, or the names do not fit.
    """
    space, inner = env.observation_space, env.unwrapped
    facts = known.known(inner)
    plain = space == inner.observation_space and not is_wrapped_by(env, gymnasium.ObservationWrapper)
    state = facts.state if plain or _is_symbolic(env) else None
    rendered = observation in ("image", "both") and not is_picture(space)
    observed = observation != "image" or not rendered
    if rendered and env.render_mode != "rgb_array":
        raise ConfigurationError(
            f"observation={observation!r} needs an environment that renders: build it with render_mode='rgb_array' "
            f"(it has {env.render_mode!r})."
        )
    if observed and state is None:
        check_readable(space, observation != "text")
    if names is not None:
        _check_names(space, names)
    beside = facts.beside if not observed or state is None else None
    labels = tuple(names) if names is not None else facts.numbers if plain else ()
    return View(observed, rendered, observation != "text", image_size, labels, state, beside)


def _check_names(space: spaces.Space[Any], names: Sequence[str]) -> None:
    size = len(space.spaces) if isinstance(space, spaces.Tuple) else (space.shape or (0,))[0]
    if len(names) != size or isinstance(names, str):
        raise ConfigurationError(f"observation_names must be {size} names for {space!s:.200}, not {names!r:.200}.")


def _is_symbolic(env: Any) -> bool:
    """True where only MiniGrid's wrappers that keep its encoding change the observation."""
    found = False
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.ObservationWrapper):
            if type(env).__module__ != "minigrid.wrappers" or type(env).__name__ not in _SYMBOLIC:
                return False
            found = True
        env = env.env
    return found
