"""Turns drawn by transformers' continuous batching: pages, eviction and new weights change no token."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest
import torch
from test_sampler_transformers import CACHED, UNCACHED, V, ask, disturbed, play, tiny, unlike_rows, worst_gap

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.continuous import ContinuousSampler
from agentrl.sampler.transformers import TransformersSampler
from agentrl.types import SampleOutput, SampleRequest

SMALL = {"page_size": 8, "max_batch_tokens": 64, "num_blocks": 64}
PAGED = [case for case in CACHED if case[0] != "Gemma2Config"]


def one(sampler: Any, request: SampleRequest) -> SampleOutput:
    return asyncio.run(sampler.sample(request))


def ids_of(played: Any) -> list[list[int]]:
    return [ids for ids, _ in played]


@pytest.mark.parametrize("case", PAGED, ids=lambda case: case[0])
def test_ids_and_log_probs_are_those_of_the_default_sampler(case: Any) -> None:
    model = tiny(*case)
    sampler = ContinuousSampler(model, config=SMALL)
    played = asyncio.run(play(sampler))
    assert worst_gap(model, played) < 3e-5
    assert ids_of(played) == ids_of(asyncio.run(play(TransformersSampler(model))))
    assert sampler.exact


@pytest.mark.parametrize("case", [*UNCACHED, *[case for case in CACHED if case not in PAGED]], ids=lambda case: case[0])
def test_models_that_pages_cannot_hold_are_sent_to_the_default_sampler(case: Any) -> None:
    with pytest.raises(ConfigurationError, match="use TransformersSampler"):
        one(ContinuousSampler(tiny(*case)), ask([5, 6]))


def test_f125_seeds_differ_and_the_same_seed_draws_the_same() -> None:
    model = tiny()

    def run(seed: int, **more: Any) -> list[Any]:
        async def all_of() -> list[Any]:
            sampler = ContinuousSampler(model, config=SMALL, **more)
            asked = [sampler.sample(ask([5, 6, i], name=str(i), seed=(seed, i), max_tokens=12)) for i in range(9)]
            return [(output.ids, output.log_probs) for output in await asyncio.gather(*asked)]

        return asyncio.run(all_of())

    assert run(1) == run(1)  # log-probs to the last bit: the batches are the same
    assert [ids for ids, _ in run(1)] == [ids for ids, _ in run(1, max_slots=2)]
    assert [ids for ids, _ in run(1)] != [ids for ids, _ in run(2)]


def test_pages_are_fed_once_and_a_later_turn_feeds_what_is_new() -> None:
    sampler = ContinuousSampler(tiny(), config=SMALL)

    async def run() -> None:
        first = list(range(10, 30))  # two whole pages and a half
        outputs = await asyncio.gather(*[sampler.sample(ask(first, name=str(i), seed=(i,))) for i in range(4)])
        assert sampler.prefilled_tokens == 20 + 3 * 4
        assert sampler.shared_tokens == 3 * 16
        ids = first + (outputs[0].ids or []) + [40, 41, 42]
        await sampler.sample(ask(ids, name="0"))
        assert sampler.prefilled_tokens - 32 <= 1 + 3 + 8  # new tokens, and at most a page
        fed = sampler.prefilled_tokens
        await sampler.sample(ask(first, name="late", seed=(9,)))
        assert sampler.prefilled_tokens == fed + 4

    asyncio.run(run())
    alone = ContinuousSampler(tiny(), config=SMALL | {"allow_block_sharing": False})
    asyncio.run(play(alone, conversations=4, group=4))
    assert alone.shared_tokens == 0


def test_keys_of_old_weights_are_not_used_after_publish() -> None:
    model = tiny()
    sampler = ContinuousSampler(model, config=SMALL)

    async def run() -> Any:
        first = list(range(10, 42))
        before = await sampler.sample(ask(first))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        sampler.publish(1)
        ids = first + (before.ids or []) + [9]
        after = await sampler.sample(ask(ids))
        assert (before.version, after.version) == (0, 1)
        return [(ids + (after.ids or []), [(len(ids), after)])]

    assert worst_gap(model, asyncio.run(run())) < 3e-5


@pytest.mark.parametrize("way", ["publish", "reset"])
@pytest.mark.parametrize("inline", [0.0, 10.0])
def test_a_turn_in_flight_goes_on_after_publish_or_reset(way: str, inline: float) -> None:
    model = tiny()
    wanted = one(TransformersSampler(model), ask([5, 6], max_tokens=60)).ids
    sampler = ContinuousSampler(model, config=SMALL)
    sampler.inline_below_s = inline

    output = asyncio.run(disturbed(sampler, way, 60, lambda: sampler.decoded_tokens >= 12))
    assert output.ids == wanted  # the weights are the same, so the tokens are
    assert output.version == 0
    assert sampler.prefilled_tokens > 12  # fed again, with what was drawn
    sampler.close()


def test_a_full_cache_feeds_turns_again_and_changes_no_token() -> None:
    model = tiny()
    roomy = ContinuousSampler(model, config=SMALL)
    tight = ContinuousSampler(model, config=SMALL | {"num_blocks": 12})  # 96 tokens, and each turn has up to 46

    async def run(sampler: Any) -> list[Any]:
        asked = [sampler.sample(ask([5, i], name=str(i), seed=(i,), max_tokens=44)) for i in range(8)]
        return [output.ids for output in await asyncio.gather(*asked)]

    assert asyncio.run(run(tight)) == asyncio.run(run(roomy))
    assert tight.forwards > roomy.forwards
    output = one(tight, ask([5] * 90, max_tokens=60))
    assert (len(output.ids or []), output.finish_reason) == (6, "length")
    with pytest.raises(SamplerError, match="96 tokens and the whole cache 96; raise num_blocks"):
        one(tight, ask([5] * 96))


def test_long_prompts_are_fed_in_parts() -> None:
    model = tiny()
    prompts = [[random.Random(i).randrange(3, V) for _ in range(150)] for i in range(3)]

    async def run(sampler: Any) -> list[Any]:
        asked = [sampler.sample(ask(ids, name=str(i), seed=(i,))) for i, ids in enumerate(prompts)]
        return [output.ids for output in await asyncio.gather(*asked)]

    assert asyncio.run(run(ContinuousSampler(model, config=SMALL))) == asyncio.run(run(TransformersSampler(model)))


def test_candidates_top_log_probs_and_stops_of_unlike_rows_in_one_batch() -> None:
    model = tiny()
    requests = unlike_rows(model)

    async def run(sampler: Any) -> list[SampleOutput]:
        return await asyncio.gather(*[sampler.sample(request) for request in requests])

    together = asyncio.run(run(ContinuousSampler(model, config=SMALL)))
    for mine, other in zip(together, asyncio.run(run(TransformersSampler(model))), strict=True):
        assert (mine.ids, mine.finish_reason) == (other.ids, other.finish_reason)
        assert mine.log_probs == pytest.approx(other.log_probs, abs=3e-5)
        assert [list(x) for x in mine.sampling_mask or []] == [list(x) for x in other.sampling_mask or []]
        assert [list(x) for x in mine.sampler_logprobs or []] == [list(x) for x in other.sampler_logprobs or []]
    assert all(1 <= len(ids) <= 4 for ids in together[1].sampling_mask or [[]])
    assert [len(x) for x in together[2].sampler_logprobs or []] == [3] * 9


def test_generation_kwargs_that_need_the_whole_text_work_here_too() -> None:
    model, request = tiny(), ask([5, 6, 7], max_tokens=40)
    free = one(ContinuousSampler(model, config=SMALL), request).ids or []
    kwargs = {"no_repeat_ngram_size": 1, "suppress_tokens": free[:2], "max_new_tokens": 30}
    sampler = ContinuousSampler(model, config=SMALL, kwargs=kwargs)
    ids = [5, 6, 7, *(one(sampler, request).ids or [])]
    assert len(ids) == len(set(ids)) == 33
    assert not set(free[:2]) & set(ids[3:])
    assert not sampler.exact


@pytest.mark.parametrize(
    ("config", "kwargs", "said"),
    [
        ({"max_memory": 0.5}, {}, "has no key 'max_memory'; did you mean"),
        ({"max_memory_percent": 1.5}, {}, r"in \(0, 1\]; got 1.5"),
        ({"scheduler_type": "lifo"}, {}, "one of .*'fifo'"),
        ({"use_async_batching": True}, {}, "use_async_batching=True cannot be used here"),
        ({"default_compile_level": 1}, {}, "default_compile_level=1"),
        ({"seed": 3}, {}, "seed=3"),
        ({}, {"cache_implementation": "static"}, "continuous batching has its own cache"),
        ({}, {"num_beams": 2}, "one sequence"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config: dict[str, Any], kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ContinuousSampler(tiny(), config=config, kwargs=kwargs)


def test_keys_reach_transformers_and_what_says_the_default_is_taken() -> None:
    asked = {"page_size": 4, "num_blocks": 30, "max_requests_per_batch": 2, "use_cuda_graph": False, "seed": None}
    sampler = ContinuousSampler(tiny(), config=asked)

    async def run() -> None:
        await sampler.sample(ask([5, 6]))
        engine = sampler._engine
        assert (engine.page, engine.capacity, engine.cache.max_batch_tokens) == (4, 120, 1024)
        assert engine._manager.continuous_batching_config.max_requests_per_batch == 2
        assert engine._manager.continuous_batching_config.max_memory_percent == 0.5

    asyncio.run(run())
    with pytest.raises(ConfigurationError, match=r"page_size.*change transformers_continuous_batching_config"):
        one(ContinuousSampler(tiny(), config={"page_size": 1}), ask([5]))


def test_the_cache_is_no_larger_than_the_turns_need_and_the_memory_allows() -> None:
    def tokens(**more: Any) -> int:
        sampler = ContinuousSampler(tiny(), **more)

        async def run() -> int:
            await sampler.sample(ask([5]))
            return sampler._engine.cache.cache_tensor.nbytes // (2 * 2 * 2 * 8 * 4)  # layers, k and v, heads, size

        return asyncio.run(run())

    assert tokens(max_slots=4) <= 4 * 256 + 2 * 32  # with the two pages that padding writes to
    assert 60_000 < tokens(max_slots=10_000, config={"max_requests_per_batch": 64}) < 70_000
    small = tokens(max_slots=10_000, config={"max_requests_per_batch": 64, "max_memory_percent": 0.005})
    assert small < 35_000


def test_mixed_precision_says_what_to_do_and_half_weights_are_sampled() -> None:
    with pytest.raises(ConfigurationError, match="load the model in bfloat16"):
        ContinuousSampler(tiny(), autocast_dtype=torch.bfloat16)
    half = tiny().to(torch.bfloat16)
    sampler = ContinuousSampler(half, config=SMALL, autocast_dtype=torch.bfloat16)
    assert worst_gap(half, asyncio.run(play(sampler))) < 0.5


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_the_model_is_the_trainers_again_between_turns(attention: str) -> None:
    model = tiny(attention_dropout=0.5).train()
    wanted = ids_of(asyncio.run(play(TransformersSampler(model))))
    model.config._attn_implementation = attention
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()
    before = (model.config._attn_implementation, [module.training for module in model.modules()])
    sampler = ContinuousSampler(model, config=SMALL)

    async def run() -> Any:
        played = await play(sampler)
        await asyncio.sleep(0)
        assert (model.config._attn_implementation, [module.training for module in model.modules()]) == before
        assert sampler._engine is not None  # and still holds its pages
        return played

    assert ids_of(asyncio.run(run())) == wanted
    model.config._attn_implementation = "sdpa"
    model.train()
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_eager_models_are_eager_again() -> None:
    model = tiny(attention="eager")
    seen = set()
    model.register_forward_pre_hook(lambda *_: seen.add(model.config._attn_implementation))
    one(ContinuousSampler(model, config=SMALL), ask([5, 6]))
    assert "paged|eager" in seen
    assert model.config._attn_implementation == "eager"


def test_a_peft_model_is_sampled_with_its_adapter() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(), config)
    played = asyncio.run(play(ContinuousSampler(model, config=SMALL)))
    assert worst_gap(model, played) < 3e-5
    with model.disable_adapter():
        assert worst_gap(model, played) > 1e-2


def test_a_failing_forward_fails_its_turns_and_not_the_sampler() -> None:
    model = tiny()
    sampler = ContinuousSampler(model, config=SMALL)
    wanted = one(sampler, ask([5, 6])).ids
    broken = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(SamplerError, match="no memory") as caught:
        one(sampler, ask([5, 6]))
    assert isinstance(caught.value.__cause__, RuntimeError)
    broken.remove()
    assert one(sampler, ask([5, 6])).ids == wanted
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    sampler.publish(1)
    with pytest.raises(SamplerError, match="weights are not finite"):
        one(sampler, ask([5, 6]))


@pytest.mark.parametrize("inline", [0.0, 10.0])
def test_cancelled_and_released_turns_end_alone_and_give_their_pages_back(inline: float) -> None:
    model = tiny()
    sampler = ContinuousSampler(model, config=SMALL)
    sampler.inline_below_s = inline

    async def run() -> list[Any]:
        asked = [sampler.sample(ask([5, 6, i], name=str(i), seed=(i,), max_tokens=60)) for i in range(4)]
        tasks = [asyncio.create_task(turn) for turn in asked]
        while sampler.decoded_tokens < 20:
            await asyncio.sleep(0)
        tasks[0].cancel()
        sampler.release("1")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert not sampler._engine.turns
        sampler.publish(1)
        assert sampler._engine.cache.compute_free_capacity() == 1.0
        return results

    results = asyncio.run(run())
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], SamplerError)
    for i in (2, 3):
        assert results[i].ids == one(TransformersSampler(model), ask([5, 6, i], seed=(i,), max_tokens=60)).ids
    sampler.close()


def test_many_conversations_with_random_arrival() -> None:
    model = tiny(num_hidden_layers=1)
    sampler = ContinuousSampler(model, config=SMALL | {"max_requests_per_batch": 16})
    played = asyncio.run(play(sampler, 60, turns=2, pause=lambda rng: 0.05 * rng.random(), group=4))
    assert worst_gap(model, played[::7]) < 3e-5


def test_bad_requests_say_what_is_wrong() -> None:
    sampler = ContinuousSampler(tiny(max_position_embeddings=40))
    with pytest.raises(SamplerError, match="id 97, outside the model's 97"):
        one(sampler, ask([5, 97]))
    with pytest.raises(SamplerError, match="50 tokens and the model's context 40"):
        one(sampler, ask([5] * 50))
    with pytest.raises(ConfigurationError, match="reads text only"):
        one(sampler, dataclasses.replace(ask([5]), media=("an image",)))


def test_a_loop_that_was_cut_off_leaves_a_sampler_that_works() -> None:
    sampler = ContinuousSampler(tiny(), config=SMALL)
    wanted = one(sampler, ask([5, 6], max_tokens=20)).ids

    async def cut_off() -> None:
        task = asyncio.create_task(sampler.sample(ask([8, 9], name="b", max_tokens=200)))
        while sampler.decoded_tokens < 40:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(cut_off())
    assert one(sampler, ask([5, 6], max_tokens=20)).ids == wanted
