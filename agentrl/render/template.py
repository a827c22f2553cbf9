"""A chat template bound to a tokenizer's special tokens: messages to guarded text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.render.codec import Codec
from agentrl.render.jinja_env import compile_template
from agentrl.render.messages import Shape, check_schemas, guard_json, prepare, without_nulls
from agentrl.types import Message

Tools = Sequence[dict[str, Any]] | None

_TOOL_SETS = 256
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "before", "rest", "own", "generation"})


def shipped(name: str) -> str:
    """The text of one of our templates, such as "qwen3" or "chatml"."""
    return resources.files("agentrl.render").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")


class ChatTemplate:
    """One template text with its variables fixed: renders conversations to text in which only the template's own
    markers can be control tokens (see `Codec.guard`).

    `own` is the tokenizer's original template, for templates of ours that build on it: they get the messages `before`
    the first assistant message, the `rest`, ``own(messages, tools)`` (the original's text without its generation
    prompt), and that prompt as `generation`.
    """

    def __init__(
        self,
        text: str,
        codec: Codec,
        tokenizer: Any,
        kwargs: dict[str, Any],
        *,
        shape: Shape | None = None,
        own: ChatTemplate | None = None,
        generation: str = "",
    ) -> None:
        self.text = text
        self.shape = shape or Shape()
        self.trusted: frozenset[str] = frozenset()  # the tags of its format, once that is known
        self._render = compile_template(text)
        self._codec = codec
        self._own, self._generation = own, generation
        self._parts: tuple[Any, tuple[str, str]] | None = None  # the last answer of `_own_parts`
        taken = _OURS & kwargs.keys()
        if taken:
            raise ConfigurationError(f"chat_template_kwargs cannot hold {sorted(taken)}: agentrl sets them itself.")
        special = {name: getattr(tokenizer, name, None) for name in _SPECIAL_NAMES}
        self.variables = {name: str(token) for name, token in special.items() if token is not None} | kwargs
        self._tools: dict[tuple[int, ...], tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {}

    def _tool_set(self, tools: Tools) -> tuple[list[dict[str, Any]], str] | None:
        """Guarded schemas and a key of their content. A schema must not be changed in place once it was used."""
        if not tools:
            return None
        ids = tuple(map(id, tools))
        entry = self._tools.get(ids)
        if entry is None:
            check_schemas(tools)
            if len(self._tools) >= _TOOL_SETS:
                self._tools.clear()
            guarded: list[dict[str, Any]] = guard_json(without_nulls(list(tools)), self._codec)
            # The first element keeps the schemas alive, so that their ids name nothing else.
            entry = self._tools[ids] = (list(tools), guarded, repr(guarded))
        return entry[1], entry[2]

    def tools_key(self, tools: Tools) -> str:
        """Equal for equal sets of tools, in order."""
        entry = self._tool_set(tools)
        return entry[1] if entry else ""

    def render(self, messages: Sequence[Message], tools: Tools = None, *, generate: bool = True) -> str:
        """The guarded text of a conversation, with the generation prompt where `generate` is set.

        Raises:
            ConfigurationError: The template refuses or cannot write the conversation.
        """
        prepared = [prepare(message, self._codec, self.trusted, self.shape) for message in messages]
        entry = self._tool_set(tools)
        return self._write(prepared, entry[0] if entry else None, generate)

    def _write(self, prepared: list[Message], tools: list[dict[str, Any]] | None, generate: bool) -> str:
        variables: dict[str, Any] = self.variables
        if self._own is not None:
            first = next((i for i, m in enumerate(prepared) if m["role"] == "assistant"), len(prepared))
            variables = variables | {
                "before": prepared[:first],
                "rest": prepared[first:],
                "own": self._write_own,
                "generation": self._generation_after(prepared[:first], tools),
            }
        try:
            return self._render(
                messages=prepared, tools=tools, documents=None, add_generation_prompt=generate, **variables
            )
        except ConfigurationError:
            raise
        except Exception as e:
            raise ConfigurationError(f"The chat template cannot write this conversation: {e}") from e

    def _write_own(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        return self._own_parts(messages, tools or None)[0]

    def _generation_after(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        try:
            return self._own_parts(messages, tools)[1]
        except ConfigurationError:  # an original may refuse a beginning that ours can do without
            return self._generation

    def _own_parts(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> tuple[str, str]:
        """The original's text of these messages without its generation prompt, and that prompt, which a system message
        may change (SmolLM3's /no_think)."""
        assert self._own is not None
        if self._parts is None or self._parts[0] != (messages, tools):
            text, usual = self._own._write(messages, tools, True), self._generation
            body = text.removesuffix(usual) if text.endswith(usual) else self._own._write(messages, tools, False)
            if not text.startswith(body):
                raise ConfigurationError("the tokenizer's own template ends this prompt in another way")
            self._parts = (messages, tools), (body, text[len(body) :])
        return self._parts[1]
