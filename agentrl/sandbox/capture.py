"""A child process is run, fed and listened to until it ends, a deadline passes or it says too much."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from agentrl.sandbox.types import ExecResult, Reason

_READ = select.POLLIN | select.POLLHUP | select.POLLERR
CHUNK = 65536


@dataclass
class Output:
    """What came on stdout and stderr, at most `cap` bytes together."""

    cap: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def take(self, into: bytearray, data: bytes) -> None:
        room = self.cap - len(self.stdout) - len(self.stderr)
        into += data[:room]
        self.truncated = self.truncated or len(data) > room


class Conversation:
    """The pipes of one child: what goes in, what came out. The child's end is seen by its pid, not by its pipes."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, cap: int) -> None:
        self.child = child
        self.output = Output(cap)
        self._poll = select.poll()
        self._pipes: dict[int, bytearray] = {}
        self._left = memoryview(stdin)
        for pipe, into in ((child.stdout, self.output.stdout), (child.stderr, self.output.stderr)):
            self._listen(pipe, into)
        if child.stdin is not None:
            os.set_blocking(child.stdin.fileno(), False)
            self._poll.register(child.stdin, select.POLLOUT)
        try:
            self._pidfd = os.pidfd_open(child.pid)
            self._poll.register(self._pidfd, select.POLLIN)
        except (OSError, AttributeError):  # no Linux: the end is found by asking, see `until`
            self._pidfd = -1

    def _listen(self, pipe: IO[bytes] | None, into: bytearray) -> None:
        if pipe is None:
            return
        os.set_blocking(pipe.fileno(), False)
        self._pipes[pipe.fileno()] = into
        self._poll.register(pipe, select.POLLIN)

    def until(self, deadline: float, tick: Callable[[], Reason | None] | None = None) -> Reason:
        """Why it ended: "ok" when the child is gone, "timeout", "output", or what `tick` (every 20 ms) says."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            wait = min(left, 0.02) if tick or self._pidfd < 0 else left
            for fd, _ in self._poll.poll(wait * 1000 + 1):
                if fd == self._pidfd:
                    return "ok"
                self._serve(fd)
            if self.output.truncated:
                return "output"
            if self._pidfd < 0 and self.child.poll() is not None:
                return "ok"
            if tick and (reason := tick()):
                return reason

    def _serve(self, fd: int) -> None:
        into = self._pipes.get(fd)
        if into is None:
            return self._feed(fd)
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(fd)
            self._pipes.pop(fd)
        self.output.take(into, data)

    def _feed(self, fd: int) -> None:
        try:
            self._left = self._left[os.write(fd, self._left[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not read its input, which is its own business
            self._left = self._left[:0]
        if not self._left and self.child.stdin is not None:
            self._poll.unregister(fd)
            with suppress(OSError):
                self.child.stdin.close()

    def drain(self) -> None:
        """What still lies in the pipes is read, up to the cap. Only for when every writer is dead or of no interest."""
        for fd, into in list(self._pipes.items()):
            with suppress(OSError):
                while not self.output.truncated and (data := os.read(fd, CHUNK)):
                    self.output.take(into, data)

    def close(self) -> None:
        """The pipes are closed, and the child is dead (killed, where it was not) and no zombie."""
        if self.child.poll() is None:
            self.child.kill()
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self.child.wait()


def result(reason: Reason, code: int | None, output: Output, began: float) -> ExecResult:
    """The record of a command that ended with `code` (None where it was ended, or where nobody knows)."""
    if reason == "ok" and (code is None or code == 137):
        reason = "killed"
    return ExecResult(
        exit_code=code if reason in ("ok", "killed", "oom") else None,
        stdout=output.stdout.decode("utf-8", "replace"),
        stderr=output.stderr.decode("utf-8", "replace"),
        truncated=output.truncated,
        reason=reason,
        duration_s=time.monotonic() - began,
    )
