"""Small processors of models with vision, built in memory: real image processors and templates, tiny tokenizers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from transformers import Gemma3Processor, Idefics3Processor, PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers import Qwen3VLProcessor as _Qwen3VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_tokenizers import make

QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def template(name: str) -> str:
    """A family's original chat template, as `trl` ships it."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """A picture of noise: another seed, another picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def _without_video(cls: type) -> Any:
    # The video processors of these families need torchvision; their processors are checked for one.
    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, value: None})


def _named(tokenizer: Any, names: dict[str, str], **special: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=names, **special  # type: ignore[arg-type]
    )  # fmt: skip


def qwen3_vl(name: str = "qwen3_vl") -> Any:
    """One token per 32 x 32 pixels, at most 16 of them."""
    images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=32 * 32, max_pixels=128 * 128)
    tokenizer = make(QWEN_SPECIAL, QWEN_MARKERS)
    return _without_video(_Qwen3VLProcessor)(images, tokenizer, None, chat_template=template(name))


def qwen2_5_vl() -> Any:
    """One token per 28 x 28 pixels, at most 16 of them."""
    images = Qwen2VLImageProcessorPil(patch_size=14, min_pixels=28 * 28, max_pixels=112 * 112)
    tokenizer = make(QWEN_SPECIAL, QWEN_MARKERS[:2])
    return _without_video(Qwen2_5_VLProcessor)(images, tokenizer, None, chat_template=template("qwen2_5_vl"))


GEMMA_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def gemma3(names: dict[str, str] | None = None, *, crops: bool = False) -> Any:
    """Four soft tokens per image. `names` are the image tokens, should they be called otherwise."""
    names = names or GEMMA_NAMES
    tokenizer = make(
        ("<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>", *names.values()), (), eos="<eos>", bos="<bos>"
    )
    tokenizer = _named(tokenizer, names, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    text = template("gemma3").replace("<start_of_image>", names["boi_token"])
    return (_Cropping if crops else Gemma3Processor)(images, tokenizer, chat_template=text, image_seq_length=4)


class _Cropping(Gemma3Processor):
    """Pan and scan is asked for in each call; smaller images than usual have crops."""

    def __call__(self, **inputs: Any) -> Any:  # type: ignore[override]
        crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
        return super().__call__(**inputs, images_kwargs=crops)


def idefics3() -> Any:
    """An image of 64 x 64 becomes four tiles and one overview, four tokens each."""
    tiles = tuple(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2))
    special = ("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>")
    tokenizer = make((*special, "<global-img>", *tiles), (), eos="<end_of_utterance>")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template("smolvlm"))


class Gemma4Like:
    """What Gemma 4's processor does with images; the class itself cannot be imported without torchvision."""

    image_token, boi, eoi = "<|image|>", "<|image>", "<image|>"

    def __init__(self) -> None:
        turns = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>', "<|tool>", "<tool|>")
        calls = ("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|video|>", "<|audio|>")
        special = ("<pad>", "<eos>", *turns, *calls, self.image_token, self.boi, self.eoi)
        self.tokenizer = make(special, (), eos="<eos>", bos="<bos>")
        self.image_processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
        self.chat_template = template("gemma4_v5")

    def __call__(self, text: str, images: list[Any], add_special_tokens: bool = True) -> dict[str, Any]:
        made = dict(self.image_processor(images))
        counts = made.pop("num_soft_tokens_per_image")
        if text.count(self.image_token) != len(counts):
            raise ValueError("as many placeholders as images, please")
        parts = text.split(self.image_token)
        shown = [f"{self.boi}{self.image_token * int(n)}{self.eoi}" for n in counts]
        text = "".join(a + b for a, b in zip(parts, [*shown, ""], strict=True))
        return {"input_ids": [self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]} | made
