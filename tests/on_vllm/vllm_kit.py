"""What the tests against a real vLLM share: a tiny model, servers of it, and log-probs from transformers.

A head of 32 numbers is the smallest that vLLM's attention on a CPU computes, hence `hidden=128`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from agentrl.sampler.draw import log_probs
from agentrl.train.tiny import make_model, make_tokenizer
from agentrl.types import SampleRequest, SamplingParams

HIDDEN = 128
CONTEXT = 2048
TOLERANCE = 3e-5  # between log-probs of vLLM and of transformers, both in fp32
SLOW_S = 300.0  # a machine that many share; a server is ready in 20 s on an idle one


def make_folder(folder: Path, seed: int = 0, *, context: int = CONTEXT, hidden: int = HIDDEN) -> Path:
    """A tiny Qwen3 model (tied embeddings) and its tokenizer, saved in `folder`."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed, hidden=hidden, context=context).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def request(
    prompt: Sequence[int], *, max_tokens: int = 32, seed: tuple[int, ...] = (0, 0, 0), conversation: str = "c",
    stop_ids: tuple[int, ...] = (), num_sampler_logprobs: int = 0, **params: Any,
) -> SampleRequest:  # fmt: skip
    """A request for one turn; further keywords are fields of SamplingParams."""
    return SampleRequest(
        [], [], list(prompt), max_tokens, SamplingParams(**params), seed, conversation, stop_ids,
        num_sampler_logprobs=num_sampler_logprobs,
    )  # fmt: skip


class Reference:
    """What transformers says of a model's drawing; the model may be trained or replaced between calls."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def of(cls, folder: Path) -> Reference:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    @torch.no_grad()
    def distribution(self, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams) -> torch.Tensor:
        """Log-probs [T, V] of what each of `ids` was drawn from."""
        whole = [*prompt, *ids]
        logits = self.model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].float()
        seen = torch.zeros_like(logits, dtype=torch.bool)
        if params.repetition_penalty != 1.0:
            for row in range(len(ids)):
                seen[row, whole[: len(prompt) + row]] = True
        return log_probs(logits, params, seen)

    def log_probs(self, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams) -> torch.Tensor:
        """Log-probs [T] of `ids`."""
        chosen = torch.tensor(list(ids))[:, None]
        return self.distribution(prompt, ids, params).gather(1, chosen)[:, 0]

    def difference(self, prompt: Sequence[int], output: Any, params: SamplingParams) -> float:
        """The largest difference between an output's log-probs and these."""
        ours = self.log_probs(prompt, output.ids, params)
        return float((ours - torch.tensor(output.log_probs)).abs().max())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Server:
    """A vLLM server of this test session's."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    def stop(self, *, hard: bool = False) -> None:
        """Its processes are gone; `hard`: killed, as by a machine that failed."""
        if self.process.poll() is None and not hard:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def plugin_installed() -> bool:
    """True where vLLM finds the weight-transfer engine "agentrl": its entry point is installed, its module is there."""
    names = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    return "agentrl" in names and importlib.util.find_spec("agentrl.sampler.vllm.plugin") is not None


def plain_flags(folder: Path, port: int) -> list[str]:
    return [
        "--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16",
        "--kv-cache-memory-bytes", "268435456", "--block-size", "32", "--enable-scale-out",
        "--no-enable-chunked-prefill",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ]  # fmt: skip


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}  # fmt: skip


def start(
    folder: Path, log: Path, *extra: str, port: int | None = None, environment: dict[str, str] | None = None,
    drop: Sequence[str] = (), wait: bool = True,
) -> Server:  # fmt: skip
    """A server of the model in `folder`, ready (unless `wait` is False).

    Args:
        extra: Further flags.
        environment: Further variables.
        drop: Flags of `plain_flags` (with their values) or variables that are left out.
    """
    port = port or free_port()
    flags = plain_flags(folder, port)
    if plugin_installed() and "--weight-transfer-config" not in drop:
        flags += ["--weight-transfer-config", '{"backend": "agentrl"}']
    for name in drop:
        if name in flags:
            at = flags.index(name)
            valued = at + 1 < len(flags) and (not flags[at + 1].startswith("--"))
            del flags[at : at + 1 + valued]
    env = {**os.environ, **{k: v for k, v in ENVIRONMENT.items() if k not in drop}, **(environment or {})}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *extra]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True, cwd=log.parent)
    server = Server(f"http://127.0.0.1:{port}", process, log, folder)
    if wait:
        _wait(server)
    return server


def _wait(server: Server) -> None:
    end = time.monotonic() + SLOW_S
    while time.monotonic() < end and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.base_url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-3000:]
    server.stop(hard=True)
    raise RuntimeError(f"The vLLM server of the tests did not get ready. The end of its log:\n{tail}")
