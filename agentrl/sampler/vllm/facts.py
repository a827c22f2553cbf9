"""What a vLLM server is: read once at the start, and refused with the flag that is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.sampler.vllm.http import ServerClient, ServerRefused
from agentrl.sampler.vllm.launch_flags import WHOLE_PROMPTS

_NO_ID = 2**31 - 1  # larger than any vocabulary


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's settings. None: it does not say (it does where it runs with VLLM_SERVER_DEV_MODE=1)."""

    version: str  # of vLLM
    model: str  # the name it is asked for by
    root: str  # the model's folder or id, as the server was started with
    max_model_len: int  # tokens of the longest sequence
    vocabulary: int | None
    scale_out: bool  # tokens in, tokens out
    dev_mode: bool  # weights can be changed, and the facts below are known
    dtype: str | None = None  # "float32", "bfloat16", ...
    max_logprobs: int | None = None  # per token; -1: as many as there are ids
    logprobs_mode: str | None = None
    return_sampling_mask: bool = False
    weight_backend: str | None = None
    lora: tuple[int, int] | None = None  # max_rank, max_loras
    lora_updates: bool = False  # adapters can be loaded while it runs
    feeds_in_parts: bool = False  # on a CPU, where vLLM dies of it once requests have seeds
    block_size: int | None = None  # tokens of one cache block
    world_size: int = 1  # devices that hold weights


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server is doing, summed over its engines."""

    kv_cache_usage: float  # in [0, 1], of the fullest engine
    running: int
    waiting: int
    preemptions: int  # since it started, as all that follow
    prefix_queries: int  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int  # and those that were found


async def read_facts(client: ServerClient, model: str | None = None) -> ServerFacts:
    """The facts of a server that is ready.

    Args:
        client: Of the server.
        model: Served name; None: the one that it serves.

    Raises:
        ConfigurationError: It does not serve `model`, or is no vLLM server.
        SamplerError: It stopped answering.
    """
    version, name, root, length = await _served(client, model)
    vocabulary, scale_out = await _vocabulary(client, name)
    try:
        info = await client.retried(lambda: client.get("/server_info", config_format="json"))
    except ServerRefused:
        return ServerFacts(version, name, root, length, vocabulary, scale_out, dev_mode=False)
    world = await client.retried(lambda: client.get("/get_world_size"))
    try:
        return ServerFacts(
            version, name, root, length, vocabulary, scale_out, dev_mode=True, **_settings(info),
            world_size=int(world["world_size"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_server(client, error) from error


def check_facts(
    facts: ServerFacts, *, vocabulary: int | None = None, weights: bool = True, log_probs: int = 0, base_url: str = ""
) -> None:
    """The server can be sampled from, and trained with where `weights` is set.

    Args:
        facts: Of the server.
        vocabulary: Ids of the model that is trained.
        weights: The weights in the server are going to be changed.
        log_probs: How many log-probs per token requests will ask for.
        base_url: For messages.

    Raises:
        ConfigurationError: It was started without something; one sentence names the flag to add.
    """
    where = f"The vLLM server at {base_url}" if base_url else "The vLLM server"

    def missing(what: str, flag: str) -> ConfigurationError:
        return ConfigurationError(f"{where} {what}: start it with {flag}.")

    if not facts.scale_out:
        raise missing("does not take token ids", "--enable-scale-out")
    if weights and not facts.dev_mode:
        raise missing("does not let its weights be changed", "VLLM_SERVER_DEV_MODE=1 in its environment")
    if weights and facts.weight_backend is None and facts.lora is None:
        raise missing("has no way to receive weights", """--weight-transfer-config '{"backend": "agentrl"}'""")
    if facts.feeds_in_parts:
        raise missing("runs on a CPU and feeds prompts in parts, of which it dies if turns have seeds", WHOLE_PROMPTS)
    if facts.logprobs_mode not in (None, "processed_logprobs"):
        raise missing(
            f"returns {facts.logprobs_mode}, which are not of the distribution that it draws from",
            "--logprobs-mode processed_logprobs",
        )
    if facts.max_logprobs is not None and 0 <= facts.max_logprobs < log_probs:
        raise missing(f"gives {facts.max_logprobs} log-probs per token and {log_probs} are needed", "--max-logprobs -1")
    if vocabulary is not None and facts.vocabulary not in (None, vocabulary):
        raise ConfigurationError(
            f"{where} serves {facts.root} with {facts.vocabulary} ids, and the model that is trained has {vocabulary}: "
            "start it with the model that is trained."
        )


async def _served(client: ServerClient, model: str | None) -> tuple[str, str, str, int]:
    """vLLM's version; the served model's name, where it comes from, and its longest sequence."""
    try:
        version = str((await client.retried(lambda: client.get("/version")))["version"])
        served = (await client.retried(lambda: client.get("/v1/models")))["data"]
        for entry in served:
            if entry["id"] == model or (model is None and not entry.get("parent")):
                return version, entry["id"], str(entry.get("root") or entry["id"]), int(entry["max_model_len"])
        names = ", ".join(str(entry["id"]) for entry in served)
    except ServerRefused:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_server(client, error) from error
    raise ConfigurationError(
        f"The vLLM server at {client.base_url} does not serve '{model}' but {names}: name one of them, or start it "
        f"with --served-model-name {model}."
    )


def _no_server(client: ServerClient, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"What answers at {client.base_url} is no vLLM server ({error!r}).")


async def _vocabulary(client: ServerClient, model: str) -> tuple[int | None, bool]:
    """How many ids the model has, as far as the server says, and whether it takes ids at all.

    The question is a request that is always refused, so it costs nothing and works while the engine is paused. An id
    outside the vocabulary in a real prompt would end the engine.
    """
    params = {"max_tokens": 1, "logit_bias": {str(_NO_ID): 0}}
    body = {"model": model, "token_ids": [0], "sampling_params": params}
    try:
        await client.post("/inference/v1/generate", body, retry=True)
    except ServerRefused as error:
        if error.status == 401:
            raise
        found = re.search(r"[Vv]ocabulary size:? *(\d+)", error.said)
        return (int(found[1]) if found else None), error.status not in (403, 404, 405)
    return None, True


def _settings(info: dict[str, Any]) -> dict[str, Any]:
    """The facts in an answer of /server_info; what an older or newer vLLM does not say is left out."""
    config = info.get("vllm_config") or {}
    model, transfer, lora = (config.get(k) or {} for k in ("model_config", "weight_transfer_config", "lora_config"))
    updates = (info.get("vllm_env") or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    dtype = model.get("dtype")
    return {
        "dtype": str(dtype).removeprefix("torch.") if dtype else None,
        "max_logprobs": model.get("max_logprobs"),
        "logprobs_mode": model.get("logprobs_mode"),
        "return_sampling_mask": bool(model.get("return_sampling_mask")),
        "weight_backend": transfer.get("backend"),
        "lora": (int(lora["max_lora_rank"]), int(lora["max_loras"])) if lora else None,
        "lora_updates": str(updates).lower() in ("1", "true"),
        "feeds_in_parts": str((config.get("device_config") or {}).get("device")) == "cpu"
        and bool((config.get("scheduler_config") or {}).get("enable_chunked_prefill")),
        "block_size": (config.get("cache_config") or {}).get("block_size"),
    }


def read_load(metrics: str) -> ServerLoad:
    """What `/metrics` says, in Prometheus' text format; a counter that is not there is 0.

    >>> read_load('vllm:num_requests_running{engine="0"} 3.0\\nvllm:num_requests_running{engine="1"} 1.0').running
    4
    """
    values: dict[str, list[float]] = {}
    for line in metrics.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            values.setdefault(name.partition("{")[0], []).append(float(value))

    def total(name: str) -> int:
        return int(sum(values.get(f"vllm:{name}", ())))

    return ServerLoad(
        kv_cache_usage=max(values.get("vllm:kv_cache_usage_perc", (0.0,))),
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        preemptions=total("num_preemptions_total"),
        prefix_queries=total("prefix_cache_queries_total"),
        prefix_hits=total("prefix_cache_hits_total"),
    )
