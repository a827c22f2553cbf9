"""Weights go to a vLLM server as a safetensors file that it reads: works everywhere, a CPU included."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.sampler.vllm.server import VLLMServerSampler
from agentrl.train.scratch import Scratch
from agentrl.train.sync_steps import GATHER, Ranks, Run, ServerSync, Session
from agentrl.train.weights import drained, policy_weights

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "agentrl-weights-"


class FileSync(ServerSync):
    """All weights in one file: in shared memory where the server runs on this host and they fit, else in `folder`.

    The last file is kept, so that a server that was restarted gets its weights back without the trainer.
    """

    way = "file"

    def __init__(
        self, model: nn.Module, sampler: VLLMServerSampler, run: Run, ranks: Ranks, timeout_s: float, folder: Path
    ) -> None:
        super().__init__(sampler, run, ranks, timeout_s)
        self.model = model
        here = on_this_host(sampler.options.base_url)
        self._parents = [SHARED_MEMORY, folder] if here and SHARED_MEMORY.is_dir() else [folder]
        self._scratch: dict[Path, Scratch] = {}
        self._new: Path | None = None
        self._last: tuple[Path, int] | None = None  # what `restore` sends, and its version
        if ranks.main:
            sampler.restore = self.restore

    def collect(self, session: Session, version: int) -> None:
        with session.clock.step(GATHER), drained(policy_weights(self.model, self.ranks.accelerator)) as weights:
            held = {name: t.cpu().contiguous() for name, t in weights if self.ranks.main}
        if self.ranks.main:
            with session.clock.step("write the weights"):
                self._new = self._write(held, version)

    def send(self, session: Session, version: int) -> None:
        async def load() -> None:
            self.hold(session)
            if self.ranks.main:
                assert self._new is not None
                await _load(session, self._new, version)
                self._keep(self._new, version)

        self.on_loop(session, load)

    async def restore(self) -> None:
        """The server, which lost them, holds the weights of the last sync again.

        Raises:
            RuntimeError: There are none.
            AgentRLError: It did not take them.
        """
        session = Session(self.sampler, self.timeout_s)
        async with asyncio.timeout(self.timeout_s), self.busy:
            if self._last is None:
                raise RuntimeError("no weights were kept to be sent again")
            await _load(session, *self._last)
            await session.resume()

    def close(self) -> None:
        for scratch in self._scratch.values():
            scratch.close()
        self._scratch.clear()
        self._last = None
        if self.sampler.restore == self.restore:
            self.sampler.restore = None

    def _why(self, version: int, step: str, error: Exception) -> str:
        said = super()._why(version, step, error)
        if "No such file" not in said:
            return said
        return (
            f"{said} The server does not see the file: where it runs in a container, give it the host's shared memory "
            "(docker run --ipc=host); where it runs on another machine, both need a disk with the output_dir on it."
        )

    def _write(self, weights: dict[str, Tensor], version: int) -> Path:
        """The file, under its name only once it is complete."""
        parent = self._parent(sum(t.numel() * t.element_size() for t in weights.values()))
        if parent not in self._scratch:
            self._scratch[parent] = Scratch(parent, PREFIX if parent == SHARED_MEMORY else f".{PREFIX}")
        file = self._scratch[parent].path / f"{version}.safetensors"
        if self._last is not None and self._last[0] == file:
            file = file.with_name(f"{version}-again.safetensors")
        part = file.with_suffix(".part")
        try:
            save_file(weights, part)
            part.chmod(0o644)  # as a checkpoint's: the server may be another user's
            os.replace(part, file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return file

    def _parent(self, size: int) -> Path:
        """Where that many bytes fit; shared memory without the last file comes before the disk."""
        memory = self._parents[0]
        if len(self._parents) > 1:
            if _free(memory) > size + (size >> 4):
                return memory
            self._forget()
            if _free(memory) > size + (size >> 4):
                return memory
        return self._parents[-1]

    def _keep(self, file: Path, version: int) -> None:
        if self._last is not None and self._last[0] != file:
            self._forget()
        self._last, self._new = (file, version), None

    def _forget(self) -> None:
        if self._last is not None:
            with contextlib.suppress(OSError):
                self._last[0].unlink(missing_ok=True)
        self._last = None


def on_this_host(base_url: str) -> bool:
    """Whether the address in a URL is one of this machine's: only such an address can be bound.

    >>> on_this_host("http://localhost:8000"), on_this_host("http://192.0.2.1:8000")
    (True, False)
    """
    host = urlsplit(base_url).hostname or ""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as s:
                s.bind(address)
                return True
    return False


async def _load(session: Session, file: Path, version: int) -> None:
    """The server holds the weights of the file, and is paused."""
    await session.pause()
    await session.start_update()
    await session.post("load the weights", "/update_weights", {"update_info": {"path": str(file)}})
    name = session.sampler.name_of(version)
    await session.post("finish the update", "/finish_weight_update", {"weight_version": name})
    await session.forget_prefixes()


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
