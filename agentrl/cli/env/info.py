"""`agentrl env info`: what an environment is, before anything is played."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from agentrl.cli.env.common import Arguments, Name, TokenizerPath, environment, load_tokenizer
from agentrl.cli.output import print_json, print_text


def info(
    name: Name,
    arguments: Arguments = None,
    tokenizer: TokenizerPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Describe an environment: its docs, what reset() takes, its tools and what they cost in a prompt."""
    described = describe(name, environment(name, arguments), load_tokenizer(tokenizer), str(tokenizer or ""))
    if as_json:
        print_json(described)
    else:
        print_text(as_text(described))


def describe(name: str, factory: Any, tokenizer: Any, tokenizer_name: str) -> dict[str, Any]:
    """Everything that `info` shows."""
    import asyncio

    from agentrl.pool import EnvironmentPool

    pool = EnvironmentPool(factory)

    async def look() -> dict[str, Any]:
        instance = await pool.acquire()
        try:
            return _described(name, instance, tokenizer, tokenizer_name)
        finally:
            pool.release(instance, healthy=True)
            await pool.close()

    return asyncio.run(look())


def _described(name: str, instance: Any, tokenizer: Any, tokenizer_name: str) -> dict[str, Any]:
    from agentrl.check import token_cost

    env = instance.env
    schemas = [tool.schema for tool in instance.tools.values()]
    cost = token_cost(schemas, [{"role": "user", "content": "x"}], tokenizer, name=tokenizer_name)
    return {
        "id": name,
        "class": f"{type(env).__module__}.{type(env).__qualname__}",
        "docs": inspect.getdoc(type(env)) or "",
        "arguments": _arguments(type(env)),
        "reset": _arguments(env.reset),
        "get_reward": callable(getattr(env, "get_reward", None)),
        "inline": instance.inline,
        "tools": [schema["function"] for schema in schemas],
        "tool_tokens": cost.tools,
        "tokenizer": cost.tokenizer,
    }


def _arguments(function: Any) -> str:
    """The signature as it is written, without self."""
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"


def as_text(described: dict[str, Any]) -> str:
    """The description as a person reads it."""
    where = "on the event loop" if described["inline"] else "on a thread of its own"
    lines = [
        f"{described['id']}  ({described['class']})",
        "",
        *described["docs"].split("\n"),
        "",
        f"arguments: {described['arguments']}",
        f"reset{described['reset']}: rows of a dataset need these columns, except seed",
        f"scores itself: {'yes' if described['get_reward'] else 'no: training needs reward functions'}; runs {where}",
        f"tools: {len(described['tools'])}, {described['tool_tokens']} tokens of every prompt with the "
        f"{described['tokenizer']}",
    ]
    for tool in described["tools"]:
        lines += ["", f"  {tool['name']}: {tool.get('description', '')}"]
        schema = json.dumps(tool["parameters"], ensure_ascii=False, indent=2)
        lines += [f"    {line}" for line in schema.split("\n")]
    return "\n".join(lines)
