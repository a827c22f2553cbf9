"""`agentrl quickstart`: a tiny policy learns to use tools, on this machine, in minutes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.output import print_json
from agentrl.errors import ConfigurationError


def quickstart(
    env: Annotated[
        str, typer.Option("--env", help="Which ready environment to learn: hunt, recycle, grid_world.")
    ] = "hunt",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Names the run's random numbers.")] = 0,
    batches: Annotated[
        int | None,
        typer.Option("--batches", min=1, help="Batches of 64 episodes; by default as many as it takes, at most 150."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Folder for the episodes and the reward curve.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout, the progress on stderr.")
    ] = False,
) -> None:
    """Train a tiny policy to use tools over several turns: no GPU, no download."""
    _check_environment(env)
    from agentrl.train import quickstart as job  # imports torch: only once the command is known to be well formed

    progress = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with progress:
        result = job.run(environment=env, seed=seed, max_batches=batches, output_dir=output_dir)
    if as_json:
        print_json(result)


def _check_environment(name: str) -> None:
    """The environment exists; said before torch is imported, which takes seconds."""
    from agentrl.train.run_objects import environment_factory, find_modules_in

    find_modules_in(Path.cwd())
    if "/" in name or ":" in name:
        environment_factory(name)
        return
    try:
        environment_factory(f"agentrl/{''.join(part.capitalize() for part in name.split('_'))}-v0")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"There is no ready environment '{name}'; hunt, recycle and grid_world are. {error}"
        ) from error
