"""Models that see images: what is sampled is what is trained, and the pictures count."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.sampler import TransformersSampler
from agentrl.sampler.vision import placeholder_ids
from agentrl.train.log_probs import PolicyForward
from agentrl.train.rows import TrainItem, make_row
from agentrl.types import ParsedCall, ParsedTurn, Rollout, SampleRequest, SamplingParams, Task, TrainingSequence
from tests.images_kit import block, images_of, says
from tests.tiny_processors import gemma3, idefics3, picture, qwen2_5_vl, qwen3_vl
from tests.tiny_vision import gemma3_model, qwen2_5_vl_model, qwen3_vl_model

FAMILIES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "qwen3_vl": (qwen3_vl, qwen3_vl_model),
    "qwen2_5_vl": (qwen2_5_vl, qwen2_5_vl_model),
    "gemma3": (gemma3, gemma3_model),
}
CPU = torch.device("cpu")


@functools.cache
def family(name: str) -> tuple[Any, Renderer]:
    processor = FAMILIES[name][0]()
    return processor, Renderer(processor)


def model_of(name: str, seed: int = 0) -> Any:
    return FAMILIES[name][1](family(name)[0], seed)


class Cave:
    """Shows a picture at the start and one with each look."""

    def reset(self, seed: int = 0) -> list[dict[str, Any]]:
        self.seed = seed
        return [block(picture(60, 70, seed)), says("A cave.")]

    def look(self, at: int) -> list[dict[str, Any]]:
        """Looks somewhere.

        Args:
            at: Where.
        """
        return [says("stone"), block(picture(40 + 20 * at, 64, self.seed + at))]


def looking(renderer: Renderer, turns: int) -> Renderer:
    """The renderer, which reads a call of `look` into the first `turns` turns of every conversation.

    Every fourth id ends a turn: a random model would hardly ever draw the one that does.
    """
    made = copy.copy(renderer)
    made.stop_ids = tuple(range(0, 400, 4))

    def parse(ids: list[int], tools: Any = None, *, start: int = 0, prompt_ids: Any = None) -> ParsedTurn:
        if start >= turns:
            return ParsedTurn({"role": "assistant", "content": "done"})
        call = {"id": f"call_{start}", "type": "function",
                "function": {"name": "look", "arguments": {"at": start + 1}}}  # fmt: skip
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return ParsedTurn(message, (ParsedCall(f"call_{start}", "look", {"at": start + 1}),))

    made.parse = parse  # type: ignore[method-assign]
    return made


def play(name: str, model: Any, *, episodes: int = 3, turns: int = 2, **sampling: Any) -> list[Rollout]:
    """Episodes side by side, each with an image at the start and one after each of `turns` calls."""
    renderer = looking(family(name)[1], turns)
    settings = RolloutSettings(max_attempts=1, sampling=SamplingParams(**sampling), max_completion_length=2000)
    engine = RolloutEngine(TransformersSampler(model), renderer, {None: EnvironmentPool(Cave)}, settings=settings)

    async def all_of_them() -> list[Rollout]:
        pairs = [
            engine.play(Task(i, 0, i, {"prompt": [{"role": "user", "content": "Go. " * (i + 1)}]}),
                        rollout_id=f"r{i}", group_id="g") for i in range(episodes)
        ]  # fmt: skip
        return [rollout for rollout, _ in await asyncio.gather(*pairs)]

    return asyncio.run(all_of_them())


def items_of(rollouts: list[Rollout]) -> list[TrainItem]:
    return [TrainItem(i, rollout.sequences, 1.0, True) for i, rollout in enumerate(rollouts)]


def recorded(rollout: Rollout) -> torch.Tensor:
    pairs = [pair for s in rollout.sequences for pair in zip(s.old_log_probs, s.completion_mask, strict=True)]
    return torch.tensor([log_prob for log_prob, mask in pairs if mask])


def forward_of(model: Any, temperature: float = 1.0) -> PolicyForward:
    policy = PolicyForward(model, temperature)
    policy.probe()
    return policy


# --- sampled and trained ---------------------------------------------------------------
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 20}])
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_log_probs_are_those_of_training(name, sampling):
    model = model_of(name)
    rollouts = play(name, model, **sampling)
    for rollout in rollouts:
        (sequence,) = rollout.sequences
        assert len(sequence.media) == 3 and len(rollout.turns) == 3, rollout.error
    row = make_row(items_of(rollouts), CPU)
    policy = forward_of(model, sampling.get("temperature", 1.0))
    with torch.no_grad(), policy.context(row):
        trained = policy.run(row).log_probs_N
    worst = (trained - torch.cat([recorded(rollout) for rollout in rollouts])).abs().max()
    print(f"\n{name} {sampling}: {len(trained)} tokens, off by {worst:.2g}")
    assert worst < 1e-4 and trained.std() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_forward_of_what_the_processor_makes_says_the_same(name):
    """No code of ours between the conversation and the model: the processor's own inputs of one whole conversation."""
    processor, renderer = family(name)
    model = model_of(name)
    talk = [{"role": "user", "content": [says("Here: "), block(picture(60, 70)), block(picture(64, 40, 1)), says("?")]}]
    own = processor.apply_chat_template(talk, tokenize=True, return_dict=True, add_generation_prompt=True,
                                        return_tensors="pt")  # fmt: skip
    length, answer = own["input_ids"].shape[1], [7, 33, 12]
    with torch.no_grad():
        whole = {"input_ids": torch.cat([own["input_ids"], torch.tensor([answer])], 1)}
        whole |= {k: v for k, v in own.items() if "mask" not in k and "ids" not in k}
        whole |= {k: torch.nn.functional.pad(v, (0, 3)) for k, v in own.items() if k.endswith("token_type_ids")}
        logits = model(**whole).logits[0, length - 1 : -1]
    logits[:, list(placeholder_ids(model))] = -torch.inf
    plain = logits.log_softmax(-1)[range(3), answer]

    ids = [*renderer.first(talk, None), *answer]
    shown = TrainingSequence(ids, [i >= length for i in range(len(ids))], [0.0] * len(ids), 0, renderer.media(talk))
    text = TrainingSequence([5, 6, *range(30, 90)], [False, *[True] * 61], [0.0] * 62)
    row = make_row([TrainItem(0, (text, shown, text), 1.0, True)], CPU)
    policy = forward_of(model)
    with torch.no_grad(), policy.context(row):
        ours = policy.run(row).log_probs_N
    assert (ours[61:64] - plain).abs().max() < 2e-6
    alone = make_row([TrainItem(0, (text,), 1.0, True)], CPU)
    with torch.no_grad(), policy.context(alone):
        assert (policy.run(alone).log_probs_N - ours[:61]).abs().max() < 5e-6


# --- gradients -------------------------------------------------------------------------
def gradients(policy: PolicyForward, rows: list[Any]) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    for row in rows:
        with policy.context(row):
            policy.run(row).log_probs_N.sum().backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_a_batch_is_that_of_its_sequences_and_reaches_the_eyes(name, checkpointing):
    model = model_of(name)
    items = items_of(play(name, model))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    policy = forward_of(model)
    together = gradients(policy, [make_row(items, CPU)])
    apart = gradients(policy, [make_row([item], CPU) for item in items])
    eyes = [n for n in together if "visual" in n or "vision_tower" in n or "multi_modal_projector" in n]
    assert len(eyes) > 10 and together.keys() == apart.keys()
    assert sum(float(together[n].abs().max()) > 1e-4 for n in eyes) > 0.8 * len(eyes)
    for n, gradient in together.items():
        assert torch.allclose(gradient, apart[n], rtol=1e-3, atol=1e-4 * float(apart[n].abs().max()) + 1e-5), n


# --- pictures count --------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_another_pixel_is_another_log_prob(name):
    model, (_, renderer) = model_of(name), family(name)
    policy = forward_of(model)

    def log_probs(pixel: int) -> torch.Tensor:
        pixels = np.array(picture(64, 64))
        pixels[5:9, 5:9] = pixel
        talk = [{"role": "user", "content": [block(pixels), says("What?")]}]
        ids = [*renderer.first(talk, None), 7, 33, 12]
        mask = [i >= len(ids) - 3 for i in range(len(ids))]
        sequence = TrainingSequence(ids, mask, [0.0] * len(ids), 0, renderer.media(talk))
        with torch.no_grad():
            return policy.run(make_row([TrainItem(0, (sequence,), 1.0, True)], CPU)).log_probs_N

    assert torch.equal(log_probs(0), log_probs(0))
    assert (log_probs(0) - log_probs(255)).abs().min() > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_ids_with_other_pictures_are_sampled_apart_f063(name):
    """F063: side by side, and one after the other; what is drawn for a picture is what is drawn for it alone."""
    model, (_, renderer) = model_of(name), family(name)
    talks = [[{"role": "user", "content": [block(picture(64, 64, seed)), says("What?")]}] for seed in (1, 2)]
    prompts = [renderer.first(talk, None) for talk in talks]
    assert prompts[0] == prompts[1]

    def request(i: int) -> SampleRequest:
        return SampleRequest(talks[i], [], prompts[i], 12, SamplingParams(), (3,), f"c{i}",
                             media=renderer.media(talks[i]))  # fmt: skip

    async def together() -> list[list[float]]:
        sampler = TransformersSampler(model)
        both = await asyncio.gather(sampler.sample(request(0)), sampler.sample(request(1)))
        later = await sampler.sample(replace(request(1), conversation_id="c0"))
        assert later.ids == both[1].ids
        return [out.log_probs or [] for out in both]

    async def alone(i: int) -> list[float]:
        return (await TransformersSampler(model).sample(request(i))).log_probs or []

    side_by_side = asyncio.run(together())
    assert abs(side_by_side[0][0] - side_by_side[1][0]) > 1e-3
    for i in (0, 1):
        assert side_by_side[i] == pytest.approx(asyncio.run(alone(i)), abs=1e-5)


def test_text_turns_beside_images_go_on_as_before():
    """A conversation whose cache was in use when the first image arrived draws what it draws alone."""
    model, (_, renderer) = model_of("qwen3_vl"), family("qwen3_vl")
    talk = [{"role": "user", "content": [block(picture(64, 64)), says("What?")]}]
    text = SampleRequest([], [], [5, 6, 7, 8], 30, SamplingParams(), (1,), "text")
    shown = SampleRequest(talk, [], renderer.first(talk, None), 5, SamplingParams(), (2,), "image",
                          media=renderer.media(talk))  # fmt: skip

    async def mixed() -> tuple[Any, Any]:
        sampler = TransformersSampler(model, admit_fraction=0.0)
        first = asyncio.create_task(sampler.sample(text))
        while sampler.decoded_tokens < 6:
            await asyncio.sleep(0)
        assert sampler.runner.cached
        await sampler.sample(shown)
        assert not sampler.runner.cached
        more = replace(text, prompt_ids=[*(text.prompt_ids or []), *((await first).ids or []), 9], seed=(4,))
        return await first, await sampler.sample(more)

    async def alone(request: SampleRequest) -> Any:
        return await TransformersSampler(model).sample(request)

    first, second = asyncio.run(mixed())
    assert first.ids == asyncio.run(alone(text)).ids
    more = replace(text, prompt_ids=[*(text.prompt_ids or []), *(first.ids or []), 9], seed=(4,))
    assert second.ids == asyncio.run(alone(more)).ids


# --- placeholders ----------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_placeholders_are_never_drawn_and_have_no_probability_in_training(name):
    model = model_of(name)
    ids = placeholder_ids(model)
    assert len(ids) == (1 if name == "gemma3" else 2)
    with torch.no_grad():  # the model itself would draw nothing else
        state = model.model(input_ids=torch.tensor([[5, 6]])).last_hidden_state[0, -1]
        model.get_output_embeddings().weight[list(ids)] = state * 50
    request = SampleRequest([], [], [5, 6], 1, SamplingParams(), (0,), "a", num_sampler_logprobs=999)
    tops = asyncio.run(TransformersSampler(model).sample(request)).sampler_logprobs
    assert tops is not None and not set(ids) & set(tops[0]) and len(tops[0]) > 300

    def trained(token: int) -> torch.Tensor:
        sequence = TrainingSequence([5, 6, token], [False, False, True], [0.0] * 3)
        return PolicyForward(model, 1.0).run(make_row([TrainItem(0, (sequence,), 1.0, True)], CPU)).log_probs_N

    for token in (10, 200):
        assert float(trained(token).detach()) == pytest.approx(tops[0][token], abs=1e-5)
    with pytest.raises(ConfigurationError, match=f"holds the id {ids[0]}, which stands for an image"):
        trained(ids[0])


# --- refusals --------------------------------------------------------------------------
def test_a_model_of_text_refuses_images():
    processor = qwen3_vl()
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(processor.tokenizer), num_key_value_heads=1, **shape))
    media = (images_of(processor).expand(picture(32, 32)),)
    request = SampleRequest([], [], [5, 6], 4, SamplingParams(), (0,), "a", media=media)
    with pytest.raises(ConfigurationError, match=r"holds 1 image.*LlamaForCausalLM reads text only"):
        asyncio.run(TransformersSampler(model, processor).sample(request))


def test_images_along_another_axis_are_refused_by_name():
    image = images_of(idefics3()).expand(picture(64, 64))
    sequence = TrainingSequence([*sorted(image.token_ids) * image.tokens, 5], [False] * image.tokens + [True],
                                [0.0] * (image.tokens + 1), 0, (image,))  # fmt: skip
    row = make_row([TrainItem(0, (sequence,), 1.0, True)], CPU)
    with pytest.raises(ConfigurationError, match=r"'pixel_values' as \[1, 5, 3, 32, 32\].*Idefics 3 and SmolVLM"):
        PolicyForward(model_of("qwen3_vl"), 1.0).run(row)
