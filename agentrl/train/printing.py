"""Completions while training: on the terminal, and as tables in trackers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig


def log_completions(
    groups: Sequence[RolloutGroup], args: GRPOConfig, step: int, console: Console | None = None
) -> None:
    """A table of the last generation batch is printed, and in wandb and trackio where they report."""
    columns, rows = completion_table(groups, args)
    if not rows:
        return
    table = Table(*columns, title=f"Step {step}", show_lines=True)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))  # Text: a completion's brackets are no markup
    (console or Console()).print(table)
    name = f"completions/step_{step}"  # under one name for all steps, a tracker shows the latest alone
    if (wandb := _reporting("wandb", args)) is not None:
        wandb.log({name: wandb.Table(columns=columns, data=rows)}, commit=False)  # with this step's numbers
    if (trackio := _reporting("trackio", args)) is not None:
        import pandas  # trackio needs it

        trackio.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))})


def _reporting(tracker: str, args: GRPOConfig) -> Any:
    """The tracker's module where this run reports to it; transformers has imported it then."""
    return sys.modules.get(tracker) if tracker in (args.report_to or ()) else None


def completion_table(groups: Sequence[RolloutGroup], args: GRPOConfig) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows: prompt, completion, rewards by source, `log_extra` columns, advantage, outcome.

    Every row has every column, also that of a rollout which failed before anything was known of it.
    """
    chosen = _choose(groups, args)
    names = list(dict.fromkeys(name for rollout in chosen for name in rollout.rewards))
    extras = list(dict.fromkeys(name for rollout in chosen for name in rollout.extra))
    rows = [
        [
            _text(rollout.prompt), _text(rollout.completion), *(rollout.rewards.get(name) for name in names),
            *(str(rollout.extra.get(name, "")) for name in extras), rollout.advantage, rollout.outcome.value,
        ]
        for rollout in chosen
    ]  # fmt: skip
    return ["Prompt", "Completion", *names, *extras, "Advantage", "Outcome"], rows


def _choose(groups: Sequence[RolloutGroup], args: GRPOConfig) -> list[Rollout]:
    rollouts = [r for group in groups for r in (group.rollouts[:1] if args.log_unique_prompts else group.rollouts)]
    return rollouts if args.num_completions_to_print is None else rollouts[: args.num_completions_to_print]


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else f"{value:.2f}"


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
