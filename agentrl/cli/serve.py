"""`agentrl serve`: a vLLM server with the flags that training needs, in the foreground."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.output import print_note, print_text


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on a hub.")],
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Further flags of vLLM; they win.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="Who may connect; the server takes weights from anybody.")
    ] = "127.0.0.1",
    dtype: Annotated[str, typer.Option("--dtype", help="That of the trainer's model.")] = "float32",
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Tokens of the longest conversation.")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", min=1, help="Take adapters up to this rank, sent alone.")
    ] = None,
    max_loras: Annotated[
        int, typer.Option("--max-loras", min=1, help="Adapters at once: max_staleness + 2 or more.")
    ] = 2,
    weights: Annotated[
        str, typer.Option("--weights", help="How weights arrive: agentrl (files, anywhere) or nccl (GPUs).")
    ] = "agentrl",
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds until it must be ready.")] = 600.0,
    log: Annotated[Path | None, typer.Option("--log", help="Where vLLM's output goes; by default a new file.")] = None,
) -> None:
    """Serve a model with vLLM for training, until Ctrl-C.

    What stands after -- is passed on: agentrl serve MODEL -- --tensor-parallel-size 2
    """
    from agentrl.errors import RunStopped
    from agentrl.sampler.vllm.launch import check_installed, start_server

    check_installed(weights)
    path = log or Path(tempfile.mkdtemp(prefix="agentrl-serve-")) / "vllm.log"
    print_note(f"Starting vLLM with {model}, process {os.getpid()}; its output goes to {path}")
    if host not in ("127.0.0.1", "localhost", "::1"):
        print_note(f"Whoever reaches {host} can replace the weights and read what is sampled: there is no password.")
    server = start_server(
        model,
        host=host,
        port=port or None,
        dtype=dtype,
        log=path,
        max_model_len=max_model_len,
        lora_rank=lora_rank,
        max_loras=max_loras,
        backend=weights,
        timeout_s=timeout,
        extra=flags or (),
    )
    with server:
        print_text(
            f'Ready at {server.base_url}. In the config: use_vllm=True, vllm_mode="server", '
            f'vllm_server_base_url="{server.base_url}"'
        )
        server.wait()
        raise RunStopped(f"{server.failure()}.")
