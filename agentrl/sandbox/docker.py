"""Sandboxes in containers, by a Docker engine that may be remote: nothing of this machine's files is mounted."""

from __future__ import annotations

import contextlib
import io
import math
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Self

from agentrl.errors import SandboxError, SandboxFileError, SandboxUnavailable
from agentrl.sandbox import reaper
from agentrl.sandbox.docker_engine import READY, connect, create_container, explanation, reap_once, remove
from agentrl.sandbox.docker_exec import Finished, close_connection, first_words, run_command
from agentrl.sandbox.files import split_path, to_bytes
from agentrl.sandbox.image import DEFAULT_IMAGE
from agentrl.sandbox.types import ExecResult, Reason, SandboxSpec, check_argv, check_env, too_long

_DEFAULT = SandboxSpec()
_OWN_S = 60.0  # for commands of ours: an unpacking, a listing
_LISTING_BYTES = 1 << 25

# $1 is a path without "..": 3, there is none; 4, no regular file; 5, a link leads there. No process of the agent runs.
_READ = """
f=/work/$1
[ -e "$f" ] || [ -L "$f" ] || exit 3
[ -f "$f" ] && [ ! -L "$f" ] || exit 4
[ "$(readlink -f "$f"; echo x)" = "$f
x" ] || exit 5
exec head -c "$2" "$f"
"""
# $@ are the folders of a tar that comes on standard input. tar itself puts a file in the place of a link or pipe.
_WRITE = """
for d do
  if [ -L "$d" ] || { [ -e "$d" ] && [ ! -d "$d" ]; }; then echo "$d is no folder, or a link" >&2; exit 5; fi
done
exec tar -xf -
"""
_WHY = {3: "there is no such file", 4: "it is no regular file", 5: "the way to it leads over a link"}


class DockerSandbox:
    """A running container with every limit of the spec; `agentrl.sandbox.Sandbox` says what its methods do.

    Args:
        spec: `image` must have sh, bash or python3, and what every system has: env, find, head, readlink, tar, timeout.
        run_id: Goes into the label `agentrl.run`.

    Raises:
        MissingDependency: the package docker is not installed.
        SandboxUnavailable: no engine answers, it has no such image, or refuses the spec.
    """

    def __init__(self, spec: SandboxSpec = _DEFAULT, run_id: str = "") -> None:
        self.spec = spec
        self._run_id = run_id
        self._owner = os.getpid()
        self._closed = False
        self._id = ""
        self._life: Any = None  # the connection to process 1
        self._ooms = 0
        self._before = ""  # the container before the last reset, which the engine may still be removing
        self._client = connect()
        reap_once(os.environ.get("DOCKER_HOST", ""))
        reaper.track(self)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | str | None = None,
        timeout_s: float = 10.0,
        max_output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
        cwd: str = "/work",
    ) -> ExecResult:
        """The command has ended and so has every process that it left; SandboxError where the sandbox is broken."""
        began = time.monotonic()
        check_argv(argv, timeout_s, max_output_bytes, cwd)
        check_env(env or {})
        if refused := too_long(argv, env or {}):
            return refused
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else bytes(stdin or b"")
        done, reason = self._run(argv, data, timeout_s, max_output_bytes, env or {}, cwd)
        with self._engine("the end of a command"):
            self._settle()
        return ExecResult(
            exit_code=done.code,
            stdout=done.out.decode("utf-8", "replace"),
            stderr=done.err.decode("utf-8", "replace"),
            truncated=done.ended == "output",
            reason=reason,
            duration_s=time.monotonic() - began,
        )

    def upload(self, files: Mapping[str, bytes | str]) -> None:
        """The files lie in /work, by paths relative to it; folders are made. SandboxFileError for any other path."""
        if not files:
            return
        inside = {"/".join(split_path(path)): to_bytes(path, content) for path, content in files.items()}
        for path, data in inside.items():
            if len(data) > self.spec.file_mb << 20:
                raise SandboxFileError(
                    f"{path!r} has {len(data)} bytes; SandboxSpec.file_mb allows {self.spec.file_mb} MB a file."
                )
        folders = sorted({str(parent) for path in inside for parent in PurePosixPath(path).parents} - {"."})
        unpack = ["sh", "-c", _WRITE, "agentrl", *folders]
        done, _ = self._run(unpack, _tar(inside, folders), _OWN_S, 65536, {}, "/work")
        if done.code != 0:
            said = done.err.decode("utf-8", "replace").strip()[:300] or f"tar ended with {done.code} ({done.ended})"
            full = " /work is full (SandboxSpec.disk_mb and files)." if "No space left" in said else ""
            raise SandboxFileError(f"The files {sorted(inside)[:5]} cannot be put into the sandbox: {said}.{full}")

    def download(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The content of a regular file below /work; SandboxFileError for anything else, and for more bytes."""
        inside = "/".join(split_path(path))
        read = ["sh", "-c", _READ, "agentrl", inside, str(max_bytes + 1)]
        done, _ = self._run(read, b"", _OWN_S, max(max_bytes, 4096), {}, "/")
        if done.ended == "output" or (done.code == 0 and len(done.out) > max_bytes):
            raise SandboxFileError(f"{path!r} has more than {max_bytes} bytes, the most that may be downloaded.")
        if done.code != 0:
            why = _WHY.get(done.code or 0) or done.err.decode("utf-8", "replace").strip()[:300]
            raise SandboxFileError(f"{path!r} cannot be taken out of the sandbox: {why}.")
        return done.out

    def list_files(self) -> list[str]:
        """Paths of the regular files below /work, relative to it, sorted; links are not followed."""
        done, _ = self._run(["find", ".", "-type", "f", "-print0"], b"", _OWN_S, _LISTING_BYTES, {}, "/work")
        if done.ended != "ended":
            raise SandboxFileError("The files in the sandbox have too many or too long names to be listed.")
        paths = (os.fsdecode(name).removeprefix("./") for name in done.out.split(b"\0"))
        return sorted(path for path in paths if path and path.isprintable())  # the rest could not be shown to a model

    def reset(self) -> None:
        """/work, /tmp and /dev/shm are empty and no process is left: as good as new."""
        with self._engine("reset"):
            self._restart()

    def alive(self) -> bool:
        """Whether the next exec can work."""
        if self._closed:
            return False
        try:
            return bool(self._client.inspect_container(self._id)["State"]["Running"])
        except Exception:  # the engine's answer or the lack of one: either way no exec would work
            return False

    def close(self) -> None:
        """Nothing of the sandbox is left on the machine. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child must not end its parent's sandbox
            return
        self._closed = True
        reaper.untrack(self)
        with contextlib.suppress(Exception):  # an engine that is gone has nothing of ours left to remove
            self._remove()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the container -------------------------------------------------------------------
    def _start(self) -> None:
        from docker.errors import APIError
        from requests.exceptions import RequestException

        self._ooms = 0
        try:
            self._id = create_container(self._client, self.spec, self._run_id)
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            self._life = self._client.attach_socket(self._id, params=streams)
            getattr(self._life, "_sock", self._life).setblocking(False)
            self._client.start(self._id)
        except (APIError, RequestException, OSError) as error:
            raise SandboxUnavailable(f"The Docker engine cannot start a sandbox: {explanation(error)}") from error
        said = first_words(self._life, _OWN_S)
        if said != READY:
            text = said.decode("utf-8", "replace").strip()[:300] or "it ended at once"
            raise SandboxUnavailable(
                f"The image {self.spec.image or DEFAULT_IMAGE!r} cannot be a sandbox: {text}. "
                "It needs sh, and bash or python3."
            )

    def _remove(self) -> None:
        if self._life is not None:
            close_connection(self._life)
        for container in (self._before, self._id):
            if container:
                remove(self._client, container)
        self._before, self._id, self._life = "", "", None

    def _restart(self) -> None:
        """A new container; the one before is killed, and being removed by the engine."""
        from docker.errors import APIError

        if self._before:
            remove(self._client, self._before)
        close_connection(self._life)
        self._before, self._id, self._life = self._id, "", None
        with contextlib.suppress(APIError):  # it is gone already
            self._client.kill(self._before)
        self._start()
        if self._closed:  # by another thread, while this one was at it
            self._remove()

    def _sweep(self) -> None:
        """Process 1 has killed everything else in the container."""
        from docker.errors import APIError

        with contextlib.suppress(APIError):  # no process 1 any more: then there is nothing to kill
            self._client.kill(self._id, signal="SIGUSR1")

    def _settle(self) -> None:
        """Nothing but process 1 is left: code that reads the runner's memory can say its last words for it, and go on.

        Swept only where something is left after a moment: process 1 takes a signal when it gets to it, and that may be
        when the next command runs already. What is still there shows that it has not got to it yet.
        """
        from docker.errors import APIError

        swept = False
        for pause_s in (0.0, 0.01, 0.03, 0.1, 0.1, 0.3, 0.5, 1.0, 1.0):
            time.sleep(pause_s)
            try:
                left = len(self._client.top(self._id)["Processes"] or ())
            except APIError:  # no process 1 any more, which the next command will find, or an engine without ps
                return
            if left <= 1:
                return
            if pause_s >= 0.1 and not swept:
                self._sweep()
                swept = True

    @contextlib.contextmanager
    def _engine(self, what: str) -> Iterator[None]:
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        if self._closed:
            raise SandboxError(f"The sandbox is closed; {what} needs an open one.")
        try:
            yield
        except (DockerException, RequestException, OSError, SandboxUnavailable) as error:
            raise SandboxError(f"The sandbox is broken: {explanation(error)}") from error

    def _run(
        self, argv: Sequence[str], stdin: bytes, timeout_s: float, cap: int, env: Mapping[str, str], cwd: str
    ) -> tuple[Finished, Reason]:
        """What came out of a command, and why it ended; the sandbox works again, in a new container if it must."""
        inside = {"HOME": "/work", "LANG": "C.UTF-8", **self.spec.env, **env}
        words = list(argv) if "=" not in argv[0] else ["sh", "-c", 'exec "$@"', "sh", *argv]
        command = [*(f"{name}={value}" for name, value in inside.items()), *words]

        def run(command: Sequence[str], stdin: bytes, cwd: str, timeout_s: float, cap: int) -> Finished:
            limits = {"cwd": cwd, "timeout_s": timeout_s, "cap": cap}
            return run_command(self._client, self._id, command, stdin=stdin, sweep=self._sweep, **limits)

        with self._engine("a command"):
            done = run(command, stdin, cwd, timeout_s, cap)
            if not done.started:  # no process more could be started in there; with all others dead, one can
                self._sweep()
                done = run(command, stdin, cwd, timeout_s, cap)
            if not done.started:
                raise SandboxError(f"The sandbox is broken: {done.out[:300].decode('utf-8', 'replace').strip()}")
            if not done.clean:
                if self._closed:
                    raise SandboxError("The sandbox was closed while a command ran in it.")
                if done.ended == "ended":
                    self._sweep()
                if not self.alive():
                    self._restart()
                    return done, "killed"
                done.ooms = self._after_all(lambda: run(["true"], b"", "/", 10.0, 65536))
        oom, self._ooms = done.ooms > self._ooms, done.ooms
        return done, _reason(done, oom)

    def _after_all(self, check: Callable[[], Finished]) -> int:
        """How often the kernel has killed for memory, by a command that shows that commands work again."""
        for pause_s in (0.0, 0.05, 0.2, 1.0):
            time.sleep(pause_s)
            with contextlib.suppress(Exception):
                done = check()
                if done.clean and done.code == 0:
                    return done.ooms
        self._restart()
        return 0


def _reason(done: Finished, oom: bool) -> Reason:
    if done.ended != "ended":
        done.code = None
        return done.ended
    if oom:
        return "oom"
    if not done.clean or done.code == 137:
        done.code = 137
        return "killed"
    return "ok"


def _tar(files: Mapping[str, bytes], folders: Sequence[str]) -> bytes:
    now, buffer = math.floor(time.time()), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in folders:
            info = tarfile.TarInfo(path)
            info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, now
            archive.addfile(info)
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode, info.mtime = len(data), 0o644, now
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
