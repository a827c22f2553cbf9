"""A Gymnasium environment as one of ours: its action is a tool, its observation text or an image."""

from __future__ import annotations

import functools
import inspect
import json
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
from gymnasium import spaces

from agentrl.environment import Environment
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.gym import known
from agentrl.gym.actions import action_of, wants_names
from agentrl.gym.build import Observation, build
from agentrl.gym.observations import check_readable, content_of, is_picture, parts_of, picture
from agentrl.types import Content

Reward = Literal["return", "last"] | Callable[[list[float]], float]

_owners: weakref.WeakKeyDictionary[gymnasium.Env[Any, Any], weakref.ref[Any]] = weakref.WeakKeyDictionary()


class GymnasiumEnvironment(Environment):
    """Any Gymnasium environment, played by calling one tool with the action.

    The tool's schema comes from the action space, `reset` passes the seed on and the row's columns as `options`, the
    reward is the return, and the episode ends when Gymnasium terminates or truncates it. Made from an id, a factory or
    an object; where a factory is expected, pass `functools.partial(GymnasiumEnvironment, ...)` or just the id.

    Args:
        env: An id, a spec, a class or function that builds a `gymnasium.Env`, or such an object, which is then owned.
        action_names: Names of a Discrete action space's values, instead of known ones or action_0, action_1, ...
        action_tool: Name of the tool.
        describe: What the first message says about the environment, instead of a known or documented line.
        observation: "text"; "image": what it renders, or its observation where that is a picture; "auto": pictures as
            images and everything else as text. Text of a Discrete observation includes the "ansi" rendering of
            environments built here that have one (pass render_mode=None to leave it out).
        observation_names: Labels for the numbers of a one-dimensional Box, or the parts of a Tuple.
        reward: "return": the sum of the rewards; "last": the last one; or a function of the list of rewards.
        max_episode_steps: Steps after which the episode is cut off, instead of the registered number.
        wrappers: Put around the environment, innermost first.
        run_inline: Whether steps run without a thread; None: only those of toy_text and classic_control.
        **make_kwargs: For `gymnasium.make`, or the factory.

    Raises:
        ConfigurationError: it cannot be built, or a space has no text form.

    Example:
        >>> env = GymnasiumEnvironment("FrozenLake-v1", is_slippery=False)
        >>> print(env.reset(seed=0))
        FrozenLake: Walk over the ice F from S to G, and not into a hole H. [ ] marks where you are.
        Call act with an action, one of: left, down, right, up.
        [S]FFF
        FHFH
        FFFH
        HFFG
        You are at row 0, column 0 (observation 0).
        >>> print(env.act("right"))
          (Right)
        S[F]FF
        FHFH
        FFFH
        HFFG
        You are at row 0, column 1 (observation 1).
        >>> env.close()
    """

    def __init__(
        self,
        env: Any,
        *,
        action_names: Sequence[str] | None = None,
        action_tool: str = "act",
        describe: str | None = None,
        observation: Observation = "auto",
        observation_names: Sequence[str] | None = None,
        reward: Reward = "return",
        max_episode_steps: int | None = None,
        wrappers: Sequence[Callable[[Any], Any]] = (),
        run_inline: bool | None = None,
        **make_kwargs: Any,
    ) -> None:
        if observation not in ("auto", "text", "image"):
            raise ConfigurationError(f"observation must be 'auto', 'text' or 'image', not {observation!r}.")
        if reward not in ("return", "last") and not callable(reward):
            raise ConfigurationError(f"reward must be 'return', 'last' or a function of the rewards, not {reward!r}.")
        if not isinstance(action_tool, str) or not action_tool.isidentifier() or hasattr(type(self), action_tool):
            raise ConfigurationError(f"action_tool must be a name that is not taken yet, not {action_tool!r}.")
        built = build(env, observation, max_episode_steps, wrappers, make_kwargs)
        self._own(built)
        self._env: gymnasium.Env[Any, Any] = built
        try:
            self._observation = observation
            self._reward = reward
            self._prepare(action_names, action_tool, describe, observation_names)
            self.run_inline = self._cheap() if run_inline is None else run_inline
        except BaseException:
            if built is not env:
                self.close()
            raise

    # --- an episode ---
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None, **row: Any) -> Content:
        """What the environment is, what to call, and the first observation. Columns of the row are `options`."""
        given = {**{key: value for key, value in row.items() if value is not None}, **(options or {})}
        if given and not self._takes_options:
            raise ConfigurationError(
                f"{self._title}.reset() takes no options, so it cannot use the column '{next(iter(given))}' of the "
                "dataset. Drop the column."
            )
        kwargs: dict[str, Any] = {"options": given} if given else {}
        observation, _ = self._env.reset(seed=None if seed is None else int(seed), **kwargs)
        self._rewards: list[float] = []
        self._started, self.done, self._over = True, False, ""
        return content_of([*self._opening, *self._shown(observation)])

    def get_reward(self) -> float:
        """The episode's score, by default the sum of its rewards."""
        if callable(self._reward):
            return self._reward(list(self._rewards))
        return self._rewards[-1] if self._reward == "last" and self._rewards else float(sum(self._rewards))

    def close(self) -> None:
        """The Gymnasium environment is closed."""
        env, self._env = self._env, _CLOSED
        self._started = False
        if env is not _CLOSED:
            _owners.pop(env.unwrapped, None)
            env.close()

    def _step(self, action: Any) -> Content:
        if not self._started:
            raise EnvironmentFailed(f"{self._title} was not reset.", stage="tool")
        if self.done:
            return self._over
        value = self._action.decode(action)
        try:
            observation, reward, terminated, truncated, _ = self._env.step(value)
            self._rewards.append(float(reward))
            parts = self._shown(observation)
        except Exception as error:  # the action was valid: this is not the model's mistake
            raise EnvironmentFailed(
                f"{self._title}.step() failed: {type(error).__name__}: {error}", stage="tool"
            ) from error
        if terminated or truncated:
            steps = f"{len(self._rewards)} step{'s' if len(self._rewards) != 1 else ''}"
            why = f"it ended after {steps}" if terminated else f"it was cut off after {steps}"
            self._over = f"The episode is over: {why}. Total reward: {sum(self._rewards):g}."
            self.done = True
            parts.append(self._over)
        return content_of(parts)

    # --- how it is shown ---
    def _prepare(
        self,
        action_names: Sequence[str] | None,
        action_tool: str,
        describe: str | None,
        observation_names: Sequence[str] | None,
    ) -> None:
        env, inner = self._env, self._env.unwrapped
        space = env.action_space
        if isinstance(action_names, str):
            raise ConfigurationError(f"action_names must be a list of names, not the text {action_names!r}.")
        if action_names is None and wants_names(space):
            assert isinstance(space, spaces.Discrete)
            same = space == inner.action_space and not _has(env, gymnasium.ActionWrapper)  # numbers mean the same
            action_names = known.action_names(inner if same else None, int(space.n))
        self._action, self._recipe_of_action = action_of(space, action_names), (space, action_names)
        same = env.observation_space == inner.observation_space and not _has(env, gymnasium.ObservationWrapper)
        facts = known.known(inner if same else None)
        self._state = facts.state
        self._labels = tuple(observation_names) if observation_names is not None else facts.numbers
        self._check_observation(observation_names)
        name = env.spec.name if env.spec is not None else type(inner).__name__.removesuffix("Env")
        self._title = name
        line = describe if describe is not None else known.about(inner)
        self._opening = [
            f"{name}: {line}" if line else f"You act in {name}.",
            f"Call {action_tool} with an action, {self._action.summary}.",
        ]
        reset = inspect.signature(inner.reset).parameters.values()
        self._takes_options = any(p.name == "options" or p.kind is p.VAR_KEYWORD for p in reset)
        self._rewards = []
        self._started, self.done, self._over = False, False, ""
        parameters = {"type": "object", "properties": {"action": self._action.schema}, "required": ["action"]}
        description = f"Take one step in {name} and see what happens."
        schema = {"name": action_tool, "description": description, "parameters": parameters}
        self.__class__ = _class_with_tool(type(self), _identifier(name), json.dumps(schema))

    def _check_observation(self, names: Sequence[str] | None) -> None:
        env, space = self._env, self._env.observation_space
        rendered = self._observation == "image" and not is_picture(space)
        if rendered and env.render_mode != "rgb_array":
            raise ConfigurationError(
                f"observation='image' needs an environment that renders: build it with render_mode='rgb_array' "
                f"(it has {env.render_mode!r})."
            )
        self._rendered = rendered
        if not rendered:
            check_readable(space, self._observation != "text")
        if names is None:
            return
        size = len(space.spaces) if isinstance(space, spaces.Tuple) else (space.shape or (0,))[0]
        if len(names) != size or isinstance(names, str):
            raise ConfigurationError(f"observation_names must be {size} names for {space!s:.200}, not {names!r:.200}.")

    def _shown(self, observation: Any) -> list[Any]:
        env, parts = self._env, []
        if self._rendered:
            return [picture(env.render())]
        if env.render_mode == "ansi":
            text = env.render()
            parts.append(known.plain(text if isinstance(text, str) else str(text)))
        if self._state is not None:
            parts.append(self._state(env.unwrapped, observation))
        else:
            parts += parts_of(env.observation_space, observation, self._labels, pictures=self._observation != "text")
        return parts

    def _cheap(self) -> bool:
        return known.is_cheap(self._env.unwrapped) and not self._rendered

    def _own(self, env: gymnasium.Env[Any, Any]) -> None:
        owner = _owners.get(env.unwrapped)
        if owner is not None and owner() is not None:
            raise ConfigurationError(
                f"{env} is in use by another GymnasiumEnvironment, and rollouts share nothing. "
                "Pass its id or a function that builds a new one each time."
            )
        _owners[env.unwrapped] = weakref.ref(self)

    # --- pickling: the class was made at runtime, so it travels as its recipe ---
    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        recipe = vars(cls).get("_recipe")
        if recipe is None:  # derived from a class that was made at runtime
            return super().__reduce__()  # type: ignore[return-value]
        return _restored, recipe, {key: value for key, value in self.__dict__.items() if key != "_action"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._action = action_of(*self._recipe_of_action)
        if self._env is not _CLOSED:
            _owners[self._env.unwrapped] = weakref.ref(self)


class _Closed(gymnasium.Env[Any, Any]):
    """Stands where a closed environment was."""

    def reset(self, **kwargs: Any) -> Any:
        raise gymnasium.error.ClosedEnvironmentError("The environment was closed.")

    step = reset  # type: ignore[assignment]

    def __reduce__(self) -> str:
        return "_CLOSED"


_CLOSED = _Closed()


def _has(env: Any, kind: type) -> bool:
    """True where a wrapper of this kind is around the environment."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, kind):
            return True
        env = env.env
    return False


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if text.isidentifier() else f"Env_{text}"


@functools.lru_cache(maxsize=512)
def _class_with_tool(base: type, name: str, schema: str) -> type:
    """A subclass with the tool: tools are found on classes, and this one is known once the environment is built."""
    function = json.loads(schema)

    def act(self: GymnasiumEnvironment, action) -> Content:
        return self._step(action)

    act.__name__ = function["name"]
    act.__qualname__ = f"{name}.{function['name']}"
    act.__doc__ = function["description"]
    act.tool_schema = function  # type: ignore[attr-defined]
    members = {
        "__module__": base.__module__, "__doc__": base.__doc__, function["name"]: act, "_recipe": (base, name, schema)
    }  # fmt: skip
    return type(name, (base,), members)


def _restored(base: type, name: str, schema: str) -> Any:
    cls = _class_with_tool(base, name, schema)
    return object.__new__(cls)
