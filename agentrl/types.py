"""Records that pass between rooms: data, no logic, no heavy imports.

Shapes in comments: T tokens of one turn or sequence, G rollouts of a group.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]
"""A chat message: ``role``, ``content`` (a string or a list of content blocks), and where they apply
``reasoning_content``, ``tool_calls`` (OpenAI's shape, ``arguments`` already a dict), ``tool_call_id``, ``name``."""

Content = str | list[dict[str, Any]]
"""Text, or content blocks: ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}``."""


# --- sampling --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults draw from the model's own distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def truncates(self) -> bool:
        """True when tokens are drawn from a set of candidates, and log-probs are of the distribution over them."""
        return self.temperature != 0 and (self.top_p < 1.0 or self.top_k > 0 or bool(self.min_p))


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One turn that waits to be sampled."""

    messages: list[Message]  # the whole conversation so far
    tools: list[dict[str, Any]]  # JSON schemas of the tools in this prompt
    prompt_ids: list[int] | None  # [P]; None where the engine plays without a renderer
    max_tokens: int
    params: SamplingParams
    seed: tuple[int, ...]  # (run seed, rollout, turn): names this turn's random stream
    conversation_id: str  # a sampler may keep a cache under this id until `release`
    stop_ids: tuple[int, ...] = ()
    write_turn: Callable[[Message], str | None] | None = None  # a made-up turn as the template writes it; None: Hermes
    media: tuple[Any, ...] = ()  # the images among `prompt_ids`, in order, as the renderer made them
    num_sampler_logprobs: int = 0  # how many of the most likely tokens at each position are wanted, for score centering


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Which weights drew the ids `start` up to `end` of a turn."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a sampler drew for one request. Samplers without ids (API models) give `message` only."""

    ids: list[int] | None  # [T] the stop token included, where one was drawn
    log_probs: list[float] | None  # [T] under the distribution each id was drawn from
    finish_reason: Literal["stop", "length"]
    version: int = 0  # of the weights that drew it, the oldest where they changed in mid-turn
    message: Message | None = None
    sampling_mask: Sequence[Sequence[int]] | None = None  # [T] the ids it was drawn from; empty, or None: all
    sampler_logprobs: Sequence[Mapping[int, float]] | None = None  # [T] of the `num_sampler_logprobs` most likely ids
    versions: tuple[VersionSpan, ...] = ()  # in order, where weights changed in mid-turn; empty: all are of `version`


class Sampler(Protocol):
    """The door behind which a policy lives."""

    async def sample(self, request: SampleRequest) -> SampleOutput: ...

    def release(self, conversation_id: str) -> None:
        """Nothing is held for this conversation any more."""
        ...


# --- rendering -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Drift:
    """Where and why a prompt does not continue the tokens held so far."""

    at: int  # index of the first differing token
    why: str
    held: int = 0  # number of tokens held; all from `at` on are rendered again
    before: str = ""  # text of the last tokens that are the same on both sides
    held_text: str = ""  # text of the held tokens from `at` on, the first of them
    new_text: str = ""  # text of the prompt from `at` on, likewise


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of one turn's prompt."""

    ids: list[int]  # [P]
    drift: Drift | None = None  # set where ids do not start with the held ids
    media: tuple[Any, ...] = ()  # the images among the ids, in order: `render.images.Expansion`


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call as the model wrote it. `error` is text for the model where it cannot be run."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn, read from its tokens."""

    message: Message
    calls: tuple[ParsedCall, ...] = ()  # in order, malformed ones included


# --- tools -----------------------------------------------------------------------------
ToolErrorKind = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "episode_over"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads after a call."""

    content: Content
    error: ToolErrorKind | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """A call and its result, as recorded."""

    turn: int
    id: str
    name: str
    arguments: dict[str, Any]
    content: Content
    error: ToolErrorKind | None
    seconds: float


# --- episodes --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a stage is given up and its rollout ends with a typed outcome; None is no limit."""

    reset_s: float | None = 60.0
    tool_s: float | None = 60.0
    reward_s: float | None = 60.0
    turn_s: float | None = 1800.0
    episode_s: float | None = 3600.0


@dataclass(frozen=True, slots=True)
class Task:
    """One row, as one group of rollouts plays it."""

    index: int  # of the row in its source
    epoch: int
    seed: int  # the same for every member of a group
    row: dict[str, Any] = field(default_factory=dict)  # all columns
    environment: str | None = None  # which of several environments


class Outcome(enum.StrEnum):
    """How an episode ended. The `failed` ones are our side's fault: they carry no reward and are never trained."""

    FINISHED = "finished"  # the model answered without a tool call
    ENV_DONE = "env_done"  # the environment said so
    TOOL_LIMIT = "tool_limit"  # max_tool_calling_iterations reached
    TRUNCATED = "truncated"  # the completion budget or the model's context ran out
    RESET_FAILED = "reset_failed"
    TOOL_FAILED = "tool_failed"  # the environment died under a tool, not the model's mistake
    REWARD_FAILED = "reward_failed"
    SAMPLER_FAILED = "sampler_failed"
    DEADLINE = "deadline"

    @property
    def failed(self) -> bool:
        return self in _FAILED


_FAILED = frozenset(
    {Outcome.RESET_FAILED, Outcome.TOOL_FAILED, Outcome.REWARD_FAILED, Outcome.SAMPLER_FAILED, Outcome.DEADLINE}
)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One sampler call: the whole prompt that it saw and what it drew. Ids are None for samplers without ids."""

    prompt_ids: list[int] | None  # [P]
    output_ids: list[int] | None  # [T]
    output_log_probs: list[float] | None  # [T]
    message: Message
    finish_reason: str
    version: int = 0
    drift: Drift | None = None
    seconds: float = 0.0
    media: tuple[Any, ...] = ()  # the images among `prompt_ids`, in order
    output_sampling_mask: Sequence[Sequence[int]] | None = None  # [T] candidate ids, as in `SampleOutput`
    output_sampler_logprobs: Sequence[Mapping[int, float]] | None = None  # [T] as in `SampleOutput`
    versions: tuple[VersionSpan, ...] = ()  # as in `SampleOutput`


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """What one forward pass sees. Every sampled token of a rollout is trained in exactly one sequence."""

    input_ids: list[int]  # [T]
    completion_mask: list[bool]  # [T] True where the id was sampled and is trained
    old_log_probs: list[float]  # [T] the sampler's; NaN where the mask is False
    version: int = 0  # oldest weights among its trained tokens
    media: tuple[Any, ...] = ()  # the images among `input_ids`, in order
    # One entry per trained token (N of them), in order; None where no turn has any:
    sampling_mask: Sequence[Sequence[int]] | None = None  # [N] candidate ids; empty: the whole vocabulary
    sampler_logprobs: Sequence[Mapping[int, float]] | None = None  # [N] the sampler's most likely ids; empty: none


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode from reset to score."""

    id: str  # unique in a run
    group_id: str
    member: int  # 0..G-1
    task: Task
    environment: str | None  # class name, None without an environment
    prompt: Any  # str or list[Message]: what the first turn saw
    messages: list[Message]  # the whole conversation, prompt included
    completion: Any  # str for plain-string prompts, else list[Message]
    completion_ids: list[int]  # [C] as trained: sampled ids and tool results between them
    turns: tuple[TurnRecord, ...]
    sequences: tuple[TrainingSequence, ...]
    tool_calls: tuple[ToolCallRecord, ...]
    outcome: Outcome
    error: str | None = None  # traceback text of a failed outcome
    attempts: int = 1
    truncated: bool = False
    rewards: dict[str, float | None] = field(default_factory=dict)  # by source, None: not scored
    reward: float | None = None  # weighted sum; None: nobody scored it
    advantage: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # log_extra columns, rollout_func fields
    seconds: dict[str, float] = field(default_factory=dict)  # reset, sample, tools, reward, total


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one task, scored together."""

    id: str
    task: Task
    rollouts: tuple[Rollout, ...]  # [G] failed ones included
    dropped: bool = False  # too few survivors, by the group policy
    metrics: dict[str, list[float]] = field(default_factory=dict)  # log_metric values
