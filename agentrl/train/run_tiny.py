"""The tiny policy of a run: the cached one of `tiny_policy`, or one made for several environments and their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.tool_schema import build_tools
from agentrl.train import setup
from agentrl.train.run_build import RunParts
from agentrl.train.tiny import enumerated_words, make_model, make_tokenizer, tiny_policy
from agentrl.train.warm_up import random_episodes, warm_up


def tiny_tokenizer(parts: RunParts, seed: int) -> Any:
    """The tokenizer that the tiny policy of these environments has; no model is made."""
    rough = make_tokenizer()
    episodes = random_episodes(parts.factory, rough, 300, dataset=parts.train_rows, seed=seed, tools=parts.tools)
    texts = [rough.decode(sequence.input_ids) for episode in episodes for sequence in episode.sequences]
    pools = setup.make_pools(parts.factory)
    schemas = [tool.schema for pool in pools.values() for tool in pool.tools.values()]
    schemas += [tool.schema for tool in build_tools(parts.tools).values()]
    return make_tokenizer(texts, enumerated_words(schemas))


def tiny_parts(parts: RunParts, seed: int, on_step: Callable[[int, float], None] | None = None) -> tuple[Any, Any]:
    """A tiny model that knows the call format and nothing of the tasks, and its tokenizer."""
    if parts.train_rows is None and not parts.tools:
        policy = tiny_policy(parts.factory, seed, on_step=on_step)
        return policy.model, policy.tokenizer
    tokenizer = tiny_tokenizer(parts, seed)
    model = make_model(tokenizer, seed)
    warm_up(
        model, tokenizer, parts.factory, dataset=parts.train_rows, tools=parts.tools or None, seed=seed, on_step=on_step
    )
    return model, tokenizer
