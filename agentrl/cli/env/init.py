"""`agentrl env init`: a package with one environment that works."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.env.package import files_of
from agentrl.cli.output import print_text
from agentrl.errors import ConfigurationError


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the package and of the ids' namespace: my_game.")],
    folder: Annotated[Path | None, typer.Option("--in", help="Folder to make it in; by default this one.")] = None,
) -> None:
    """Start a package: an environment that passes 'agentrl env check', its test, a README."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigurationError(
            f"'{name}' cannot be a namespace. Use lower-case letters, digits and underscores, such as my_game."
        )
    if name == "agentrl":
        raise ConfigurationError("The namespace 'agentrl' is taken by the ready environments; choose another name.")
    root = (folder or Path()) / name
    if root.exists():
        raise ConfigurationError(f"'{root}' exists already; choose another name, or move it away.")
    for path, text in files_of(name).items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    print_text(
        f"Made {root}/. Next:\n  cd {root}\n  agentrl env check {name}/{class_name}-v0\n"
        f"  agentrl env play {name}/{class_name}-v0\n  python -m pytest"
    )
