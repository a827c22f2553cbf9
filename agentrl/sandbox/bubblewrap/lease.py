"""Numbers that only one sandbox on the machine has at a time; as root each stands for a uid of its own."""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxUnavailable

FIRST_UID = 58000  # above people's uids, below those of systemd, Debian and subordinate ranges
COUNT = 1000
CLEAN_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Lease:
    """A number held by an open lock file. The kernel lets go of it when this process dies, however it dies."""

    number: int
    uid: int | None  # None: not root, so sandboxes run under the uid of this process
    fd: int

    def drop(self) -> list[str]:
        """The words of a command line that continue it as this lease's uid, with no other group."""
        if self.uid is None:
            return []
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--inh-caps=-all"]

    def freshen(self) -> None:
        """The lock file looks new, so that cleaners of /tmp leave it alone."""
        os.utime(self.fd)

    def label(self, text: str) -> None:
        """The lock file says for people and the reaper what the lease is for."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text.encode("utf-8", "replace"), 0)

    def told(self) -> str:
        """What `label` was last told by whoever held this number, empty after a release."""
        return os.pread(self.fd, 4096, 0).decode("utf-8", "replace")

    def release(self) -> None:
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


def state_dir() -> Path:
    """The folder of locks and mount points, made if need be: /run/agentrl for root, else one of this user's own."""
    user, path = os.getuid(), _state_path()
    try:
        for folder in (path, path / "slots", path / "work", path / "scratch", path / "etc"):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o755)  # whatever the umask: the uids of sandboxes pass through
        status = path.lstat()
    except OSError as error:
        raise SandboxUnavailable(f"The sandbox cannot use its folder {path}: {error.strerror}.") from error
    # In /tmp anybody may have made it first.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o022:
        raise SandboxUnavailable(f"{path} is not a folder that only uid {user} can change; remove it.")
    return path


def _state_path() -> Path:
    # /run/user is of no use without root: it goes at the end of a login, and runs go on.
    return Path("/run/agentrl" if os.getuid() == 0 else f"/tmp/agentrl-{os.getuid()}")


def take(number: int) -> Lease | None:
    """The lease of this number, or None while another sandbox on the machine has it."""
    path = state_dir() / "slots" / str(number)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SandboxUnavailable(f"The sandbox cannot make its lock {path}: {error.strerror}.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = os.path.samestat(os.fstat(fd), os.stat(path))  # a cleaner of /tmp may have taken the file away
    except OSError:
        current = False
    if not current:
        os.close(fd)
        return None
    return Lease(number, FIRST_UID + number if os.getuid() == 0 else None, fd)


def lease() -> Lease:
    """A number that nobody else has, and as root a uid that no account has and no process runs under."""
    for number in range(COUNT):
        if os.getuid() == 0 and _is_account(FIRST_UID + number):
            continue
        if held := take(number):
            kill_all(held)
            return held
    raise SandboxUnavailable(f"All {COUNT} sandboxes that may run on this machine are in use.")


def _is_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def known() -> list[int]:
    """Numbers that were ever leased here."""
    return sorted(int(entry.name) for entry in (state_dir() / "slots").iterdir() if entry.name.isdigit())


def processes(held: Lease) -> Iterator[int]:
    """Processes of this lease: all of its uid, or of ours those whose command line has the lease's mark."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != (os.getuid() if held.uid is None else held.uid):
                continue
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if (held.uid is not None or mark(held) in words) and not _is_zombie(name):
                yield int(name)


def mark(held: Lease) -> bytes:
    """A word in the command lines of a sandbox's outermost processes (its host name), by which they are known."""
    return f"agentrl-sandbox-{held.number}".encode()  # not a word that a person would choose


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def kill_all(held: Lease) -> int:
    """No process of the lease is left; the number of those that were. Only for who holds the lease."""
    first = list(processes(held))
    end = time.monotonic() + 10
    while (left := list(processes(held))) and time.monotonic() < end:
        if held.uid is not None:  # one call of the kernel's reaches all of them, even those that fork
            command = [*held.drop(), "sh", "-c", "kill -KILL -1"]
            subprocess.run(command, env={"PATH": CLEAN_PATH}, capture_output=True, check=False)
        for pid in left if held.uid is None else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return len(first)
