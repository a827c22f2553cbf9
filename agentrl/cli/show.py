"""`agentrl show`: the episodes of a run, as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.output import on_terminal, print_json, print_note, print_text, terminal_width
from agentrl.errors import ConfigurationError
from agentrl.record import read_episodes
from agentrl.view.transcript import MAX_CHARS, render_transcript, transcript_text

Numbered = tuple[int, dict[str, Any]]  # position among the selected episodes, record


def show(
    file: Annotated[Path, typer.Argument(help="An episodes.jsonl, or the folder of a run that holds one.")],
    index: Annotated[
        int | None, typer.Option("--index", help="Which of the selected episodes; -1 is the last. Default: 0.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only the episodes of this optimizer step.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The episode with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The episode with the lowest reward.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Add each turn's token ids and log-probs.")] = False,
    full: Annotated[bool, typer.Option("--full", help=f"Do not cut messages at {MAX_CHARS} characters.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="One line for each selected episode instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show one episode of a run as a readable transcript."""
    _check_selection(index, best, worst, list_all)
    episodes = ((n, r) for n, r in enumerate(r for r in read_episodes(file) if step is None or r["step"] == step))
    if list_all:
        _print_list(episodes, as_json)
        return
    if best or worst:
        number, record, note = _extreme(episodes, highest=best)
    else:
        number, record, note = _at(episodes, 0 if index is None else index)
    if record is None:
        where = f" of step {step}" if step is not None else ""
        raise ConfigurationError(
            f"'{file}' holds no such episode{where}: {note}. 'agentrl show {file} --list' lists them."
        )
    if as_json:
        print_json(record)
        return
    max_chars = None if full else MAX_CHARS
    if on_terminal():
        from rich.console import Console

        width = terminal_width()
        Console(width=width, highlight=False).print(
            render_transcript(record, width=width, ids=ids, max_chars=max_chars)
        )
    else:
        print_text(transcript_text(record, width=terminal_width(), ids=ids, max_chars=max_chars))
    if note:
        print_note(f"(episode {number}, {note})")


def _check_selection(index: int | None, best: bool, worst: bool, list_all: bool) -> None:
    chosen = [
        name
        for name, given in (("--index", index is not None), ("--best", best), ("--worst", worst), ("--list", list_all))
        if given
    ]
    if len(chosen) > 1:
        raise ConfigurationError(f"{' and '.join(chosen)} exclude each other: give one of them.")


def _extreme(episodes: Iterable[Numbered], *, highest: bool) -> tuple[int, dict[str, Any] | None, str]:
    """The scored episode with the highest or lowest reward, the first of equals; the note counts all."""
    number, found, total, scored = -1, None, 0, 0
    for position, record in episodes:
        total += 1
        reward = record["reward"]
        if not isinstance(reward, (int, float)):
            continue
        scored += 1
        if found is None or (reward > found["reward"] if highest else reward < found["reward"]):
            number, found = position, record
    return number, found, f"{'best' if highest else 'worst'} of {scored} scored, {total} in all"


def _at(episodes: Iterable[Numbered], index: int) -> tuple[int, dict[str, Any] | None, str]:
    """The episode at the index, counted from the end where negative. Holds |index| records, not the file."""
    if index >= 0:
        total = 0
        for position, record in episodes:
            total += 1
            if position == index:
                return index, record, ""
        return index, None, f"there are {total}, counted from 0, and --index was {index}"
    kept: list[Numbered] = []
    total = 0
    for item in episodes:
        total += 1
        kept.append(item)
        del kept[:index]
    if len(kept) < -index:
        return index, None, f"there are {total} and --index was {index}"
    return kept[0][0], kept[0][1], f"{total} in all"


def _print_list(episodes: Iterator[Numbered], as_json: bool) -> None:
    if not as_json:
        print_text(f"{'index':>6} {'step':>6} {'reward':>8} {'turns':>5}  {'outcome':<15} {'environment':<16} id")
    for number, record in episodes:
        row = {
            "index": number,
            "step": record["step"],
            "reward": record["reward"],
            "turns": len(record["turns"]),
            "outcome": record["outcome"],
            "environment": record["environment"],
            "id": record["id"],
        }
        if as_json:
            print_json(row)
            continue
        step = "-" if row["step"] is None else row["step"]
        reward = f"{row['reward']:.3f}" if isinstance(row["reward"], (int, float)) else row["reward"] or "-"
        environment = row["environment"] or "-"
        print_text(
            f"{number:>6} {step:>6} {reward:>8} {row['turns']:>5}  {row['outcome']:<15} {environment:<16} {row['id']}"
        )
