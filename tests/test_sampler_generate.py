"""Turns drawn by transformers' `generate`: its caches and kwargs change what they say, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
import transformers
from test_sampler_transformers import CACHED, UNCACHED, ask, disturbed, play, tiny, unlike_rows, worst_gap

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.generate import GenerateSampler
from agentrl.sampler.transformers import TransformersSampler
from agentrl.types import SampleOutput, SampleRequest


def one(sampler: Any, request: SampleRequest) -> SampleOutput:
    return asyncio.run(sampler.sample(request))


def drawn(model: Any, request: SampleRequest, **kwargs: Any) -> list[int]:
    ids = one(GenerateSampler(model, kwargs=kwargs), request).ids
    assert ids is not None
    return ids


@pytest.mark.parametrize("case", [*CACHED, *UNCACHED], ids=lambda case: case[0])
def test_ids_and_log_probs_are_those_of_the_default_sampler(case: Any) -> None:
    model = tiny(*case)
    played = asyncio.run(play(GenerateSampler(model), turns=2))
    assert worst_gap(model, played) < 2e-5
    wanted = asyncio.run(play(TransformersSampler(model), turns=2))
    assert [ids for ids, _ in played] == [ids for ids, _ in wanted]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_caches_change_nothing_and_compile_nothing_on_a_cpu(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compiled.append(args) or args[0])
    model, made = tiny(), []
    before = model._prepare_static_cache
    monkeypatch.setattr(model, "_prepare_static_cache", lambda *args, **kw: made.append(kw) or before(*args, **kw))
    sampler = GenerateSampler(model, cache_implementation=cache)
    played = asyncio.run(play(sampler))
    assert worst_gap(model, played) < 2e-5
    assert [ids for ids, _ in played] == [ids for ids, _ in asyncio.run(play(TransformersSampler(model)))]
    assert bool(made) == (cache == "static")
    assert not compiled
    assert sampler.exact


def test_impossible_caches_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'statik' is none of dynamic, static, .* Did you mean 'static'"):
        GenerateSampler(tiny(), cache_implementation="statik")
    with pytest.raises(ConfigurationError, match=r"'offloaded_static' moves keys .* use 'static'"):
        GenerateSampler(tiny(), cache_implementation="offloaded_static")
    quantized = GenerateSampler(tiny(), cache_implementation="quantized", kwargs={"cache_config": {"backend": "no"}})
    assert not quantized.exact
    with pytest.raises(ConfigurationError, match="does not run with Qwen3ForCausalLM and cache_implementation='quant"):
        one(quantized, ask([5, 6]))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"num_beams": 4}, "'num_beams' cannot be used here: a rollout is one sequence"),
        ({"num_return_sequences": 2}, "num_generations says"),
        ({"return_dict_in_generate": True}, "reads the tokens by itself"),
        ({"streamer": object()}, "handed out when"),
        ({"assistant_model": object()}, "one sequence"),
        ({"typical_p": 0.5}, "candidates of a token"),
        ({"do_sample": False}, "tokens are drawn"),
        ({"max_length": 9}, "max_new_tokens"),
        ({"eos_token_id": 3}, "chat template"),
        ({"supress_tokens": [3]}, "did you mean 'suppress_tokens'"),
        ({"watermarking_config": {}}, "these can: sequence_bias"),
        ({"max_new_tokens": 0}, "at least 1; got 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1 does not work"),
        ({"bad_words_ids": [3]}, "bad_words_ids"),
    ],
)
def test_what_cannot_work_is_refused_by_name(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        GenerateSampler(tiny(), kwargs=kwargs)


def test_what_says_the_default_or_nothing_is_taken() -> None:
    GenerateSampler(tiny(), kwargs={"num_beams": 1, "do_sample": True, "typical_p": None, "use_cache": False})


def test_processors_change_the_distribution_that_ids_are_drawn_from() -> None:
    model, request = tiny(), ask([5, 6, 7], max_tokens=40)
    free = drawn(model, request)
    often = max(set(free), key=free.count)
    assert often not in drawn(model, request, suppress_tokens=[often])
    assert free[0] != drawn(model, request, begin_suppress_tokens=[free[0]])[0]
    pair = free[3:5]
    held = drawn(model, request, bad_words_ids=[pair])
    assert held[:4] == free[:4]
    assert held[4] != free[4]
    ids = [5, 6, 7, *drawn(model, request, no_repeat_ngram_size=1)]
    assert len(set(ids)) == len(ids)
    always = drawn(model, request, sequence_bias=[[[9], 50.0]])
    assert set(always) == {9}
    output = one(GenerateSampler(model, kwargs={"sequence_bias": [[[9], 50.0]]}), request)
    assert max(abs(x) for x in output.log_probs or [1.0]) < 1e-6  # of what was drawn from, not of the model
    assert not GenerateSampler(model, kwargs={"suppress_tokens": [9]}).exact


def test_a_turn_has_its_own_processors_in_any_batch() -> None:
    model = tiny()
    prompt, kwargs = list(range(3, 33)), {"min_new_tokens": 12, "no_repeat_ngram_size": 2}
    stop = drawn(model, ask(prompt, max_tokens=20), no_repeat_ngram_size=2)[2]
    requests = [ask(prompt, name="a", max_tokens=20, stop=(stop,)), ask([8], name="b", seed=(2,), max_tokens=9)]

    async def together() -> list[Any]:
        sampler = GenerateSampler(model, kwargs=kwargs)
        return [x.ids for x in await asyncio.gather(*[sampler.sample(request) for request in requests])]

    alone = [drawn(model, request, **kwargs) for request in requests]
    assert asyncio.run(together()) == alone
    assert len(alone[0]) > 12
    assert stop not in alone[0][:12]  # counted from the end of its own prompt, with its own stop ids


def test_max_new_tokens_bounds_a_turn_and_lengthens_none() -> None:
    model = tiny()
    sampler = GenerateSampler(model, kwargs={"max_new_tokens": 5})
    output = one(sampler, ask([5, 6], max_tokens=9))
    assert (len(output.ids or []), output.finish_reason) == (5, "length")
    assert len(one(sampler, ask([5, 6], max_tokens=3)).ids or []) == 3


def test_the_checkpoints_own_generation_config_does_not_leak_in() -> None:
    model = tiny()
    wanted = one(GenerateSampler(model), ask([5, 6], max_tokens=20))
    theirs = transformers.GenerationConfig(
        do_sample=True, temperature=0.1, repetition_penalty=3.0, suppress_tokens=wanted.ids, eos_token_id=wanted.ids
    )
    model.generation_config = theirs
    output = one(GenerateSampler(model), ask([5, 6], max_tokens=20))
    assert (output.ids, output.log_probs) == (wanted.ids, wanted.log_probs)
    assert model.generation_config is theirs


def test_candidates_top_log_probs_and_stops_of_unlike_rows_in_one_batch() -> None:
    model = tiny()
    requests = unlike_rows(model)

    async def run(sampler: Any) -> list[SampleOutput]:
        return await asyncio.gather(*[sampler.sample(request) for request in requests])

    sampler = GenerateSampler(model)
    together, wanted = asyncio.run(run(sampler)), asyncio.run(run(TransformersSampler(model)))
    for one_, other in zip(together, wanted, strict=True):
        assert (one_.ids, one_.finish_reason) == (other.ids, other.finish_reason)
        assert one_.log_probs == pytest.approx(other.log_probs, abs=2e-5)
        assert [list(x) for x in one_.sampling_mask or []] == [list(x) for x in other.sampling_mask or []]
        assert [list(x) for x in one_.sampler_logprobs or []] == [list(x) for x in other.sampler_logprobs or []]
    assert together[0].finish_reason == "stop"
    assert all(1 <= len(ids) <= 4 for ids in together[1].sampling_mask or [[]])
    assert [len(x) for x in together[2].sampler_logprobs or []] == [3] * 9


def test_f125_seeds_differ_and_squeezed_batches_do_not() -> None:
    model = tiny()

    async def run(seed: int, slots: int) -> list[Any]:
        sampler = GenerateSampler(model, max_slots=slots)
        asked = [sampler.sample(ask([5, 6, i], name=str(i), seed=(seed, i), max_tokens=9)) for i in range(7)]
        return [output.ids for output in await asyncio.gather(*asked)]

    assert asyncio.run(run(1, 7)) == asyncio.run(run(1, 2))
    assert asyncio.run(run(1, 7)) != asyncio.run(run(2, 7))


def test_the_event_loop_goes_on_and_turns_are_answered_when_they_end() -> None:
    sampler = GenerateSampler(tiny())
    threads = set()
    sampler.model.register_forward_pre_hook(lambda *_: threads.add(threading.current_thread().name))
    beats, order = 0, []

    async def turn(name: str, count: int) -> None:
        await sampler.sample(ask([5] * 100, name=name, max_tokens=count))
        order.append(name)

    async def run() -> None:
        nonlocal beats
        tasks = [asyncio.create_task(turn(*x)) for x in (("long", 100), ("short", 2))]
        while not all(task.done() for task in tasks):
            beats += 1
            await asyncio.sleep(0)
            if order == ["short"]:
                order.append("long goes on" if not tasks[0].done() else "late")
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert beats > 20
    assert threads == {"agentrl-sampler_0"}
    assert order == ["short", "long goes on", "long"]
    sampler.close()


@pytest.mark.parametrize("given_up", [False, True])
def test_whoever_has_all_answers_may_train_the_model(given_up: bool) -> None:
    """The sampler's thread has left the model by then; with turns that were given up, once `quiet` returns."""
    sampler = GenerateSampler(tiny())
    base, inside = sampler.base.generate, []

    def slow_to_leave(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            out = base(*args, **kwargs)
            time.sleep(0.05)
            return out
        finally:
            inside.clear()

    sampler.base.generate = slow_to_leave

    async def run() -> None:
        turns = [asyncio.create_task(sampler.sample(ask([5, 6], name=str(i), max_tokens=3 + 60 * i))) for i in range(3)]
        if given_up:
            await turns[0]
            for task in turns[1:]:
                task.cancel()
        await asyncio.wait(turns)
        if given_up:
            await sampler.quiet()
        assert not inside

    asyncio.run(run())
    sampler.close()


def test_a_failing_forward_fails_its_turns_and_not_the_sampler() -> None:
    model = tiny()
    sampler = GenerateSampler(model)
    wanted = one(sampler, ask([5, 6])).ids
    broken = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(SamplerError, match="no memory") as caught:
        one(sampler, ask([5, 6]))
    assert isinstance(caught.value.__cause__, RuntimeError)
    broken.remove()
    assert one(sampler, ask([5, 6])).ids == wanted


def test_weights_that_are_no_numbers_are_said_to_be() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(SamplerError, match="weights are not finite"):
        one(GenerateSampler(model), ask([5, 6]))


def test_cancelled_and_released_turns_end_alone() -> None:
    model = tiny()
    sampler = GenerateSampler(model)

    async def run() -> list[Any]:
        one_ = asyncio.create_task(sampler.sample(ask([5, 6], name="a", max_tokens=200)))
        two = asyncio.create_task(sampler.sample(ask([5, 7], name="b", max_tokens=200)))
        three = asyncio.create_task(sampler.sample(ask([5, 8], name="c", max_tokens=30)))
        while sampler.forwards < 10:
            await asyncio.sleep(0)
        one_.cancel()
        sampler.release("b")
        results = await asyncio.gather(one_, two, three, return_exceptions=True)
        await sampler.sample(ask([5, 9], max_tokens=1))  # the next batch
        return list(results)

    cancelled, released, output = asyncio.run(run())
    assert sampler.forwards < 60  # nobody waited for the 200
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(released, SamplerError)
    assert output.ids == one(GenerateSampler(model), ask([5, 8], max_tokens=30)).ids
    sampler.close()


@pytest.mark.parametrize("way", ["publish", "reset"])
def test_a_turn_in_flight_goes_on_after_publish_or_reset(way: str) -> None:
    model = tiny()
    wanted = one(GenerateSampler(model), ask([5, 6], max_tokens=60)).ids
    sampler = GenerateSampler(model)

    output = asyncio.run(disturbed(sampler, way, 60, lambda: sampler.forwards >= 12))
    assert output.ids == wanted  # the weights are the same, so the tokens are
    assert output.version == 0
    assert sampler.prefilled_tokens > 2  # the turn was fed again
    assert one(sampler, ask([5, 6])).version == (7 if way == "publish" else 0)


def test_after_publish_the_new_weights_draw() -> None:
    model = tiny()
    sampler = GenerateSampler(model, cache_implementation="static")
    asyncio.run(play(sampler))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    sampler.publish(1)
    after = asyncio.run(play(sampler))
    assert {output.version for _, outputs in after for _, output in outputs} == {1}
    assert worst_gap(model, after) < 2e-5


def test_training_mode_checkpointing_and_adapters_are_left_as_they_were() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(attention_dropout=0.5), config).train()
    model.gradient_checkpointing_enable()
    model.base_model.model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    played = asyncio.run(play(GenerateSampler(model)))
    assert [module.training for module in model.modules()] == before
    assert worst_gap(model, played) < 2e-5
    with model.disable_adapter():
        assert worst_gap(model, played) > 1e-2
    model.train()
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()


def test_another_attention_for_training_is_left_as_it_was() -> None:
    model = tiny()
    wanted = one(GenerateSampler(model), ask([5, 6], max_tokens=20)).ids
    model.config._attn_implementation = "an attention of the trainer"
    assert one(GenerateSampler(model), ask([5, 6], max_tokens=20)).ids == wanted
    assert model.config._attn_implementation == "an attention of the trainer"


def test_bad_requests_say_what_is_wrong() -> None:
    sampler = GenerateSampler(tiny(max_position_embeddings=40))
    with pytest.raises(SamplerError, match="id 97, outside the model's 97"):
        one(sampler, ask([5, 97]))
    with pytest.raises(SamplerError, match="50 tokens and the model's context 40"):
        one(sampler, ask([5] * 50))
    with pytest.raises(ConfigurationError, match="reads text only"):
        one(sampler, dataclasses.replace(ask([5]), media=("an image",)))
    assert len(one(sampler, ask([5] * 35, max_tokens=100)).ids or []) == 5


def test_a_loop_that_was_cut_off_leaves_a_sampler_that_works() -> None:
    sampler = GenerateSampler(tiny())
    wanted = one(sampler, ask([5, 6], max_tokens=20)).ids

    async def cut_off() -> None:
        task = asyncio.create_task(sampler.sample(ask([8, 9], name="b", max_tokens=200)))
        while sampler.forwards < 40:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(cut_off())
    assert sampler.forwards < 100  # it did not draw on to the end
    assert one(sampler, ask([5, 6], max_tokens=20)).ids == wanted
