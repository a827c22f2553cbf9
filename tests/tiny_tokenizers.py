"""Small byte-level BPE tokenizers with the control tokens of real families, built in memory in milliseconds."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "You may call one or more functions to assist with the user query. # Tools function name arguments json object",
    '{"type": "function", "function": {"name": "search", "description": "Search a place.", "parameters": {}}}',
    "system user assistant tool the answer is hello hello world what is in the cave a note says: mill 0 1 2 3 4 5",
    "\n\n<tool_call>\n</tool_call>\n<tool_response>\n</tool_response> think reasoning",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
QWEN_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@functools.lru_cache
def _bpe(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer.to_str()


def make(
    special: tuple[str, ...] = QWEN_SPECIAL,
    markers: tuple[str, ...] = QWEN_MARKERS,
    *,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    chat_template: str | None = None,
    vocab_size: int = 420,
) -> Any:
    """A PreTrainedTokenizerFast. `markers` are added tokens that are not special; with `bos`, text gets one."""
    tokenizer = Tokenizer.from_str(_bpe(vocab_size))
    names = ([bos] if bos else []) + list(special)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in markers])
    if bos:
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=ids
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, pad_token=special[0])
    made.chat_template = chat_template
    return made


def qwen(chat_template: str | None = None) -> Any:
    """Like Qwen3's: think and call tags are single, non-special added tokens."""
    return make(chat_template=chat_template)


def chatml(chat_template: str | None = None, bos: str | None = None) -> Any:
    """Like SmolLM2's: only <|im_start|>, <|im_end|> and <|endoftext|>; tags are ordinary text."""
    return make(QWEN_SPECIAL[:3], (), chat_template=chat_template, bos=bos)
