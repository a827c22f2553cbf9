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
from agentrl.errors import ConfigurationError, EnvironmentFailed, ToolArgumentError
from agentrl.gym import known
from agentrl.gym.actions import action_of, wants_names
from agentrl.gym.build import Observation, build, is_wrapped_by
from agentrl.gym.masks import Valid, check_can_mask, find_mask
from agentrl.gym.observations import content_of
from agentrl.gym.view import check_settings, view_of
from agentrl.tool_errors import short
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
            images and everything else as text; "both": as "auto", and what it renders. Text of a Discrete observation
            includes the "ansi" rendering of environments built here that have one (pass render_mode=None to leave it
            out).
        observation_names: Labels for the numbers of a one-dimensional Box, or the parts of a Tuple.
        image_size: Pixels of a picture's longer side: it is enlarged or shrunk to it. None: as it comes.
        action_mask: Whether the environment's mask of valid actions holds (`info["action_mask"]`, a key of that name in
            the observation, or a method `action_masks`): they are said, and another action is answered with them and
            without a step. False: every action is a step, and its effect is the environment's business.
        action_repeat: Steps that one action takes, fewer where the episode ends or the mask forbids it.
        max_times: How often a call may ask for its action at most, with an argument `times`; 1: there is none.
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
        image_size: int | None = None,
        action_mask: bool = False,
        action_repeat: int = 1,
        max_times: int = 1,
        reward: Reward = "return",
        max_episode_steps: int | None = None,
        wrappers: Sequence[Callable[[Any], Any]] = (),
        run_inline: bool | None = None,
        **make_kwargs: Any,
    ) -> None:
        check_settings(observation, image_size)
        _check_count("action_repeat", action_repeat)
        _check_count("max_times", max_times)
        if reward not in ("return", "last") and not callable(reward):
            raise ConfigurationError(f"reward must be 'return', 'last' or a function of the rewards, not {reward!r}.")
        if not isinstance(action_tool, str) or not action_tool.isidentifier() or hasattr(type(self), action_tool):
            raise ConfigurationError(f"action_tool must be a name that is not taken yet, not {action_tool!r}.")
        built = build(env, observation, max_episode_steps, wrappers, make_kwargs)
        self._own(built)
        self._env: gymnasium.Env[Any, Any] = built
        try:
            self._reward, self._repeat, self._max_times = reward, action_repeat, max_times
            self._masked, self._valid = action_mask, None
            self._view = view_of(built, observation, observation_names, image_size)
            self._prepare(action_names, action_tool, describe)
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
        observation, info = self._env.reset(seed=None if seed is None else int(seed), **kwargs)
        self._rewards: list[float] = []
        self._started, self.done, self._over = True, False, ""
        self._valid = self._read_mask(observation, info)
        if self._masked and self._valid is None:
            raise ConfigurationError(
                f"action_mask=True, but {self._title} gives no mask: neither info['action_mask'] nor an observation of "
                "that name nor a method action_masks()."
            )
        start = known.known(self._env.unwrapped).start
        begin = [start(self._env.unwrapped)] if start is not None else []
        return content_of([*self._opening, *begin, *self._shown(observation)])

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

    def _step(self, action: Any, times: Any = 1) -> Content:
        if not self._started:
            raise EnvironmentFailed(f"{self._title} was not reset.", stage="tool")
        if self.done:
            return self._over
        value = self._action.decode(action)
        if not isinstance(times, int) or isinstance(times, bool) or not 1 <= times <= self._max_times:
            raise ToolArgumentError(
                f"No step was taken: 'times' should be a whole number from 1 to {self._max_times}, not {short(times)}."
            )
        if self._valid is not None:
            self._valid.check(value)
        return content_of(self._advance(value, self._repeat * times))

    def _advance(self, value: Any, steps: int) -> list[Any]:
        """What is seen after so many steps, or fewer, with what ended them."""
        observation, terminated = self._once(value)
        taken = 1
        while taken < steps and not self.done and (self._valid is None or self._valid.allows(value)):
            observation, terminated = self._once(value)
            taken += 1
        try:
            parts = self._shown(observation)
        except Exception as error:
            raise self._failed(error) from error
        if self.done:
            count = len(self._rewards)
            why = f"it {'ended' if terminated else 'was cut off'} after {count} step{'' if count == 1 else 's'}"
            self._over = f"The episode is over: {why}. Total reward: {sum(self._rewards):g}."
            return [*parts, self._over]
        if taken < steps:
            parts.append(f"Only {taken} of {steps} steps were taken: the action is not possible any more.")
        return parts

    def _once(self, value: Any) -> tuple[Any, bool]:
        """(observation, terminated) of one step."""
        try:
            observation, reward, terminated, truncated, info = self._env.step(value)
            self._rewards.append(float(reward))
            self.done = bool(terminated or truncated)
            self._valid = None if self.done else self._read_mask(observation, info)
        except EnvironmentFailed:
            raise
        except Exception as error:  # the action was valid: this is not the model's mistake
            raise self._failed(error) from error
        return observation, bool(terminated)

    def _failed(self, error: Exception) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._title}.step() failed: {type(error).__name__}: {error}", stage="tool")

    def _read_mask(self, observation: Any, info: Any) -> Valid | None:
        """The actions that are possible now; None where all are, and where masks do not hold."""
        mask = find_mask(self._env, observation, info) if self._masked else None
        if mask is None:
            return None
        space, names = self._recipe_of_action
        assert isinstance(space, spaces.Discrete)
        return Valid.of(mask, space, names)

    def _shown(self, observation: Any) -> list[Any]:
        parts = self._view.parts(self._env, observation)
        return parts if self._valid is None else [*parts, f"Possible actions: {self._valid.said}."]

    # --- how it is called ---
    def _prepare(self, action_names: Sequence[str] | None, action_tool: str, describe: str | None) -> None:
        env, inner = self._env, self._env.unwrapped
        space = env.action_space
        if isinstance(action_names, str):
            raise ConfigurationError(f"action_names must be a list of names, not the text {action_names!r}.")
        if action_names is None and wants_names(space):
            assert isinstance(space, spaces.Discrete)
            wrapped = is_wrapped_by(env, gymnasium.ActionWrapper)
            same = space == inner.action_space and not wrapped  # numbers mean the same
            action_names = known.action_names(inner if same else None, int(space.n))
        if self._masked:
            check_can_mask(space)
        self._action, self._recipe_of_action = action_of(space, action_names), (space, action_names)
        name = env.spec.name if env.spec is not None else type(inner).__name__.removesuffix("Env")
        self._title = name
        self._opening = self._introduction(action_tool, known.about(inner) if describe is None else describe)
        reset = inspect.signature(inner.reset).parameters.values()
        self._takes_options = any(p.name == "options" or p.kind is p.VAR_KEYWORD for p in reset)
        self._rewards = []
        self._started, self.done, self._over = False, False, ""
        properties = {"action": self._action.schema}
        if self._max_times > 1:
            properties["times"] = {
                "type": "integer", "minimum": 1, "maximum": self._max_times,
                "description": "How many times in a row; 1 if it is left out.",
            }  # fmt: skip
        parameters = {"type": "object", "properties": properties, "required": ["action"]}
        description = f"Take one step in {name} and see what happens."
        if self._repeat * self._max_times > 1:
            description = f"Take steps in {name} and see what happens."
        schema = {"name": action_tool, "description": description, "parameters": parameters}
        self.__class__ = _class_with_tool(type(self), _identifier(name), json.dumps(schema))

    def _introduction(self, tool: str, line: str) -> list[str]:
        """What the first message says before anything is seen."""
        also = f" Each call takes it {self._repeat} times in a row." if self._repeat > 1 else ""
        if self._max_times > 1:
            also += f" With times, up to {self._max_times}, it is repeated as often."
        legend = known.known(self._env.unwrapped).legend if self._view.state is not None and self._view.observed else ""
        return [
            f"{self._title}: {line}" if line else f"You act in {self._title}.",
            *([legend] if legend else []),
            f"Call {tool} with an action, {self._action.summary}.{also}",
        ]

    def _cheap(self) -> bool:
        return known.is_cheap(self._env.unwrapped) and not self._view.rendered

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


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r:.80}.")


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if text.isidentifier() else f"Env_{text}"


@functools.lru_cache(maxsize=512)
def _class_with_tool(base: type, name: str, schema: str) -> type:
    """A subclass with the tool: tools are found on classes, and this one is known once the environment is built."""
    function = json.loads(schema)

    def once(self: GymnasiumEnvironment, action) -> Content:
        return self._step(action)

    def repeated(self: GymnasiumEnvironment, action, times=1) -> Content:
        return self._step(action, times)

    act = repeated if "times" in function["parameters"]["properties"] else once
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
