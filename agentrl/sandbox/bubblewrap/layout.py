"""What a sandbox sees as its file system: the host's /usr, or a folder that is given; and which Python is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.bubblewrap.lease import state_dir

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
READ_ONLY = ("--remount-ro", "/")  # the root that the folders are put on is a tmpfs of no size
NEEDED = "import ctypes, json, sqlite3, ssl, sys, unittest, zlib; sys.exit(sys.version_info < (3, 9))"
ACCOUNTS = {
    "passwd": "root:x:0:0::/nonexistent:/bin/false\nagent:x:1000:1000::/work:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "ld.so.cache": "",  # a place to bind the host's on
    "resolv.conf": "",
}


@dataclass(frozen=True)
class Layout:
    """Words of bwrap's that build the file system before /proc, /dev, /tmp and /work; variables; words after them."""

    words: tuple[str, ...]
    env: dict[str, str]
    after: tuple[str, ...] = ()


def layout(image: str | None, network: bool) -> Layout:
    """The file system of a sandbox; SandboxUnavailable where the image is no usable folder or there is no Python."""
    if image is not None:
        return Layout(("--ro-bind", _checked(image), "/"), {"PATH": "/opt/py/bin:/opt/python/bin:" + SYSTEM_PATH})
    etc = _etc()
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    words += ["--ro-bind", str(etc), "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    words += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if network:
        words += ["--ro-bind-try", "/etc/ssl", "/etc/ssl"]
        words += ["--ro-bind-try", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
    if system_python():
        return Layout(tuple(words), {"PATH": SYSTEM_PATH}, READ_ONLY)
    python = copied_python()
    env = {"PATH": f"/opt/python/bin:{SYSTEM_PATH}"}
    if any((python / "lib").glob("libpython*.so*")):
        env["LD_LIBRARY_PATH"] = "/opt/python/lib"
    return Layout((*words, "--ro-bind", str(python), "/opt/python"), env, READ_ONLY)


def _checked(image: str) -> str:
    path = Path(image).absolute()
    if not path.is_dir():
        raise SandboxUnavailable(f"The sandbox image {image!r} is no folder; for bubblewrap it is a root file system.")
    missing = [name for name in ("proc", "dev", "tmp", "work") if not (path / name).is_dir()]
    if missing:
        raise SandboxUnavailable(
            f"The sandbox image {image!r} has no folder {', '.join(missing)} to mount on; make it."
        )
    return str(path)


def _etc() -> Path:
    """A folder of the few files of /etc that programs ask for; none of the host's accounts."""
    folder = state_dir() / "etc"
    try:
        for name, text in ACCOUNTS.items():
            if not (folder / name).is_file():
                temporary = folder / f".{name}-{os.getpid()}-{threading.get_native_id()}"
                temporary.write_text(text)
                temporary.chmod(0o644)
                temporary.rename(folder / name)
        for name in ("alternatives", "ssl"):
            if not (folder / name).is_dir():
                (folder / name).mkdir(exist_ok=True)
                (folder / name).chmod(0o755)
    except OSError as error:
        raise SandboxUnavailable(f"The sandbox cannot write its files in {folder}: {error.strerror}.") from error
    return folder


@cache
def system_python() -> str | None:
    """The first whole Python 3.9 or newer below /usr, or None."""
    for path in ("/usr/local/bin/python3", "/usr/bin/python3"):
        if os.access(path, os.X_OK) and Path(path).resolve().is_relative_to("/usr"):
            run = subprocess.run([path, "-I", "-c", NEEDED], env={}, capture_output=True, check=False)
            if run.returncode == 0:
                return path
    return None


@cache
def copied_python() -> Path:
    """A copy of the Python that runs this (without site-packages), made once in a cache that every uid can read."""
    version = f"python-{sys.version.split()[0]}-{os.uname().machine}"
    base = Path("/var/cache") if os.getuid() == 0 else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = base / "agentrl" / version
    if not (target / "bin" / "python3").exists():
        copy_python(target)
    return target


def copy_python(target: Path) -> None:
    """`target` holds bin/python3 and lib, whole or not at all; SandboxUnavailable where it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    except OSError as error:
        raise SandboxUnavailable(f"The sandbox's Python cannot be copied to {target}: {error.strerror}.") from error
    try:
        _copy(building)
        building.rename(target)
    except (OSError, shutil.Error) as error:
        if not (target / "bin" / "python3").exists():  # another process may have been first
            why = error.strerror if isinstance(error, OSError) and error.strerror else "the disk may be full"
            raise SandboxUnavailable(f"The sandbox's Python cannot be copied to {target}: {why}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _copy(into: Path) -> None:
    base, name = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (into / "bin").mkdir()
    shutil.copy(Path(sys._base_executable).resolve(), into / "bin" / name)  # type: ignore[attr-defined]
    for alias in ("python3", "python"):
        (into / "bin" / alias).symlink_to(name)
    leave = shutil.ignore_patterns(
        "site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "config-*", "*.a"
    )
    shutil.copytree(base / "lib" / name, into / "lib" / name, symlinks=False, ignore=leave)
    for library in (base / "lib").glob("*.so*"):
        shutil.copy(library, into / "lib" / library.name)
    for path in [into, *into.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
