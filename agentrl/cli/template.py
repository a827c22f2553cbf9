"""`agentrl template check`: can this chat template be trained with, and what would be trained?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.output import on_terminal, print_json, print_text
from agentrl.errors import ConfigurationError


def template_app() -> typer.Typer:
    """The command `template check`."""
    app = typer.Typer(help="Look at what a chat template does to a conversation.", no_args_is_help=True)
    app.callback()(_root)
    app.command()(check)
    return app


def _root() -> None:
    # A typer of one command would otherwise be that command: `agentrl template MODEL`.
    ...


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|FOLDER|FILE", help="A model's name, its folder, or a .jinja file.")
    ],
    variables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Variables of the template: enable_thinking=false."),
    ] = None,
    tools: Annotated[
        list[str] | None, typer.Option("--tools", help="'module:function' or 'module:Class'; can be repeated.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="An environment (id or 'module:Class') with tools.")] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="'original', or a file, in place of the automatic choice.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Name or folder of a tokenizer, for a .jinja file.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long stretches of the episode whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check a model's chat template for training: tool calls, forks, and which tokens would be trained.

    Loads the tokenizer, no weights. The exit code is 1 where the template cannot be used.
    """
    from agentrl.train.run_objects import find_modules_in, read_assignments

    find_modules_in(Path.cwd())
    schemas = _schemas(tools, env)
    loaded = _tokenizer(model, tokenizer)
    asked = chat_template if chat_template in (None, "original") else _read(Path(chat_template))
    report = examine(model, loaded, schemas, asked, read_assignments(variables or (), "variable"))
    if as_json:
        print_json(report.as_json())
    else:
        _print(report, full)
    if not report.usable:
        raise typer.Exit(1)


def examine(
    model: str, tokenizer: Any, schemas: list[dict[str, Any]], asked: str | None, variables: dict[str, Any]
) -> Any:
    """The `TemplateReport` of a tokenizer. What the template cannot do is in it, not raised."""
    from agentrl.check.sample import play_sample
    from agentrl.cli.template_view import TemplateReport
    from agentrl.render import Renderer

    try:
        renderer = Renderer(
            tokenizer, chat_template=asked, chat_template_kwargs=variables, with_tools=bool(schemas)
        )  # fmt: skip
        episode = play_sample(renderer, tokenizer, schemas)
    except ConfigurationError as error:
        return TemplateReport(model, tokenizer, None, None, str(error))
    return TemplateReport(model, tokenizer, renderer, episode, None)


# --- what the words name ---------------------------------------------------------------
def _schemas(tools: list[str] | None, env: str | None) -> list[dict[str, Any]]:
    """The tools that were named; without any, one that searches a place."""
    from agentrl.check.sample import LOOK

    if tools and env:
        raise ConfigurationError("--tools and --env exclude each other: give one of them.")
    if env:
        return _tools_of(env)
    if not tools:
        return [LOOK]
    from agentrl.environment import discover_tools
    from agentrl.tool_schema import build_tool
    from agentrl.train.run_objects import named_function

    made = []
    for spec in tools:
        found: Any = named_function(spec, "tool")
        made += discover_tools(found).values() if isinstance(found, type) else [build_tool(found)]
    if not made:
        raise ConfigurationError(f"There is no tool in {', '.join(tools)}: public methods of a class are tools.")
    return [tool.schema for tool in made]


def _tools_of(env: str) -> list[dict[str, Any]]:
    import asyncio

    from agentrl.pool import EnvironmentPool
    from agentrl.train.run_objects import environment_factory

    pool = EnvironmentPool(environment_factory(env))

    async def look() -> list[dict[str, Any]]:
        instance = await pool.acquire()
        try:
            return [tool.schema for tool in instance.tools.values()]
        finally:
            pool.release(instance, healthy=True)
            await pool.close()

    return asyncio.run(look())


def _tokenizer(model: str, named: str | None) -> Any:
    """The model's tokenizer; that of `named` with the template of the file `model`."""
    if not model.endswith(".jinja"):
        if named is not None:
            raise ConfigurationError(f"--tokenizer is for a .jinja file, and '{model}' has a tokenizer of its own.")
        return _load(model)
    if named is None:
        raise ConfigurationError(f"'{model}' is a template: name the tokenizer that it is for, --tokenizer MODEL.")
    text = _read(Path(model))
    loaded = _load(named)
    loaded.chat_template = text
    loaded.name_or_path = model
    return loaded


def _load(name: str) -> Any:
    """The tokenizer on this machine, else the hub's."""
    from agentrl.train.run_tokenizer import local_tokenizer

    try:
        return local_tokenizer(name)
    except ConfigurationError:
        if Path(name).exists() or not _is_hub_name(name):
            raise
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others
        text = str(error).strip().split("\n")[0][:160]
        raise ConfigurationError(f"No tokenizer '{name}' on this machine or on the hub: {text}") from error


def _is_hub_name(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The template '{path}' cannot be read: {error}.") from error


# --- printing --------------------------------------------------------------------------
def _print(report: Any, full: bool) -> None:
    if on_terminal():
        from rich.console import Console

        Console(highlight=False).print(report.rich(full=full), soft_wrap=True)
    else:
        print_text(report.text(full=full))
