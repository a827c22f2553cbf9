"""One command in a container: started, fed, watched and ended by a clock and a cap of our own."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import select
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from docker import APIClient

Ended = Literal["ended", "timeout", "output"]

_LAST_WORDS = 128  # more than the length of the runner's last words, which are no output
_DRAIN_S = 3.0  # for the connection to end once everything in the container has been killed
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError)

# What runs a command, as the same user. It waits for a first line, so that no output is sent before we listen (the
# SDK's HTTP reader would swallow it), and that line holds a secret. Standard input is cut off by its length: half a
# connection cannot be closed over TLS. `timeout` is for the day this process dies before the deadline. At the end every
# process of the user but process 1 and this shell is killed; then the last words on stdout and stderr, which come by
# separate ways, say so by the secret, with the exit code and how often the kernel has killed for memory. Where they are
# missing, the command has killed this shell.
RUNNER = r"""
IFS= read -r secret || exit 125
cwd=$1 limit=$2 size=$3; shift 3
exec 3>&2
go() { echo 1000 >/proc/self/oom_score_adj; exec timeout -s KILL "$limit" env -i "PATH=$PATH" "$@"; }
if ! cd -- "$cwd"; then code=126
else
  exec 2>/dev/null  # where this shell says that a command was killed
  if [ "$size" = 0 ]; then (go "$@") </dev/null 2>&3 3>&-; code=$?
  else head -c "$size" | (go "$@") 2>&3 3>&-; code=$?
  fi
fi
kill -9 -1 2>/dev/null
oom=0
for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
  [ -r "$file" ] && while read -r key value; do [ "$key" = oom_kill ] && oom=$value; done <"$file"
done
printf %s "$secret"
printf '%s %s %s' "$secret" "$code" "$oom" >&3
"""


@dataclass(slots=True)
class Finished:
    """How a command ended: `clean` if the runner said so itself, `code` and `ooms` (kills for memory so far) then."""

    ended: Ended
    started: bool = True
    clean: bool = False
    code: int | None = None
    ooms: int = 0
    out: bytes = b""
    err: bytes = b""


@dataclass(slots=True)
class _Output:
    """Bytes as they come from the engine: frames of stdout and stderr, and at the end the runner's last words."""

    secret: bytes
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    _raw: bytearray = field(default_factory=bytearray)
    _left: int = 0  # bytes of the frame that are still to come
    _stderr: bool = False

    def feed(self, data: bytes) -> None:
        self._raw += data
        while self._raw:
            if not self._left:
                if len(self._raw) < 8:
                    return
                self._stderr, self._left = self._raw[0] == 2, int.from_bytes(self._raw[4:8], "big")
                del self._raw[:8]
            part = self._raw[: self._left]
            (self.err if self._stderr else self.out).extend(part)
            self._left -= len(part)
            del self._raw[: len(part)]

    @property
    def words_in_err(self) -> re.Pattern[bytes]:
        return re.compile(rb"%s (\d+) (\d+)\Z" % self.secret)

    def last_words(self) -> tuple[int, int] | None:
        """The exit code and the kills for memory, once both streams are complete."""
        found = self.out.endswith(self.secret) and self.words_in_err.search(self.err[-120:])
        return (int(found[1]), int(found[2])) if found else None


def run_command(
    client: APIClient,
    container: str,
    command: Sequence[str],
    *,
    stdin: bytes,
    cwd: str,
    timeout_s: float,
    cap: int,
    sweep: Callable[[], None],
) -> Finished:
    """The command has ended, or its time or output has: then `sweep` was called, which kills all in the container.

    Args:
        command: `NAME=VALUE` for each environment variable, then the program and its arguments.
        stdin: What the command reads; empty for nothing.
        cap: Most bytes of stdout and stderr together; what is above it is cut.

    Raises:
        docker.errors.APIError: the engine could not start a command in the container.
    """
    shell = ["sh", "-c", RUNNER, "agentrl", cwd, str(int(min(timeout_s, 1e9)) + 3), str(len(stdin)), *command]
    made = client.exec_create(container, shell, stdin=True, user="1000:1000")
    output = _Output(secrets.token_hex(16).encode())
    with _socket(client.exec_start(made["Id"], socket=True)) as connection:
        waiting = memoryview(output.secret + b"\n" + stdin)
        try:
            ended = _talk(connection, output, waiting, time.monotonic() + timeout_s, cap)
        except BaseException:  # Ctrl-C
            sweep()
            raise
        if ended != "ended":
            sweep()
        if ended == "timeout":  # what was on its way
            _talk(connection, output, memoryview(b""), time.monotonic() + _DRAIN_S, cap)
    words = output.last_words() if ended == "ended" else None
    # They may have come too late, or half of them: no output either way.
    out, err = bytes(output.out).removesuffix(output.secret), output.words_in_err.sub(b"", output.err)
    if len(out) + len(err) > cap:
        ended = "output" if ended == "ended" else ended
        out, err = out[:cap], err[: max(0, cap - len(out))]
    code, ooms = words or (None, 0)
    started = ended != "ended" or words is not None or _has_started(client, made["Id"])
    return Finished(ended, started, words is not None, code, ooms, out, err)


def _has_started(client: APIClient, command: str) -> bool:
    """Whether a runner without last words was there: what kills it leaves a code from 128 on, or no container."""
    from docker.errors import NotFound

    try:
        code = client.exec_inspect(command)["ExitCode"]
    except NotFound:
        return True
    return code is None or code >= 128


def _talk(connection: Any, output: _Output, waiting: memoryview, until: float, cap: int) -> Ended:
    """All of `waiting` is sent and all that comes is read, until the end, the deadline ("timeout") or the cap."""
    poll = select.poll()  # select() knows no file descriptor above 1023
    pending = getattr(connection, "pending", int)  # what TLS has decrypted already wakes no poll
    while True:
        if output.last_words() is not None:
            return "ended"
        if len(output.out) + len(output.err) > cap + _LAST_WORDS:
            return "output"
        left = until - time.monotonic()
        if left <= 0:
            return "timeout"
        if waiting:
            waiting = _send(connection, waiting)
        # A channel over ssh is never reported as writable: while something waits to be sent, it is tried anyway.
        wait_s = 0.0 if pending() else min(left, 0.02 if waiting else 1000.0)
        poll.register(connection.fileno(), select.POLLIN | (select.POLLOUT if waiting else 0))
        happened = dict(poll.poll(math.ceil(wait_s * 1000))).get(connection.fileno(), 0)
        if not (pending() or happened & ~select.POLLOUT):
            continue
        try:
            data = connection.recv(65536)
        except _AGAIN:
            continue
        except OSError:
            return "ended"
        if not data:
            return "ended"
        output.feed(data)


def _send(connection: Any, waiting: memoryview) -> memoryview:
    try:
        return waiting[connection.send(waiting[:65536]) :]
    except _AGAIN:
        return waiting
    except OSError:
        return memoryview(b"")  # the command has ended without reading it all


@contextlib.contextmanager
def _socket(opened: Any) -> Iterator[Any]:
    """The connection itself, not blocking; closed with all that the SDK keeps around it."""
    connection = getattr(opened, "_sock", opened)
    connection.setblocking(False)
    try:
        yield connection
    finally:
        close_connection(opened)


def first_words(opened: Any, timeout_s: float) -> bytes:
    """The first that a container says on a connection to it; empty where it has ended or says nothing."""
    output = _Output(b"never said")
    _talk(getattr(opened, "_sock", opened), output, memoryview(b""), time.monotonic() + timeout_s, -_LAST_WORDS)
    return bytes(output.out + output.err)


def close_connection(opened: Any) -> None:
    """A connection that the SDK has handed out is closed, and its file descriptor with it."""
    response = getattr(opened, "_response", None)
    for each in (response, opened, getattr(opened, "_sock", None)):
        if each is not None:
            with contextlib.suppress(OSError, ValueError):
                each.close()
