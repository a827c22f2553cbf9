"""A policy that says what a script tells it: the sampler for tests, examples and replays."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.types import Message, SampleOutput, SampleRequest

Turn = Any
"""One scripted turn: ids (``list[int]``), ``(ids, log_probs)``, text, a message, a whole ``SampleOutput``, or an
exception, which is raised."""

Script = Sequence[Turn] | Mapping[str, Sequence[Turn]] | Callable[[SampleRequest], Turn]

LOG_PROB = -1.0  # of every scripted id without a log-prob of its own


def write_hermes(message: Message) -> str:
    """The text of an assistant message: reasoning, content and tool calls in Hermes form.

    >>> call = {"function": {"name": "search", "arguments": {"place": "cave"}}}
    >>> print(write_hermes({"role": "assistant", "content": "Let me look.", "tool_calls": [call]}))
    Let me look.
    <tool_call>
    {"name": "search", "arguments": {"place": "cave"}}
    </tool_call>
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(block.get("text", "") for block in content)
    parts = [content] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        body = {"name": function["name"], "arguments": function.get("arguments", {})}
        parts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    text = "\n".join(parts)
    if reasoning := message.get("reasoning_content"):
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    return text


def write_made_up(message: Message, request: SampleRequest, write: Callable[[Message], str] | None) -> str:
    """The text of a turn that nobody sampled: as `write` has it, else as the template of the conversation would write
    it, else in Hermes form."""
    if write is not None:
        return write(message)
    text = request.write_turn(message) if request.write_turn is not None else None
    return write_hermes(message) if text is None else text


def encode_turn(text: str, tokenizer: Any, request: SampleRequest) -> list[int]:
    """The ids of a turn's text, with the first stop id at the end where the request has one."""
    if tokenizer is None:
        raise ConfigurationError(
            "This turn is text, but the conversation is played in token ids. Give the sampler a tokenizer "
            "(ScriptedSampler(script, tokenizer=tokenizer)) or script the turn as a list of ids."
        )
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if request.stop_ids and (not ids or ids[-1] not in request.stop_ids):
        ids.append(request.stop_ids[0])
    return ids


def as_output(ids: list[int], log_probs: list[float] | None, request: SampleRequest, version: int = 0) -> SampleOutput:
    """The ids as a sampler would have drawn them: cut after the first stop id, and at ``max_tokens``.

    >>> request = SampleRequest([], [], [1], max_tokens=3, params=None, seed=(0,), conversation_id="a", stop_ids=(9,))
    >>> as_output([5, 9, 7], None, request)
    SampleOutput(ids=[5, 9], log_probs=[-1.0, -1.0], finish_reason='stop', ...)
    >>> as_output([5, 6, 7, 9], None, request).finish_reason
    'length'
    """
    log_probs = [LOG_PROB] * len(ids) if log_probs is None else list(log_probs)
    if len(log_probs) != len(ids):
        raise ConfigurationError(f"The script gives {len(log_probs)} log-probs for {len(ids)} ids; give one for each.")
    end = next((i + 1 for i, token in enumerate(ids) if token in request.stop_ids), None)
    if end is not None and end <= request.max_tokens:
        return SampleOutput(list(ids[:end]), log_probs[:end], "stop", version)
    # A script without any stop id ends where it ends, unless the budget ends it first.
    cut = request.max_tokens
    reason = "length" if len(ids) > cut or (request.stop_ids and len(ids) == cut) else "stop"
    return SampleOutput(list(ids[:cut]), log_probs[:cut], reason, version)


class ScriptedSampler:
    """Plays a script instead of a model.

    A list of turns is played by every conversation from its own beginning; a dict gives each conversation id its own
    list; a callable (sync or async) is asked for each turn. A script that has run out is a `SamplerError`.

    Args:
        script: The turns; see `Turn` for what one may be.
        tokenizer: Encodes turns given as text or messages; only needed when the engine plays in ids.
        write: Turns a message into text; by default as the conversation's template writes turns.
        version: Of the pretended weights.

    >>> import asyncio
    >>> from agentrl.types import SampleRequest, SamplingParams
    >>> sampler = ScriptedSampler([[5, 6, 2], [7, 2]])
    >>> ask = lambda name: SampleRequest([], [], [1], 16, SamplingParams(), (0,), name, stop_ids=(2,))
    >>> [asyncio.run(sampler.sample(ask(name))).ids for name in ("a", "a", "b")]
    [[5, 6, 2], [7, 2], [5, 6, 2]]
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Any = None,
        write: Callable[[Message], str] | None = None,
        version: int = 0,
    ) -> None:
        if isinstance(script, (str, bytes)) or not (callable(script) or isinstance(script, (Mapping, Sequence))):
            raise ConfigurationError(
                f"A script is a list of turns, a dict of such lists by conversation, or a callable; got "
                f"{type(script).__name__}."
            )
        self.script = script
        self.tokenizer = tokenizer
        self.write = write
        self.version = version
        self.requests: list[SampleRequest] = []  # every request, in order of arrival
        self.released: list[str] = []  # conversation ids, in order of release
        self._played: dict[str, int] = {}

    async def sample(self, request: SampleRequest) -> SampleOutput:
        """The next turn of the request's conversation; raises the turn where it is an exception."""
        self.requests.append(request)
        turn = self._next(request)
        if inspect.isawaitable(turn):
            turn = await turn
        if isinstance(turn, BaseException):
            raise turn
        if isinstance(turn, SampleOutput):
            return turn
        return self._to_output(turn, request)

    def release(self, conversation_id: str) -> None:
        """The conversation is over; the same id would start its script from the beginning."""
        self.released.append(conversation_id)
        self._played.pop(conversation_id, None)

    def publish(self, version: int) -> None:
        """Later turns carry this version."""
        self.version = version

    def _next(self, request: SampleRequest) -> Turn:
        if callable(self.script):
            return self.script(request)
        turns: Any = self.script
        if isinstance(turns, Mapping):
            if request.conversation_id not in turns:
                known = ", ".join(repr(key) for key in list(turns)[:5])
                raise SamplerError(f"The script has no conversation '{request.conversation_id}' (it has {known}).")
            turns = turns[request.conversation_id]
        number = self._played.get(request.conversation_id, 0)
        if number >= len(turns):
            raise SamplerError(
                f"The script has {len(turns)} turns, and conversation '{request.conversation_id}' asks for turn "
                f"{number + 1}. Add a turn, or end the episode earlier."
            )
        self._played[request.conversation_id] = number + 1
        return turns[number]

    def _to_output(self, turn: Turn, request: SampleRequest) -> SampleOutput:
        if isinstance(turn, (str, dict)):
            message = {"role": "assistant", "content": turn} if isinstance(turn, str) else turn
            if request.prompt_ids is None:
                return SampleOutput(None, None, "stop", self.version, message)
            text = turn if isinstance(turn, str) else write_made_up(turn, request, self.write)
            return as_output(encode_turn(text, self.tokenizer, request), None, request, self.version)
        ids, log_probs = turn if isinstance(turn, tuple) else (turn, None)
        if not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
            raise ConfigurationError(f"A scripted turn is ids, (ids, log_probs), text or a message; got {turn!r}.")
        return as_output(list(ids), log_probs, request, self.version)
