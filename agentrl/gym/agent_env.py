"""One of our environments as a `gymnasium.Env`: observations and actions are text, a step is an assistant's turn."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from agentrl.environment import Instance, reset_kwargs
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.gym.runner import Runner
from agentrl.gym.text_space import CallText, FreeText
from agentrl.gym.turn import read_turn
from agentrl.pool import EnvironmentPool
from agentrl.registry import EnvironmentSpec, resolve, takes_seed
from agentrl.tool_schema import describe_unknown
from agentrl.types import Content, Outcome, ParsedCall, ToolResult


class AgentEnv(gymnasium.Env[str, str]):
    """A conversational environment behind Gymnasium's interface, without a tokenizer.

    The observation of `reset` is the prompt; `info["tools"]` holds the JSON schemas of the tools. An action is one
    turn: a tool call ``{"name": ..., "arguments": {...}}`` in JSON, a list of such calls, or any other text, which is
    the final answer and ends the episode. The next observation is what the tools answered, one after the other.

    The reward is 0 until the episode ends, then what `get_reward` says (0 without one). The episode terminates with the
    final answer or when the environment is done, and is truncated after `max_turns` turns; then ``info["outcome"]``
    says how: "finished", "env_done" or "tool_limit". A `TimeLimit` around it cuts episodes off without a score.

    It can be pickled at any time if the factory and the environment itself can.

    Args:
        environment: A class, a function that builds an environment, a registered id, or "package.module:Name".
        rows: Dataset rows, one of which is drawn at each `reset`; `reset(options={...})` gives a row instead.
        max_turns: Turns after which the episode is truncated.
        max_length: Characters of an observation or an action.
        timeout_s: Seconds for `reset`, a tool or `get_reward`; after that the environment is thrown away.
        render_mode: "ansi": `render` returns the conversation so far.

    Raises:
        ConfigurationError: the environment cannot be built, or an option cannot work.

    Example:
        >>> class Door:
        ...     def reset(self):
        ...         self.open = False
        ...         return "Open the door."
        ...     def push(self) -> str:
        ...         '''Push the door.'''
        ...         self.open = True
        ...         return "It opens."
        ...     def get_reward(self):
        ...         return float(self.open)
        >>> env = AgentEnv(Door)
        >>> env.reset(seed=0)[0]
        'Open the door.'
        >>> env.step('{"name": "push", "arguments": {}}')
        ('It opens.', 0.0, False, False, {'turns': 1, 'tool_calls': 1, 'tool_errors': 0})
        >>> env.step("It is open.")
        ('', 1.0, True, False, {'turns': 2, 'tool_calls': 1, 'tool_errors': 0, 'outcome': 'finished'})
        >>> env.close()
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's shape

    def __init__(
        self,
        environment: EnvironmentSpec,
        *,
        rows: Sequence[Mapping[str, Any]] | None = None,
        max_turns: int | None = None,
        max_length: int = 1 << 20,
        timeout_s: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ConfigurationError(f"render_mode must be None or 'ansi', not {render_mode!r}.")
        if max_turns is not None and max_turns < 1:
            raise ConfigurationError(f"max_turns must be at least 1, not {max_turns}.")
        if rows is not None and not len(rows):
            raise ConfigurationError("rows is empty; leave it out for an environment that needs none.")
        self._factory = resolve(environment)
        self._rows = rows
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self.render_mode = render_mode
        self._messages: list[tuple[str, str]] = []  # (role, text)
        self._counts = {"turns": 0, "tool_calls": 0, "tool_errors": 0}
        self._over = True
        self._start(self._factory)
        assert self._instance is not None
        self._seeded = takes_seed(self._instance.env)
        self.tools: list[dict[str, Any]] = [tool.schema for tool in self._pool.tools.values()]
        self.observation_space = FreeText(max_length)
        self.action_space = CallText(max_length, self.tools)

    def _start(self, factory: Callable[..., object]) -> None:
        self._runner = Runner()
        self._pool = EnvironmentPool(factory)
        self._instance: Instance | None = self._runner.run(self._pool.acquire())

    # --- Gymnasium's interface ---
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt of a new episode. The environment gets the seed itself, or one drawn from the last seed's stream.

        Raises:
            ConfigurationError: the row lacks a column that the environment needs, or there is nothing to say.
            EnvironmentFailed: the environment broke.
        """
        super().reset(seed=seed)
        row: Mapping[str, Any] = options or {}
        if self._rows is not None and not options:
            row = self._rows[int(self.np_random.integers(len(self._rows)))]
        drawn = int(self.np_random.integers(2**31)) if seed is None else int(seed)
        self._over = True
        observation, images = self._run(self._reset(row, drawn))
        self._messages = [("user", observation)]
        self._counts = dict.fromkeys(self._counts, 0)
        self._over = False
        return observation, {**self._info(images), "tools": copy.deepcopy(self.tools)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """What the tools answered to one turn, and at the end the reward.

        Raises:
            ResetNeeded: there is no episode, or it is over.
            EnvironmentFailed: the environment broke, which is not the agent's mistake; the episode is lost.
        """
        if not isinstance(action, str):
            raise TypeError(f"An action is text, one assistant turn, not {type(action).__name__}.")
        if self._over:
            raise ResetNeeded("There is no episode: call reset() first, and again after the end of each episode.")
        self._over = True  # until this turn has gone well
        calls = read_turn(action, start=self._counts["tool_calls"])
        observation, images = self._run(self._turn(calls)) if calls else ("", [])
        self._counts["turns"] += 1
        outcome = self._outcome(calls)
        reward = self._run(self._score()) if outcome is not None else 0.0
        self._messages.append(("assistant", str(action)))
        if calls:
            self._messages.append(("tool", observation))
        self._over = outcome is not None
        ending = {"outcome": outcome.value} if outcome is not None else {}
        truncated = outcome is Outcome.TOOL_LIMIT
        return observation, reward, self._over and not truncated, truncated, {**self._info(images), **ending}

    def render(self) -> str | None:  # type: ignore[override]
        """The conversation so far, if render_mode is "ansi"."""
        if self.render_mode is None:
            return None
        return "\n\n".join(f"{role}: {text}" for role, text in self._messages)

    def close(self) -> None:
        """The environment is closed; there is nothing to reset any more."""
        self._over = True
        self._instance = None
        self._runner.close(self._pool)

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """As registered, and marked as nondeterministic where the environment's `reset` takes no seed."""
        return vars(self).get("_spec")

    @spec.setter
    def spec(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None and not self._seeded:
            value = copy.copy(value)
            value.nondeterministic = True
        self._spec = value

    # --- one episode ---
    async def _reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, list[Any]]:
        if self._instance is None:
            self._instance = await self._pool.acquire()
        instance = self._instance
        kwargs = reset_kwargs(instance.env, row, seed, {"rollout_id": uuid.uuid4().hex})
        shown = await instance.reset(kwargs, self._timeout_s)
        prompt = row.get("prompt")
        texts = [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt or ()]
        if shown is None and not texts:
            raise ConfigurationError(
                f"The row has no prompt and {instance.name}.reset() returned None: one of them must say what to do."
            )
        read = [_read(content) for content in texts]
        first, images = _read(shown if shown is not None else "")
        before = "\n\n".join(text for text, _ in read)
        return before + first, [image for _, found in read for image in found] + images

    async def _turn(self, calls: Sequence[ParsedCall]) -> tuple[str, list[Any]]:
        texts, images = [], []
        for call in calls:
            result = await self._call(call)
            self._counts["tool_calls"] += 1
            self._counts["tool_errors"] += result.error is not None
            text, found = _read(result.content)
            texts.append(text)
            images += found
        return "\n".join(texts), images

    async def _call(self, call: ParsedCall) -> ToolResult:
        assert self._instance is not None
        if call.error is not None:
            return ToolResult(call.error, "malformed")
        if self._instance.done:
            return ToolResult("The episode is over; this call was not run.", "episode_over")
        tool = self._pool.tools.get(call.name)
        if tool is None:
            return ToolResult(describe_unknown(call.name, self._pool.tools), "unknown_tool")
        return await self._instance.call(tool, call.arguments, self._timeout_s)

    async def _score(self) -> float:
        assert self._instance is not None
        reward = await self._instance.reward(self._timeout_s)
        return 0.0 if reward is None else reward

    def _outcome(self, calls: Sequence[ParsedCall]) -> Outcome | None:
        assert self._instance is not None
        if not calls:
            return Outcome.FINISHED
        if self._instance.done:
            return Outcome.ENV_DONE
        return Outcome.TOOL_LIMIT if self._max_turns is not None and self._counts["turns"] >= self._max_turns else None

    def _info(self, images: list[Any]) -> dict[str, Any]:
        return {**self._counts, **({"images": images} if images else {})}

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._runner.run(work)
        except EnvironmentFailed:  # never used again; the next reset builds another
            if self._instance is not None:
                self._pool.release(self._instance, healthy=False)
                self._instance = None
            raise

    # --- pickling ---
    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("_runner", "_pool", "_instance")}
        state["_held"] = self._instance.env if self._instance is not None else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop("_held")
        self.__dict__.update(state)
        self._start(self._factory if held is None else _Resumed(held, self._factory))


class _Resumed:
    """A factory whose first environment is one that came out of a pickle, in the middle of its episode."""

    def __init__(self, held: object, factory: Callable[..., object]) -> None:
        self.held: object | None = held
        self.factory = factory
        self.run_inline = getattr(held, "run_inline", False)

    def __call__(self) -> object:
        held, self.held = self.held, None
        return self.factory() if held is None else held


def _read(content: Content) -> tuple[str, list[Any]]:
    """Content as text, with a mark where an image stands, and the images."""
    if isinstance(content, str):
        return content, []
    images = [block["image"] for block in content if block["type"] == "image"]
    return "\n".join("[image]" if b["type"] == "image" else b["text"] for b in content), images
