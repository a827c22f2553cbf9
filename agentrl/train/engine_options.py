"""Which engine draws the rollouts, and how: the options of generation, checked and made into records."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl.errors import ConfigurationError
from agentrl.types import SamplingParams

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig

COLOCATE = (
    "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode",
    "vllm_model_impl",
)  # fmt: skip
SERVER = (
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
)  # fmt: skip
ANY_VLLM = ("vllm_mode", "vllm_structured_outputs_regex")
AUTO = "auto"  # `vllm_server_base_url`: the run starts a server of its own

# these of `generation_kwargs` change how long a turn may be or how it is computed, not what it is drawn from
_HARMLESS = (
    "max_new_tokens", "cache_implementation", "cache_config", "use_cache", "max_cache_len", "prefill_chunk_size",
    "disable_compile", "skip_reading_prefix_cache",
)  # fmt: skip
_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Drawn:
    """The distribution that turns are drawn from, and what `generation_kwargs` say besides it."""

    params: SamplingParams
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # without what `params` holds


def drawn_from(args: GRPOConfig) -> Drawn:
    """The sampling parameters of the config, with those of `generation_kwargs` over them.

    Raises:
        ConfigurationError: `generation_kwargs` are no table, or a value is out of range.
    """
    kwargs = table(args.generation_kwargs, "generation_kwargs")
    params = SamplingParams(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty)
    mine = {name: kwargs.pop(name) for name in _OWN if kwargs.get(name) is not None}
    kwargs = {name: value for name, value in kwargs.items() if name not in _OWN}
    params = replace(params, **mine)
    for fine, text in (
        (_number(params.temperature) and 0 < params.temperature < math.inf, "temperature must be above 0 and finite"),
        (_number(params.top_p) and 0 < params.top_p <= 1, "top_p must be in (0, 1]"),
        (isinstance(params.top_k, int) and params.top_k >= 0, "top_k must be a whole number: 0 (off) or more"),
        (params.min_p is None or (_number(params.min_p) and 0 <= params.min_p <= 1), "min_p must be in [0, 1]"),
        (
            _number(params.repetition_penalty) and 0 < params.repetition_penalty < math.inf,
            "repetition_penalty must be above 0 and finite",
        ),
    ):
        if not fine:
            raise ConfigurationError(f"generation_kwargs: {text}.")
    return Drawn(params, kwargs)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def table(value: dict | str | None, name: str) -> dict[str, Any]:
    """An option that is a dict, or JSON of one.

    >>> table('{"top_k": 5}', "generation_kwargs")
    {'top_k': 5}

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{name} is not JSON: {error.msg}.") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be a table of names and values, not a {type(value).__name__}.")
    return dict(value)


def check_engine(args: GRPOConfig) -> None:
    """The options of generation fit each other; those that do nothing beside the others are warned about.

    Raises:
        ConfigurationError: Two that exclude each other, or a value out of range.
    """
    drawn = drawn_from(args)
    for fine, text in _rules(args):
        if not fine:
            raise ConfigurationError(f"{text}.")
    if args.use_vllm and not 0.01 <= drawn.params.temperature <= 2.0:
        raise ConfigurationError(f"vLLM draws at temperatures from 0.01 to 2, not {drawn.params.temperature}.")
    _check_correction(args, drawn.params)
    _warn_of_masks(args, drawn.kwargs)
    _warn_of_idle(args)


def _rules(args: GRPOConfig) -> list[tuple[bool, str]]:
    vllm, batching = args.use_vllm, args.use_transformers_continuous_batching
    return [
        (args.vllm_mode in ("server", "colocate"), "vllm_mode must be 'server' or 'colocate'"),
        (args.vllm_model_impl in ("vllm", "transformers"), "vllm_model_impl must be 'vllm' or 'transformers'"),
        (
            not (vllm and batching),
            "use_vllm and use_transformers_continuous_batching are two engines: set one of them",
        ),
        (
            not (vllm and args.cache_implementation),
            "cache_implementation is the cache of transformers' generate; vLLM has its own: leave it out",
        ),
        (
            not (batching and args.cache_implementation),
            "cache_implementation is of transformers' generate; continuous batching has its own cache: leave it out",
        ),
        (
            0 < args.vllm_gpu_memory_utilization <= 1,
            "vllm_gpu_memory_utilization is a share of the memory, in (0, 1]",
        ),
        (args.vllm_tensor_parallel_size >= 1, "vllm_tensor_parallel_size must be at least 1"),
        (
            args.vllm_max_model_length is None or args.vllm_max_model_length >= 2,
            "vllm_max_model_length must be at least 2, or None",
        ),
        (args.vllm_server_timeout > 0, "vllm_server_timeout must be above 0"),
        (0 < args.vllm_server_port < 65536, "vllm_server_port must be a port: 1 to 65535"),
        (0 < args.vllm_group_port < 65536, "vllm_group_port must be a port: 1 to 65535"),
        (
            args.vllm_server_base_url in (None, AUTO) or is_address(args.vllm_server_base_url),
            f"vllm_server_base_url={args.vllm_server_base_url!r} is no address: write 'http://HOST:PORT' or 'auto'",
        ),
    ]  # fmt: skip


def is_address(url: str) -> bool:
    """Whether this names a server.

    >>> [is_address(url) for url in ("http://localhost:8000", "localhost:8000", "http://localhost:8000.")]
    [True, False, False]
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _check_correction(args: GRPOConfig, params: SamplingParams) -> None:
    """The ratios of the sampler correction would be those of the distribution that tokens were drawn from."""
    if not args.vllm_importance_sampling_correction:
        return
    off = "set vllm_importance_sampling_correction=False"
    if params.repetition_penalty != 1.0:
        raise ConfigurationError(
            f"repetition_penalty={params.repetition_penalty} changes what the sampler draws from and not what is "
            f"trained, so every importance sampling ratio would be biased: {off}, or leave repetition_penalty at 1.0."
        )
    if args.use_vllm and args.vllm_structured_outputs_regex:
        raise ConfigurationError(
            "vllm_structured_outputs_regex leaves the engine few tokens to draw from, so every importance sampling "
            f"ratio would be near 0 and the loss with it: {off}."
        )
    if args.use_vllm and params.top_k == 0 and (params.top_p < 1 or params.min_p):
        name = "top_p" if params.top_p < 1 else "min_p"
        raise ConfigurationError(
            f"{name}={getattr(params, name)} with vLLM needs top_k > 0 (top_k=512, say): vLLM tells the tokens that "
            f"each one was drawn from only up to top_k of them, and without them every importance sampling ratio would "
            f"be biased. Or {off}."
        )


def _warn_of_masks(args: GRPOConfig, kwargs: Mapping[str, Any]) -> None:
    """Says what changes the distribution in the sampler alone, so that importance sampling ratios are biased."""
    names = [f"generation_kwargs[{name!r}]" for name in kwargs if name not in _HARMLESS]
    if names and args.vllm_importance_sampling_correction:
        warnings.warn(
            f"{', '.join(names)}: the sampler draws from another distribution than the one that is trained, so "
            "importance sampling ratios are biased. Set vllm_importance_sampling_correction=False to train without "
            "them.",
            stacklevel=5,
        )


def _warn_of_idle(args: GRPOConfig) -> None:
    """Says which options of generation were set that do nothing beside the others."""
    server = args.use_vllm and args.vllm_mode == "server"
    idle: list[tuple[bool, tuple[str, ...], str]] = [
        (not args.use_vllm, (*ANY_VLLM, *COLOCATE, *SERVER), "use_vllm=False"),
        (server and args.vllm_server_base_url != AUTO, COLOCATE, "vllm_mode='server': it is a flag of the server"),
        (args.use_vllm and not server, SERVER, "vllm_mode='colocate'"),
        (
            not args.use_transformers_continuous_batching, ("transformers_continuous_batching_config",),
            "use_transformers_continuous_batching=False",
        ),
        (
            args.vllm_server_base_url is not None, ("vllm_server_host", "vllm_server_port"),
            f"vllm_server_base_url={args.vllm_server_base_url!r}",
        ),
    ]  # fmt: skip
    defaults = {option.name: option.default for option in dataclasses.fields(args)}
    said: set[str] = set()
    for applies, names, because in idle:
        for name in names:
            if applies and name not in said and getattr(args, name) != defaults[name]:
                said.add(name)
                warnings.warn(f"{name}={getattr(args, name)!r} has no effect with {because}.", stacklevel=5)
