"""Tiny tokenizers of every family that agentrl supports, with its control tokens and its original chat template.

The control tokens are those of the public tokenizers as far as known (which of them are special decides what a decoder
hides); the vocabulary is the small BPE of `tiny_tokenizers`. The templates are the originals that `trl` ships; those of
SmolLM2 and SmolLM3, which it does not ship, are written here to behave as the public ones do.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizers import make

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
QWEN_2 = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_suffix|>")
QWEN_3 = (*QWEN_2, "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_3 = (
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|finetune_right_pad_id|>",
)
DEEPSEEK = (
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{part}▁{edge}｜>" for part in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
    "<｜tool▁sep｜>",
    "<｜fim▁hole｜>",
)
GEMMA_3 = ("<pad>", "<eos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
GEMMA_4 = (
    *("<pad>", "<eos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>'),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|image|>", "<|audio|>", "<|video|>", "<|image>", "<image|>"),
)
GLM_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "/nothink"),
)
GLM_MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
HARMONY = (
    *("<|endoftext|>", "<|startoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|call|>"),
)
COHERE = (
    *("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
)
PHI_3 = ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
LFM_2 = (
    *("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|tool_{part}_{edge}|>" for part in ("list", "call", "response") for edge in ("start", "end")),
)
NEMOTRON = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
MUSE = ("<|end_of_text|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|patch|>", "<|video|>")

SMOLLM2 = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As the public template behaves: a long system block with the date and the reasoning mode (not ended by <|im_end|>
# unless there are tools), tools as Python literals, calls and reasoning_content dropped, an empty block before every
# turn in /no_think mode, tool results as user turns without tags.
SMOLLM3 = """
{%- set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' %}
{%- set wanted = messages[0].content if messages[0].role == 'system' else '' %}
{%- if '/no_think' in wanted %}{% set mode = '/no_think' %}{% endif %}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' ~ strftime_now('%d %B %Y') ~ '\nReasoning Mode: ' ~ mode }}
{{- '\n\n## Custom Instructions\n\n' ~ (wanted.replace('/no_think', '').replace('/think', '').rstrip() or 'Be helpful.') ~ '\n\n' }}
{%- if tools %}
    {{- '### Tools\n\n<tools>\n' }}
    {%- for tool in tools %}{{- (tool | string) ~ '\n' }}{%- endfor %}
    {{- '</tools>\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags.\n\n<|im_end|>\n' }}
{%- endif %}
{%- set empty = '' if mode == '/think' else '<think>\n\n</think>\n' %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role in ['user', 'tool'] %}
        {{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' ~ empty ~ content.lstrip('\n') ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' ~ empty }}{%- endif %}
"""  # noqa: E501
WRITTEN_HERE = {"smollm2": SMOLLM2, "smollm3": SMOLLM3}


@dataclass(frozen=True)
class Family:
    """What makes a tokenizer: control tokens and templates. `trims`: special tokens that swallow the space after them,
    `adds_bos`: text encoded by the tokenizer begins with its BOS."""

    templates: list[str]
    special: tuple[str, ...] = CHATML
    markers: tuple[str, ...] = ()
    trims: tuple[str, ...] = ()
    eos: str = "<|im_end|>"
    bos: str | None = None
    adds_bos: bool = False


_LLAMA = Family([], LLAMA_3, eos="<|eot_id|>", bos="<|begin_of_text|>", adds_bos=True)
_PHI = Family([], ("<unk>", "<|endoftext|>"), trims=PHI_3, eos="<|endoftext|>", bos="<s>")
_COHERE = Family([], COHERE, eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", adds_bos=True)
_GEMMA = Family([], GEMMA_3, eos="<eos>", bos="<bos>", adds_bos=True)
_DEEPSEEK_BOS = "<｜begin▁of▁sentence｜>"
_LFM = Family([], LFM_2, bos="<|startoftext|>", adds_bos=True)
_DEEPSEEK = Family(
    [],
    ("<｜▁pad▁｜>", "<｜end▁of▁sentence｜>"),
    (*DEEPSEEK, "<think>", "</think>"),
    eos="<｜end▁of▁sentence｜>",
    bos=_DEEPSEEK_BOS,
    adds_bos=True,
)


def _like(base: Family, *templates: str, more: tuple[str, ...] = (), markers: tuple[str, ...] = ()) -> Family:
    return replace(base, templates=list(templates), special=base.special + more, markers=base.markers + markers)


_KINDS: dict[str, Family] = {
    "qwen2_5": Family(["qwen2_5"], CHATML + VISION, QWEN_2),
    "qwen2_5_vl": Family(["qwen2_5_vl"], CHATML + VISION, QWEN_2),
    "qwen3": Family(["qwen3"], CHATML + VISION, QWEN_3),
    "qwen3_instruct_2507": Family(["qwen3_instruct_2507"], CHATML + VISION, QWEN_3),
    "qwen3_vl": Family(["qwen3_vl"], CHATML + VISION, QWEN_3),
    "qwen3_5": Family(["qwen3_5_think", "qwen3_5_nothink"], CHATML + VISION, QWEN_3),
    "qwen3_6": Family(["qwen3_6"], CHATML + VISION, QWEN_3),
    "qwen3_8": Family(["qwen3_8"], CHATML + VISION, QWEN_3),
    "nemotron3": Family(
        ["nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"], NEMOTRON, bos="<s>"
    ),
    "smollm2": Family(["smollm2"], (*CHATML, "<repo_name>", "<file_sep>", "<filename>"), bos="<|im_start|>"),
    "smollm3": Family(
        ["smollm3"], ("<|end_of_text|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>"), QWEN_3[4:] + QWEN_3[:2]
    ),
    "lfm2": _like(_LFM, "lfm2", "lfm2_v2"),
    "lfm2_5": _like(_LFM, "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", more=("<image>",), markers=("<think>", "</think>")),
    "llama3": _like(_LLAMA, "llama3"),
    "llama3_1": _like(_LLAMA, "llama3_1"),
    "llama3_2": _like(_LLAMA, "llama3_2"),
    "deepseek_v3": _like(_DEEPSEEK, "deepseekv3"),
    "deepseek_r1_distill": _like(_DEEPSEEK, "deepseek_r1_distill"),
    "gemma": _like(_GEMMA, "gemma"),
    "gemma3": _like(_GEMMA, "gemma3"),
    "gemma4": Family(
        ["gemma4_v5", "gemma4_v4", "gemma4_v3", "gemma4_v2", "gemma4"], GEMMA_4, eos="<eos>", bos="<bos>", adds_bos=True
    ),
    "diffusion_gemma": Family(["diffusion_gemma"], GEMMA_4, eos="<eos>", bos="<bos>", adds_bos=True),
    "glm4moe": Family(["glm4moe"], GLM_SPECIAL, GLM_MARKERS, eos="<|endoftext|>"),
    "gptoss": Family(["gptoss"], HARMONY, eos="<|return|>", bos="<|startoftext|>"),
    "phi3": _like(_PHI, "phi3"),
    "phi3_5": _like(_PHI, "phi3_5"),
    "cohere": _like(_COHERE, "cohere"),
    "cohere2": _like(_COHERE, "cohere2", more=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "muse_glimmer": Family(["muse_glimmer"], MUSE, eos="<|eot|>", bos="<|begin_of_text|>", adds_bos=True),
}
FAMILIES: dict[str, list[str]] = {name: kind.templates for name, kind in _KINDS.items()}
"""Families and their original templates; the first is the one that `tokenizer` takes."""


@functools.lru_cache
def template_text(name: str) -> str:
    """The original template of this name: trl's file, or the stand-in written here."""
    if name in WRITTEN_HERE:
        return WRITTEN_HERE[name]
    found = importlib.util.find_spec("trl")  # its files are read; it is not imported, which takes seconds
    assert found is not None and found.origin is not None, "the dev extra brings trl"
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A new tokenizer of the family, with the named one of its original templates (default: the first)."""
    kind = _KINDS[family]
    name = template or kind.templates[0]
    if name not in kind.templates:
        raise ValueError(f"'{name}' is no template of {family}; it has {kind.templates}.")
    special = kind.special if kind.adds_bos or kind.bos in (None, *kind.special) else (*kind.special, str(kind.bos))
    made: Any = make(
        special,
        kind.markers,
        eos=kind.eos,
        bos=kind.bos if kind.adds_bos else None,
        chat_template=template_text(name),
    )
    if kind.trims:
        trims: list[Any] = [AddedToken(t, normalized=False, special=True, rstrip=True) for t in kind.trims]
        made.add_tokens(trims, special_tokens=True)
    if kind.bos and not kind.adds_bos:
        made.bos_token = kind.bos
    return made
