"""The tables of docs/chat-templates.md say what Renderer does with the originals of all families."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import families
import pytest

from agentrl.render import Renderer, probe
from agentrl.render.codec import Codec
from agentrl.render.learn import learn
from agentrl.render.template import ChatTemplate

PAGE = (Path(__file__).parent.parent / "docs/chat-templates.md").read_text(encoding="utf-8")
ORIGINALS = {  # family on the page: its originals
    "Qwen2.5": ["qwen2_5"],
    "Qwen2.5-VL": ["qwen2_5_vl"],
    "Qwen3": ["qwen3"],
    "Qwen3-Instruct-2507, Qwen3-VL": ["qwen3_instruct_2507", "qwen3_vl"],
    "Qwen3.5 (prompt opens a block)": ["qwen3_5_think"],
    "Qwen3.5 (prompt closes a block)": ["qwen3_5_nothink"],
    "Qwen3.6": ["qwen3_6"],
    "Qwen3.8": ["qwen3_8"],
    "Nemotron 3, 3.5": ["nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"],
    "SmolLM2": ["smollm2"],
    "SmolLM3": ["smollm3"],
    "LFM2, first": ["lfm2"],
    "LFM2, later": ["lfm2_v2"],
    "LFM2.5": ["lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"],
    "Llama 3": ["llama3"],
    "Llama 3.1, 3.2": ["llama3_1", "llama3_2"],
    "DeepSeek-V3, R1 distills": ["deepseekv3", "deepseek_r1_distill"],
    "Gemma 1": ["gemma"],
    "Gemma 3": ["gemma3"],
    "Gemma 4, newest revision": ["gemma4_v5"],
    "Gemma 4, earlier revisions": ["gemma4_v4", "gemma4_v3", "gemma4"],
    "Gemma 4, second revision": ["gemma4_v2"],
    "DiffusionGemma": ["diffusion_gemma"],
    "GLM-4-MoE": ["glm4moe"],
    "GPT-OSS": ["gptoss"],
    "Phi-3, Phi-3.5": ["phi3", "phi3_5"],
    "Cohere (Aya Expanse, Tiny Aya)": ["cohere", "cohere2"],
    "Muse Glimmer": ["muse_glimmer"],
}
FAMILY_OF = {original: family for family, originals in families.FAMILIES.items() for original in originals}


def table(header: str) -> dict[str, list[str]]:
    """The rows of the table whose header begins so, by their first cell."""
    lines = PAGE[PAGE.index(header) :].split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[1:] for row in rows}


CHOICES, FORMATS = table("| family | own template |"), table("| family | calls |")


@functools.lru_cache
def renderer(original: str) -> Renderer:
    return Renderer(families.tokenizer(FAMILY_OF[original], original))


def own_behaviour(original: str) -> str:
    """What the original does, in the words of the page."""
    made = families.tokenizer(FAMILY_OF[original], original)
    codec = Codec(made)
    template = ChatTemplate(families.template_text(original), codec, made, {})
    like = learn(template, codec, made)
    sets = (None, [probe.TOOL]) if like.calls else (None,)
    faults = [probe.rewriting(template, tools, like.style, several=like.several) for tools in sets]
    words = {
        "no tools": not like.reads_tools,
        "no calls": like.reads_tools and not like.calls,
        "no system": any(fault and "ystem" in fault for fault in faults),
        "rewrites": any(fault and "differently" in fault for fault in faults),
        "one call": like.calls and not like.several,
    }
    return ", ".join(word for word, true in words.items() if true) or "continues"


def test_the_page_names_every_family_once() -> None:
    assert list(CHOICES) == list(FORMATS) == list(ORIGINALS)
    assert sorted(name for names in ORIGINALS.values() for name in names) == sorted(FAMILY_OF)


@pytest.mark.parametrize("family", ORIGINALS)
def test_the_table_of_choices_is_true_F049(family: str) -> None:
    own, with_tools, without, changes = CHOICES[family]
    for original in ORIGINALS[family]:
        assert own_behaviour(original) == own, original
        verdict = renderer(original).verdict
        assert (f"`{verdict.template}`", verdict.preserving) == (with_tools, True), original
        bare = Renderer(families.tokenizer(FAMILY_OF[original], original), with_tools=False).verdict
        assert (f"`{bare.template}`", bare.preserving) == (without, True), original
    assert bool(changes) == (with_tools != "`original`")


@pytest.mark.parametrize("family", ORIGINALS)
def test_the_table_of_formats_is_true_F045(family: str) -> None:
    calls, reasoning, stops = FORMATS[family]
    ends: set[str] = set()
    for original in ORIGINALS[family]:
        made = renderer(original)
        like = made.describe()
        assert f"`{like['calls']}`" == calls
        thinking, begun = like["thinking"], (like["generation"] or "").rstrip()
        said = f"`{thinking.strip()}`" if thinking else "none"
        if thinking and begun.endswith(thinking.strip()):
            said += ", opens"
        elif begun.endswith("</think>"):
            said += ", closes"
        assert said == reasoning, original
        ends |= {made.decode([i]) for i in made.stop_ids}
    assert ends == set(re.findall(r"`([^`]+)`", stops))
    assert calls.strip("`") in {key.strip("`") for key in table("| calls | a call of")}
