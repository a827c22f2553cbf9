"""The policies that `agentrl eval` knows: scripted, random, and models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cli.env.lines import read_turn
from agentrl.errors import ConfigurationError

KINDS = "'random', 'scripted:FILE', 'model:FOLDER' or 'vllm:http://HOST:PORT'"


@dataclass(frozen=True, slots=True)
class Policy:
    """A sampler, the tokenizer that it plays with (None: in messages), and the context that its model has."""

    name: str
    sampler: Any
    tokenizer: Any = None
    context: int | None = None


def make_policy(
    spec: str, seed: int, tools: dict[str, Any], model: tuple[str, dict[str, Any]] | None, slots: int
) -> Policy:
    """The policy of this name.

    Args:
        spec: "random", "scripted:FILE", "model:FOLDER", "vllm:URL", or "model" for the model of a run file.
        seed: Of the random policy.
        tools: Schemas by name: a scripted file may hold lines as `env play` reads them.
        model: Of the run file, with what `from_pretrained` needs.
        slots: Episodes that are sampled side by side.

    Raises:
        ConfigurationError: No such policy or file, or a file that cannot be read.
    """
    kind, _, argument = spec.partition(":")
    if kind == "random" and not argument:
        from agentrl.sampler import RandomPolicy

        return Policy("random", RandomPolicy(seed))
    if kind == "scripted" and argument:
        from agentrl.sampler import ScriptedSampler

        return Policy(spec, ScriptedSampler(read_script(Path(argument), tools)))
    if kind == "model":
        if argument:
            return _model(argument, {}, slots)
        if model is None:
            raise ConfigurationError("Name the model: --policy model:FOLDER.")
        return _model(*model, slots)
    if kind == "vllm" and argument.startswith(("http://", "https://")):
        return _served(argument, slots)
    raise ConfigurationError(f"There is no policy '{spec}'; policies are {KINDS}.")


def read_script(path: Path, tools: dict[str, Any]) -> list[Any]:
    """The turns that a file scripts: a JSON list of texts and messages, or lines as in `agentrl env play`.

    Raises:
        ConfigurationError: No such file, not JSON, no list, or a line that is no turn (with its number).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"There is no script '{path}'.") from None
    if path.suffix == ".json":
        try:
            turns = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"'{path}' is not JSON: {error.msg} (line {error.lineno}).") from None
        if not isinstance(turns, list) or not all(isinstance(turn, (str, dict)) for turn in turns):
            raise ConfigurationError(
                f"'{path}' must hold a list of turns: texts, or messages such as {{'tool_calls': ...}}."
            )
        return turns
    turns = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            turns.append(read_turn(line, tools))
        except ConfigurationError as error:
            raise ConfigurationError(f"'{path}', line {number}: {error}") from None
    return turns


def _model(name: str, kwargs: dict[str, Any], slots: int) -> Policy:
    from agentrl.train.run_model import load_policy

    sampler, tokenizer, context = load_policy(name, kwargs, slots)
    return Policy(f"model:{name}", sampler, tokenizer, context)


def _served(address: str, slots: int) -> Policy:
    from agentrl.train.run_model import load_served

    sampler, tokenizer, context = load_served(address, slots)
    return Policy(f"vllm:{address}", sampler, tokenizer, context)
