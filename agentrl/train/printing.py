"""Completions on the terminal while training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig


def print_completions(
    groups: Sequence[RolloutGroup], args: GRPOConfig, step: int, console: Console | None = None
) -> None:
    """A table of the last generation batch: prompt, completion, rewards by source, advantage, outcome."""
    chosen = _choose(groups, args)
    if not chosen:
        return
    names = list(dict.fromkeys(name for rollout in chosen for name in rollout.rewards))
    extras = list(dict.fromkeys(name for rollout in chosen for name in rollout.extra))
    table = Table(
        "Prompt", "Completion", *names, *extras, "Advantage", "Outcome", title=f"Step {step}", show_lines=True
    )
    for rollout in chosen:
        numbers = [_number(rollout.rewards.get(name)) for name in names]
        shown = [str(rollout.extra.get(name, "")) for name in extras]
        cells = [_text(rollout.prompt), _text(rollout.completion), *numbers, *shown, _number(rollout.advantage),
                 rollout.outcome.value]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))  # Text: a completion's brackets are no markup
    (console or Console()).print(table)


def _choose(groups: Sequence[RolloutGroup], args: GRPOConfig) -> list[Rollout]:
    rollouts = [r for group in groups for r in (group.rollouts[:1] if args.log_unique_prompts else group.rollouts)]
    return rollouts if args.num_completions_to_print is None else rollouts[: args.num_completions_to_print]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    lines = []
    for message in content if isinstance(content, list) else []:
        calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls", [])]
        said = message.get("content") or ""
        lines.append(
            f"{message.get('role')}: {said if isinstance(said, str) else '[blocks]'} {' '.join(calls)}".strip()
        )
    return "\n".join(lines)
