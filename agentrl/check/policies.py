"""Episodes of policies that know nothing: what rewards a beginner would see."""

from __future__ import annotations

from typing import Any

from agentrl.check.probes import TIMEOUT_S, text_of
from agentrl.environment import Instance, reset_kwargs
from agentrl.sampler.random_policy import RandomPolicy
from agentrl.types import Message, SampleRequest, SamplingParams

MAX_TURNS = 16


async def play_no_op(instance: Instance, row: dict[str, Any], seed: int) -> float | None:
    """The reward of an episode in which nothing was done."""
    await instance.reset(reset_kwargs(instance.env, row, seed, {"rollout_id": "check"}), TIMEOUT_S)
    return await instance.reward(TIMEOUT_S)


async def play_random(instance: Instance, row: dict[str, Any], seed: int) -> float | None:
    """The reward of an episode of `RandomPolicy`, of at most 16 turns."""
    policy = RandomPolicy(seed)
    start = await instance.reset(reset_kwargs(instance.env, row, seed, {"rollout_id": "check"}), TIMEOUT_S)
    messages: list[Message] = [{"role": "user", "content": f"{row.get('prompt') or ''} {text_of(start)}"}]
    schemas = [tool.schema for tool in instance.tools.values()]
    for turn in range(MAX_TURNS):
        request = SampleRequest(messages, schemas, None, 64, SamplingParams(), (seed, turn), "check")
        message = (await policy.sample(request)).message or {}
        messages.append(message)
        calls = message.get("tool_calls") or ()
        for call in calls:
            function = call["function"]
            result = await instance.call(instance.tools[function["name"]], function["arguments"], TIMEOUT_S)
            messages.append({"role": "tool", "name": function["name"], "content": result.content})
        if not calls or instance.done:
            break
    return await instance.reward(TIMEOUT_S)
