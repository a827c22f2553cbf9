"""One attempt at one episode: reset, sample, call tools, until it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl import pictures
from agentrl.environment import Instance, reset_kwargs
from agentrl.errors import AgentRLError, ConfigurationError, SamplerError
from agentrl.rollout.messages import TOO_DEEP, characters, check_output, opening, read_message, shallow
from agentrl.rollout.sequences import completion_ids, to_sequences
from agentrl.tool_schema import Tool, describe_unknown
from agentrl.types import (
    Message,
    Outcome,
    ParsedCall,
    ParsedTurn,
    Prompt,
    Rollout,
    SampleOutput,
    Sampler,
    SampleRequest,
    Task,
    ToolCallRecord,
    ToolResult,
    TurnRecord,
)

if TYPE_CHECKING:
    from agentrl.render import Renderer
    from agentrl.rollout.engine import RolloutSettings


@dataclass(slots=True)
class Episode:
    """The state of one attempt. Lives inside one coroutine; what leaves it is a frozen `Rollout`."""

    task: Task
    instance: Instance
    environment: str | None  # its name, also where the factory builds several classes
    rollout_id: str
    group_id: str
    member: int
    attempt: int
    seed: tuple[int, int]
    tools: dict[str, Tool]
    schemas: list[dict[str, Any]]
    sampler: Sampler
    renderer: Renderer | None
    settings: RolloutSettings

    messages: list[Message] = field(default_factory=list)
    text: str | None = None  # the prompt, where it is a plain string
    observation: str = ""  # the end of `text` that `reset` wrote
    prompt_length: int = 0  # messages that belong to the prompt
    media: tuple[Any, ...] = ()  # the images of the latest prompt
    turns: list[TurnRecord] = field(default_factory=list)
    calls: list[ToolCallRecord] = field(default_factory=list)
    scored: bool = False
    reward: float | None = None  # the environment's
    seconds: dict[str, float] = field(default_factory=lambda: {"reset": 0.0, "sample": 0.0, "tools": 0.0})

    @property
    def conversation_id(self) -> str:
        return f"{self.rollout_id}/{self.attempt}"

    # --- the beginning ---
    async def reset(self) -> None:
        """The environment is at its start and the prompt stands."""
        started = time.perf_counter()
        observation = None
        if self.instance.env is not None:
            kwargs = reset_kwargs(self.instance.env, self.task.row, self.task.seed, {"rollout_id": self.rollout_id})
            observation = await self.instance.reset(kwargs, self.settings.deadlines.reset_s)
            if self.instance.done:
                raise ConfigurationError(
                    f"{self.environment}.done is true right after reset(); set it to False there, instances are reused."
                )
        if isinstance(observation, list):
            pictures.check_observation(observation)
        self.seconds["reset"] += time.perf_counter() - started
        prompt = self.task.row.get("prompt")
        shown = self.instance.env is None and pictures.in_row(self.task.row)
        if isinstance(prompt, str) and (self.tools or shown or isinstance(observation, list)):
            prompt = [{"role": "user", "content": prompt}]  # tools and images can only be shown in a conversation
        if isinstance(prompt, str):
            self.observation = str(observation or "")
            self.text = prompt + self.observation
            self.messages = [{"role": "user", "content": self.text}]
        else:
            self.messages = opening(prompt, observation, f"Row {self.task.index}", self.environment)
            if shown:
                self.messages = pictures.with_column(self.messages, self.task.row)
        self.prompt_length = len(self.messages)

    def _first_prompt(self) -> list[int] | None:
        if self.renderer is None:
            return None
        if self.text is None:
            ids = self.renderer.first(self.messages, self.schemas)
            if any(pictures.blocks_of(self.messages)):
                self.media = self.renderer.media(self.messages)
        else:  # what reset() returned was not written by the prompt's author: it cannot become control tokens
            trusted = self.text[: len(self.text) - len(self.observation)]
            ids = self.renderer.text_prompt(trusted, self.observation)
        self._check_fits(len(ids))
        return ids

    # --- the turn loop ---
    async def turns_until_end(self) -> Outcome:
        """Samples and runs tools until the episode ends; says how it ended."""
        prompt = self._first_prompt()
        first_length = len(prompt or ())
        held, drift, iterations, limit = prompt, None, 0, self.settings.max_tool_calling_iterations
        while True:
            started = time.perf_counter()
            output = await self._sample(held, self._allowance(held, first_length))
            parsed = self._parse(output, held)
            self.messages.append(parsed.message)
            self.turns.append(
                TurnRecord(
                    held, output.ids, output.log_probs, parsed.message, output.finish_reason, output.version, drift,
                    time.perf_counter() - started, self.media, output.sampling_mask, output.sampler_logprobs,
                    output.versions,
                )
            )  # fmt: skip
            if output.finish_reason == "length":
                return Outcome.TRUNCATED
            if not parsed.calls or not self.tools:
                return Outcome.FINISHED
            if limit is not None and iterations >= limit:
                return Outcome.TOOL_LIMIT
            new_from = len(self.messages)
            await self._run_calls(parsed.calls)
            iterations += 1
            if self.instance.done:
                return Outcome.ENV_DONE
            if held is not None and output.ids is None:
                held = drift = None  # a sampler without ids: the next prompt cannot continue what it drew
                self.media = ()
            elif held is not None:
                held = [*held, *(output.ids or ())]
                following = self._next_prompt(held, new_from, first_length)
                if following is None:
                    del self.messages[new_from:]
                    return Outcome.TRUNCATED
                held, drift, self.media = following.ids, following.drift, following.media

    def _check_fits(self, length: int) -> None:
        context = self.settings.max_context
        if length == 0:
            raise ConfigurationError(f"The prompt of row {self.task.index} is empty: write something into it.")
        if context is not None and length >= context:
            raise ConfigurationError(
                f"The prompt of row {self.task.index} has {length} tokens, but the model sees {context}: "
                "shorten the prompt or what reset() returns, or use a model with a longer context."
            )

    def _allowance(self, held: list[int] | None, first_length: int) -> int:
        """Tokens that this turn may sample; at least 1, because longer prompts were refused before."""
        budget, length = self.settings.max_completion_length, len(held) if held is not None else 0
        limits = [] if budget is None else [budget if self.settings.turn_budget else budget - (length - first_length)]
        if self.settings.max_context is not None:
            limits.append(self.settings.max_context - length)
        return max(1, min(limits)) if limits else 1 << 30

    def _next_prompt(self, held: list[int], new_from: int, first_length: int) -> Prompt | None:
        """The next turn's prompt, or None where it would leave no room to answer: then the result is rolled back."""
        assert self.renderer is not None
        budget = None if self.settings.turn_budget else self.settings.max_completion_length
        ends = [first_length + budget] if budget is not None else []
        if self.settings.max_context is not None:
            ends.append(self.settings.max_context)
        if ends:
            room = min(ends) - len(held)
            size = sum(characters(message["content"]) for message in self.messages[new_from:])
            if size > max(room, 1) * self.renderer.max_token_chars():
                return None  # certainly too long: not worth tokenising
        known = {"media": self.media} if self.media else {}  # renderers of text need not know of it
        following = self.renderer.next(held, self.messages, new_from, self.schemas, **known)
        return None if ends and len(following.ids) >= min(ends) else following

    async def _sample(self, prompt_ids: list[int] | None, max_tokens: int) -> SampleOutput:
        request = SampleRequest(
            messages=list(self.messages), tools=self.schemas, prompt_ids=prompt_ids, max_tokens=max_tokens,
            params=self.settings.sampling, seed=(*self.seed, len(self.turns)), conversation_id=self.conversation_id,
            stop_ids=self.renderer.stop_ids if self.renderer is not None else (), media=self.media,
            write_turn=self._writer(prompt_ids),
            num_sampler_logprobs=self.settings.num_sampler_logprobs,
        )  # fmt: skip
        started, seconds = time.perf_counter(), self.settings.deadlines.turn_s
        turn = asyncio.timeout(seconds)
        try:
            async with turn:
                output = await self.sampler.sample(request)
            check_output(output, request)
            return output
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise SamplerError("The sampler cancelled the turn.") from e
        except AgentRLError:
            raise
        except Exception as e:
            if isinstance(e, TimeoutError) and turn.expired():
                raise TimeoutError(f"A turn took longer than {seconds} s.") from e
            raise SamplerError(f"The sampler failed: {type(e).__name__}: {e}") from e
        finally:
            self.seconds["sample"] += time.perf_counter() - started

    def _writer(self, prompt_ids: list[int] | None) -> Callable[[Message], str | None] | None:
        """How a turn that nobody sampled would be written here: scripts and random policies make them up."""
        if self.renderer is None or self.text is not None or prompt_ids is None:
            return None
        return self.renderer.writer(self.schemas, prompt_ids)

    def _parse(self, output: SampleOutput, prompt: list[int] | None) -> ParsedTurn:
        try:
            if output.ids is None:
                return read_message(output.message or {}, start=len(self.calls))
            if self.renderer is None:
                raise SamplerError("The sampler drew ids, and there is no tokenizer to read them: pass tokenizer=...")
            if self.text is not None:
                return ParsedTurn({"role": "assistant", "content": self.renderer.plain_text(output.ids)})
            try:
                return shallow(self.renderer.parse(output.ids, self.schemas, start=len(self.calls), prompt_ids=prompt))
            except RecursionError:
                call = ParsedCall(f"call_{len(self.calls)}", "", error=f"This tool call was not run: {TOO_DEEP}.")
                text = self.renderer.plain_text(output.ids)
                return ParsedTurn({"role": "assistant", "content": text}, (call,))
        except AgentRLError:
            raise
        except Exception as e:
            raise SamplerError(f"What the sampler gave cannot be read: {type(e).__name__}: {e}") from e

    # --- tools ---
    async def _run_calls(self, calls: tuple[ParsedCall, ...]) -> None:
        """Runs one turn's calls in order; each adds a tool message. After `done` the rest is refused."""
        for call in calls:
            result = await self._run_call(call)
            self.seconds["tools"] += result.seconds
            self.calls.append(
                ToolCallRecord(
                    len(self.turns) - 1,
                    call.id,
                    call.name,
                    call.arguments,
                    result.content,
                    result.error,
                    result.seconds,
                )
            )
            self.messages.append(
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.content}
            )

    async def _run_call(self, call: ParsedCall) -> ToolResult:
        if call.error is not None:
            return ToolResult(call.error, "malformed")
        if self.instance.done:
            return ToolResult("The episode is over; this call was not run.", "episode_over")
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult(describe_unknown(call.name, self.tools), "unknown_tool")
        return await self.instance.call(tool, call.arguments, self.settings.deadlines.tool_s)

    # --- the end ---
    async def score(self) -> None:
        """The environment's own reward is known, if it has one."""
        if self.instance.env is None or not callable(getattr(self.instance.env, "get_reward", None)):
            return
        started = time.perf_counter()
        self.reward = await self.instance.reward(self.settings.deadlines.reward_s)
        self.scored = True
        self.seconds["reward"] = time.perf_counter() - started

    def finish(self, outcome: Outcome, error: str | None, total: float) -> Rollout:
        """The attempt as a frozen record; a failed one keeps its turns for reading but has nothing to train."""
        turns = tuple(self.turns)
        sequences = tuple(to_sequences(turns))
        self.seconds["total"] = total
        after = self.messages[self.prompt_length :]
        return Rollout(
            id=self.rollout_id, group_id=self.group_id, member=self.member, task=self.task,
            environment=self.environment,
            prompt=self.text if self.text is not None else self.messages[: self.prompt_length],
            messages=self.messages,
            completion="".join(str(message["content"]) for message in after) if self.text is not None else after,
            completion_ids=completion_ids(sequences), turns=turns,
            sequences=() if outcome.failed else sequences,
            tool_calls=tuple(self.calls), outcome=outcome, error=error, attempts=self.attempt,
            truncated=outcome is Outcome.TRUNCATED, seconds=self.seconds,
            rewards={self.environment or "": self.reward} if self.scored and not outcome.failed else {},
        )  # fmt: skip
