"""One command of a sandbox: bwrap is started, its program listened to, and all that it started is dead at the end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from agentrl.errors import SandboxError
from agentrl.sandbox.bubblewrap.lease import CLEAN_PATH
from agentrl.sandbox.capture import Conversation, Output
from agentrl.sandbox.types import Reason

START_S = 60.0  # for bwrap to build a sandbox on a machine that is busy; the program's time begins after it
BWRAP_FAILED = re.compile(rb"bwrap: (execvp|Can't chdir to) (.*): ([^:\n]*)\n\Z", re.DOTALL)


def run(
    bwrap: Sequence[str],
    program: Sequence[bytes],
    *,
    stdin: bytes | None,
    pass_fds: tuple[int, ...],
    timeout_s: float,
    max_output_bytes: int,
    watch: Callable[[int], Callable[[], Reason | None]] | None,
) -> tuple[Reason, int | None, Output]:
    """Why the program ended, its exit code, what it wrote.

    `bwrap` are the words up to the program, `pass_fds` the files that are named in them, `watch` makes a watchdog of
    the first process's pid. SandboxError where bwrap did not get as far as starting the program.
    """
    status, status_end = os.pipe()
    words = [*bwrap, "--json-status-fd", str(status_end), "--", *program]
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(status_end, *pass_fds),
            env={"PATH": CLEAN_PATH},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        os.close(status)
        raise SandboxError(f"The sandbox could not start a program: {error}.") from error
    finally:
        os.close(status_end)
    talk = Conversation(child, stdin or b"", max_output_bytes)
    told = bytearray()
    try:
        reason = _converse(talk, status, told, timeout_s, watch)
        os.set_blocking(status, False)
        with suppress(BlockingIOError):
            told += os.read(status, 4096)
    finally:
        os.close(status)
        talk.close()
    if reason == "ok" and b'"exit-code"' not in told:
        return _without_code(talk.output, child.returncode)
    return reason, child.returncode, talk.output


def _converse(
    talk: Conversation,
    status: int,
    told: bytearray,
    timeout_s: float,
    watch: Callable[[int], Callable[[], Reason | None]] | None,
) -> Reason:
    first = _first_process(talk, status, told)
    if first is None:  # bwrap itself failed: what it said is read by who finds no exit code
        talk.until(time.monotonic() + 5)
        talk.drain()
        return "ok"
    pid, pidfd = first
    try:
        reason = talk.until(time.monotonic() + timeout_s, watch(pid) if watch else None)
    finally:
        _end(pidfd)
        if talk.child.poll() is None:
            # It passes on the code of a program that ended by itself, and so may need a moment.
            with suppress(subprocess.TimeoutExpired):
                talk.child.wait(5)
            talk.child.kill()
    talk.drain()
    return "output" if talk.output.truncated and reason == "ok" else reason


def _first_process(talk: Conversation, status: int, told: bytearray) -> tuple[int, int] | None:
    """The pid of the namespace's first process and an open pidfd of it; None where bwrap ended without one.

    `told` is all that bwrap has written on `status` until then, which may be the exit code too.
    """
    end = time.monotonic() + START_S
    while b"\n" not in told:
        if not _readable(status, end - time.monotonic()):
            talk.child.kill()
            raise SandboxError(f"bwrap did not start within {START_S:.0f} s.")
        data = os.read(status, 4096)
        if not data:
            return None
        told += data
    pid = json.loads(told.partition(b"\n")[0])["child-pid"]
    try:
        return pid, os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        return pid, os.open(os.devnull, os.O_RDONLY)


def _end(pidfd: int) -> None:
    """The namespace's first process is dead, and so is every process in the namespace: the kernel sees to it first."""
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _readable(pidfd, 30)
    os.close(pidfd)


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _without_code(output: Output, code: int) -> tuple[Reason, int | None, Output]:
    """What it means that bwrap told no exit code: no such program, no such folder, killed, or a sandbox that broke."""
    text = bytes(output.stderr)
    if match := BWRAP_FAILED.search(text):
        what, name, why = match.groups()
        output.stderr[:] = name + (
            b": command not found\n" if what == b"execvp" and b"No such" in why else b": " + why + b"\n"
        )
        return "ok", 127 if what == b"execvp" and b"No such" in why else 126, output
    if code < 0 or code > 128:
        return "ok", None, output
    lines = text.decode(errors="replace").strip().splitlines() or ["no reason given"]
    raise SandboxError(f"The sandbox could not start a program: {lines[-1]}.")
