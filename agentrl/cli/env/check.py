"""`agentrl env check`: does an environment keep its promises?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.env.common import Arguments, Name, TokenizerPath, environment, load_tokenizer
from agentrl.cli.output import on_terminal, print_json, print_text

COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def check(
    name: Name,
    arguments: Arguments = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Rows to reset with: a json, jsonl, csv or parquet file (first 8).")
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Episodes of the random policy.")] = 16,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of resets and random calls.")] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Seconds for each reset, tool call and get_reward.")
    ] = 30.0,
    tokenizer: TokenizerPath = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail the check as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and numbers as JSON.")] = False,
) -> None:
    """Check an environment for training: tools, seeds, leaks, bad arguments, many at once, rewards, times, tokens.

    The exit code is 1 where it has errors.
    """
    from agentrl.check import examine_environment

    factory = environment(name, arguments)
    report = examine_environment(
        factory, rows=_rows(data), seed=seed, episodes=episodes, timeout=timeout,
        tokenizer=load_tokenizer(tokenizer), tokenizer_name=str(tokenizer or ""),
    )  # fmt: skip
    failed = bool(report.count("error") or (strict and report.count("warning")))
    if as_json:
        print_json(_as_json(name, report, failed))
    else:
        _print(name, report)
    if failed:
        raise typer.Exit(1)


def _rows(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None:
        return None
    from agentrl.train.run_objects import load_rows

    rows = [dict(row) for row in load_rows(path, limit=8)]
    if not rows:
        from agentrl.errors import ConfigurationError

        raise ConfigurationError(f"'{path}' has no rows.")
    return rows


def _as_json(name: str, report: Any, failed: bool) -> dict[str, Any]:
    return {
        "id": name,
        "environment": report.name,
        "ok": not failed,
        "findings": [{"level": finding.level, "what": finding.what} for finding in report.findings],
        "rewards": report.rewards,
        "milliseconds": report.milliseconds,
        "tokens": report.tokens,
    }


def _print(name: str, report: Any) -> None:
    lines = [(finding.level, finding.what) for finding in report.findings]
    if on_terminal():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for level, what in lines:
            console.print(Text.assemble((f"{level}: ", COLOURS[level]), what))
    else:
        for level, what in lines:
            print_text(f"{level}: {what}")
    counts = [(report.count(level), level) for level in ("error", "warning")]
    said = ", ".join(f"{n or 'no'} {word}{'' if n == 1 else 's'}" for n, word in counts)
    print_text(f"{name}: {said}.")
