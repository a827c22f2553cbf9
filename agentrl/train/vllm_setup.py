"""vLLM as the sampler of a run: its server, or an engine in the trainer's process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentrl.errors import ConfigurationError
from agentrl.rollout.loop import LoopThread
from agentrl.train import setup
from agentrl.train.checkpoint_folder import checkpoint_folder
from agentrl.train.engine_options import AUTO, Drawn
from agentrl.train.policy_sampler import PolicySampler, autocast_dtype
from agentrl.train.self_check import check_agreement, trainer_log_probs
from agentrl.types import SampleOutput, SampleRequest

if TYPE_CHECKING:
    from agentrl.sampler.vllm.launch_server import Server
    from agentrl.train.config import GRPOConfig


def server(
    model: Any, tokenizer: Any, args: GRPOConfig, drawn: Drawn, loop: LoopThread, accelerator: Any, slots: int
) -> PolicySampler:
    """A server, of somebody or of the run's own (`vllm_server_base_url="auto"`)."""
    from agentrl.sampler.vllm import ServerOptions, VLLMServerSampler
    from agentrl.train.weight_sync import server_sync

    closers: list[Callable[[], Any]] = []
    try:
        url, ended = _server_url(model, tokenizer, args, accelerator, closers)
        options = ServerOptions(
            base_url=url, timeout_s=args.vllm_server_timeout, max_connections=max(slots, 1),
            drawing=_drawing(args, drawn), ended=ended, answer_s=args.turn_timeout or 1800.0,
        )  # fmt: skip
        sampler = VLLMServerSampler(options)
        closers.append(lambda: loop.run(sampler.close()))
        candidates = drawn.params.top_k if args.vllm_importance_sampling_correction else 0
        facts = loop.run(sampler.start(vocabulary_of(model), log_probs=candidates))
        _warn_of_dtype(facts.dtype, model, args)
        sync = server_sync(
            model, sampler, lambda work: loop.run(work()), accelerator=accelerator, folder=Path(str(args.output_dir)),
            group_port=args.vllm_group_port, timeout_s=args.vllm_server_timeout,
        )  # fmt: skip
        closers.append(sync.close)
    except BaseException:
        PolicySampler(None, None, False, model, closers=closers).close()
        raise
    check = _first_check(model, sampler, drawn, loop, accelerator, {facts.dtype, engine_dtype(model, args)})
    return PolicySampler(
        sampler, _context(model, facts.max_model_len), False, model, sync, closers, check=check,
        first_error=sync.ranks.first_error,
    )  # fmt: skip


def _server_url(
    model: Any, tokenizer: Any, args: GRPOConfig, accelerator: Any, closers: list[Any]
) -> tuple[str, Callable[[], str | None]]:
    """The address of the server, the same on all ranks, and what says why it ended.

    The main rank starts it where the run owns it; nobody knows why somebody else's ended.
    """
    if args.vllm_server_base_url != AUTO:
        host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
        return args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}", lambda: None
    said: list[Any] = [None, None]
    server: Server | None = None
    if accelerator.is_main_process:
        try:
            server = _start_server(model, tokenizer, args, accelerator, closers)
            said[0] = server.base_url
        except Exception as error:  # the other ranks must not wait for it
            said[1] = error
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(said)
    if said[1] is not None:
        raise said[1]
    return said[0], (lambda: None) if server is None else server.failure


def _start_server(model: Any, tokenizer: Any, args: GRPOConfig, accelerator: Any, closers: list[Any]) -> Server:
    from agentrl.sampler.vllm.launch import free_gpus, start_server

    _check_heads(model)
    folder = checkpoint_folder(model, tokenizer, closers, args.trust_remote_code)
    log = Path(str(args.output_dir)) / "vllm_server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"Starting a vLLM server; its output goes to {log}", flush=True)
    server = start_server(
        str(folder), dtype=engine_dtype(model, args), log=log,
        max_model_len=args.vllm_max_model_length, tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpus=free_gpus(accelerator.num_processes, args.vllm_tensor_parallel_size),
        timeout_s=args.vllm_server_timeout, extra=_server_flags(args),
    )  # fmt: skip
    closers.append(server.stop)
    return server


def _check_heads(model: Any) -> None:
    """vLLM's attention on this machine can compute the model's heads; on a CPU it would die of them at the first turn.

    Raises:
        ConfigurationError: The heads are too small.
    """
    config = setup.bare(model).config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size < _LEAST_HEAD and not torch.cuda.is_available():
        raise ConfigurationError(
            f"The model's attention heads have {size} numbers, and vLLM on a CPU needs {_LEAST_HEAD} or more: use the "
            "default sampler (use_vllm=False) for it, or a model with larger heads (make_model(hidden=128), say)."
        )


_LEAST_HEAD = 32


def _server_flags(args: GRPOConfig) -> tuple[str, ...]:
    flags: list[str] = []
    if args.vllm_model_impl != "vllm":
        flags += ["--model-impl", args.vllm_model_impl]
    if args.trust_remote_code:
        flags.append("--trust-remote-code")
    return tuple(flags)


def colocate(
    model: Any, tokenizer: Any, args: GRPOConfig, drawn: Drawn, loop: LoopThread, accelerator: Any, slots: int
) -> PolicySampler:
    """An engine in this process."""
    from agentrl.sampler.vllm import ColocateOptions, VLLMSampler
    from agentrl.train.weight_sync import DirectSync

    _check_heads(model)
    closers: list[Callable[[], Any]] = []
    try:
        folder = checkpoint_folder(model, tokenizer, closers, args.trust_remote_code)
        options = ColocateOptions(
            model=str(folder), dtype=engine_dtype(model, args), max_model_len=args.vllm_max_model_length,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization, model_impl=args.vllm_model_impl,
            tensor_parallel_size=args.vllm_tensor_parallel_size, sleep=args.vllm_enable_sleep_mode, seed=args.seed,
            max_num_seqs=max(1, min(slots, 256)), trust_remote_code=args.trust_remote_code,
            drawing=_drawing(args, drawn),
        )  # fmt: skip
        sampler = VLLMSampler(options)
        closers.append(sampler.close)
        sync = DirectSync(model, sampler, accelerator)
        closers.append(sync.close)
    except BaseException:
        PolicySampler(None, None, False, model, closers=closers).close()
        raise
    check = _first_check(model, sampler, drawn, loop, accelerator, {options.dtype})
    ranks = args.vllm_tensor_parallel_size
    return PolicySampler(
        sampler, _context(model, sampler.max_model_len), False, model, sync, closers, args.vllm_enable_sleep_mode,
        check, sync.ranks.first_error, ranks, accelerator.process_index % ranks,
    )  # fmt: skip


def _context(model: Any, served: int) -> int:
    """Tokens that both the model and the engine can see."""
    own = setup.context_length(model)
    return served if own is None else min(own, served)


def _first_check(
    model: Any, sampler: Any, drawn: Drawn, loop: LoopThread, accelerator: Any, dtypes: set[str | None]
) -> Callable[[], Exception | None]:
    """Compares a turn of the engine with the trainer, by log-probs, without what masks tokens in the engine alone."""
    temperature = drawn.params.temperature

    def sample(request: SampleRequest) -> SampleOutput:
        usual = sampler.drawing
        sampler.drawing = replace(usual, extra={}, regex=None)
        try:
            return loop.run(sampler.sample(request))
        finally:
            sampler.drawing = usual

    def check() -> Exception | None:
        try:
            check_agreement(
                sample, trainer_log_probs(model, temperature, accelerator), half=dtypes != {"float32"},
                vocabulary=vocabulary_of(model), temperature=temperature,
            )  # fmt: skip
        except Exception as error:  # the other ranks must not wait for this one
            return error
        return None

    return check


def _drawing(args: GRPOConfig, drawn: Drawn) -> Any:
    from agentrl.sampler.vllm import Drawing

    return Drawing(
        candidates=args.vllm_importance_sampling_correction, extra=drawn.kwargs,
        regex=args.vllm_structured_outputs_regex,
    )  # fmt: skip


def engine_dtype(model: Any, args: GRPOConfig) -> str:
    """The dtype in which another engine computes what the trainer does: that of mixed precision, else of the weights.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> engine_dtype(torch.nn.Linear(1, 1), SimpleNamespace(bf16=True, fp16=False))
    'bfloat16'
    """
    dtype = autocast_dtype(args) or next(setup.bare(model).parameters()).dtype
    return str(dtype).removeprefix("torch.")


def _warn_of_dtype(served: str | None, model: Any, args: GRPOConfig) -> None:
    mine = engine_dtype(model, args)
    if served is not None and served.removeprefix("torch.") != mine:
        warnings.warn(
            f"The vLLM server computes in {served.removeprefix('torch.')} and the trainer in {mine}: log-probs will "
            f"differ by tenths. Start the server with --dtype {mine}, or train in its dtype.", stacklevel=4,
        )  # fmt: skip


def vocabulary_of(model: Any) -> int:
    """Rows of the embedding as the config has them."""
    return int(setup.bare(model).config.get_text_config().vocab_size)
