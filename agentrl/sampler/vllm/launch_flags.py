"""How a vLLM server of ours is started: its command, its environment and its GPUs, from plain arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigurationError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank may be
BACKENDS = ("agentrl", "nccl")
MIB = 1 << 20
# The flags that would break what the client relies on, and why
OWNED = {
    "--model": "MODEL is an argument of its own",
    "--served-model-name": "requests name the model 'policy'",
    "--host": "host is an argument of its own",
    "--port": "port is an argument of its own",
    "--uds": "the trainer speaks to a port",
    "--ssl-keyfile": "the trainer speaks plain HTTP",
    "--ssl-certfile": "the trainer speaks plain HTTP",
    "--root-path": "the trainer knows no prefix",
    "--api-key": "the trainer sends no key",
    "--api-server-count": "only the command 'vllm serve' heeds it; start that yourself and name its URL",
}
# A launcher's variables say which rank of the *training* a process is; in the server they would be wrong.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
LAUNCHERS += ("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """What is served, and how; checked where it is made."""

    model: str
    dtype: str  # the trainer's, or log-probs differ by 0.1 and more
    served_name: str = "policy"
    max_model_len: int | None = None
    lora_rank: int | None = None  # None: no adapters
    max_loras: int = 1  # adapters at once; max_staleness + 2 for training
    backend: str = "agentrl"  # how weights arrive: "agentrl" (files, everywhere) or "nccl" (GPUs)
    tensor_parallel_size: int = 1
    extra: tuple[str, ...] = ()  # further flags of vLLM, which win

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(f"Weights arrive by one of {', '.join(BACKENDS)}, not by '{self.backend}'.")
        if self.tensor_parallel_size < 1 or self.max_loras < 1:
            raise ConfigurationError("tensor_parallel_size and max_loras are at least 1.")
        if self.lora_rank is not None:
            lora_rank(self.lora_rank)
        for word in self.extra:
            name = word.partition("=")[0].replace("_", "-")
            if name in OWNED:
                raise ConfigurationError(f"{name} cannot be passed on to vLLM: {OWNED[name]}.")


WHOLE_PROMPTS = "--no-enable-chunked-prefill"
"""On a CPU vLLM 0.32 dies of a request with a seed whose prompt is fed in parts (the generator has no offset)."""


def command(flags: ServerFlags, host: str, port: int, *, cpu: bool, memory: int) -> list[str]:
    """The words that start the server. `memory` is what the key-value cache may take on a CPU, in bytes (0: unsaid)."""
    # The command `vllm` dies in the CPU build, whose distribution has another name.
    words = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", flags.model, "--served-model-name", flags.served_name]
    words += ["--host", host, "--port", str(port), "--dtype", flags.dtype]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    words += ["--weight-transfer-config", json.dumps({"backend": flags.backend})]
    if flags.max_model_len is not None:
        words += ["--max-model-len", str(flags.max_model_len)]
    if flags.tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(flags.tensor_parallel_size)]
    if flags.lora_rank is not None:
        words += ["--enable-lora", "--max-lora-rank", str(lora_rank(flags.lora_rank))]
        words += ["--max-loras", str(flags.max_loras)]
    if cpu:  # small blocks: what conversations share is found in finer steps
        words += ["--enforce-eager", "--block-size", "32", WHOLE_PROMPTS]
        words += ["--kv-cache-memory-bytes", str(memory)] if memory else []
    return [*words, *flags.extra]


def environment(
    given: Mapping[str, str], *, cpu: bool, lora: bool = False, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """The variables of the server's process: those given, without a launcher's, with what the server needs."""
    if given.get("VLLM_API_KEY"):
        raise ConfigurationError("VLLM_API_KEY is set, and the trainer sends no key: unset it for servers of agentrl.")
    env = {k: v for k, v in given.items() if k not in LAUNCHERS and not k.startswith("TORCHELASTIC_")}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1"}
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    plugins = env.get("VLLM_PLUGINS")
    if plugins is not None and "agentrl" not in plugins.split(","):
        env["VLLM_PLUGINS"] = f"{plugins},agentrl".strip(",")
    if lora:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if cpu:  # two threads on a busy machine made generation a hundred times slower; more is for the user to say
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env


def lora_rank(rank: int) -> int:
    """The smallest rank that vLLM can be started with and that holds adapters of this rank.

    >>> lora_rank(4), lora_rank(32), lora_rank(300)
    (8, 32, 320)
    """
    if not 1 <= rank <= LORA_RANKS[-1]:
        raise ConfigurationError(f"vLLM serves LoRA adapters of rank 1 to {LORA_RANKS[-1]}, not {rank}.")
    return next(allowed for allowed in LORA_RANKS if allowed >= rank)


def gpus_left(visible: str | None, count: int, trainer: int, wanted: int = 1) -> tuple[str, ...]:
    """The GPUs for the server: the first `wanted` that the trainer's processes on this machine do not use.

    `visible` is CUDA_VISIBLE_DEVICES (None: not set), `count` the GPUs of the machine, `trainer` the number of
    training processes here, which take the first GPUs, one each.

    >>> gpus_left(None, 4, trainer=2), gpus_left("3,5,7", 8, trainer=1, wanted=2)
    (('2',), ('5', '7'))
    """
    names = [str(n) for n in range(count)] if visible is None else _before_invalid(visible)
    left = tuple(names[trainer : trainer + wanted])
    if len(left) < wanted:
        raise ConfigurationError(
            f"A vLLM server needs {wanted} GPU{'s' * (wanted > 1)} of its own, and training takes {trainer} of the "
            f'{len(names)} of this machine: start fewer training processes, or share them with vllm_mode="colocate".'
        )
    return left


def cache_memory(given: Mapping[str, str]) -> int:
    """Bytes for the key-value cache on a CPU: an eighth of what is free, 256 MiB to 2 GiB; 0 where the user says it."""
    if given.get("VLLM_CPU_KVCACHE_SPACE"):
        return 0
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # macOS does not say
        free = 0
    return min(max(free // 8, 256 * MIB), 2048 * MIB)


def _before_invalid(visible: str) -> list[str]:
    """CUDA ignores what follows the first -1 or empty entry."""
    names: list[str] = []
    for name in (word.strip() for word in visible.split(",")):
        if not name or name == "-1":
            break
        names.append(name)
    return names
