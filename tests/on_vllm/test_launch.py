"""A real vLLM, started by `start_server` and by `agentrl serve`: has what training needs, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vllm_kit

from agentrl.errors import ConfigurationError
from agentrl.sampler.vllm import launch_ports
from agentrl.sampler.vllm.launch import start_server
from agentrl.sampler.vllm.server import ServerOptions, VLLMServerSampler

SMALL = ("--kv-cache-memory-bytes", "268435456", "--max-num-seqs", "16")


def processes(mark: str) -> list[int]:
    """The living processes whose environment holds the mark, without this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            marked = mark.encode() in Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if marked and state not in "ZX" and int(name) != os.getpid():
            found.append(int(name))
    return found


@pytest.fixture
def mark(monkeypatch, tmp_path):
    text = f"AGENTRL_TEST_MARK={tmp_path}"
    monkeypatch.setenv(*text.split("=", 1))
    yield text
    left = processes(text)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


async def one_turn(base_url: str, vocabulary: int) -> tuple[VLLMServerSampler, object]:
    """The sampler's own checks of the server's flags pass, and a turn is drawn."""
    sampler = VLLMServerSampler(ServerOptions(base_url, timeout_s=60))
    try:
        await sampler.start(vocabulary)
        sampler.open(0)
        return sampler, await sampler.client.post(
            "/inference/v1/generate",
            {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 0, "ignore_eos": True}},
        )
    finally:
        await sampler.close()


@pytest.mark.slow
def test_a_server_of_ours_has_every_flag_and_is_gone_afterwards(folder, tmp_path, mark):
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    log = tmp_path / "run" / "vllm.log"
    before = time.monotonic()
    with start_server(
        folder, dtype="float32", log=log, max_model_len=512, lora_rank=4, max_loras=3, timeout_s=300, extra=SMALL
    ) as server:
        print(f"ready after {time.monotonic() - before:.1f} s")
        sampler, answer = asyncio.run(one_turn(server.base_url, vocabulary))
        facts = sampler.facts
        assert facts.model == "policy" and facts.root == str(folder) and facts.max_model_len == 512
        assert facts.dev_mode and facts.scale_out and facts.weight_backend == "agentrl" and facts.lora == (8, 3)
        assert facts.logprobs_mode == "processed_logprobs" and facts.max_logprobs == -1 and facts.block_size == 32
        assert str(facts.dtype).removeprefix("torch.") == "float32"
        assert len(answer["choices"][0]["token_ids"]) == 4  # type: ignore[index]
        assert len(processes(mark)) >= 3  # keeper, API server, engine
        with pytest.raises(ConfigurationError, match=rf"Port {server.port} is taken by process \d+ \(.*vllm"):
            launch_ports.check_free("127.0.0.1", server.port)
        before = time.monotonic()
    print(f"stopped after {time.monotonic() - before:.1f} s")
    assert not processes(mark) and server.poll() == 0  # it took SIGTERM and ended in order
    assert server.failure() is None and "Starting vLLM server" in log.read_text()


@pytest.mark.slow
def test_agentrl_serve_says_where_and_dies_with_its_parent(folder, tmp_path, mark):
    log = tmp_path / "vllm.log"
    words = ["serve", str(folder), "--port", "0", "--log", str(log), "--max-model-len", "512", "--", *SMALL]
    command = [sys.executable, "-m", "agentrl", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    line = child.stdout.readline()
    assert line.startswith("Ready at http://127.0.0.1:"), line + child.stderr.read()
    url = line.split()[2].rstrip(".")
    assert f'use_vllm=True, vllm_mode="server", vllm_server_base_url="{url}"' in line
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    assert f"0100007F:{int(url.rpartition(':')[2]):04X} " in listening  # 127.0.0.1 only
    child.kill()
    child.wait()
    until = time.monotonic() + 8
    while processes(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert not processes(mark)


@pytest.mark.slow
def test_a_length_that_the_model_lacks_is_one_sentence(folder, tmp_path, mark):
    too_long = vllm_kit.CONTEXT + 1
    with pytest.raises(ConfigurationError) as caught:
        start_server(folder, dtype="float32", log=tmp_path / "log", max_model_len=too_long, timeout_s=300, extra=SMALL)
    message = str(caught.value)
    assert f"User-specified max_model_len ({too_long})" in message and "\n" not in message
    assert str(folder) in message and str(tmp_path / "log") in message


def test_a_folder_that_is_not_there_is_named_before_anything_starts(tmp_path, mark):
    with pytest.raises(ConfigurationError, match="There is no folder '/no/such/model'"):
        start_server("/no/such/model", dtype="float32", log=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_nccl_is_refused_on_a_cpu_build(folder, tmp_path):
    with pytest.raises(ConfigurationError, match="NCCL is for GPUs"):
        start_server(folder, dtype="float32", log=tmp_path / "log", backend="nccl")
