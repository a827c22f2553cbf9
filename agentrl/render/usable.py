"""Whether a template can be used, said in one sentence that names the model and what to pass instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import ConfigurationError
from agentrl.render.choose import GENERIC, Choice

log = logging.getLogger(__name__)
_ASK = 'Pass a chat_template that writes tools, and calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
T = TypeVar("T")


class Complaints:
    """Sentences about the template of one tokenizer."""

    def __init__(self, tokenizer: Any, asked: str | None) -> None:
        model = str(getattr(tokenizer, "name_or_path", "") or "")
        self.model = model
        self._who = f"The chat template of {model}" if model else "The tokenizer's chat template"
        self._asked = asked is not None
        self._own = bool(getattr(tokenizer, "chat_template", None))
        if asked is not None and asked != "original":
            self._who = "The given chat_template"

    def of_arguments(self, asked: Any, kwargs: Any, own: Any) -> None:
        """The arguments are of the right kind.

        Raises:
            ConfigurationError: Names the one that is not.
        """
        if asked is not None and not isinstance(asked, str):
            raise ConfigurationError(f"chat_template must be text, not a {type(asked).__name__}.")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise ConfigurationError(f"chat_template_kwargs must be a dict, not a {type(kwargs).__name__}.")
        if own is not None and not isinstance(own, (str, dict)):
            raise ConfigurationError(f"{self._who} must be text, not a {type(own).__name__}.")
        if asked == "original" and not own:
            raise ConfigurationError(f"{self._who} is missing, so there is no original to keep. {_ASK}")

    def around(self, make: Callable[[], T]) -> T:
        """What `make` gives; a template that does not parse is named."""
        try:
            return make()
        except ConfigurationError as e:
            start = "The chat template "
            if not str(e).startswith(start + "does not parse"):
                raise
            raise ConfigurationError(f"{self._who} {str(e).removeprefix(start)} {_ASK}") from e

    def of_tools(self, choice: Choice | None) -> None:
        """Tools and calls can be written; what a user should know about it is logged.

        Raises:
            ConfigurationError: They cannot.
        """
        if choice is None:
            raise ConfigurationError(f"{self._who} is missing, and conversations with tools need one. {_ASK}")
        like, verdict = choice.behaviour, choice.verdict
        if not like.calls:
            if like.refusal:
                raise ConfigurationError(f"{self._who} cannot be used: {like.refusal}. {_ASK}")
            raise ConfigurationError(f"{self._who} writes tool calls in no form that agentrl can read. {_ASK}")
        if not like.reads_tools and not self._asked:
            raise ConfigurationError(f"{self._who} leaves tools out of the prompt. {_ASK}")
        if not like.reads_tools:
            log.warning("%s leaves tools out of the prompt: your prompts must describe them.", self._who)
        if not verdict.preserving:
            log.warning("%s rewrites history (%s): turns that it rewrites fork.", self._who, verdict.why)
        if verdict.template in GENERIC and self._own and not self._asked:
            log.warning(
                "%s is not used for tools (%s): agentrl describes them in the system message and reads calls as "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>. Pass a chat_template for another form.',
                self._who,
                verdict.why,
            )
