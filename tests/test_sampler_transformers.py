"""The sampler's tokens against plain forwards of the model: the cache, batching and drawing change nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.transformers import TransformersSampler
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

V = 97
PLAIN = SamplingParams()
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MIXED = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

CACHED = [
    ("Qwen3Config", {**SHAPE, "head_dim": 8}, "sdpa"),
    ("LlamaConfig", SHAPE, "eager"),
    ("MistralConfig", {**SHAPE, "sliding_window": 8}, "sdpa"),
    ("Qwen2Config", {**SHAPE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sdpa"),
    ("Gemma2Config", {**SHAPE, "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 1.0}, "eager"),
    ("Gemma3TextConfig", {**SHAPE, **MIXED}, "sdpa"),
    ("Phi3Config", {**SHAPE, "sliding_window": 8}, "sdpa"),
    ("GPT2Config", GPT2, "sdpa"),
    ("SmolLM3Config", {**SHAPE, "num_hidden_layers": 4}, "sdpa"),
    ("Qwen3MoeConfig", {**SHAPE, **EXPERTS}, "sdpa"),
    ("GptOssConfig", {**SHAPE, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8}, "eager"),
]
UNCACHED = [
    ("MambaConfig", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}, "eager"),
    ("MptConfig", {"vocab_size": V, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, "eager"),
    ("BloomConfig", {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "eager"),
]


def tiny(
    config: str = "Qwen3Config", fields: dict[str, Any] | None = None, attention: str = "sdpa", **more: Any
) -> Any:
    torch.manual_seed(0)
    fields = {**SHAPE, "head_dim": 8} if fields is None else fields
    made = getattr(transformers, config)(**{**fields, **more})
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)  # far from uniform, so that a wrong mask shows
    return model


def ask(
    ids: list[int],
    *,
    name: str = "a",
    seed: tuple[int, ...] = (1, 0, 0),
    max_tokens: int = 6,
    params: SamplingParams = PLAIN,
    stop: tuple[int, ...] = (),
) -> SampleRequest:
    return SampleRequest([], [], ids, max_tokens, params, seed, name, stop)


Played = list[tuple[list[int], list[tuple[int, SampleOutput]]]]


async def play(
    sampler: TransformersSampler,
    conversations: int = 6,
    *,
    turns: int = 3,
    params: SamplingParams = PLAIN,
    pause: Callable[[random.Random], float] | None = None,
    group: int = 2,
) -> Played:
    """Conversations in groups with one first prompt, with tool results of unlike lengths between the turns."""
    draw = random.Random(0)
    first = [[draw.randrange(3, V) for _ in range(draw.choice([1, 5, 20, 33]))] for _ in range(conversations)]

    async def converse(number: int) -> tuple[list[int], list[tuple[int, SampleOutput]]]:
        ids, rng, outputs = list(first[number // group]), random.Random(number), []
        for turn in range(turns):
            if pause is not None:
                await asyncio.sleep(pause(rng))
            request = ask(ids, name=str(number), seed=(1, number, turn), max_tokens=5 + number % 3, params=params)
            request = SampleRequest(
                [], [], ids, request.max_tokens, params, request.seed, request.conversation_id, tuple(range(3, 10))
            )
            output = await sampler.sample(request)
            assert output.ids is not None
            outputs.append((len(ids), output))
            ids = ids + output.ids + [rng.randrange(3, V) for _ in range(rng.choice([2, 11]))]
        sampler.release(str(number))
        return ids, outputs

    return await asyncio.gather(*[converse(number) for number in range(conversations)])


def worst_gap(model: Any, played: Played, temperature: float = 1.0) -> float:
    """The largest difference between recorded log-probs and those of one plain forward of each final sequence."""
    model.eval()
    worst = 0.0
    with torch.no_grad():
        for ids, outputs in played:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            scores = (logits / temperature).log_softmax(-1)
            for start, output in outputs:
                for i, (token, log_prob) in enumerate(zip(output.ids or [], output.log_probs or [], strict=True)):
                    worst = max(worst, abs(scores[start + i - 1, token].item() - log_prob))
    return worst


@pytest.mark.parametrize(("config", "fields", "attention"), CACHED, ids=[name for name, _, _ in CACHED])
def test_log_probs_equal_a_full_forward(config: str, fields: dict[str, Any], attention: str) -> None:
    model = tiny(config, fields, attention)
    sampler = TransformersSampler(model)
    assert worst_gap(model, asyncio.run(play(sampler))) < 2e-5
    assert sampler.runner.cached


@pytest.mark.parametrize(("config", "fields", "attention"), UNCACHED, ids=[name for name, _, _ in UNCACHED])
def test_models_that_cannot_be_cached_are_recomputed(config: str, fields: dict[str, Any], attention: str) -> None:
    model = tiny(config, fields, attention)
    sampler = TransformersSampler(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worst_gap(model, asyncio.run(play(sampler, turns=2))) < 2e-5
    assert not sampler.runner.cached


def test_long_prompts_in_parts_and_small_forwards_change_nothing() -> None:
    model = tiny(attention="eager")
    sampler = TransformersSampler(model, max_forward_tokens=8)
    assert worst_gap(model, asyncio.run(play(sampler))) < 2e-5


def test_f029_log_probs_are_of_the_distribution_drawn_from_at_any_temperature() -> None:
    model = tiny()
    played = asyncio.run(play(TransformersSampler(model), params=SamplingParams(temperature=0.6)))
    assert worst_gap(model, played, temperature=0.6) < 2e-5
    assert worst_gap(model, played, temperature=1.0) > 0.1


def test_f125_seeds_differ_and_f161_the_same_seed_needs_no_state() -> None:
    model = tiny()

    def drawn(seed: int, sampler: TransformersSampler) -> list[int] | None:
        return asyncio.run(sampler.sample(ask([5, 6, 7], seed=(seed, 0, 0), max_tokens=24))).ids

    old, resumed = TransformersSampler(model), TransformersSampler(model)
    asyncio.run(play(old))  # a history that the resumed process does not have
    assert drawn(1, old) == drawn(1, resumed)
    assert drawn(1, old) != drawn(2, old)
    turns = [asyncio.run(old.sample(ask([5, 6, 7], seed=(1, 0, turn), max_tokens=24))).ids for turn in range(2)]
    assert turns[0] != turns[1]


def test_what_else_is_in_the_batch_does_not_change_the_ids() -> None:
    model = tiny()
    alone = asyncio.run(play(TransformersSampler(model), conversations=1))
    crowd = asyncio.run(play(TransformersSampler(model), conversations=9))
    squeezed = asyncio.run(play(TransformersSampler(model, max_slots=2), conversations=9))
    assert [ids for ids, _ in crowd[:1]] == [ids for ids, _ in alone]
    assert [ids for ids, _ in squeezed] == [ids for ids, _ in crowd]


def test_only_new_tokens_are_fed() -> None:
    sampler = TransformersSampler(tiny())

    async def run() -> None:
        first = list(range(10, 30))
        outputs = await asyncio.gather(*[sampler.sample(ask(first, name=str(i), seed=(i,))) for i in range(4)])
        assert sampler.prefilled_tokens == 20  # four identical prompts, one fed
        assert sampler.shared_tokens == 60
        ids = first + (outputs[0].ids or []) + [40, 41, 42]
        await sampler.sample(ask(ids, name="0"))
        assert sampler.prefilled_tokens == 20 + 1 + 3  # the last drawn token was never fed, and three new ones
        await sampler.sample(ask([*ids[:10], 50], name="0"))
        assert sampler.prefilled_tokens == 24 + 1  # a rewritten history keeps the common prefix
        await sampler.sample(ask(first, name="late", seed=(9,)))
        assert sampler.prefilled_tokens == 25 + 1  # a sibling that comes late copies all but the last token

    asyncio.run(run())


def test_f127_the_context_clips_the_turn_and_refuses_a_prompt_that_fills_it() -> None:
    model = tiny(max_position_embeddings=40)
    sampler = TransformersSampler(model)
    output = asyncio.run(sampler.sample(ask([5] * 35, max_tokens=100)))
    assert output.finish_reason == "length"
    assert len(output.ids or []) == 5
    with pytest.raises(SamplerError, match=r"50 tokens .* context 40"):
        asyncio.run(sampler.sample(ask([5] * 50)))
    with pytest.raises(SamplerError, match="40 tokens"):
        asyncio.run(sampler.sample(ask([5] * 40)))


def test_stop_ids_end_the_turn_and_stay_in_it() -> None:
    sampler = TransformersSampler(tiny())
    free = asyncio.run(sampler.sample(ask([5, 6], max_tokens=8))).ids or []
    stopped = asyncio.run(sampler.sample(ask([5, 6], max_tokens=8, stop=(free[3],))))
    end = free.index(free[3]) + 1
    assert (stopped.ids, stopped.finish_reason) == (free[:end], "stop")
    assert len(stopped.log_probs or []) == end


def test_greedy_equals_generate() -> None:
    model = tiny().eval()
    ids = [11, 12, 13, 14]
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 4:].tolist()
    params = SamplingParams(temperature=0.0)
    assert asyncio.run(TransformersSampler(model).sample(ask(ids, max_tokens=12, params=params))).ids == wanted


def test_rows_with_unlike_parameters_share_a_batch() -> None:
    model = tiny()
    kinds = [
        PLAIN,
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0.0),
    ]

    async def run(sampler: TransformersSampler, some: list[int]) -> list[list[int] | None]:
        asked = [sampler.sample(ask([7, 8, i + 9], name=str(i), seed=(i,), params=kinds[i % 4])) for i in some]
        return [output.ids for output in await asyncio.gather(*asked)]

    together = asyncio.run(run(TransformersSampler(model), list(range(8))))
    alone = [asyncio.run(run(TransformersSampler(model), [i]))[0] for i in range(8)]
    assert together == alone


def test_after_publish_the_new_weights_draw() -> None:
    model = tiny()
    sampler = TransformersSampler(model)
    before = asyncio.run(play(sampler))
    assert {output.version for _, outputs in before for _, output in outputs} == {0}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sampler.publish(1)
    after = asyncio.run(play(sampler))
    assert {output.version for _, outputs in after for _, output in outputs} == {1}
    assert worst_gap(model, after) < 2e-5
    assert worst_gap(model, before) > 1e-3


def test_publish_drops_what_a_kept_conversation_had_cached() -> None:
    model = tiny()
    sampler = TransformersSampler(model)

    async def run() -> Played:
        first = [5, 6, 7, 8]
        before = await sampler.sample(ask(first))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        sampler.publish(1)
        ids = first + (before.ids or []) + [9]
        after = await sampler.sample(ask(ids))
        return [(ids + (after.ids or []), [(len(ids), after)])]

    assert worst_gap(model, asyncio.run(run())) < 2e-5


def test_the_same_prompt_again_draws_the_same_ids() -> None:
    sampler = TransformersSampler(tiny())

    async def run() -> list[list[int] | None]:
        outputs = [await sampler.sample(ask([5, 6, 7], max_tokens=max_tokens)) for max_tokens in (1, 6, 6)]
        return [output.ids for output in outputs]

    one, six, again = asyncio.run(run())
    assert six == again
    assert one == (six or [])[:1]
    assert sampler.prefilled_tokens == 3 + 1 + 1  # the last prompt token is fed each time


def test_soft_capped_attention_is_not_sampled_with_sdpa() -> None:
    name, fields, _ = next(case for case in CACHED if case[0] == "Gemma2Config")
    model = tiny(name, fields, "eager")
    model.config._attn_implementation = "an attention of the trainer"
    played = asyncio.run(play(TransformersSampler(model)))
    model.config._attn_implementation = "eager"
    assert worst_gap(model, played) < 2e-5


async def disturbed(sampler: Any, way: str, max_tokens: int, begun: Callable[[], bool]) -> SampleOutput:
    """A turn that new weights (or a reset) met once it had begun."""
    turn = asyncio.create_task(sampler.sample(ask([5, 6], max_tokens=max_tokens)))
    while not begun():
        await asyncio.sleep(0)
    sampler.publish(7) if way == "publish" else sampler.reset()
    return await turn


def unlike_rows(model: Any) -> list[SampleRequest]:
    """Turns with stop ids, candidates, most likely ids and lengths of their own."""
    narrow, cold = SamplingParams(top_k=4, top_p=0.9), SamplingParams(temperature=0.3, repetition_penalty=1.3)
    first = asyncio.run(TransformersSampler(model).sample(ask([5, 6], max_tokens=12))).ids or []
    return [
        ask([5, 6], name="a", max_tokens=12, stop=(first[3],)),
        ask([7] * 20, name="b", seed=(2,), max_tokens=3, params=narrow),
        dataclasses.replace(ask([9], name="c", seed=(3,), max_tokens=9, params=cold), num_sampler_logprobs=3),
    ]


@pytest.mark.parametrize("way", ["publish", "reset"])
def test_a_turn_in_flight_goes_on_after_publish_or_reset(way: str) -> None:
    model = tiny()
    sampler = TransformersSampler(model)
    wanted = asyncio.run(TransformersSampler(model).sample(ask([5, 6], max_tokens=40))).ids

    output = asyncio.run(disturbed(sampler, way, 40, lambda: sampler.decoded_tokens >= 10))
    assert output.ids == wanted  # the weights are the same, so the tokens are
    assert output.version == 0


def test_200_conversations_with_random_arrival() -> None:
    model = tiny(num_hidden_layers=1)
    sampler = TransformersSampler(model, max_slots=32)
    played = asyncio.run(play(sampler, 200, turns=2, pause=lambda rng: 0.05 * rng.random(), group=4))
    assert len(played) == 200
    assert worst_gap(model, played[::7]) < 2e-5
    assert not sampler._table.by_conversation


def test_two_event_loops_in_a_row_and_one_that_was_cut_off() -> None:
    sampler = TransformersSampler(tiny())
    wanted = asyncio.run(sampler.sample(ask([5, 6], max_tokens=30))).ids

    async def cut_off() -> None:
        task = asyncio.create_task(sampler.sample(ask([8, 9], name="b", max_tokens=200)))
        await asyncio.sleep(0.005)
        assert not task.done()

    asyncio.run(cut_off())
    assert asyncio.run(sampler.sample(ask([5, 6], max_tokens=30))).ids == wanted


def test_cancelled_turns_free_their_rows_and_the_others_go_on() -> None:
    model = tiny()
    sampler = TransformersSampler(model, inline_below_s=0.0)  # in the thread

    async def run() -> list[Any]:
        asked = [sampler.sample(ask([5, 6, i], name=str(i), seed=(i,), max_tokens=30)) for i in range(6)]
        tasks = [asyncio.create_task(turn) for turn in asked]
        while sampler.decoded_tokens < 12:
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert sorted(sampler._table.by_conversation) == ["1", "3", "5"]
        return results

    results = asyncio.run(run())
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    for i in (1, 3, 5):
        alone = asyncio.run(TransformersSampler(model).sample(ask([5, 6, i], seed=(i,), max_tokens=30)))
        assert results[i].ids == alone.ids
    sampler.close()


def test_a_failing_forward_fails_its_turns_and_not_the_sampler() -> None:
    model = tiny()
    sampler = TransformersSampler(model)
    wanted = asyncio.run(sampler.sample(ask([5, 6]))).ids
    broken = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(SamplerError, match="no memory") as caught:
        asyncio.run(sampler.sample(ask([5, 6])))
    assert isinstance(caught.value.__cause__, RuntimeError)
    broken.remove()
    assert asyncio.run(sampler.sample(ask([5, 6]))).ids == wanted


def test_bad_requests_say_what_is_wrong() -> None:
    sampler = TransformersSampler(tiny())
    with pytest.raises(SamplerError, match="id 97, outside the model's 97"):
        asyncio.run(sampler.sample(ask([5, 97])))
    with pytest.raises(SamplerError, match="needs prompt ids"):
        asyncio.run(sampler.sample(ask([])))
    with pytest.raises(ConfigurationError, match="encoder-decoder"):
        sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8, "vocab_size": V}
        TransformersSampler(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))


def test_training_mode_dropout_and_checkpointing_do_not_reach_the_sampler() -> None:
    model = tiny(attention_dropout=0.5).train()
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()
    sampler = TransformersSampler(model)
    played = asyncio.run(play(sampler))
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training  # each module back in its own mode
    assert worst_gap(model, played) < 2e-5
    model.train()
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()


def test_bfloat16_and_autocast_draw_close_to_the_plain_forward() -> None:
    model = tiny()
    sampler = TransformersSampler(model, autocast_dtype=torch.bfloat16)
    assert worst_gap(model, asyncio.run(play(sampler))) < 0.5
    half = tiny().to(torch.bfloat16)
    assert worst_gap(half, asyncio.run(play(TransformersSampler(half)))) < 0.5


def test_a_peft_model_is_sampled_with_its_adapter() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    base = tiny()
    model = peft.get_peft_model(base, config)
    played = asyncio.run(play(TransformersSampler(model)))
    assert worst_gap(model, played) < 2e-5
    with model.disable_adapter():
        assert worst_gap(model, played) > 1e-2


def test_another_attention_for_training_is_left_as_it_was() -> None:
    model = tiny()
    wanted = asyncio.run(play(TransformersSampler(model)))
    model.config._attn_implementation = "flex_attention"
    again = asyncio.run(play(TransformersSampler(model)))
    assert model.config._attn_implementation == "flex_attention"
    assert [ids for ids, _ in again] == [ids for ids, _ in wanted]


def test_the_event_loop_goes_on_during_slow_forwards() -> None:
    sampler = TransformersSampler(tiny(), inline_below_s=0.0)
    beats = 0

    async def run() -> None:
        nonlocal beats
        turn = asyncio.create_task(sampler.sample(ask([5] * 100, max_tokens=30)))
        while not turn.done():
            beats += 1
            await asyncio.sleep(0)
        await turn

    asyncio.run(run())
    assert beats > 60  # at least once while each forward ran
    sampler.close()
