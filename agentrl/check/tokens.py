"""What tools cost in a prompt, without a model and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.render import Renderer
from agentrl.types import Message

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_LEVEL = "byte-level tokenizer (one token per byte; a trained one needs about a quarter)"


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Tokens of a first prompt, and the part of it that describes the tools."""

    prompt: int
    tools: int
    tokenizer: str  # which one counted


def byte_level_tokenizer() -> Any:
    """A tokenizer with one token for each byte and the control tokens of ChatML.

    >>> byte_level_tokenizer().encode("é<|im_end|>").tokens
    ['Ã', '©', '<|im_end|>']
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


def token_cost(
    schemas: Sequence[dict[str, Any]], messages: Sequence[Message], tokenizer: Any = None, *, name: str = ""
) -> TokenCost:
    """What the first prompt costs with these tools, and how much of it is for them.

    Args:
        schemas: Of the tools, in OpenAI's shape.
        messages: The first prompt.
        tokenizer: A fast tokenizer; None: one token per byte.
        name: Of the tokenizer, for the record.
    """
    renderer = Renderer(byte_level_tokenizer() if tokenizer is None else tokenizer, with_tools=bool(schemas))
    whole = len(renderer.first(list(messages), list(schemas)))
    bare = len(renderer.first(list(messages), [])) if schemas else whole
    return TokenCost(whole, whole - bare, BYTE_LEVEL if tokenizer is None else name or type(tokenizer).__name__)
