"""What the `env` commands share: the environment that is meant, and the tokenizer that counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Name = Annotated[str, typer.Argument(metavar="ID", help="A registered id (agentrl/Hunt-v0) or 'module:Class'.")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Arguments of the environment, such as hops=2.")
]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="Folder of a tokenizer that counts; by default one token per byte.")
]


def environment(name: str, arguments: list[str] | None) -> Callable[..., object]:
    """The factory of the environment; modules in the current folder are found."""
    from agentrl.train.run_objects import environment_factory, find_modules_in, read_assignments

    find_modules_in(Path.cwd())
    return environment_factory(name, read_assignments(arguments or (), "argument"))


def load_tokenizer(path: Path | None) -> Any:
    """The tokenizer in the folder; None where none was named."""
    if path is None:
        return None
    from agentrl.train.run_tokenizer import local_tokenizer

    return local_tokenizer(str(path))
