"""A chat template bound to a tokenizer's special tokens: messages to guarded text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render.calls import THINK_CLOSE, THINK_OPEN
from agentrl.render.codec import Codec
from agentrl.render.jinja_env import compile_template
from agentrl.render.messages import guard_json, prepare
from agentrl.types import Message

Tools = Sequence[dict[str, Any]] | None

_TOOL_SETS = 256
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def shipped(name: str) -> str:
    """The text of one of our templates: "qwen3" or "chatml"."""
    return resources.files("agentrl.render").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")


class ChatTemplate:
    """One template text with its variables fixed: renders conversations to text in which only the template's own
    markers can be control tokens (see `Codec.guard`)."""

    def __init__(
        self, text: str, codec: Codec, tokenizer: Any, kwargs: dict[str, Any], markers: frozenset[str]
    ) -> None:
        self.text = text
        self._render = compile_template(text)
        self._codec = codec
        self._trusted = markers | {THINK_OPEN, THINK_CLOSE} | codec.tags
        taken = {"messages", "tools", "documents", "add_generation_prompt"} & kwargs.keys()
        if taken:
            raise ConfigurationError(f"chat_template_kwargs cannot hold {sorted(taken)}: agentrl sets them itself.")
        special = {name: getattr(tokenizer, name, None) for name in _SPECIAL_NAMES}
        self._variables = {name: str(token) for name, token in special.items() if token is not None} | kwargs
        self._tools: dict[tuple[int, ...], tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {}

    def _tool_set(self, tools: Tools) -> tuple[list[dict[str, Any]], str] | None:
        """Guarded schemas and a key of their content. A schema must not be changed in place once it was used."""
        if not tools:
            return None
        ids = tuple(map(id, tools))
        entry = self._tools.get(ids)
        if entry is None:
            if len(self._tools) >= _TOOL_SETS:
                self._tools.clear()
            guarded: list[dict[str, Any]] = guard_json(list(tools), self._codec)
            # The first element keeps the schemas alive, so that their ids name nothing else.
            entry = self._tools[ids] = (list(tools), guarded, repr(guarded))
        return entry[1], entry[2]

    def tools_key(self, tools: Tools) -> str:
        """Equal for equal sets of tools, in order."""
        entry = self._tool_set(tools)
        return entry[1] if entry else ""

    def render(self, messages: Sequence[Message], tools: Tools = None, *, generate: bool = True) -> str:
        """The guarded text of a conversation, with the generation prompt where `generate` is set."""
        prepared = [prepare(message, self._codec, self._trusted) for message in messages]
        entry = self._tool_set(tools)
        try:
            return self._render(
                messages=prepared,
                tools=entry[0] if entry else None,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except ConfigurationError:
            raise
        except Exception as e:
            raise ConfigurationError(f"The chat template cannot write this conversation: {e}") from e
