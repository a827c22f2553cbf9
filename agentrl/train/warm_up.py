"""Supervised warm-up on random tool use, for models that never call tools.

A policy that never calls a tool gets no reward and learns nothing. Training it for a moment on episodes of a random
policy teaches the call format and that results follow calls, and nothing about the task: no good action is shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from agentrl.mixing import weights_of
from agentrl.render import Renderer
from agentrl.render.images import tokenizer_and_processor
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer
from agentrl.sampler import RandomPolicy
from agentrl.tasks import TaskSource, derive_seed
from agentrl.tool_schema import build_tools
from agentrl.train import setup
from agentrl.train.log_probs import PolicyForward
from agentrl.train.rows import TrainItem, make_row
from agentrl.types import Rollout, TrainingSequence


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did."""

    episodes: int
    random_reward: float | None  # mean reward of the random policy
    first_loss: float  # nats per token
    last_loss: float


def random_episodes(
    environment_factory: Any, tokenizer: Any, count: int, *, dataset: Any = None, seed: int = 0, stop_p: float = 0.0,
    max_calls: int = 8, tools: Sequence[Callable[..., Any]] | None = None, chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Rollout]:  # fmt: skip
    """`count` episodes of a policy that calls random tools with arguments drawn from their schemas.

    Args:
        environment_factory: As in `GRPOTrainer`.
        tokenizer: Writes the turns as token ids.
        dataset: Rows to play; an environment that writes its prompts needs none.
        seed: Of start states and calls; disjoint from the start states of a trainer with the same seed.
        stop_p: Chance of a turn to answer in words instead of calling a tool.
        max_calls: Turns with calls, where the environment does not end the episode itself.
        tools: Standalone tools.
        chat_template: As in `GRPOConfig`, like `chat_template_kwargs`: what is trained must be what is warmed up.
    """
    pools = setup.make_pools(environment_factory)
    standalone = build_tools(tools)
    source = TaskSource(
        dataset, seed=derive_seed(seed, "warm-up"), environments=weights_of(environment_factory),
        prompt_required=environment_factory is None,
    )  # fmt: skip
    settings = RolloutSettings(
        max_completion_length=None, max_tool_calling_iterations=max_calls, seed=derive_seed(seed, "warm-up")
    )
    policy = RandomPolicy(seed, stop_p=stop_p, tokenizer=tokenizer_and_processor(tokenizer)[0])
    engine = RolloutEngine(
        policy,
        Renderer(
            tokenizer,
            chat_template=setup.template_text(chat_template),
            chat_template_kwargs=chat_template_kwargs,
            with_tools=bool(standalone) or any(pool.tools for pool in pools.values()),
        ),
        pools,
        standalone,
        settings,
    )
    plans = [GroupPlan(f"warm{i}", source.task(0, i), 1) for i in range(count)]
    groups = play_and_close(engine, Scorer([]), plans)
    return [rollout for group in groups for rollout in group.rollouts if not rollout.outcome.failed]


def warm_up(
    model: Any,
    tokenizer: Any,
    environment_factory: Any = None,
    *,
    dataset: Any = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    episodes: int = 2000,
    steps: int = 400,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    stop_p: float = 0.0,
    max_calls: int = 8,
    seed: int = 0,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> WarmUp:
    """The model has seen what tool use looks like: `steps` supervised steps on random episodes.

    The loss is cross-entropy on every token after the first prompt, tool results included: predicting them is what
    teaches a small model to read and copy them. AdamW, learning rate ramped over 20 steps (a quarter of all, where that
    is less) and decayed linearly.

    Args:
        model: A transformers causal language model; trained in place.
        tokenizer: Its tokenizer.
        environment_factory: As in `GRPOTrainer`.
        chat_template: As in `GRPOConfig`, like `chat_template_kwargs`: what is trained must be what is warmed up.
        on_step: Called with the step and its loss.

    Raises:
        ConfigurationError: Nothing to play.
    """
    played = random_episodes(
        environment_factory, tokenizer, episodes, dataset=dataset, seed=seed, stop_p=stop_p, max_calls=max_calls,
        tools=tools, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs,
    )  # fmt: skip
    items = [_on_everything_after_the_prompt(rollout) for rollout in played]
    rng = random.Random(derive_seed(seed, "warm-up order"))
    policy = PolicyForward(setup.bare(model), 1.0)
    policy.probe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.98))
    device = next(model.parameters()).device
    ramp = min(20, max(1, steps // 4))
    losses = []
    model.train()
    try:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (step + 1) / ramp) * max(0.1, 1 - step / steps)
            row = make_row([rng.choice(items) for _ in range(batch_size)], device)
            with policy.context(row):
                loss = -model(agentrl_row=row)["log_probs_N"].mean()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if on_step is not None:
                on_step(step + 1, losses[-1])
    finally:
        policy.restore()
        model.eval()
    rewards = [value for rollout in played for value in rollout.rewards.values() if value is not None]
    tail = losses[-10:]
    return WarmUp(
        len(played), sum(rewards) / len(rewards) if rewards else None, losses[0] if losses else 0.0,
        sum(tail) / len(tail) if tail else 0.0,
    )  # fmt: skip


def _on_everything_after_the_prompt(rollout: Rollout) -> TrainItem:
    first = len(rollout.turns[0].prompt_ids or ())
    sequences: list[TrainingSequence] = []
    for sequence in rollout.sequences:
        shown = frozenset[int]().union(*(image.token_ids for image in sequence.media))  # nobody can predict these
        mask = [t >= first and i not in shown for t, i in enumerate(sequence.input_ids)]
        sequences.append(replace(sequence, completion_mask=mask))
    return TrainItem(index=0, sequences=tuple(sequences), advantage=0.0, active=True)
