"""Images: from a content block to the text that stands for it and to what a model's forward needs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from images_kit import block, call, images_of, says, user

from agentrl.errors import ConfigurationError
from agentrl.render.codec import Codec
from agentrl.render.images import Images, image_text
from tests import tiny_processors
from tests.tiny_processors import gemma3, idefics3, picture, qwen2_5_vl, qwen3_vl

# --- what stands for an image ----------------------------------------------------------
# A token per 32 x 32 pixels after each side was rounded to a multiple of 32; at most 128 x 128 pixels in all.
SIZES = [((32, 32), 1), ((96, 64), 3 * 2), ((100, 70), 3 * 2), ((128, 96), 4 * 3), ((256, 256), 4 * 4)]


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_an_image_of_qwen3_vl_is_one_token_per_merged_patch(size, count):
    processor = qwen3_vl()
    made = images_of(processor).expand(picture(*size))
    assert made.text == "<|image_pad|>" * count and made.tokens == count and made.size == size
    grid = made.features["image_grid_thw"].tolist()
    assert len(grid) == 1 and math.prod(grid[0]) == 4 * count == len(made.features["pixel_values"])
    assert made.features["mm_token_type_ids"].tolist() == [[1] * count]
    assert made.token_ids == {processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")}


def test_an_image_of_gemma_3_has_borders_and_newlines_around_its_soft_tokens():
    made = images_of(gemma3()).expand(picture(50, 40))
    assert made.text == "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    assert made.tokens == 4 and made.features["pixel_values"].shape == (1, 3, 28, 28)
    assert made.features["token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]


def test_the_crops_of_a_wide_image_are_shown_too():
    made = images_of(gemma3(crops=True)).expand(picture(60, 30))
    assert made.text.count("<start_of_image>") == 3 and made.tokens == 12  # 60 / 30 = 2 crops and the whole
    assert made.text.startswith("Here is the original image \n\n<start_of_image>")
    assert made.features["pixel_values"].shape == (3, 3, 28, 28)


def test_an_image_of_smolvlm_is_tiles_and_an_overview():
    made = images_of(idefics3()).expand(picture(64, 64))
    assert made.tokens == (2 * 2 + 1) * 4 and made.text.count("<fake_token_around_image>") == 2 * 2 + 2
    assert made.features["pixel_values"].shape == (1, 5, 3, 32, 32)


FAMILIES = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl, "gemma3": gemma3, "idefics3": idefics3}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_ids_are_those_of_the_processor_itself(family, count):
    """Whole conversations through `take` and `fill`, against the processor's own rendering and tokenisation."""
    processor = FAMILIES[family]()
    shown = [block(picture(40 + 30 * i, 60, seed=i)) for i in range(count)]
    talk = [
        user(says("Look: "), *shown[:2], says(" and\n")),
        {"role": "assistant", "content": [says("I see.")]},
        user(*shown[2:], says("And now?")),
    ]
    images = images_of(processor)
    plain, media = images.take(talk)
    text = images.fill(processor.apply_chat_template(plain, add_generation_prompt=True), plain, media)
    want = processor.apply_chat_template(talk, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert Codec(processor.tokenizer).encode(text) == list(want["input_ids"][0])
    pixels = np.concatenate([one.features["pixel_values"] for one in media])
    assert len(media) == count
    if family == "idefics3":  # that processor lays the images of a prompt along another axis
        pixels = np.concatenate(list(pixels))[None]
    assert np.array_equal(pixels, np.concatenate(list(map(np.asarray, [want["pixel_values"]]))))


def test_the_ids_with_images_in_tool_results_are_those_of_the_processor():
    processor = qwen3_vl()
    talk = [
        user(says("Look around.")),
        {"role": "assistant", "content": "", "tool_calls": [call(0), call(1)]},
        {"role": "tool", "content": [says("north"), block(picture(64, 64))]},
        {"role": "tool", "content": [block(picture(96, 64)), block(picture(32, 96)), says("south")]},
    ]
    images = images_of(processor)
    plain, media = images.take(talk)
    text = images.fill(processor.apply_chat_template(plain, add_generation_prompt=True), plain, media)
    want = processor.apply_chat_template(talk, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert Codec(processor.tokenizer).encode(text) == list(want["input_ids"][0])
    assert [one.tokens for one in media] == [4, 6, 3]


# --- which token it is -----------------------------------------------------------------
def test_the_placeholder_is_found_by_behaviour_f143():
    """F143: other names, and a processor that does not say which of them it replaces."""

    class Mute:
        def __init__(self, inner: Any) -> None:
            self.inner, self.tokenizer, self.image_processor = inner, inner.tokenizer, inner.image_processor

        def __call__(self, text: str, images: list[Any], add_special_tokens: bool) -> Any:
            return self.inner(text=text, images=images, add_special_tokens=add_special_tokens)

    names = {"boi_token": "<pic>", "eoi_token": "</pic>", "image_token": "<speck>"}
    for processor in (gemma3(names), Mute(gemma3(names))):
        inner = getattr(processor, "inner", processor)
        images = Images(processor, Codec(processor.tokenizer), lambda talk, p=inner: p.apply_chat_template(talk))
        assert images.placeholder == "<pic>" and images.tokens == {"<pic>", "<speck>", "</pic>"}
        made = images.expand(picture(30, 30))
        assert made.token_ids == {processor.tokenizer.convert_tokens_to_ids("<speck>")} and made.tokens == 4
    inner = qwen3_vl()
    mute = Images(Mute(inner), Codec(inner.tokenizer), lambda talk: inner.apply_chat_template(talk))
    assert mute.placeholder == "<|image_pad|>"  # the vision tags around it are added too, but stay as they are
    assert mute.tokens == {"<|image_pad|>", "<|vision_start|>", "<|vision_end|>"}


def test_gemma_4_writes_as_many_tokens_as_the_image_is_large():
    processor = tiny_processors.Gemma4Like()
    images = Images(processor, Codec(processor.tokenizer), lambda talk: f"<bos>{'<|image|>' * len(talk[0]['content'])}")
    assert images.placeholder == "<|image|>"
    made = images.expand(picture(96, 48))
    assert made.text == "<|image>" + "<|image|>" * made.tokens + "<image|>" and made.tokens > 1
    plain, media = images.take([user(block(picture(96, 48)), block(picture(96, 48, seed=1)))])
    assert images.fill("a<|image|>b<|image|>", plain, media) == f"a{media[0].text}b{media[1].text}"  # never twice


@pytest.mark.parametrize(
    ("text", "said"),
    [("x", "writes no token for an image"), ("<|vision_start|>", "<|vision_start|> for an image")],
)
def test_a_template_without_a_usable_placeholder_is_refused(text, said):
    processor = qwen3_vl()
    images = Images(processor, Codec(processor.tokenizer), lambda talk: text * (len(talk[0]["content"]) - 1))
    with pytest.raises(ConfigurationError, match="Pass the") as caught:
        images.take([user(block(picture(32, 32)))])
    assert said in str(caught.value)
    assert images.tokens == frozenset()


def test_what_a_template_writes_for_an_image_is_known_as_text():
    render = qwen3_vl().apply_chat_template
    assert image_text(render) == "<|vision_start|><|image_pad|><|vision_end|>"
    assert image_text(lambda talk: "nothing") == ""
