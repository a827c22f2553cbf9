"""A tiny policy and its tokenizer, made here for given environments: small enough to learn on a laptop CPU.

What makes it small: the tokenizer is trained on random episodes of those environments, with merges that may cross
words, so that a prompt with tools takes about 20 tokens instead of 180, and enumerated argument values are one token
each. A real model needs none of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.render.template import shipped
from agentrl.train import setup
from agentrl.train.warm_up import random_episodes, warm_up

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
    fast.chat_template = shipped("qwen3")
    return fast


def make_model(
    tokenizer: Any, seed: int, *, hidden: int = 64, layers: int = 2, context: int = 2048
) -> Qwen3ForCausalLM:
    """A Qwen3 model of about 0.14 million parameters, freshly initialised from `seed`."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, intermediate_size=3 * hidden, max_position_embeddings=context,
        tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
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


@dataclass(frozen=True, slots=True)
class TinyPolicy:
    """A model that knows the call format and nothing of the task, and its tokenizer."""

    model: Qwen3ForCausalLM
    tokenizer: Any
    cached: bool


def tiny_policy(
    environment_factory: Any,
    seed: int = 0,
    *,
    episodes: int = 2000,
    steps: int = 400,
    batch_size: int = 32,
    cache: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> TinyPolicy:
    """A tiny policy for these environments, made and warmed up here, or read from the cache of an earlier run.

    Args:
        environment_factory: As in `GRPOTrainer`; the environment writes its own prompts.
        seed: Of the weights, of the episodes it was warmed up on, and of their order.
        episodes: Random episodes to warm up on; `steps` of `batch_size` of them are trained (see `warm_up`).
        cache: Folder; default: AGENTRL_CACHE, else ~/.cache/agentrl.
        on_step: Called with each warm-up step and its loss.
    """
    pools = setup.make_pools(environment_factory)
    schemas = [tool.schema for pool in pools.values() for tool in pool.tools.values()]
    bytes_only = make_tokenizer()
    played = random_episodes(environment_factory, bytes_only, 300, seed=seed)
    texts = [bytes_only.decode(sequence.input_ids) for episode in played for sequence in episode.sequences]
    folder = (cache or cache_root()) / _name_of(seed, episodes, steps, batch_size, texts, schemas)
    if (folder / "config.json").exists():
        return TinyPolicy(Qwen3ForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), True)
    tokenizer = make_tokenizer(texts, enumerated_words(schemas))
    model = make_model(tokenizer, seed)
    warm_up(
        model, tokenizer, environment_factory, episodes=episodes, steps=steps, batch_size=batch_size, seed=seed,
        on_step=on_step,
    )  # fmt: skip
    _save(model, tokenizer, folder)
    return TinyPolicy(model, tokenizer, False)


def cache_root() -> Path:
    """AGENTRL_CACHE, else ~/.cache/agentrl."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")


def _name_of(*parts: object) -> str:
    """A name for what follows from `parts` and from the code that makes it."""
    code = [Path(__file__), Path(__file__).with_name("warm_up.py")]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8)
    for file in code:
        digest.update(file.read_bytes())
    return f"tiny-{digest.hexdigest()}"


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Saved whole or not at all: a run that is stopped here leaves nothing that a later one would take for a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        tokenizer.save_pretrained(work)
        model.save_pretrained(work)
        with contextlib.suppress(OSError):  # another run was first
            Path(work).rename(folder)
            Path(work).mkdir()
