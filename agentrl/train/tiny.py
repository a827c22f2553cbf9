"""A tiny policy and its tokenizer, made here for given environments: small enough to learn on a laptop CPU.

What makes it small: the tokenizer is trained on random episodes of those environments, with merges that may cross
words, so that a prompt with tools takes about 20 tokens instead of 180, and enumerated argument values are one token
each. A real model needs none of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_tokenizer(texts: Iterable[str] = (), words: Sequence[str] = (), vocabulary: int = 640) -> Any:
    """A byte-level BPE tokenizer in Qwen3's format.

    Args:
        texts: What the merges are learnt from; empty: bytes only.
        words: Become one token each.
        vocabulary: Largest number of tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    atoms = [*CONTROL, *MARKERS, *words]
    between = re.compile("|".join(map(re.escape, sorted(atoms, key=len, reverse=True))))
    trainer = trainers.BpeTrainer(
        vocab_size=max(300, vocabulary - len(atoms)), special_tokens=[], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((piece for text in texts for piece in between.split(text) if piece), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*MARKERS, *words)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = training_template()
    return fast


def training_template() -> str:
    """Qwen3's format as this package trains it."""
    return (Path(__file__).parent.parent / "render" / "templates" / "qwen3.jinja").read_text()


def make_model(vocabulary: int, seed: int, *, hidden: int = 64, layers: int = 2, context: int = 2048) -> Qwen3ForCausalLM:
    """A Qwen3 model of about 0.14 million parameters, freshly initialised from `seed`."""
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, intermediate_size=3 * hidden, max_position_embeddings=context,
        tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def enumerated_words(schemas: Iterable[Any]) -> list[str]:
    """All strings that the schemas enumerate, in order.

    >>> enumerated_words([{"parameters": {"properties": {"place": {"enum": ["cave", "mill"]}}}}])
    ['cave', 'mill']
    """
    found: dict[str, None] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for value in node.get("enum", ()) if isinstance(node.get("enum"), list) else ():
                if isinstance(value, str) and value:
                    found[value] = None
            for value in node.values():
                walk(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                walk(value)

    walk(list(schemas))
    return list(found)


def cache_folder(*parts: object) -> Path:
    """A folder under AGENTRL_CACHE (default: ~/.cache/agentrl) for what follows from `parts` alone."""
    root = Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")
    name = hashlib.blake2b(json.dumps([str(part) for part in parts]).encode(), digest_size=8).hexdigest()
    return root / name
