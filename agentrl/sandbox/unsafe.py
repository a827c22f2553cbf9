"""Commands as bare processes of this user, for code that you wrote yourself. It protects nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from agentrl.errors import SandboxError
from agentrl.sandbox import reaper
from agentrl.sandbox.capture import Conversation, result
from agentrl.sandbox.files import list_files, read_file, write_files
from agentrl.sandbox.types import ExecResult, SandboxSpec, check_argv, check_env, to_text_bytes, too_long

WARNING = (
    "The sandbox backend 'unsafe-subprocess' does not protect this machine: the code can read and delete your files "
    "and use the network. Use it only for code that you wrote; else install Docker or bubblewrap."
)


class UnsafeSandbox:
    """The interface of a sandbox without a sandbox: a temporary folder in place of /work, a deadline, an output cap.

    Of the spec only `env` and `file_mb` (for uploads) hold. Programs see the temporary folder's real path.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        warnings.warn(WARNING, RuntimeWarning, stacklevel=3)
        self.spec = spec
        self._closed = False
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-unsafe-"))
        reaper.track(self)

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
        """See `Sandbox.exec`; of the processes that it leaves only those of its own session are dead."""
        check_argv(argv, timeout_s, max_output_bytes, cwd)
        check_env(env or {})
        if refused := too_long(argv, env or {}):
            return refused
        began = time.monotonic()
        variables = {"PATH": os.defpath + ":/usr/local/bin", "HOME": str(self._path()), "LANG": "C.UTF-8"}
        place = self._path() / Path(cwd).relative_to("/work") if cwd.startswith("/work") else Path(cwd)
        try:
            child = subprocess.Popen(
                [to_text_bytes(word) for word in argv],
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**variables, **self.spec.env, **(env or {})},
                cwd=place,
                start_new_session=True,
            )
        except OSError as error:
            return ExecResult(127, "", f"{argv[0]}: {error.strerror}\n", False, "ok", time.monotonic() - began)
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin or b""
        talk = Conversation(child, data, max_output_bytes)
        try:
            reason = talk.until(time.monotonic() + timeout_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            talk.drain()
            talk.close()
        code = child.returncode
        return result(
            "output" if talk.output.truncated else reason, code if code >= 0 else 128 - code, talk.output, began
        )

    def _path(self) -> Path:
        if self._closed:
            raise SandboxError("The sandbox is closed. Open another one.")
        return self._folder

    def _root(self) -> int:
        return os.open(self._path(), os.O_RDONLY | os.O_DIRECTORY)

    def upload(self, files: Mapping[str, bytes | str]) -> None:
        """See `Sandbox.upload`."""
        root = self._root()
        try:
            write_files(root, files, self.spec.file_mb)
        finally:
            os.close(root)

    def download(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.download`."""
        root = self._root()
        try:
            return read_file(root, path, max_bytes)
        finally:
            os.close(root)

    def list_files(self) -> list[str]:
        """See `Sandbox.list_files`."""
        root = self._root()
        try:
            return list_files(root)
        finally:
            os.close(root)

    def reset(self) -> None:
        """The temporary folder is empty; /tmp is the machine's own and stays as it is."""
        shutil.rmtree(self._path(), ignore_errors=True)
        self._folder.mkdir(mode=0o700)

    def alive(self) -> bool:
        """Whether it is open."""
        return not self._closed

    def close(self) -> None:
        """The temporary folder is gone."""
        if not self._closed and os.getpid() == self._owner:  # a forked child leaves its parent's alone
            self._closed = True
            shutil.rmtree(self._folder, ignore_errors=True)
            reaper.untrack(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
