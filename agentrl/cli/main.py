"""The `agentrl` command: `main` runs it, each subcommand lives in a file beside this one.

Nothing here may import torch at module level: `agentrl --help` answers in well under half a second. What goes wrong is
told in one or two sentences on stderr. Exit codes: 0 done, 1 a defect of agentrl (or a check found errors), 2
something the user can fix, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentrl.cli.env import env_app
from agentrl.cli.evaluate import evaluate
from agentrl.cli.output import discard_output
from agentrl.cli.quickstart import quickstart
from agentrl.cli.serve import serve
from agentrl.cli.show import show
from agentrl.cli.template import template_app
from agentrl.cli.train import train
from agentrl.errors import AgentRLError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command has run; returns its exit code. `arguments` are those of the command line by default."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words  # accepted before and after the subcommand
    words = [word for word in words if word != "--debug"] or ["--help"]
    try:
        code = build_app()(words, prog_name="agentrl", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        discard_output()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        print(message, file=sys.stderr)
        return code


def _explain(error: Exception) -> tuple[str, int]:
    """One or two sentences for a person, and the exit code."""
    usage = getattr(error, "format_message", None)  # typer's own errors: a wrong option, a missing argument
    if usage is not None:
        said = str(usage())
        stop = "" if said.endswith(("?", ".")) else "."
        return f"Error: {said}{stop} 'agentrl --help' lists the commands and options.", 2
    if isinstance(error, AgentRLError) or (isinstance(error, ConnectionError) and not error.strerror):
        return f"Error: {error}", 2
    if isinstance(error, OSError) and error.strerror:
        where = f" '{error.filename}'" if error.filename else ""
        return f"Error: {error.strerror}{where}.", 2
    name = type(error).__name__
    return f"Unexpected {name}: {error}\nThis is a defect. Run the command again with --debug for the traceback.", 1


class _Commands(TyperGroup):
    """Ctrl-C reaches `main`; typer would turn it into a silent exit."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


def build_app() -> typer.Typer:
    """The command tree. Help is drawn by rich on a terminal and is plain text elsewhere."""
    rich = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    app = typer.Typer(
        name="agentrl",
        cls=_Commands,
        help="Train language models to act: environments and tools in Python, GRPO on a laptop or a cluster.",
        add_completion=False,
        rich_markup_mode="rich" if rich else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command()(quickstart)
    app.command()(train)
    app.command("eval")(evaluate)
    app.command()(show)
    app.command()(serve)
    app.add_typer(env_app(), name="env")
    app.add_typer(template_app(), name="template")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"agentrl {version('agentrl')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    # Both options have done their work before this runs: `main` reads --debug, the callback prints the version.
    del version, debug


if __name__ == "__main__":
    sys.exit(main())
