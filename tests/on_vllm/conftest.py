"""Fixtures of the tests against a real vLLM: one server for the whole session."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

# One thread each for the server and for this process: with more, a busy machine makes both crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # helpers beside the tests: vllm_kit

import pytest
import torch
import vllm_kit

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model and its tokenizer, as the session's server serves them."""
    return vllm_kit.make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_kit.Server]:
    """A vLLM server of `folder`. A test that changes its weights or its version puts them back, or starts its own."""
    running = vllm_kit.start(folder, tmp_path_factory.mktemp("vllm") / "server.log")
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def reference(folder: pathlib.Path) -> vllm_kit.Reference:
    """Log-probs of the model in `folder` from transformers; a test that changes the model makes its own."""
    return vllm_kit.Reference.of(folder)
