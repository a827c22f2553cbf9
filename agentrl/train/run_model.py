"""A model and its tokenizer, ready to be sampled from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import ConfigurationError
from agentrl.sampler import TransformersSampler
from agentrl.train.engine_options import is_address
from agentrl.train.setup import context_length


def load_policy(name: str, kwargs: Mapping[str, Any], slots: int) -> tuple[TransformersSampler, Any, int | None]:
    """The sampler of a model in its own dtype, on the accelerator where there is one; its tokenizer; its context.

    Args:
        name: A folder or a hub id.
        kwargs: Of `from_pretrained`, for the model and the tokenizer (`revision`, `gguf_file`).
        slots: Episodes that are sampled side by side.

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise ConfigurationError(f"There is no folder '{name}' to load a model from.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **kwargs)
    except (OSError, ValueError) as error:  # a name that is nowhere, a folder without weights, no network
        text = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"The model '{name}' cannot be loaded: {text}") from error
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    context = context_length(model)
    return TransformersSampler(model, max_context=context, max_slots=slots), tokenizer, context


def load_served(address: str, slots: int) -> tuple[Any, Any, int | None]:
    """The sampler of the model that a vLLM server serves; its tokenizer; its context.

    Args:
        address: As "http://HOST:PORT"; "#FOLDER" behind it names the tokenizer where the server's is not found here.
        slots: Requests in flight at a time.

    Raises:
        ConfigurationError: There is no server, it lacks a flag, or no tokenizer is found.
    """
    from agentrl.sampler.vllm import ServerOptions, VLLMServerSampler

    url, _, named = address.partition("#")
    sampler = VLLMServerSampler(ServerOptions(url.rstrip("/"), timeout_s=_PATIENCE_S, max_connections=max(1, slots)))

    async def start() -> Any:
        try:
            return await sampler.start(weights=False)
        finally:
            await sampler.close()

    if not is_address(url):
        raise ConfigurationError(f"'{url}' is no address: write --policy vllm:http://HOST:PORT.")
    try:
        facts = asyncio.run(start())
    except ConnectionError as error:
        raise ConfigurationError(f"No vLLM server answered at {url} within {_PATIENCE_S:g} s.") from error
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(named or facts.root)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The server at {url} serves '{facts.root}', whose tokenizer is not found here: name a folder that has it, "
            f"as in --policy vllm:{url}#FOLDER."
        ) from error
    return sampler, tokenizer, facts.max_model_len


_PATIENCE_S = 30.0  # for a server that is asked from the command line
