"""Chat templates, compiled once in a sandbox that knows what Hugging Face templates use."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agentrl.errors import ConfigurationError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` blocks render as their body: they mark trained text for others, and we train on ids."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter writes < > & ' as escapes for web pages; a model must read and write them as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _ours(name: str) -> str | None:
    # What a template may import: the files beside ours, and nothing else of the machine.
    if not name.removesuffix(".jinja").isidentifier():
        return None
    file = resources.files("agentrl.render").joinpath("templates", name)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        loader=jinja2.FunctionLoader(_ours),
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    # Read once: a conversation that is played past midnight must not find another date in its own system prompt.
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    return environment


@functools.lru_cache(maxsize=64)
def compile_template(text: str) -> Callable[..., str]:
    """The template as a function of its variables; a template that does not parse is a ConfigurationError."""
    try:
        return _environment().from_string(text).render
    except jinja2.TemplateSyntaxError as e:
        raise ConfigurationError(f"The chat template does not parse: {e.message} (line {e.lineno}).") from e
