"""From an id, a spec, a factory or an object to a Gymnasium environment that renders what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from agentrl.errors import ConfigurationError
from agentrl.gym.observations import is_picture
from agentrl.gym.packages import keep_quiet
from agentrl.registry import gymnasium_spec

Observation = Literal["auto", "text", "image", "both"]
MODES: tuple[str, ...] = get_args(Observation)


def build(
    source: Any,
    observation: Observation,
    max_episode_steps: int | None,
    wrappers: Sequence[Callable[[Any], Any]],
    make_kwargs: dict[str, Any],
) -> gymnasium.Env[Any, Any]:
    """A Gymnasium environment, its wrappers around it.

    One that is made from an id is built a second time where it turns out that it should render.

    Raises:
        ConfigurationError: naming the id or the factory, and why it cannot be built.
    """
    if isinstance(source, gymnasium.Env):
        if make_kwargs:
            raise ConfigurationError(
                f"'{next(iter(make_kwargs))}' cannot be given to an environment that is built already. "
                "Pass its id or its class."
            )
        return _wrapped(source, source, max_episode_steps, wrappers)
    if isinstance(source, (str, EnvSpec)):
        spec = gymnasium_spec(source) if isinstance(source, str) else source
        limit = {"max_episode_steps": max_episode_steps} if max_episode_steps is not None else {}
        # Gymnasium's checker warns on the terminal of what `check_environment` reports
        kwargs = {"disable_env_checker": True, **limit, **make_kwargs}
        keep_quiet()

        def make(**more: Any) -> gymnasium.Env[Any, Any]:
            made = _called(lambda: gymnasium.make(spec, **kwargs, **more), f"'{spec.id}'")
            keep_quiet()  # of what it has imported
            return _wrapped(made, source, None, wrappers)

        return _rendering(make, observation, "render_mode" in make_kwargs)
    if not callable(source):
        raise ConfigurationError(
            "GymnasiumEnvironment takes an id, a spec, a class or function that builds a gymnasium.Env, or such an "
            f"object, not {source!r:.80}."
        )
    name = getattr(source, "__qualname__", repr(source))
    return _wrapped(_called(lambda: source(**make_kwargs), name), source, max_episode_steps, wrappers)


def _rendering(
    make: Callable[..., gymnasium.Env[Any, Any]], observation: Observation, chosen: bool
) -> gymnasium.Env[Any, Any]:
    env = make()
    space, mode = env.observation_space, None
    if observation in ("image", "both") and not is_picture(space):
        mode = "rgb_array"
    elif observation in ("auto", "text") and isinstance(space, spaces.Discrete):
        mode = "ansi"
    if chosen or mode is None or mode == env.render_mode or mode not in env.metadata.get("render_modes", ()):
        return env
    env.close()
    return make(render_mode=mode)


def _called(make: Callable[[], Any], name: str) -> gymnasium.Env[Any, Any]:
    try:
        env = make()
    except Exception as error:  # a missing package, a misspelled argument, a bug
        raise ConfigurationError(f"Building {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigurationError(f"{name} built {env!r:.80}, which is not a gymnasium.Env.")
    return env


def _wrapped(
    env: Any, source: Any, max_episode_steps: int | None, wrappers: Sequence[Callable[[Any], Any]]
) -> gymnasium.Env[Any, Any]:
    try:
        if max_episode_steps is not None:
            env = gymnasium.wrappers.TimeLimit(env, max_episode_steps)
        for wrapper in wrappers:
            env = wrapper(env)
    except Exception as error:
        raise ConfigurationError(f"Wrapping {env} failed: {type(error).__name__}: {error}") from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigurationError(f"A wrapper of {source} gave {env!r:.80}, which is not a gymnasium.Env.")
    return env


def is_wrapped_by(env: Any, kind: type) -> bool:
    """True where a wrapper of this kind is around the environment."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, kind):
            return True
        env = env.env
    return False
