"""Images through the renderer and the engine: prompts, bridging, budgets, records."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest

from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.sampler import ScriptedSampler
from agentrl.types import Outcome, Rollout, Task
from tests.images_kit import block, says, user
from tests.tiny_processors import Gemma4Like, gemma3, idefics3, picture, qwen2_5_vl, qwen3_vl, template

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    },
}


def oracle(processor: Any, talk: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    made = processor.apply_chat_template(
        talk, tools=tools, tokenize=True, return_dict=True, add_generation_prompt=True
    )  # fmt: skip
    return list(made["input_ids"][0])


# --- prompts ---------------------------------------------------------------------------
@pytest.mark.parametrize("make", [qwen3_vl, qwen2_5_vl, gemma3, idefics3, lambda: qwen3_vl("qwen3_6")])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_first_prompt_is_that_of_the_processor(make, count):
    processor = make()
    shown = [block(picture(40 + 30 * i, 60, seed=i)) for i in range(count)]
    talk = [user(says("Look: "), *shown, says(" What is it?"))]
    renderer = Renderer(processor, with_tools=False)
    assert renderer.first(talk, None) == oracle(processor, talk)
    assert len(renderer.media(talk)) == count


def test_a_first_prompt_with_tools_and_text_only_is_that_of_the_processor():
    processor = qwen3_vl()
    renderer = Renderer(processor)
    talk = [{"role": "system", "content": [says("Be brief.")]}, user(says("Look."), block(picture(64, 64)))]
    assert renderer.first(talk, [LOOK]) == oracle(processor, talk, [LOOK])
    assert renderer.first([talk[0], user(says("x"))], [LOOK]) == oracle(processor, [talk[0], user(says("x"))], [LOOK])
    assert renderer.media([user(says("x"))]) == ()


def test_gemma_4_shows_an_image():
    renderer = Renderer(Gemma4Like(), with_tools=False)
    talk = [user(block(picture(96, 48)), says("What?"))]
    (image,) = renderer.media(talk)
    assert renderer.decode(renderer.first(talk, None)) == (
        f"<bos><|turn>user\n{image.text}What?<turn|>\n<|turn>model\n"
    )  # fmt: skip


def conversation(results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "look", "arguments": {"at": i}}}
        for i in range(len(results))
    ]
    return [
        user(says("Where?"), block(picture(32, 32))),
        {"role": "assistant", "content": "", "tool_calls": calls},
        *[
            {"role": "tool", "name": "look", "tool_call_id": f"call_{i}", "content": content}
            for i, content in enumerate(results)
        ],
    ]


RESULTS = [
    [[block(picture(64, 64, 1))]],
    [[says("north "), block(picture(64, 64, 1)), says(" of\n")]],
    [[says("a"), block(picture(64, 64, 1)), block(picture(32, 96, 2))], [says("b")], [block(picture(96, 96, 3))]],
]


@pytest.mark.parametrize("results", RESULTS)
def test_images_in_tool_results_continue_the_held_ids_as_the_processor_writes_them(results):
    processor = qwen3_vl()
    renderer = Renderer(processor)
    talk = conversation(results)
    first = renderer.first(talk[:1], [LOOK])
    media = renderer.media(talk[:1])
    turn = renderer.write_turn(talk[1], [LOOK])
    assert turn is not None
    held = [*first, *processor.tokenizer.encode(turn, add_special_tokens=False)]
    prompt = renderer.next(held, talk, 2, [LOOK], media)
    assert prompt.drift is None and prompt.ids[: len(held)] == held
    assert prompt.ids == oracle(processor, talk, [LOOK])
    assert prompt.media == renderer.media(talk) and prompt.media[0] is media[0]


def test_a_training_template_shows_images_of_tools_too():
    """Qwen2.5-VL's own template writes no tools; ours writes what the original writes for an image."""
    renderer = Renderer(qwen2_5_vl())
    assert renderer.verdict.template != "original" and renderer.verdict.preserving
    talk = conversation([[says("north "), block(picture(56, 56, 1))]])
    first = renderer.first(talk[:1], [LOOK])
    shown = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert "Where?" + shown.replace("<|image_pad|>" * 4, "<|image_pad|>") in renderer.decode(first)
    prompt = renderer.next([*first, 5], talk, 2, [LOOK], renderer.media(talk[:1]))
    assert f"<tool_response>\nnorth {shown}\n</tool_response>" in renderer.decode(prompt.ids)
    assert [one.tokens for one in prompt.media] == [1, 4]


PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if block.type == 'image' else block.text }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_plain_chatml_shows_images_as_the_original_does():
    """A template of ours that knows nothing of blocks gets the original's text for an image."""
    processor = qwen3_vl()
    processor.chat_template = PLAIN
    renderer = Renderer(processor)
    assert renderer.verdict.template != "original"
    talk = conversation([[says("north "), block(picture(64, 64, 1)), says("<|image_pad|>")]])
    first = renderer.first(talk[:1], [LOOK])
    shown = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert "user\nWhere?<|vision_start|><|image_pad|><|vision_end|><|im_end|>" in renderer.decode(first)
    prompt = renderer.next([*first, 5], talk, 2, [LOOK], renderer.media(talk[:1]))
    assert f"<tool_response>\nnorth {shown}<|image_pad|>\n</tool_response>" in renderer.decode(prompt.ids)
    (pad,) = prompt.media[0].token_ids
    assert prompt.ids.count(pad) == 1 + 4


def test_numbered_images_are_numbered_through():
    """A template that counts its images makes later text depend on earlier images: nothing is bridged blindly."""
    processor = qwen3_vl()
    renderer = Renderer(processor, chat_template_kwargs={"add_vision_id": True})
    talk = conversation([[block(picture(64, 64, 1))]])
    first = renderer.first(talk[:1], [LOOK])
    turn = renderer.write_turn(talk[1], [LOOK])
    assert turn is not None
    held = [*first, *processor.tokenizer.encode(turn, add_special_tokens=False)]
    text = renderer.decode(renderer.next(held, talk, 2, [LOOK], renderer.media(talk[:1])).ids)
    assert "Where?Picture 1: <|vision" in text and "<tool_response>\nPicture 2: <|vision" in text


def test_a_template_that_rewrites_history_keeps_all_images_of_its_new_prompt():
    rewriting = PLAIN.replace(
        "if m.content is string", "if m.role == 'assistant' and not loop.last %}old{% elif m.content is string"
    )
    processor = qwen3_vl()
    renderer = Renderer(processor, chat_template=rewriting, with_tools=False)
    talk = [
        user(block(picture(32, 32)), says("What?")),
        {"role": "assistant", "content": "hello"},
        user(block(picture(64, 64, 1))),
    ]
    held = [*renderer.first(talk[:1], None), *processor.tokenizer.encode("hello<|im_end|>", add_special_tokens=False)]
    prompt = renderer.next(held, talk, 2, None, renderer.media(talk[:1]))
    assert prompt.drift is not None and [one.tokens for one in prompt.media] == [1, 4]
    (pad,) = prompt.media[0].token_ids
    assert prompt.ids.count(pad) == 5 and "<|im_start|>assistant\nold<|im_end|>" in renderer.decode(prompt.ids)


def test_spelled_placeholders_are_text_f065():
    """F065: in messages of users, tools, systems and assistants; the count of placeholders is that of the images."""
    processor = qwen3_vl()
    renderer = Renderer(processor)
    spelled = says("<|image_pad|> <|vision_start|>")
    talk = conversation([[spelled, block(picture(64, 64, 1))]])
    talk = [{"role": "system", "content": [spelled]}, user(spelled, *talk[0]["content"]), *talk[1:]]
    talk[2]["content"] = "<|image_pad|>"
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = renderer.first(talk, [LOOK])
    assert ids.count(pad) == 1 + 4 and renderer.decode(ids).count("<|image_pad|>") == 1 + 4 + 4


def test_a_placeholder_that_is_not_special_is_no_marker_that_a_policy_may_write_f065():
    """F065: assistants may write tags that are added but not special; an image's placeholder is not among them."""
    processor = qwen3_vl()
    for token in processor.tokenizer.backend_tokenizer.get_added_tokens_decoder().values():
        if "image" in token.content:
            token.special = False
            processor.tokenizer.backend_tokenizer.add_tokens([token])
    renderer = Renderer(processor)
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    talk = [user(block(picture(64, 64))), {"role": "assistant", "content": "<|image_pad|>"}, user(says("x"))]
    assert renderer.first(talk, [LOOK]).count(pad) == 4


def test_a_template_that_writes_images_for_users_only_is_refused_at_first_use_f141():
    """F141."""
    text = template("qwen3_vl")
    middle = text.index('message.role == "tool"')
    deaf = text[:middle] + text[middle:].replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    renderer = Renderer(qwen3_vl(), chat_template=deaf)
    talk = conversation([[block(picture(64, 64, 1))]])
    first = renderer.first(talk[:1], [LOOK])
    with pytest.raises(ConfigurationError, match="leaves out those of tool messages"):
        renderer.next([*first, 5], talk, 2, [LOOK], renderer.media(talk[:1]))


def test_a_tokenizer_alone_shows_no_images():
    tokenizer = qwen3_vl().tokenizer
    tokenizer.chat_template = template("qwen3_vl")
    with pytest.raises(ConfigurationError, match="and the tokenizer reads text only: pass the processor"):
        Renderer(tokenizer).first([user(block(picture(2, 2)))], [LOOK])


def test_equal_prompts_of_other_images_are_not_mixed_up():
    """F063: a group's first prompt is rendered once; another row's image makes another prompt."""
    renderer = Renderer(qwen3_vl())
    one, two = np.zeros((32, 32, 3), np.uint8), np.full((64, 32, 3), 7, np.uint8)
    short = renderer.first([user(block(one))], [LOOK])
    assert renderer.first([user(block(one.copy()))], [LOOK]) == short
    assert len(renderer.first([user(block(two))], [LOOK])) == len(short) + 1


# --- episodes --------------------------------------------------------------------------
class Cave:
    """Shows a picture at the start and with each look; the same canvas is drawn on again and again."""

    def __init__(self) -> None:
        self.canvas = np.zeros((64, 64, 3), np.uint8)

    def reset(self) -> list[dict[str, Any]]:
        self.canvas[:] = 0
        return [block(self.canvas), says("A cave.")]

    def look(self, at: int) -> list[dict[str, Any]]:
        """Looks somewhere.

        Args:
            at: Where.
        """
        self.canvas[at] += 50
        if at == 60:
            return [says("dark"), block("no/such/file.png")]
        return [says("stone"), block(self.canvas)]


def looks(at: int) -> dict[str, Any]:
    return {"tool_calls": [{"name": "look", "arguments": {"at": at}}]}


@functools.cache
def eyes() -> tuple[Any, Renderer]:
    processor = qwen3_vl()
    return processor, Renderer(processor)


def play(script: list[Any], *, environment: Any = Cave, row: Any = None, **more: Any) -> Rollout:
    processor, renderer = eyes()
    sampler = ScriptedSampler(script, tokenizer=processor.tokenizer)
    settings = RolloutSettings(max_attempts=1, max_failures_in_row=2, **more)
    engine = RolloutEngine(sampler, renderer, {None: EnvironmentPool(environment)}, settings=settings)
    task = Task(0, 0, 1, {"prompt": [{"role": "user", "content": "Go. "}]} if row is None else row)

    async def one() -> Rollout:
        rollout, _ = await engine.play(task, rollout_id="r", group_id="g")
        return rollout

    return asyncio.run(one())


def test_images_of_reset_and_tools_reach_the_sequence_f145():
    """F145: embedded pictures, from reset and from tools, in order, with the features of each."""
    rollout = play([looks(1), looks(2), "stone"])
    assert rollout.outcome is Outcome.FINISHED
    (sequence,) = rollout.sequences
    assert [one.size for one in sequence.media] == [(64, 64)] * 3 and len({one.key for one in sequence.media}) == 3
    assert [len(turn.media) for turn in rollout.turns] == [1, 2, 3]
    (pad,) = sequence.media[0].token_ids
    assert sequence.input_ids.count(pad) == 3 * 4
    trained = [i for i, mask in zip(sequence.input_ids, sequence.completion_mask, strict=True) if mask]
    assert pad not in trained and trained == [i for turn in rollout.turns for i in turn.output_ids or ()]


def test_the_sampler_is_given_the_images_of_its_prompt():
    processor = qwen3_vl()
    sampler = ScriptedSampler([looks(1), "stone"], tokenizer=processor.tokenizer)
    engine = RolloutEngine(sampler, Renderer(processor), {None: EnvironmentPool(Cave)})
    asyncio.run(engine.play(Task(0, 0, 1, {"prompt": None}), rollout_id="r", group_id="g"))
    assert [len(request.media) for request in sampler.requests] == [1, 2]


@pytest.mark.parametrize("room", range(1, 40, 3))
def test_a_result_that_does_not_fit_is_rolled_back_whole_f041(room):
    """F041: its text, its image and its ids; whatever the budget, no image is cut."""
    whole = play([looks(1), looks(2), "stone"])
    first = len(whole.turns[0].prompt_ids or ())
    turn = len(whole.turns[0].output_ids or ())
    rollout = play([looks(1), looks(2), "stone"], max_completion_length=turn + room)
    added = len(whole.turns[1].prompt_ids or ()) - first - turn
    (sequence,) = rollout.sequences
    (pad,) = sequence.media[0].token_ids
    assert rollout.outcome is Outcome.TRUNCATED and rollout.truncated
    if room <= added:
        assert [message["role"] for message in rollout.messages] == ["user", "assistant"]
        assert len(sequence.media) == 1 and sequence.input_ids.count(pad) == 4
        assert len(sequence.input_ids) == first + turn
    else:
        assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
        assert len(sequence.media) == 2 and sequence.input_ids.count(pad) == 8
    assert len(sequence.input_ids) <= first + turn + room


def test_a_broken_image_of_a_tool_fails_the_rollout():
    rollout = play([looks(60), "stone"])
    assert rollout.outcome is Outcome.TOOL_FAILED and "no/such/file.png" in (rollout.error or "")
    assert rollout.sequences == ()


def test_a_broken_image_of_reset_fails_the_reset():
    class Blind(Cave):
        def reset(self) -> list[dict[str, Any]]:
            return [block("no/such/file.png")]

    rollout = play(["stone"], environment=Blind)
    assert rollout.outcome is Outcome.RESET_FAILED and "no/such/file.png" in (rollout.error or "")


def test_a_broken_image_of_a_row_stops_the_run():
    row = {"prompt": [user(block("no/such/file.png"))]}
    with pytest.raises(ConfigurationError, match="no/such/file"):
        play(["stone"], environment=None, row=row)


@pytest.mark.parametrize("prompt", ["What is it?", [{"role": "user", "content": "What is it?"}]])
def test_the_image_column_of_a_row_is_shown(prompt):
    rollout = play(["stone"], environment=None, row={"prompt": prompt, "image": picture(64, 64)})
    assert [one.tokens for one in rollout.sequences[0].media] == [4]
    assert [piece["type"] for piece in rollout.messages[0]["content"]] == ["image", "text"]
