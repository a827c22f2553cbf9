"""Files in and out of a folder that untrusted code has filled: no link, pipe or `..` is followed on the host."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping

from agentrl.errors import SandboxFileError

LONGEST_PATH, MOST_FOLDERS = 4096, 200
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a FIFO returns at once


def split_path(path: str) -> list[str]:
    """The parts of a path below /work; SandboxFileError for one that is absolute, empty, has `..` or a NUL.

    >>> split_path("src/./main.py")
    ['src', 'main.py']
    """
    if not isinstance(path, str):
        raise SandboxFileError(f"A path in a sandbox is text, not {type(path).__name__}.")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/work/"):
        parts = parts[1:]
    elif path.startswith("/"):
        parts = []
    if not parts or ".." in parts or "\0" in path or path.endswith("/"):
        raise SandboxFileError(
            f"{path[:200]!r} is no file below /work. Use a path such as 'src/main.py', without '..'."
        )
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError:  # half of a UTF-16 pair
        raise SandboxFileError(f"{path[:200]!r} has a character that no file's name can have.") from None
    if length >= LONGEST_PATH or len(parts) > MOST_FOLDERS:
        raise SandboxFileError(f"{path[:200]!r}... is too long for a path.")
    return parts


def to_bytes(path: str, content: bytes | str) -> bytes:
    """The bytes of a file's content, text as UTF-8; SandboxFileError for any other type."""
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if isinstance(content, bytes):
        return content
    raise SandboxFileError(f"The content of {path!r} is {type(content).__name__}; give bytes or str.")


def write_files(root: int, files: Mapping[str, bytes | str], file_mb: int) -> None:
    """Every file lies below the folder `root` (an open directory); what was there by that name is replaced."""
    for path, content in files.items():
        parts, data = split_path(path), to_bytes(path, content)
        if len(data) > file_mb << 20:
            raise SandboxFileError(f"{path!r} has {len(data)} bytes; SandboxSpec.file_mb allows {file_mb} MB a file.")
        with _reasons(path), _folder(root, parts[:-1], make=True) as folder:
            _replace(folder, parts[-1], data)


def _replace(folder: int, name: str, data: bytes) -> None:
    # A rename replaces a link, a pipe or a hard link itself and never writes through it.
    temporary = f".{secrets.token_hex(8)}"
    fd = os.open(temporary, _NEW, 0o644, dir_fd=folder)
    try:
        with open(fd, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise


def read_file(root: int, path: str, max_bytes: int) -> bytes:
    """The content of a regular file below the folder `root`; SandboxFileError for anything else or more bytes."""
    parts = split_path(path)
    with (
        _reasons(path),
        _folder(root, parts[:-1]) as folder,
        open(os.open(parts[-1], _FILE, dir_fd=folder), "rb") as file,
    ):
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SandboxFileError(f"{path!r} is no regular file.")
        if status.st_size <= max_bytes and len(data := file.read(max_bytes + 1)) <= max_bytes:
            return data
        raise SandboxFileError(f"{path!r} has {status.st_size} bytes; at most {max_bytes} may be downloaded.")


def list_files(root: int) -> list[str]:
    """Regular files below the folder `root`, sorted; no names that are no text, no paths too long to name."""
    found: list[str] = []
    folders = [""]
    while folders:
        here = folders.pop()
        try:
            fd = os.open(here or ".", _FOLDER, dir_fd=root)
        except OSError:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    path = f"{here}/{entry.name}" if here else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                    elif entry.is_file(follow_symlinks=False) and path.isprintable():
                        found.append(path)
        finally:
            os.close(fd)
    return sorted(found)


@contextlib.contextmanager
def _folder(root: int, parts: list[str], *, make: bool = False) -> Iterator[int]:
    here = os.dup(root)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
            deeper = os.open(part, _FOLDER, dir_fd=here)
            os.close(here)
            here = deeper
        yield here
    finally:
        os.close(here)


@contextlib.contextmanager
def _reasons(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        say = {
            errno.ENOENT: "does not exist",
            errno.ELOOP: "is or goes through a symbolic link, which is not followed",
            errno.ENOTDIR: "goes through something that is no folder (links are not followed)",
            errno.EISDIR: "is a folder",
            errno.ENXIO: "is no regular file",
            errno.ENOSPC: "does not fit: /work is full (SandboxSpec.disk_mb and files)",
            errno.EDQUOT: "does not fit: /work is full (SandboxSpec.disk_mb and files)",
        }.get(error.errno or 0, f"could not be opened: {error.strerror}")
        raise SandboxFileError(f"{path[:200]!r} {say}.") from error


@contextlib.contextmanager
def as_user(uid: int | None) -> Iterator[None]:
    """This thread opens and makes files as `uid`, with no right of root's to pass over permissions; None: as it is."""
    if uid is None:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsgid(uid)
    libc.setfsuid(uid)
    try:
        if libc.setfsuid(-1) != uid:  # -1 changes nothing and answers with what holds
            raise SandboxFileError(f"This process may not act as uid {uid} on files.")
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)
