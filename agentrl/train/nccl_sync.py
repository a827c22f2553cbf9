"""Weights go to a vLLM server from GPU to GPU, by vLLM's own sender over NCCL."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from agentrl.errors import MissingDependency
from agentrl.sampler.vllm.server import VLLMServerSampler
from agentrl.train.sync_steps import GATHER, Ranks, Run, ServerSync, Session
from agentrl.train.weights import policy_weights


class NcclSync(ServerSync):
    """The main rank broadcasts all weights to the server's GPUs; the others hand it their shards meanwhile.

    A server that was restarted has left the group: it gets its weights with the next sync.
    """

    way = "nccl"

    def __init__(
        self, model: nn.Module, sampler: VLLMServerSampler, run: Run, ranks: Ranks, timeout_s: float, port: int
    ) -> None:
        super().__init__(sampler, run, ranks, timeout_s)
        self.port = port
        self._source = _source(model, ranks.accelerator)
        self._sender: Any = None

    def collect(self, session: Session, version: int) -> None:
        """Names and shapes are known, and the group stands."""
        with session.clock.step(GATHER):
            self._source.metadata()
        if self._sender is None:
            with session.clock.step("connect"):
                self._sender = in_time(lambda: self._connect(session.left()), session.left())

    def send(self, session: Session, version: int) -> None:
        async def pause() -> None:
            self.hold(session)
            if self.ranks.main:
                await session.pause()

        self.on_loop(session, pause)
        self._sender.client.version = self.sampler.name_of(version)
        try:
            with session.clock.step("load the weights"):  # start and finish are in it
                in_time(self._sender.send_weights, session.left())
        except BaseException:
            self._disconnect()
            raise

        async def forget() -> None:
            if self.ranks.main:
                await session.forget_prefixes()

        self.on_loop(session, forget)

    def close(self) -> None:
        if self._sender is not None:
            self._disconnect()

    def _connect(self, timeout_s: float) -> Any:
        try:
            from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
                WeightTransferTrainerFactory,
            )
            from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
                NCCLTrainerInitInfo,
            )
        except ImportError as error:
            raise MissingDependency("vllm", "vllm", "Sending weights over NCCL") from error
        base_url = self.sampler.options.base_url
        info = NCCLTrainerInitInfo(
            master_address=own_address(base_url), master_port=self.port,
            world_size=1 + self.sampler.facts.world_size, rank=self.ranks.number,
        )  # fmt: skip
        client = _client(base_url, timeout_s)
        with contextlib.suppress(Exception):  # what a trainer before this one left behind
            client.shutdown_weight_transfer_engine() if self.ranks.main else None
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

    def _disconnect(self) -> None:
        sender, self._sender = self._sender, None
        with contextlib.suppress(Exception):  # the group may be broken
            in_time(sender.shutdown, 10.0)


def in_time(work: Callable[[], Any], timeout_s: float) -> Any:
    """The result of work that cannot be interrupted: a broadcast whose other end has died never returns.

    Raises:
        TimeoutError: It is not done; its thread stays behind.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def target() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="agentrl-nccl", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def own_address(base_url: str) -> str:
    """This machine's address as the server sees it.

    >>> own_address("http://127.0.0.1:8000")
    '127.0.0.1'
    """
    parts = urlsplit(base_url)
    where = (parts.hostname or "127.0.0.1", parts.port or 80)
    family, kind, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(address)  # of datagrams: nothing is sent
        return s.getsockname()[0]


def _client(base_url: str, timeout_s: float) -> Any:
    """vLLM's client, which its sender calls from threads of its own."""
    from vllm.distributed.weight_transfer.clients import (  # pyright: ignore[reportMissingImports]
        HTTPVLLMWeightSyncClient,
    )

    class Client(HTTPVLLMWeightSyncClient):
        version: str | None = None  # that the next update is finished with

        def start_weight_update(self) -> None:
            try:
                super().start_weight_update()
            except Exception as error:  # an update that a failed sync left open
                if getattr(getattr(error, "response", None), "status_code", 0) != 500:
                    raise
                super().finish_weight_update()
                super().start_weight_update()

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            super().finish_weight_update(weight_version or self.version)

    return Client(base_url, timeout_s)


def _source(model: nn.Module, accelerator: Any) -> Any:
    """The policy's weights in the form that vLLM's senders take."""
    try:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            ParamMeta,
            WeightSource,
        )
    except ImportError as error:
        raise MissingDependency("vllm", "vllm", "Sending weights over NCCL") from error

    class Source(WeightSource):
        def __init__(self) -> None:
            self.known: list[Any] | None = None

        def metadata(self) -> list[Any]:
            if self.known is None:  # shapes do not change in a run; the first sync gathers twice
                self.known = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self]
            return self.known

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in policy_weights(model, accelerator):
                yield name, tensor.contiguous()

    return Source()
