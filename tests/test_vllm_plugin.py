"""What of vLLM can be checked where it is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from agentrl.errors import ConfigurationError, MissingDependency
from agentrl.sampler.vllm import plugin
from agentrl.sampler.vllm.colocate import ColocateOptions, VLLMSampler
from agentrl.sampler.vllm.wire import Drawing

SPEC = importlib.util.find_spec("vllm")
INSTALLED = SPEC is not None and SPEC.origin is not None  # without an origin it is the folder tests/on_vllm


def test_without_vllm_the_plugin_does_nothing_and_the_sampler_says_what_to_install() -> None:
    plugin.register()
    if INSTALLED:
        from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
            WeightTransferEngineFactory,
        )

        assert plugin.ENGINE in WeightTransferEngineFactory._registry
        return
    with pytest.raises(MissingDependency, match=r"needs the package 'vllm'.*\[vllm(-cpu)?\]"):
        VLLMSampler(ColocateOptions("some/model"))
    with pytest.raises(MissingDependency):  # and nothing is left open by the first failure
        VLLMSampler(ColocateOptions("some/model"))


def test_the_plugin_imports_nothing() -> None:
    """vLLM loads it in each of its processes, also of people who train nothing."""
    code = (
        "import sys, agentrl.sampler.vllm.plugin; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no model folder '/nowhere/model'"):
        VLLMSampler(ColocateOptions("/nowhere/model"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, "vllm_gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "vllm_gpu_memory_utilization"),
        ({"tensor_parallel_size": 0}, "vllm_tensor_parallel_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "vllm_max_model_length"),
        ({"model_impl": "jax"}, "vllm_model_impl"),
    ],
)
def test_options_are_checked_where_they_are_made(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ColocateOptions("some/model", **bad)  # pyright: ignore[reportArgumentType]


def test_generation_kwargs_that_are_not_the_users_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'n'"):
        ColocateOptions("some/model", drawing=Drawing(extra={"n": 2}))
