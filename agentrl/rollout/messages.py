"""What comes in from rows, resets and samplers, brought into one shape or refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.types import Content, Message, ParsedCall, ParsedTurn, SampleOutput, SampleRequest

MOST_LEVELS = 100  # of dicts and lists in a call's arguments: whoever copies or writes them recurses
TOO_DEEP = f"its arguments are nested too deeply (more than {MOST_LEVELS} levels)"
_NESTS = (Mapping, list, tuple)


def opening(prompt: Any, observation: Content | None, row: str, environment: str | None) -> list[Message]:
    """The first messages: the row's prompt with what `reset` returned at the end of its last user message.

    >>> opening([{"role": "user", "content": "Play. "}], "You see a door.", "Row 0", "Door")
    [{'role': 'user', 'content': 'Play. You see a door.'}]

    Raises:
        ConfigurationError: Something else than messages, or nothing at all.
    """
    messages = _messages(prompt, row)
    if observation is None:
        if not messages:
            who = f"{environment}.reset() returned None" if environment else "there is no environment"
            raise ConfigurationError(f"{row} has no prompt and {who}: one of them must say what to do.")
        return messages
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": observation}]
    before = last.get("content") or ""
    if isinstance(before, str) and isinstance(observation, str):
        last["content"] = before + observation
    else:
        last["content"] = _blocks(before) + _blocks(observation)
    return messages


def _messages(prompt: Any, row: str) -> list[Message]:
    """The prompt's messages, copied one level deep: media are not copied, and nothing below is ever changed."""
    if prompt is None:
        return []
    if isinstance(prompt, Mapping) or not hasattr(prompt, "__iter__"):
        raise ConfigurationError(
            f"The prompt of {row.lower()} is a {type(prompt).__name__}; use text or a list of messages."
        )
    messages = list(prompt)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigurationError(
                f"The prompt of {row.lower()} holds {message!r:.80}; a message is a dict with 'role' and 'content'."
            )
    return [dict(message) for message in messages]


def _blocks(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def characters(content: Content) -> int:
    """Characters of text in a message's content."""
    if isinstance(content, str):
        return len(content)
    return sum(len(block.get("text") or "") for block in content)


def check_output(output: Any, request: SampleRequest) -> None:
    """What the sampler drew can be recorded and trained.

    Raises:
        SamplerError: Neither ids nor a message, more ids than were asked for, other log-probs than ids, or log-probs
            that are no finite numbers.
    """
    if not isinstance(output, SampleOutput):
        raise SamplerError(f"The sampler returned a {type(output).__name__}; it must return a SampleOutput.")
    if output.finish_reason not in ("stop", "length"):
        raise SamplerError(
            f"The sampler gave the finish reason {output.finish_reason!r}; it must be 'stop' or 'length'."
        )
    ids, log_probs = output.ids, output.log_probs
    if ids is None:
        if not isinstance(output.message, dict):
            raise SamplerError("The sampler gave neither ids nor a message.")
        return
    if not isinstance(ids, list) or not {int}.issuperset(map(type, ids)):
        raise SamplerError(f"The sampler must give ids as a list of int, not {ids!r:.80}.")
    if len(ids) > request.max_tokens:
        raise SamplerError(f"The sampler drew {len(ids)} tokens where {request.max_tokens} were allowed.")
    if log_probs is None:
        return
    if len(log_probs) != len(ids):
        raise SamplerError(f"The sampler gave {len(log_probs)} log-probs for {len(ids)} ids; one belongs to each.")
    if not math.isfinite(sum(log_probs)):
        raise SamplerError("The sampler gave a log-prob that is not finite.")
    check_candidates(ids, output.sampling_mask)
    if request.num_sampler_logprobs and output.sampler_logprobs is None:
        raise SamplerError(
            f"{request.num_sampler_logprobs} most likely tokens at each position were asked for, but this sampler "
            "records none. Use one that does, or leave score centering off."
        )
    if output.sampler_logprobs is not None and len(output.sampler_logprobs) != len(ids):
        raise SamplerError(
            f"The sampler gave {len(output.sampler_logprobs)} sets of most likely tokens for {len(ids)} ids."
        )


def check_candidates(ids: Sequence[int], sets: Sequence[Sequence[int]] | None) -> None:
    """Each id was drawn from its candidate set (an empty one is the whole vocabulary).

    Raises:
        SamplerError: It was not, or there are more or fewer sets than ids.
    """
    if sets is None:
        return
    if len(sets) != len(ids):
        raise SamplerError(f"The sampler gave {len(sets)} candidate sets for {len(ids)} ids; one belongs to each.")
    for place, (token, candidates) in enumerate(zip(ids, sets, strict=True)):
        if len(candidates) and token not in candidates:
            raise SamplerError(f"The sampler drew id {token} at place {place}, which is not in its candidate set.")


def read_message(message: Message, start: int = 0) -> ParsedTurn:
    """A turn that came without ids, in the shape that parsing gives: role and content set, well-formed calls only.

    Calls without an id are numbered from `start`.
    """
    calls = tuple(_read_call(call, f"call_{n}") for n, call in enumerate(message.get("tool_calls") or (), start))
    content = message.get("content") or ""
    shaped: Message = {"role": "assistant", "content": content if isinstance(content, (str, list)) else str(content)}
    shaped |= {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    fine = [call for call in calls if call.error is None]
    if fine:
        # Copied: a tool that changes its arguments must not change the record of the call.
        shaped["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": copy.deepcopy(call.arguments)},
            }
            for call in fine
        ]
    return ParsedTurn(shaped, calls)


def _read_call(call: Any, name: str) -> ParsedCall:
    """A call in OpenAI's shape, arguments as a dict or JSON text; what cannot be run says why.

    >>> _read_call({"function": {"name": "search", "arguments": '{"place": "cave"}'}}, "call_0").arguments
    {'place': 'cave'}
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return ParsedCall(name, "", error='This tool call was not run: it has no "name" of a tool.')
    tool, value = function["name"], function.get("arguments")
    name = str(call.get("id") or name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            return ParsedCall(
                name, tool, error=f"This call of {tool} was not run: its arguments are not valid JSON: {e}."
            )
    elif value is None or isinstance(value, str):
        value = {}
    if not isinstance(value, dict):
        kind = type(value).__name__
        error = f'This call of {tool} was not run: "arguments" must be a JSON object, not a {kind}.'
        return ParsedCall(name, tool, error=error)
    if nested_deeper(value, MOST_LEVELS):
        return ParsedCall(name, tool, error=f"This call of {tool} was not run: {TOO_DEEP}.")
    return ParsedCall(name, tool, value)


def nested_deeper(value: Any, levels: int) -> bool:
    """Whether dicts and lists lie in one another more than so many times. Never recurses.

    >>> nested_deeper({"a": [1]}, 2), nested_deeper({"a": [[1]]}, 2)
    (False, True)
    """
    layer = [value]
    for _ in range(levels + 1):
        inner = [each.values() if isinstance(each, Mapping) else each for each in layer if isinstance(each, _NESTS)]
        if not inner:
            return False
        layer = [each for values in inner for each in values]
    return True


def shallow(turn: ParsedTurn) -> ParsedTurn:
    """The turn; calls whose arguments are nested too deeply for whoever copies, checks or writes them are errors."""
    deep = {call.id for call in turn.calls if nested_deeper(call.arguments, MOST_LEVELS)}
    if not deep:
        return turn
    error = "This call of {} was not run: " + TOO_DEEP + "."
    calls = tuple(
        ParsedCall(call.id, call.name, error=error.format(call.name)) if call.id in deep else call
        for call in turn.calls
    )
    message = {key: value for key, value in turn.message.items() if key != "tool_calls"}
    fine = [call for call in turn.message.get("tool_calls") or () if call["id"] not in deep]
    return ParsedTurn(message | ({"tool_calls": fine} if fine else {}), calls)
