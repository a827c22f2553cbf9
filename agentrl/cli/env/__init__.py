"""`agentrl env`: find, try, check and start environments."""

from __future__ import annotations

import typer

from agentrl.cli.env.check import check
from agentrl.cli.env.info import info
from agentrl.cli.env.init import init
from agentrl.cli.env.list import list_environments
from agentrl.cli.env.play import play


def env_app() -> typer.Typer:
    """The commands `env list`, `env info`, `env check`, `env play` and `env init`."""
    app = typer.Typer(help="List, describe, check and play environments, or start a new one.", no_args_is_help=True)
    app.command("list")(list_environments)
    app.command()(info)
    app.command()(check)
    app.command()(play)
    app.command()(init)
    return app
