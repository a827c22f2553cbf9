"""A process that keeps a sandbox's folders: it owns a mount namespace with sized tmpfs, and ends when its run does."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.bubblewrap.lease import CLEAN_PATH, Lease, mark, state_dir
from agentrl.sandbox.types import SandboxSpec

# It waits for the end of its standard input: the kernel closes that when this process dies, even of SIGKILL; then
# the namespace, and with it the mounts and what is in them, are gone. (A death signal would come with the thread.)
SCRIPT = """set -e
mount -t tmpfs -o "$1" tmpfs "$2/work"
mount -t tmpfs -o "$1" tmpfs "$2/scratch"
mkdir "$2/work/work" "$2/scratch/tmp" "$2/scratch/shm"
echo ready
read -r end || exit 0"""
OWN_FOLDERS = 2  # the mount and the folder in it take an inode each
NO_NAMESPACES = (
    "This machine does not let uid {uid} make the namespaces that bubblewrap needs ({why}). Allow unprivileged user "
    "namespaces, or use Docker: a local engine, or a remote one named by DOCKER_HOST."
)


@dataclass(frozen=True)
class Holder:
    process: subprocess.Popen[bytes]
    work: int  # an open directory: /work of the sandbox, as the host reaches it

    def enter(self) -> list[str]:
        """The words of a command line that continue it among this holder's mounts."""
        proc = f"/proc/{self.process.pid}/ns"
        return ["nsenter", "--preserve-credentials", f"--user={proc}/user", f"--mount={proc}/mnt"]

    def binds(self) -> list[str]:
        """bwrap's words for the folders that a program may write to."""
        state = state_dir()
        pairs = {"work/work": "/work", "scratch/tmp": "/tmp", "scratch/shm": "/dev/shm"}
        return [word for source, target in pairs.items() for word in ("--bind", str(state / source), target)]

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """The process is gone, and with it the mounts."""
        with suppress(OSError):
            os.close(self.work)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def start(held: Lease, spec: SandboxSpec) -> Holder:
    """Empty folders of the spec's sizes; SandboxUnavailable where the kernel does not allow namespaces."""
    options = f"size={spec.disk_mb}m,nr_inodes={spec.files + OWN_FOLDERS},mode=0755,nosuid,nodev"
    command = [*held.drop(), "unshare", "--user", "--map-root-user", "--mount"]
    command += ["sh", "-c", SCRIPT, mark(held).decode(), options, str(state_dir())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": CLEAN_PATH},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.readline() != b"ready\n":
            why = process.stderr.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise SandboxUnavailable(NO_NAMESPACES.format(uid=held.uid or os.getuid(), why=why[-1]))
        inside = Path(f"/proc/{process.pid}/root{state_dir()}/work/work")
        return Holder(process, os.open(inside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except BaseException:
        process.kill()
        process.communicate()
        raise
