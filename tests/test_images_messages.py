"""Images in messages, in a row's column, in sequences and records, and where they are refused."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import numpy as np
import PIL.Image
import pytest
from images_kit import block, images_of, says, user

from agentrl import pictures
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.json_safe import json_safe
from agentrl.render.codec import Codec
from agentrl.render.images import Images, tokenizer_and_processor
from agentrl.rollout.sequences import to_sequences
from agentrl.types import TrainingSequence, TurnRecord
from tests.tiny_processors import picture, qwen3_vl


# --- messages --------------------------------------------------------------------------
def test_images_are_taken_from_the_content_f145():
    """F145: in every spelling of a block, also as Arrow fills it with None."""
    original = picture(64, 32)
    png = io.BytesIO()
    original.save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    sources: list[dict[str, Any]] = [
        block(original),
        block(np.asarray(original)),
        block(np.asarray(original).transpose(2, 0, 1)),
        block(png.getvalue()),
        block(url),
        block({"bytes": png.getvalue(), "path": None}),
        {"type": "image", "text": None, "image": None, "image_url": url},
        {"type": "image_url", "image_url": {"url": url}, "text": None},
        {"type": "image", "base64": base64.b64encode(png.getvalue()).decode()},
        {"image": original},
    ]
    images = images_of(qwen3_vl())
    plain, media = images.take([user(*sources, {"type": "text", "text": "x", "image": None})])
    assert len(media) == len(sources) and len({one.key for one in media}) == 1
    assert media[0].features["pixel_values"] is media[-1].features["pixel_values"]  # made once
    assert plain[0]["content"] == [{"type": "image"}] * len(sources) + [{"type": "text", "text": "x", "image": None}]


def test_an_image_file_is_read_and_turned_upright(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn clockwise by 90 degrees
    picture(64, 32).save(tmp_path / "photo.png", exif=exif)
    for path in (tmp_path / "photo.png", str(tmp_path / "photo.png"), f"file://{tmp_path}/photo.png"):
        assert pictures.open_image(block(path)).size == (32, 64)


def test_other_modes_become_rgb():
    assert {pictures.open_image(block(PIL.Image.new(m, (3, 2)))).mode for m in ("L", "1", "P", "RGBA", "CMYK")} == {
        "RGB"
    }
    assert pictures.open_image(block(np.zeros((4, 5), np.uint8))).size == (5, 4)
    assert pictures.open_image(block(np.zeros((4, 5, 1), np.uint8))).size == (5, 4)


BAD = [
    (PIL.Image.new("RGB", (0, 5)), "0 x 5 pixels"),
    (np.zeros((0, 5, 3), np.uint8), "5 x 0 pixels"),
    (np.zeros((4, 5, 3), np.float32), "array of float32"),
    (np.zeros((5, 6, 7), np.uint8), r"\[5, 6, 7\]"),
    ("no/such/file.png", "'no/such/file.png' cannot be read"),
    ("https://example.org/a.png", "downloads nothing"),
    (b"not an image", "cannot be read as an image"),
    ("data:image/png;base64,!!", "base64 text cannot be decoded"),
    ({"uri": "x"}, r"\['uri'\]"),
    (7, "it is a int"),
    (None, "holds no image"),
    (picture(401, 2), "refuses it .ValueError: absolute aspect ratio"),
]


@pytest.mark.parametrize(("source", "said"), BAD, ids=[said[:20] for _, said in BAD])
def test_a_bad_image_is_the_authors_error_in_a_prompt_and_the_environments_in_a_result(source, said):
    images = images_of(qwen3_vl())
    with pytest.raises(ConfigurationError, match=rf"^The image in messages\[1\] \(user\) cannot be shown: .*{said}"):
        images.take([{"role": "system", "content": "x"}, user(block(source))])
    with pytest.raises(EnvironmentFailed, match=said) as caught:
        images.take([user(says("x")), {"role": "tool", "content": [block(source)]}])
    assert caught.value.stage == "tool"


def test_a_truncated_file_is_bad_too():
    png = io.BytesIO()
    picture(64, 64).save(png, "PNG")
    with pytest.raises(ValueError, match="cannot be read as an image"):
        pictures.open_image(block(png.getvalue()[:2000]))


def test_a_bad_image_from_reset_is_a_failed_reset():
    pictures.check_observation([says("x"), block(picture(2, 2))])
    with pytest.raises(EnvironmentFailed, match=r"reset\(\) returned an image that cannot be shown") as caught:
        pictures.check_observation([says("x"), block("no/such/file.png")])
    assert caught.value.stage == "reset"


def test_a_model_of_text_meets_an_image():
    images = Images(None, Codec(qwen3_vl().tokenizer), lambda talk: "", "org/text-model")
    assert images.take([user(says("x"))]) == ([user(says("x"))], ()) and not images.available
    with pytest.raises(ConfigurationError, match=r"messages\[0\] \(user\) holds an image, and org/text-model reads te"):
        images.take([user(block(picture(2, 2)))])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (1, "wrote 1 placeholder for 3 images: it leaves out those of tool messages. .* put the image into a user"),
        (2, "wrote 2 placeholders for 3 images: it leaves out those of user messages."),
        (0, r"wrote 0 placeholders for 3 images \(roles: tool, user\)"),
        (4, r"wrote 4 placeholders for 3 images \(roles: tool, user\)"),
    ],
)
def test_a_template_that_drops_images_is_named_f141(written, said):
    """F141: never N tokens and M features."""
    images = images_of(qwen3_vl())
    talk = [user(block(picture(32, 32))), {"role": "tool", "content": [block(picture(32, 64)), block(picture(64, 32))]}]
    plain, media = images.take(talk)
    with pytest.raises(ConfigurationError, match=said):
        images.fill("<|image_pad|>" * written, plain, media)
    assert images.fill("<|image_pad|>" * 3, plain, media) == "<|image_pad|>" * 5


def test_a_guarded_placeholder_is_no_placeholder_f065():
    """F065: text that spells it stays text, and does not count."""
    processor = qwen3_vl()
    images, codec = images_of(processor), Codec(processor.tokenizer)
    plain, media = images.take([user(says("<|image_pad|>"), block(picture(32, 64)))])
    ids = codec.encode(images.fill(codec.guard("<|image_pad|>") + "<|image_pad|>", plain, media))
    assert ids == [*codec.encode_plain("<|image_pad|>"), *[codec.control["<|image_pad|>"]] * 2]


def test_known_images_are_not_made_again():
    """The images of the held prompt are passed on, even where an environment has drawn over its picture since."""
    canvas = picture(32, 32)
    images = images_of(qwen3_vl())
    _, held = images.take([user(block(canvas))])
    canvas.paste((0, 0, 0), (0, 0, 32, 32))
    _, media = images.take([user(block(canvas)), user(block(canvas))], held)
    assert media[0] is held[0] and media[1].key != held[0].key
    assert images.expand(pictures.open_image(block(canvas))) is media[1]


def test_features_are_kept_within_bounds(monkeypatch):
    images = images_of(qwen3_vl())
    first = images.expand(picture(128, 128))  # 64 patches of 1536 float32: 393216 bytes
    monkeypatch.setattr("agentrl.render.images._CACHE_BYTES", 1_000_000)
    for seed in range(1, 4):
        images.expand(picture(128, 128, seed))
    assert images._cached_bytes < 1_000_000 and len(images._cache) == 2
    assert images.expand(picture(128, 128)) is not first and images.expand(picture(128, 128)) == first


def test_an_expansion_survives_a_journey_to_another_process():
    made = images_of(qwen3_vl()).expand(picture(64, 32))
    back = pickle.loads(pickle.dumps(made))
    assert (
        back == made
        and back.tokens == 2
        and np.array_equal(back.features["pixel_values"], made.features["pixel_values"])
    )


def test_a_record_keeps_no_pixels():
    made = images_of(qwen3_vl()).expand(picture(64, 32))
    written = json_safe((made,))
    assert written == [{"type": "image", "sha256": made.key, "size": [64, 32], "tokens": 2}]
    assert json_safe(block(picture(64, 32))) == {"type": "image", "sha256": made.key, "size": [64, 32]}


def test_a_processor_is_told_from_a_tokenizer():
    processor = qwen3_vl()
    assert tokenizer_and_processor(processor) == (processor.tokenizer, processor)
    assert tokenizer_and_processor(processor.tokenizer) == (processor.tokenizer, None)


# --- the row's column ------------------------------------------------------------------
def test_pictures_of_the_column_begin_the_first_user_message():
    one, two = picture(2, 2), picture(3, 3)
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "Which?"}]
    got = pictures.with_column(talk, {"images": [one, two], "prompt": talk})
    assert got == [talk[0], user(block(one), block(two), says("Which?"))]
    assert pictures.with_column(talk, {"image": one}) == [talk[0], user(block(one), says("Which?"))]
    assert talk[1] == {"role": "user", "content": "Which?"}  # the row is not changed
    with pytest.raises(ConfigurationError, match="no user message"):
        pictures.with_column(talk[:1], {"image": one})


def test_pictures_of_the_column_fill_blocks_without_an_image_f145():
    one, two = picture(2, 2), picture(3, 3)
    empty = {"type": "image", "image": None}
    got = pictures.with_column([user(empty, says("or")), user(empty)], {"images": [one, two]})
    assert got == [user(block(one), says("or")), user(block(two))]
    embedded = [user(block(one))]
    assert pictures.with_column(embedded, {"images": []}) == embedded
    assert pictures.with_column(embedded, {"images": [two]}) == embedded  # what the message says counts
    with pytest.raises(ConfigurationError, match="2 image blocks and the row 1 images"):
        pictures.with_column([user(empty, empty)], {"images": [one]})


@pytest.mark.parametrize("row", [{}, {"image": "python:3.12"}, {"images": None}, {"images": ["a.png"]}, {"image": 3}])
def test_a_column_of_other_things_is_no_image(row):
    talk = [{"role": "user", "content": "Fix it."}]
    assert pictures.in_row(row) == [] and pictures.with_column(talk, row) == talk


# --- sequences -------------------------------------------------------------------------
def test_sequences_carry_their_images_and_check_their_number_f141():
    """F141: the count is checked before any forward; a placeholder that the policy drew itself is no image."""
    images = images_of(qwen3_vl())
    one, two = images.expand(picture(32, 64)), images.expand(picture(32, 64, seed=1))
    (pad,) = one.token_ids
    first = TurnRecord([1, pad, pad, 2], [3, pad], [-0.5, -0.5], {}, "stop", media=(one,))
    held = [1, pad, pad, 2, 3, pad]
    second = TurnRecord([*held, pad, pad, 9], [4], [-0.1], {}, "stop", media=(one, two))
    (joined,) = to_sequences([first, second])
    assert joined.media == (one, two) and sum(joined.completion_mask) == 3
    with pytest.raises(ValueError, match="4 placeholder ids for 2 image features"):
        to_sequences([first, TurnRecord([*held, pad, pad, 9], [4], [-0.1], {}, "stop", media=(one,))])


def test_equal_ids_of_other_images_fork_f063():
    """F063: two pictures of one size have the same ids; joining them would train on the wrong one."""
    images = images_of(qwen3_vl())
    one, two = images.expand(picture(32, 32)), images.expand(picture(32, 32, seed=1))
    (pad,) = one.token_ids
    turns = [
        TurnRecord([1, pad], [3], [-0.5], {}, "stop", media=(one,)),
        TurnRecord([1, pad, 3, 5], [4], [-0.1], {}, "stop", media=(two,)),
    ]
    got = to_sequences(turns)
    assert got == [
        TrainingSequence([1, pad, 3], [False, False, True], [got[0].old_log_probs[0]] * 2 + [-0.5], 0, (one,)),
        TrainingSequence([1, pad, 3, 5, 4], [False] * 4 + [True], [got[1].old_log_probs[0]] * 4 + [-0.1], 0, (two,)),
    ]
