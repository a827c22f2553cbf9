"""What a sandbox may do, what came out of a command in it, and the door both backends share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, runtime_checkable

from agentrl.errors import ConfigurationError

LONGEST_WORD = 128 << 10  # bytes of an argument or a variable, with its end: Linux's MAX_ARG_STRLEN
LONGEST_LINE = 512 << 10  # all of them together: an engine's messages hold 4 MiB, where a character may take six bytes
Reason = Literal["ok", "timeout", "oom", "output", "killed"]


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox may do. Every limit is always set; a limit that is not positive is a ConfigurationError.

    `memory_mb`, `cpus` and `processes` (threads count) hold for all processes of a sandbox together, `open_files` and
    `file_mb` (largest file) for each process. `disk_mb` and `files` bound what lies in /work; /tmp and /dev/shm have
    the same again, together. `image` is a Docker image's name, or for bubblewrap a root file system's folder.
    `env` is all that is inside besides PATH, HOME and LANG.

    >>> SandboxSpec(memory_mb=0)
    Traceback (most recent call last):
    agentrl.errors.ConfigurationError: SandboxSpec.memory_mb is 0; it must be more than zero.
    """

    memory_mb: int = 512
    cpus: float = 1.0
    processes: int = 64
    open_files: int = 256
    disk_mb: int = 64
    files: int = 4096
    file_mb: int = 32
    network: bool = False
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("memory_mb", "cpus", "processes", "open_files", "disk_mb", "files", "file_mb"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"SandboxSpec.{name} is {getattr(self, name)!r}; it must be more than zero.")
        check_env(self.env)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did. Whatever code in a sandbox does is a result, never an exception.

    `reason`: "ok", the main process ended by itself (`exit_code` is its own, 128 + n if signal n ended it);
    "timeout", it was still there at the deadline (`exit_code` None); "output", it wrote more than the cap (None);
    "oom", something in it was killed for memory (the main process's code, or None where it was ended from outside);
    "killed", SIGKILL ended it and none of these limits did, such as its own `kill -9 -1` (137, or None).
    `stdout` and `stderr` are UTF-8, what is malformed replaced; `truncated` says that output was cut at the cap, which
    is for both together. `duration_s` is the time that exec took.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    reason: Reason
    duration_s: float


@runtime_checkable
class Sandbox(Protocol):
    """A place for code that nobody has read. One per episode, a context manager, for one thread at a time."""

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
        ...

    def upload(self, files: Mapping[str, bytes | str]) -> None:
        """The files lie in /work, by paths relative to it; folders are made. SandboxFileError for any other path."""
        ...

    def download(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The content of a regular file below /work; SandboxFileError for anything else, and for more bytes."""
        ...

    def list_files(self) -> list[str]:
        """Paths of the regular files below /work, relative to it, sorted; links are not followed."""
        ...

    def reset(self) -> None:
        """/work, /tmp and /dev/shm are empty and no process is left: as good as new."""
        ...

    def alive(self) -> bool:
        """Whether the next exec can work."""
        ...

    def close(self) -> None:
        """Nothing of the sandbox is left on the machine. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def check_env(env: Mapping[str, str]) -> None:
    """Every name and value can be an environment variable; ConfigurationError names the first that cannot."""
    for name, value in env.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigurationError(f"{name!r} is no name for an environment variable: letters, digits and _ only.")
        if not isinstance(value, str) or "\0" in value:
            raise ConfigurationError(f"The environment variable {name} must be a text without a NUL character.")


def check_argv(argv: Sequence[str], timeout_s: float, max_output_bytes: int, cwd: str = "/work") -> None:
    """The arguments of an exec can be used; ConfigurationError says which cannot."""
    if not isinstance(argv, (list, tuple)) or not argv or not all(isinstance(word, str) for word in argv):
        raise ConfigurationError(f"argv must be a list of str such as ['python3', 'main.py'], not {argv!r:.200}.")
    if any("\0" in word for word in argv) or not argv[0]:
        raise ConfigurationError("The command's name must not be empty, and no word of argv may have a NUL character.")
    if not 0 < timeout_s < 1e6 or max_output_bytes < 0:
        raise ConfigurationError(f"timeout_s is {timeout_s!r} and max_output_bytes {max_output_bytes!r}; neither fits.")
    if not isinstance(cwd, str) or "\0" in cwd:
        raise ConfigurationError(f"cwd must be a path such as '/work', without a NUL character, not {cwd!r:.200}.")


def too_long(argv: Sequence[str], env: Mapping[str, str]) -> ExecResult | None:
    """What a shell says of a command line that is too long to start: a model can write one. None where it is not.

    >>> too_long(["echo", "x" * 200_000], {}).stderr, too_long(["echo", "x" * 100_000], {})
    ('echo: Argument list too long\\n', None)
    """
    words = [*argv, *(f"{name}={value}" for name, value in env.items())]
    sizes = [len(to_text_bytes(word)) + 1 for word in words]
    if max(sizes) <= LONGEST_WORD and sum(sizes) + 8 * len(sizes) <= LONGEST_LINE:
        return None
    return ExecResult(126, "", f"{argv[0][:200]}: Argument list too long\n", False, "ok", 0.0)


def to_text_bytes(text: str) -> bytes:
    r"""The bytes of a path or an argument: UTF-8, with the bytes that `os.fsdecode` could not read as they were.

    >>> to_text_bytes("\udcff\ud800")
    b'\xff?'
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a UTF-16 pair: JSON can spell it, and so can a model
        return re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text).encode("utf-8", "surrogateescape")
