"""`agentrl env play`: a person is the policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.env.common import Arguments, Name, environment
from agentrl.cli.env.lines import HELP, read_turn
from agentrl.cli.output import on_terminal, print_json, print_text
from agentrl.errors import ConfigurationError


def play(
    name: Name,
    arguments: Arguments = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the start state.")] = 0,
    data: Annotated[Path | None, typer.Option("--data", help="Play a row of this file.")] = None,
    row: Annotated[int, typer.Option("--row", min=0, help="Which row of --data.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", help="Append the episode to this file (for 'agentrl show').")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON at the end.")] = False,
) -> None:
    """Play an episode yourself: you see what a model would see, and your lines are its turns."""
    from agentrl.rollout.play import play_episode

    factory = environment(name, arguments)
    person = Person(quiet=as_json)
    episode = play_episode(factory, person.turn, task=_row(data, row), seed=seed, max_tool_calling_iterations=None)
    person.show_rest(episode.messages)
    reward = "none (no get_reward)" if episode.reward is None else f"{episode.reward:g}"
    if output is not None:
        from agentrl.record import EpisodeWriter

        with EpisodeWriter(output) as writer:
            writer.write(episode)
    if as_json:
        print_json({"reward": episode.reward, "outcome": episode.outcome, "turns": len(episode.turns)})
    else:
        turns = "turn" if len(episode.turns) == 1 else "turns"
        print_text(f"Over ({episode.outcome.value}) after {len(episode.turns)} {turns}. Reward: {reward}")


def _row(path: Path | None, number: int) -> dict[str, Any]:
    if path is None:
        return {}
    from agentrl.train.run_objects import load_rows

    rows = load_rows(path)
    if number >= len(rows):
        raise ConfigurationError(f"'{path}' has {len(rows)} rows, counted from 0; --row was {number}.")
    return dict(rows[number])


class Person:
    """Shows what is new and asks for a line. With a pipe as input, the lines are echoed."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._shown = 0

    def turn(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The message that the person's next line means; an empty answer at the end of the input."""
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        if not self._shown and not self.quiet:
            self._print(self._tools_text(functions))
        self.show_rest(messages)
        while True:
            line = self._ask()
            if line is None:
                return {"role": "assistant", "content": ""}
            if line.strip() == "?":
                self._print(f"{HELP}\n{self._tools_text(functions)}")
            elif line.strip():
                try:
                    return read_turn(line, functions)
                except ConfigurationError as error:
                    self._print(str(error))

    def show_rest(self, messages: Sequence[dict[str, Any]]) -> None:
        """Messages that were not seen yet are shown, but for the person's own."""
        for message in messages[self._shown :]:
            if message.get("role") != "assistant":
                name = f"{message['name']}: " if message.get("name") else ""
                self._print(f"[{message.get('role')}] {name}{_text(message.get('content'))}")
        self._shown = len(messages)

    def _ask(self) -> str | None:
        prompt = "" if self.quiet else "> "
        try:
            if sys.stdin.isatty():
                return input(prompt)
            line = sys.stdin.readline()
        except EOFError:
            return None
        if line == "":
            return None
        self._print(f"{prompt}{line.rstrip()}")
        return line

    def _print(self, text: str) -> None:
        if self.quiet:
            return
        if on_terminal():
            from rich.console import Console

            Console(highlight=False).print(text, markup=False, style=None if text.startswith(("> ", "[")) else "dim")
        else:
            print_text(text)

    @staticmethod
    def _tools_text(functions: dict[str, Any]) -> str:
        if not functions:
            return "(no tools: your first line is the answer)"
        lines = ["Tools (? for help):"]
        for name, function in functions.items():
            lines.append(f"  {_usage(name, function)}  {function.get('description', '')}".rstrip())
            for argument, schema in (function["parameters"].get("properties") or {}).items():
                lines.append(f"      {argument}: {schema.get('description', '')}".rstrip())
        return "\n".join(lines)


def _usage(name: str, function: dict[str, Any]) -> str:
    """How to call it: `search place=cave|mill [deep=true|false]`."""
    parameters = function["parameters"]
    words = [name]
    for argument, schema in (parameters.get("properties") or {}).items():
        choices = schema.get("enum")
        kind = "|".join(map(_plain, choices)) if choices else str(schema.get("type", "value")).upper()
        word = f"{argument}={kind}"
        words.append(word if argument in parameters.get("required", ()) else f"[{word}]")
    return " ".join(words)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return " ".join(block.get("text") or f"({block.get('type')})" for block in content)
