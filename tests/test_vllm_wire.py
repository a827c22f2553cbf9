"""What is asked of vLLM and how its answers are read; no vLLM is needed for either."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler.vllm.wire import (
    FLOOR,
    TIES,
    BadAnswer,
    Drawing,
    RawTurn,
    engine_seed,
    read_json,
    read_output,
    sampling_params,
)
from agentrl.types import SampleRequest, SamplingParams, VersionSpan


def a_request(top: int = 0, **params: Any) -> SampleRequest:
    return SampleRequest(
        [], [], [1, 2], 8, SamplingParams(**params), (7, 3, 1), "c", stop_ids=(5, 6), num_sampler_logprobs=top
    )


def entry(i: int, log_prob: float, tops: list[tuple[int, float]] | None = None) -> dict[str, Any]:
    rows = [{"token_id": t, "logprob": lp, "rank": None} for t, lp in tops or [(i, log_prob)]]
    return {"token_id": i, "logprob": log_prob, "rank": 1, "top_logprobs": rows}


def an_answer(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [e["token_id"] for e in entries], "finish_reason": "stop", "sampling_mask": None,
        "logprobs": {"content": list(entries)},
    }  # fmt: skip
    return {"choices": [{**choice, **changes}]}


# --- what is asked ---
def test_a_turn_ends_at_our_stop_ids_alone() -> None:
    fields = sampling_params(a_request(temperature=0.7, top_p=0.9, top_k=4, min_p=0.1), Drawing())
    assert fields["stop_token_ids"] == [5, 6] and fields["ignore_eos"] is True and fields["max_tokens"] == 8
    assert (fields["temperature"], fields["top_p"], fields["top_k"], fields["min_p"]) == (0.7, 0.9, 4, 0.1)
    assert fields["repetition_penalty"] == 1.0 and fields["detokenize"] is False


def test_no_two_turns_of_a_run_share_an_engine_seed() -> None:
    """F125 and F161: the engine's stream is named by (run seed, rollout, turn), not by the engine's own seed."""
    names = list(itertools.product((1, 2), range(50), range(10)))
    seeds = {engine_seed(name) for name in names}
    assert len(seeds) == len(names) and all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_params(a_request(), Drawing())["seed"] == engine_seed((7, 3, 1))


@pytest.mark.parametrize(
    ("params", "top", "drawing", "asked"),
    [
        ({}, 0, Drawing(), 0),
        ({"top_k": 4}, 0, Drawing(), 4 + TIES),
        ({"top_k": 4}, 0, Drawing(candidates=False), 0),
        ({"top_k": 4}, 0, Drawing(sampling_mask=True), 0),
        ({"top_k": 4}, 3, Drawing(sampling_mask=True), 4),  # the drawn id takes a place among the 3
        ({"top_k": 4}, 0, Drawing(max_logprobs=5), 5),
        ({"top_k": 4}, 30, Drawing(vocabulary=20), 20),
        ({"top_k": 4, "temperature": 0}, 0, Drawing(), 0),  # greedy: every id counts
    ],
)
def test_log_probs_asked_for_are_those_that_are_read(
    params: dict[str, Any], top: int, drawing: Drawing, asked: int
) -> None:
    assert sampling_params(a_request(top, **params), drawing)["logprobs"] == asked


@pytest.mark.parametrize(
    ("params", "drawing", "said"),
    [
        ({"top_p": 0.9}, Drawing(), "needs top_k > 0"),
        ({"min_p": 0.1}, Drawing(), "needs top_k > 0"),
        ({"top_k": 30}, Drawing(max_logprobs=20), "--max-logprobs -1"),
        ({"temperature": 3.0}, Drawing(), "between 0.01 and 2"),
        ({"temperature": 0.001}, Drawing(), "between 0.01 and 2"),  # vLLM would silently draw at 0.01
        ({}, Drawing(sampling_mask=True), "--return-sampling-mask"),
    ],
)
def test_what_vllm_cannot_draw_or_say_is_refused(params: dict[str, Any], drawing: Drawing, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        sampling_params(a_request(**params), drawing)


def test_top_p_alone_is_drawn_where_no_candidates_are_wanted() -> None:
    assert sampling_params(a_request(top_p=0.9), Drawing(candidates=False))["top_p"] == 0.9


def test_generation_kwargs_beat_the_requests_params() -> None:
    drawing = Drawing(extra={"top_k": 3, "presence_penalty": 0.5})
    fields = sampling_params(a_request(top_k=9), drawing)
    assert (fields["top_k"], fields["presence_penalty"], fields["logprobs"]) == (3, 0.5, 3 + TIES)


@pytest.mark.parametrize("key", ["n", "seed", "max_tokens", "logprobs", "stop", "temprature"])
def test_generation_kwargs_that_are_not_the_users_are_named(key: str) -> None:
    """vLLM's server ignores keys that it does not know, so a typing error would go unseen."""
    with pytest.raises(ConfigurationError, match=f"'{key}'"):
        Drawing(extra={key: 2})


def test_a_regex_ends_a_turn_by_the_engines_end_token() -> None:
    fields = sampling_params(a_request(), Drawing(regex="[ab]+"))
    assert fields["structured_outputs"] == {"regex": "[ab]+"} and fields["ignore_eos"] is False


# --- what is read ---
def test_a_turn_is_read_id_for_id() -> None:
    raw = read_json(an_answer(entry(3, -0.5), entry(5, -1.5)))
    output = read_output(raw, a_request(), Drawing(vocabulary=10), version=4)
    assert (output.ids, output.log_probs, output.finish_reason, output.version) == ([3, 5], [-0.5, -1.5], "stop", 4)
    assert output.sampling_mask is None and output.sampler_logprobs is None and output.versions == ()


def test_candidates_are_those_of_the_returned_ids_that_can_be_drawn() -> None:
    """Two of top_k=2 tie with a third (all three count); at the second token top-p left only one."""
    first = entry(3, -1.1, [(3, -1.1), (9, -1.1), (1, -1.1), (4, FLOOR), (0, FLOOR)])
    second = entry(5, 0.0, [(5, 0.0), (3, FLOOR), (1, FLOOR)])
    output = read_output(read_json(an_answer(first, second)), a_request(top_k=2), Drawing(), 0)
    assert output.sampling_mask is not None and [list(row) for row in output.sampling_mask] == [[1, 3, 9], [5]]


def test_minus_infinity_of_an_engine_in_this_process_is_no_candidate() -> None:
    raw = RawTurn([3], [-0.1], "stop", [[3, 4, 5]], [[-0.1, -2.4, -math.inf]])
    output = read_output(raw, a_request(top=3, top_k=2), Drawing(), 0)
    assert [list(row) for row in output.sampling_mask or ()] == [[3, 4]]
    assert output.sampler_logprobs == [{3: -0.1, 4: -2.4}]


def test_candidates_of_an_engine_that_returns_them_are_taken() -> None:
    raw = read_json(an_answer(entry(3, -0.5), sampling_mask=[[7, 3]]))
    output = read_output(raw, a_request(top_k=2), Drawing(sampling_mask=True), 0)
    assert [list(row) for row in output.sampling_mask or ()] == [[3, 7]]


def test_the_most_likely_ids_come_best_first_whatever_was_drawn() -> None:
    """vLLM puts the drawn id first; it counts among the most likely only where it is one of them."""
    drawn = entry(8, -5.0, [(8, -5.0), (1, -0.3), (2, -1.5), (4, -3.0)])
    output = read_output(read_json(an_answer(drawn)), a_request(top=3), Drawing(), 0)
    assert output.sampler_logprobs is not None
    assert list(output.sampler_logprobs[0].items()) == [(1, -0.3), (2, -1.5), (4, -3.0)]


def test_spans_of_two_versions_are_kept_and_the_oldest_is_the_turns() -> None:
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))
    raw = read_json(an_answer(entry(3, -0.5), entry(5, -1.5)), spans=spans)
    output = read_output(raw, a_request(), Drawing(), version=9)
    assert output.version == 4 and output.versions == spans
    one = read_output(replace(raw, spans=(VersionSpan(5, 0, 2),)), a_request(), Drawing(), version=9)
    assert one.version == 5 and one.versions == ()


def test_a_repetition_that_vllm_cut_counts_as_cut() -> None:
    raw = read_json(an_answer(entry(3, -0.5), finish_reason="repetition"))
    assert read_output(raw, a_request(), Drawing(), 0).finish_reason == "length"


GOOD = RawTurn([3, 4], [-0.5, -0.6], "stop")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (replace(GOOD, log_probs=[-0.5, math.nan]), "not finite"),
        (replace(GOOD, log_probs=[-0.5, None]), "not finite"),
        (replace(GOOD, log_probs=[-0.5, FLOOR]), "not finite"),  # what vLLM's JSON makes of NaN
        (replace(GOOD, log_probs=[-0.5, -math.inf]), "not finite"),
        (replace(GOOD, log_probs=[-0.5, 12.0]), "processed_logprobs"),  # logits
        (replace(GOOD, log_probs=[-0.5]), "1 log-probs for 2 tokens"),
        (replace(GOOD, log_probs=None), "no log-probs"),
        (replace(GOOD, ids=[], log_probs=[]), "without a single token"),
        (replace(GOOD, ids=[3, 10]), "another model"),
        (replace(GOOD, ids=[3, -1]), "another model"),
        (replace(GOOD, finish_reason="abort"), "gave up this turn"),
        (replace(GOOD, finish_reason=None), "gave up this turn"),
        (replace(GOOD, spans=(VersionSpan(1, 0, 1),)), "do not cover"),
        (replace(GOOD, spans=(VersionSpan(1, 0, 1), VersionSpan(2, 0, 2))), "do not cover"),
    ],
)
def test_a_turn_that_cannot_be_trained_on_is_a_failed_turn(raw: RawTurn, said: str) -> None:
    with pytest.raises(SamplerError, match=said):
        read_output(raw, a_request(), Drawing(vocabulary=10), 0)


def test_missing_candidates_and_most_likely_ids_are_said() -> None:
    with pytest.raises(SamplerError, match="candidates"):
        read_output(GOOD, a_request(top_k=2), Drawing(), 0)
    with pytest.raises(SamplerError, match="candidates"):
        read_output(GOOD, a_request(top_k=2), Drawing(sampling_mask=True), 0)
    with pytest.raises(SamplerError, match="most likely"):
        read_output(GOOD, a_request(top=2), Drawing(), 0)


@pytest.mark.parametrize(
    "garbage",
    [
        None, [], {}, "text", {"choices": []}, {"choices": [None]}, an_answer(entry(3, -1.0), token_ids=["3"]),
        an_answer(entry(3, -1.0), token_ids=[4]), an_answer(entry(3, -1.0), logprobs={"content": [{}]}),
        an_answer(entry(3, -1.0), logprobs=[1]), an_answer(entry(3, -1.0), token_ids=7),
    ],
)  # fmt: skip
def test_garbage_is_a_bad_answer(garbage: Any) -> None:
    with pytest.raises(BadAnswer):
        read_json(garbage)


def test_neither_torch_nor_vllm_nor_aiohttp_is_needed_to_import_it() -> None:
    code = (
        "import sys; sys.modules.update({'torch': None, 'vllm': None, 'aiohttp': None, 'transformers': None});"
        "from agentrl.sampler.vllm import Drawing, ServerOptions, VLLMServerSampler"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
