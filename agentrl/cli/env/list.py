"""`agentrl env list`: which environments there are."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.output import print_json, print_note, print_table


def list_environments(
    gymnasium: Annotated[
        bool, typer.Option("--gymnasium", help="Also the environments of Gymnasium (to be wrapped).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the environments that can be named by id.

    Installed packages that announce environments are asked for theirs, and so are packages named <namespace>_envs.
    """
    for package, reason in import_packages():
        print_note(f"The package '{package}' could not be imported: {reason}")
    rows = conversational()
    if gymnasium:
        rows += plain_gymnasium()
    if as_json:
        print_json(rows)
        return
    print_table(["id", "kind", "what it is"], [[row["id"], row["kind"], row["about"]] for row in rows])


def import_packages() -> list[tuple[str, str]]:
    """Every package that has environments is imported; returns those that could not be, and why."""
    from agentrl.train.run_objects import find_modules_in

    find_modules_in(Path.cwd())
    plugins = {plugin.module: plugin for plugin in importlib.metadata.entry_points(group="agentrl.environments")}
    named = {module.name for module in pkgutil.iter_modules() if module.name.endswith("_envs")}
    failed = []
    for package in sorted({*plugins, *named}):
        try:
            importlib.import_module(package)
            if package in plugins and plugins[package].attr:
                plugins[package].load()()
        except (Exception, SystemExit) as error:  # somebody else's module; the others are listed all the same
            failed.append((package, f"{type(error).__name__}: {error}"))
    return failed


def conversational() -> list[dict[str, Any]]:
    """The registered environments of agentrl, in order of their ids."""
    import gymnasium

    from agentrl.registry import ConversationalEntry

    return [
        {"id": name, "kind": "conversation", "about": _about(spec.entry_point.entry_point)}
        for name, spec in sorted(gymnasium.registry.items())
        if isinstance(spec.entry_point, ConversationalEntry)
    ]


def plain_gymnasium() -> list[dict[str, Any]]:
    """The registered environments of Gymnasium's own kind; nothing is imported for them."""
    import gymnasium

    from agentrl.registry import ConversationalEntry

    return [
        {"id": name, "kind": "gymnasium", "about": spec.entry_point if isinstance(spec.entry_point, str) else ""}
        for name, spec in sorted(gymnasium.registry.items())
        if not isinstance(spec.entry_point, ConversationalEntry)
    ]


def _about(entry_point: Any) -> str:
    """The first line of the docstring; why it cannot be had, where it cannot."""
    from agentrl.registry import load

    try:
        text = load(entry_point).__doc__ or ""
    except (Exception, SystemExit) as error:
        return f"(cannot be imported: {type(error).__name__}: {error})"
    return text.strip().split("\n")[0]
