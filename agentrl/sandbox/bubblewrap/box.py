"""The bubblewrap sandbox: one holder of folders, and a bwrap of its own for each command."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox import reaper
from agentrl.sandbox.bubblewrap import cgroup, holder, lease, machine, seccomp, watchdog
from agentrl.sandbox.bubblewrap.layout import layout
from agentrl.sandbox.bubblewrap.run import run
from agentrl.sandbox.capture import result
from agentrl.sandbox.files import as_user, list_files, read_file, write_files
from agentrl.sandbox.types import ExecResult, SandboxSpec, check_argv, check_env, to_text_bytes, too_long

NAMESPACES = [
    *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
]
_proven: set[tuple[str | None, bool]] = set()  # what has run a program in this process, and need not show it again


class BubblewrapSandbox:
    """A sandbox of Linux namespaces. As root it runs under an unprivileged uid that no other sandbox has.

    Its constructor raises SandboxUnavailable, saying what is missing on this machine.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        machine.check_machine()
        self.spec = spec
        self._layout = layout(spec.image, spec.network)
        self._holder: holder.Holder | None = None
        self._group = cgroup.Cgroup({}, 1)
        self._closed = False
        self._owner = os.getpid()
        self._lease = lease.lease()
        reaper.track(self)
        try:
            names = {"run": reaper.run_id(), **spec.labels}
            self._lease.label(", ".join(f"{name} {value}" for name, value in names.items()))
            self._group = cgroup.create(self._lease.number, spec)
            self._holder = holder.start(self._lease, spec)
            if (spec.image, spec.network) not in _proven:
                self._prove()
        except BaseException:
            self.close()
            raise

    def _prove(self) -> None:
        """A sandbox that cannot start a program is refused at once, with bwrap's own reason."""
        try:
            proof = self.exec(["true"])
        except SandboxError as error:
            who = self._lease.uid or os.getuid()
            raise SandboxUnavailable(holder.NO_NAMESPACES.format(uid=who, why=error)) from error
        if proof.exit_code != 0:
            raise SandboxUnavailable(
                f"The sandbox image {self.spec.image!r} cannot run `true`: {proof.stderr.strip()}."
            )
        _proven.add((self.spec.image, self.spec.network))

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
        """See `Sandbox.exec`."""
        check_argv(argv, timeout_s, max_output_bytes, cwd)
        check_env(env or {})
        held = self._living()
        self._lease.freshen()
        began = time.monotonic()
        if refused := too_long(argv, env or {}):
            return refused
        kills = self._group.oom_kills()
        counted = "memory" in self._group.folders
        fds = seccomp.filter_fd(counted=counted), arguments(self._options(held, env or {}, cwd))
        bwrap = [
            "bwrap",
            "--seccomp",
            str(fds[0]),
            "--hostname",
            lease.mark(self._lease).decode(),
            "--args",
            str(fds[1]),
        ]
        try:
            reason, code, output = run(
                [*self._before(held, timeout_s), *bwrap],
                [to_text_bytes(word) for word in argv],
                stdin=stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin,
                pass_fds=fds,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                watch=None if counted else partial(watchdog.Watchdog, limit=self.spec.memory_mb << 20),
            )
        finally:
            for fd in fds:
                os.close(fd)
        if reason == "ok" and self._group.oom_kills() > kills:
            reason = "oom"
        return result(reason, code, output, began)

    def _living(self) -> holder.Holder:
        if self._closed or self._holder is None or not self._holder.alive():
            raise SandboxError("The sandbox is closed, or its process was killed. Open another one.")
        return self._holder

    def _before(self, held: holder.Holder, timeout_s: float) -> list[str]:
        """The words ahead of bwrap: into the cgroup, under the limits, to the lease's uid, among the mounts."""
        spec, cores = self.spec, math.ceil(self.spec.cpus)
        limits = {
            "cpu": math.ceil(timeout_s * cores) + 1,  # of one process, whose threads may use all cores
            "fsize": spec.file_mb << 20,
            "core": 0,
            "nofile": spec.open_files,
            "nproc": spec.processes + cgroup.OWN,
        }
        words = self._group.entry()
        if "memory" not in self._group.folders:  # a second line behind the watchdog; threads' stacks count too
            limits["data"] = (2 * spec.memory_mb + 8 * spec.processes) << 20
        words += ["prlimit", *(f"--{name}={value}" for name, value in limits.items())]
        if "cpu" not in self._group.folders:
            mine = sorted(os.sched_getaffinity(0))
            start = self._lease.number * cores
            chosen = {mine[(start + i) % len(mine)] for i in range(cores)}
            words += ["taskset", "-c", ",".join(map(str, sorted(chosen)))]
        return [*words, *self._lease.drop(), *held.enter()]

    def _options(self, held: holder.Holder, env: Mapping[str, str], cwd: str) -> list[str]:
        words = [*NAMESPACES, *(["--share-net"] if self.spec.network else [])]
        if (
            machine.bwrap_version() >= machine.NESTED
        ):  # a second lock: the filter of system calls denies new namespaces too
            words.append("--disable-userns")
        inside = {"HOME": "/work", "LANG": "C.UTF-8", **self._layout.env, **self.spec.env, **env}
        words += [word for name, value in inside.items() for word in ("--setenv", name, value)]
        words += [*self._layout.words, "--proc", "/proc", "--dev", "/dev", *held.binds()]
        return [*words, "--remount-ro", "/dev", *self._layout.after, "--chdir", cwd]

    def upload(self, files: Mapping[str, bytes | str]) -> None:
        """See `Sandbox.upload`."""
        with as_user(self._lease.uid):
            write_files(self._living().work, files, self.spec.file_mb)

    def download(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.download`."""
        with as_user(self._lease.uid):
            return read_file(self._living().work, path, max_bytes)

    def list_files(self) -> list[str]:
        """See `Sandbox.list_files`."""
        with as_user(self._lease.uid):
            return list_files(self._living().work)

    def reset(self) -> None:
        """See `Sandbox.reset`."""
        held = self._living()
        held.close()
        lease.kill_all(self._lease)
        self._holder = holder.start(self._lease, self.spec)

    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return not self._closed and self._holder is not None and self._holder.alive()

    def close(self) -> None:
        """See `Sandbox.close`."""
        if self._closed or os.getpid() != self._owner:  # a forked child must not end its parent's sandbox
            return
        self._closed = True
        if self._holder is not None:
            self._holder.close()
        lease.kill_all(self._lease)
        self._group.remove()
        self._lease.release()
        reaper.untrack(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def arguments(words: Sequence[str]) -> int:
    """An open file from which bwrap's --args reads these words: the command line is seen by the program inside."""
    fd = os.memfd_create("agentrl-arguments")
    with open(fd, "wb", closefd=False) as file:
        file.write(b"".join(to_text_bytes(word) + b"\0" for word in words))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
