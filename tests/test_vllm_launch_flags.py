"""Command, environment and GPUs of a server, from plain arguments."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigurationError
from agentrl.sampler.vllm.launch_flags import ServerFlags, cache_memory, command, environment, gpus_left, lora_rank


def words(*, cpu: bool, memory: int = 0, **kwargs) -> str:
    return " ".join(command(ServerFlags("M", "float32", **kwargs), "127.0.0.1", 8000, cpu=cpu, memory=memory)[1:])


def test_the_command_on_a_gpu():
    assert words(cpu=False, backend="nccl", max_model_len=512, tensor_parallel_size=2, extra=("--seed", "3")) == (
        "-P -m vllm.entrypoints.openai.api_server --model M --served-model-name policy --host 127.0.0.1 --port 8000 "
        "--dtype float32 --enable-scale-out --logprobs-mode processed_logprobs --max-logprobs -1 "
        '--weight-transfer-config {"backend": "nccl"} --max-model-len 512 --tensor-parallel-size 2 --seed 3'
    )


def test_the_command_on_a_cpu():
    said = words(cpu=True, memory=5, lora_rank=4, max_loras=3)
    assert '{"backend": "agentrl"} --enable-lora --max-lora-rank 8 --max-loras 3 ' in said
    assert said.endswith("--enforce-eager --block-size 32 --no-enable-chunked-prefill --kv-cache-memory-bytes 5")
    assert "kv-cache" not in words(cpu=True)


@pytest.mark.parametrize(
    ("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (65, 128), (257, 320), (321, 512), (512, 512)]
)
def test_lora_ranks_are_rounded_up(rank, allowed):
    assert lora_rank(rank) == allowed


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"lora_rank": 513}, "rank 1 to 512, not 513"),
        ({"lora_rank": 0}, "not 0"),
        ({"max_loras": 0}, "max_loras"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"backend": "carrier-pigeon"}, "agentrl, nccl, not by 'carrier-pigeon'"),
        ({"extra": ("--port=1",)}, "--port cannot be passed"),
        ({"extra": ("--served_model_name", "x")}, "'policy'"),
        ({"extra": ("--api-server-count", "8")}, "vllm serve"),
        ({"extra": ("--api-key", "x")}, "no key"),
    ],
)
def test_flags_that_cannot_be_are_refused(kwargs, said):
    with pytest.raises(ConfigurationError, match=said):
        ServerFlags("M", "float32", **kwargs)


def test_the_environment_of_a_server():
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}
    env = environment({"HOME": "/h", **launcher}, cpu=True)
    assert env == {
        "HOME": "/h", "VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    own = {"OMP_NUM_THREADS": "6", "VLLM_CPU_OMP_THREADS_BIND": "0-5", "VLLM_PLUGINS": "mine"}
    env = environment(own, cpu=True, lora=True, gpus=("2", "3"))
    assert env["OMP_NUM_THREADS"] == "6" and env["VLLM_CPU_OMP_THREADS_BIND"] == "0-5"
    assert env["VLLM_PLUGINS"] == "mine,agentrl" and env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "OMP_NUM_THREADS" not in environment({}, cpu=False)
    assert environment({"VLLM_PLUGINS": ""}, cpu=False)["VLLM_PLUGINS"] == "agentrl"
    with pytest.raises(ConfigurationError, match="VLLM_API_KEY"):
        environment({"VLLM_API_KEY": "secret"}, cpu=True)


@pytest.mark.parametrize(
    ("visible", "count", "trainer", "wanted", "gpus"),
    [
        (None, 8, 4, 1, ("4",)),
        (None, 8, 4, 4, ("4", "5", "6", "7")),
        (None, 8, 0, 2, ("0", "1")),
        ("6,2,4", 8, 1, 2, ("2", "4")),
        ("GPU-aa, MIG-bb", 8, 1, 1, ("MIG-bb",)),
        ("0,1,-1,2", 8, 1, 1, ("1",)),
    ],
)
def test_the_gpus_that_the_trainer_leaves(visible, count, trainer, wanted, gpus):
    assert gpus_left(visible, count, trainer, wanted) == gpus


@pytest.mark.parametrize(
    ("visible", "count", "trainer", "wanted"),
    [(None, 1, 1, 1), (None, 8, 8, 1), (None, 8, 5, 4), ("", 8, 0, 1), ("-1", 8, 0, 1), ("0,1,-1,2", 8, 2, 1)],
)
def test_no_gpu_left(visible, count, trainer, wanted):
    with pytest.raises(ConfigurationError, match='vllm_mode="colocate"'):
        gpus_left(visible, count, trainer, wanted)


def test_the_memory_of_the_cache():
    assert 256 << 20 <= cache_memory({}) <= 2048 << 20
    assert cache_memory({"VLLM_CPU_KVCACHE_SPACE": "8"}) == 0
