"""Which engine draws the rollouts: options that fit each other, and those that do not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigurationError
from agentrl.train.config import GRPOConfig
from agentrl.train.engine_options import drawn_from, table
from agentrl.types import SamplingParams


def make(tmp_path: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), report_to="none", **options)


# --- generation_kwargs -----------------------------------------------------------------
def test_generation_kwargs_beat_the_fields_of_the_config(tmp_path: Path):
    args = make(
        tmp_path, temperature=0.5, top_k=3, min_p=0.1,
        generation_kwargs={"temperature": 0.9, "top_p": 0.8, "suppress_tokens": [1]},
    )  # fmt: skip
    drawn = drawn_from(args)
    assert drawn.params == SamplingParams(0.9, 0.8, 3, 0.1, 1.0)
    assert drawn.kwargs == {"suppress_tokens": [1]}
    assert args.generation_kwargs == {"temperature": 0.9, "top_p": 0.8, "suppress_tokens": [1]}  # not eaten


def test_generation_kwargs_may_be_json_as_from_a_command_line(tmp_path: Path):
    assert drawn_from(make(tmp_path, generation_kwargs='{"top_k": 7}')).params.top_k == 7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 0}, "temperature must be above 0"),
        ({"temperature": "hot"}, "temperature must be above 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be a whole number"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\]"),
        ("{top_k", "generation_kwargs is not JSON"),
        ("[1]", "must be a table"),
    ],
)
def test_values_in_generation_kwargs_are_checked_as_the_fields_are(tmp_path: Path, given: Any, said: str):
    with pytest.raises(ConfigurationError, match=said):
        make(tmp_path, generation_kwargs=given)


def test_a_missing_table_is_empty():
    assert table(None, "x") == {} and table({}, "x") == {}


# --- the sampler correction ------------------------------------------------------------
@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"min_p": 0.1}, {"generation_kwargs": {"top_p": 0.9}}])
def test_candidates_of_vllm_are_bounded_by_top_k(tmp_path: Path, option: dict[str, Any]):
    with pytest.raises(ConfigurationError, match=r"needs top_k > 0 .* vllm_importance_sampling_correction=False"):
        make(tmp_path, use_vllm=True, **option)
    make(tmp_path, use_vllm=True, top_k=50, **option)
    make(tmp_path, use_vllm=True, vllm_importance_sampling_correction=False, **option)
    make(tmp_path, **option)  # the trainer's own sampler records them without a bound


def test_a_repetition_penalty_needs_the_correction_to_be_off(tmp_path: Path):
    for option in ({"repetition_penalty": 1.1}, {"generation_kwargs": {"repetition_penalty": 1.1}}):
        with pytest.raises(ConfigurationError, match=r"repetition_penalty=1\.1 changes what the sampler draws from"):
            make(tmp_path, **option)
        make(tmp_path, vllm_importance_sampling_correction=False, **option)


# --- options that exclude each other ---------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_vllm": True, "use_transformers_continuous_batching": True}, "set one of them"),
        ({"use_vllm": True, "cache_implementation": "static"}, "vLLM has its own"),
        ({"use_transformers_continuous_batching": True, "cache_implementation": "static"}, "its own cache"),
        ({"use_vllm": True, "ds3_gather_for_generation": False}, "ds3_gather_for_generation=False is not available"),
        ({"use_vllm": True, "vllm_structured_outputs_regex": "a+"}, "correction=False"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:8000."}, "is no address"),
        ({"use_vllm": True, "vllm_mode": "remote"}, "'server' or 'colocate'"),
        ({"use_vllm": True, "vllm_model_impl": "auto"}, "'vllm' or 'transformers'"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 1.5}, "share of the memory"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 0}, "at least 1"),
        ({"use_vllm": True, "vllm_max_model_length": 1}, "at least 2"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.0}, "above 0"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 70000}, "1 to 65535"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_group_port": 0}, "1 to 65535"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "localhost:8000"}, "is no address"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, options: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        make(tmp_path, **options)


# --- options that do nothing -----------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"vllm_mode": "server"}, ["vllm_mode='server' has no effect with use_vllm=False"]),
        ({"vllm_structured_outputs_regex": "a"}, ["vllm_structured_outputs_regex='a' has no effect"]),
        ({"vllm_server_port": 9}, ["vllm_server_port=9 has no effect with use_vllm=False"]),
        ({"use_vllm": True, "vllm_server_port": 9}, ["vllm_server_port=9 has no effect with vllm_mode='colocate'"]),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 2},
            ["vllm_tensor_parallel_size=2 has no effect with vllm_mode='server': it is a flag of the server"],
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "auto", "vllm_tensor_parallel_size": 2},
            [],
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:1", "vllm_server_port": 9},
            ["vllm_server_port=9 has no effect with vllm_server_base_url='http://a:1'"],
        ),
        (
            {"transformers_continuous_batching_config": {"num_blocks": 4}},
            ["has no effect with use_transformers_continuous_batching=False"],
        ),
        ({"use_vllm": True}, []),
    ],
)
def test_options_without_effect_are_named(tmp_path: Path, options: dict[str, Any], idle: list[str]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(tmp_path, **options)
    texts = [str(one.message) for one in caught if "has no effect" in str(one.message)]
    assert len(texts) == len(idle) and all(want in text for want, text in zip(idle, texts, strict=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_vllm": True, "generation_kwargs": {"presence_penalty": 1.0}}, "generation_kwargs['presence_penalty']"),
        ({"generation_kwargs": {"suppress_tokens": [3]}}, "generation_kwargs['suppress_tokens']"),
        ({"generation_kwargs": {"max_new_tokens": 3, "top_k": 4}}, None),
        (
            {"generation_kwargs": {"suppress_tokens": [3]}, "vllm_importance_sampling_correction": False},
            None,
        ),
    ],
)  # fmt: skip
def test_what_changes_the_distribution_in_the_sampler_alone_is_named(
    tmp_path: Path, options: dict[str, Any], named: str | None
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(tmp_path, **options)
    texts = [str(one.message) for one in caught if "ratios are biased" in str(one.message)]
    assert [named in text for text in texts] == ([] if named is None else [True])
