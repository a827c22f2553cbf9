"""The Docker engine: how it is reached, what each container may do, and whose containers are left over."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import MissingDependency, SandboxUnavailable
from agentrl.sandbox.docker_seccomp import FIRST_GOOD_API, profile
from agentrl.sandbox.image import DEFAULT_IMAGE
from agentrl.sandbox.reaper import start_ticks
from agentrl.sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from docker import APIClient

LABEL = "agentrl"  # on every container, with the labels agentrl.run, .host, .pid and .started
_SPARE_PROCESSES = 4  # process 1, and the shell, the clock and the feeder of a command
_LEAST_PROCESSES = 16  # with fewer the engine itself cannot start a command in the container
_API_TIMEOUT_S = 60

# Process 1 keeps the sandbox alive, reaps, and kills all else in it on SIGUSR1. The kernel protects it from every
# signal sent inside but that one, and killing needs no new process, for which a fork bomb would leave no room. (dash
# and busybox do not reap what they have not started.) Its standard input is a connection that our process holds: where
# that ends, by a crash or a SIGKILL too, process 1 ends, the container with it, and the engine removes that.
_BASH_INIT = (
    "trap 'kill -9 -1; again=1' USR1; echo ready; exec >/dev/null 2>&1; "
    'while :; do again=; read -rn 1 byte || [ "$again" ] || exit; done'
)
_PYTHON_INIT = """
import contextlib, os, signal
def sweep(*_):
    with contextlib.suppress(OSError):
        os.kill(-1, 9)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, sweep)
os.write(1, b"ready\\n")
nothing = os.open("/dev/null", os.O_WRONLY)
os.dup2(nothing, 1), os.dup2(nothing, 2)
while os.read(0, 4096):
    pass
"""
READY = b"ready\n"
_INIT = [
    "sh",
    "-c",
    'command -v bash >/dev/null && exec bash -c "$0"; command -v python3 >/dev/null && exec python3 -ISc "$1"; '
    'echo "it has neither bash nor python3"',
    _BASH_INIT,
    _PYTHON_INIT,
]

_versions: dict[str, str] = {}  # what each engine speaks, asked once
_versions_lock = threading.Lock()


def connect() -> APIClient:
    """A client of the engine that DOCKER_HOST names, else of this machine's; it has answered.

    Each sandbox has one of its own: the SDK's sessions are not safe to share between threads, and a sandbox is used by
    one thread at a time. It holds at most three connections: requests, process 1, and the command that runs.

    Raises:
        MissingDependency: the package docker is not installed.
        SandboxUnavailable: nothing answers, or not to this user.
    """
    try:
        import docker
        import docker.utils
        from docker.errors import DockerException
        from requests.exceptions import RequestException
    except ImportError as error:
        raise MissingDependency("docker", "docker", "The Docker sandbox") from error
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        with _versions_lock:
            version = _versions.get(host)
        client = docker.APIClient(**docker.utils.kwargs_from_env(), version=version or "auto", timeout=_API_TIMEOUT_S)
        if host.startswith("unix://"):
            # The SDK would keep one for each of the last 25 paths that were asked for.
            client.headers["Connection"] = "close"
        if version is None:
            with _versions_lock:
                _versions[host] = client.api_version
        return client
    except (DockerException, RequestException, OSError, ValueError) as error:
        raise SandboxUnavailable(why_no_engine(host, str(error))) from error


def engine_problem() -> str | None:
    """None where a Docker engine answers, else one sentence on what is missing."""
    try:
        client = connect()
        try:
            client.ping()
        finally:
            client.close()
    except (SandboxUnavailable, MissingDependency) as error:
        return str(error)
    except Exception as error:  # whatever the SDK raises: the engine has gone
        return why_no_engine(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock", str(error))
    return None


def why_no_engine(host: str, text: str) -> str:
    """What is wrong with the engine at that address, and what to do about it."""
    if "Permission denied" in text or "PermissionError" in text:
        return (
            f"The Docker engine at {host} does not let this user in. Add the user to the group docker (usermod -aG "
            "docker NAME, then log in again), or set DOCKER_HOST to an engine that does."
        )
    if host.startswith("unix://") and ("FileNotFoundError" in text or "refused" in text.lower()):
        return (
            f"No Docker engine answers at {host}. Start it (on Debian: apt-get install docker.io; on macOS: Docker "
            "Desktop or colima), or set DOCKER_HOST to the address that `docker context inspect` shows."
        )
    reason = re.sub(r"\s+", " ", text).strip()[:300]
    return f"The Docker engine at {host} cannot be used: {reason}. Check DOCKER_HOST, and that the engine runs."


def create_container(client: APIClient, spec: SandboxSpec, run_id: str) -> str:
    """A container, not yet started, that has every limit of the spec; its id.

    Raises:
        SandboxUnavailable: there is no such image.
    """
    from docker.errors import APIError, ImageNotFound

    image = spec.image or DEFAULT_IMAGE
    try:
        volumes = client.inspect_image(image)["Config"].get("Volumes") or {}
        container = client.create_container(
            image,
            entrypoint=_INIT,
            command=[],
            user="1000:1000",
            working_dir="/work",
            hostname="sandbox",
            stdin_open=True,  # with detach left False the engine closes it when the connection ends
            labels=labels(spec, run_id),
            host_config=client.create_host_config(**limits(spec, tuple(volumes), _filter(client))),
            healthcheck={"test": ["NONE"]},  # an image's own would run beside the agent's code
            use_config_proxy=False,  # proxies of the host's configuration may hold its passwords
        )
    except ImageNotFound as error:
        how = (
            "Build it with: python -m agentrl.sandbox.image"
            if spec.image is None
            else f"Fetch it with: docker pull {image}"
        )
        raise SandboxUnavailable(f"The Docker engine has no image {image!r}. {how}") from error
    except APIError as error:
        raise SandboxUnavailable(f"The Docker engine refuses a sandbox of {image!r}: {explanation(error)}") from error
    lost = [warning for warning in container.get("Warnings") or () if "discarded" in warning.lower()]
    if lost:
        remove(client, container["Id"])
        raise SandboxUnavailable(f"This Docker engine cannot hold a sandbox to its limits: {lost[0]}")
    return str(container["Id"])


def _filter(client: APIClient) -> list[str]:
    api = tuple(int(part) for part in str(client.api_version).split(".")[:2])
    return [] if api >= FIRST_GOOD_API else [f"seccomp={profile()}"]


def limits(spec: SandboxSpec, volumes: tuple[str, ...] = (), security: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments of the SDK's `create_host_config`; an image's own volumes become small tmpfs folders."""
    from docker.types import LogConfig, Ulimit

    memory, shm = spec.memory_mb << 20, max(1, spec.disk_mb // 4)
    owned = "uid=1000,gid=1000,mode=0700,nosuid,nodev"

    def tmpfs(size_mb: int, files: int, more: str = "exec") -> str:
        return f"size={size_mb}m,nr_inodes={files + 1},{owned},{more}"

    return {
        "auto_remove": True,
        "network_mode": "bridge" if spec.network else "none",
        "mem_limit": memory,
        "memswap_limit": memory,
        "cpu_period": 100_000,  # and not nano_cpus, which the engine refuses for more than there are
        "cpu_quota": max(1000, int(spec.cpus * 100_000)),
        "pids_limit": max(_LEAST_PROCESSES, spec.processes + _SPARE_PROCESSES),
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", *security],
        "ipc_mode": "none",  # no /dev/shm but the one below, and no message queue file system
        "sysctls": {"kernel.shm_rmid_forced": "1", "kernel.msgmni": "16"},  # nothing outlives its process
        "ulimits": [
            Ulimit(name="nofile", soft=spec.open_files, hard=spec.open_files),
            Ulimit(name="fsize", soft=spec.file_mb << 20, hard=spec.file_mb << 20),
            Ulimit(name="core", soft=0, hard=0),
            # None for processes: that limit counts a uid's processes in all containers of the machine.
        ],
        "tmpfs": {
            "/work": tmpfs(spec.disk_mb, spec.files),
            "/tmp": tmpfs(max(1, spec.disk_mb - shm), max(1, spec.files * 3 // 4)),
            "/dev/shm": tmpfs(shm, max(1, spec.files // 4), "noexec"),
            **{path: tmpfs(1, 16) for path in volumes},
        },
        "log_config": LogConfig(type="none"),
    }


def explanation(error: Exception) -> str:
    """What the engine said, on one line."""
    return re.sub(r"\s+", " ", str(getattr(error, "explanation", None) or error)).strip()[:300]


# --- whose container ---------------------------------------------------------------------
def labels(spec: SandboxSpec, run_id: str) -> dict[str, str]:
    """The labels of a container: the spec's, and what tells whether the process that made it is gone."""
    own = {"run": run_id, "host": this_host(), "pid": str(os.getpid()), "started": started(os.getpid())}
    return {**spec.labels, LABEL: "sandbox", **{f"{LABEL}.{name}": value for name, value in own.items()}}


@functools.cache
def this_host() -> str:
    """A text for this machine and process namespace: only in one of the same text do pids mean the same processes."""
    try:
        machine = Path("/etc/machine-id").read_text().strip()[:12]
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        machine = space = ""
    return "/".join(part for part in (platform.node(), machine, space) if part)


def started(pid: int) -> str:
    """When a process started, as the boot and the clock ticks since it; empty where there is none (or no /proc)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            ticks = start_ticks(pid)
            return f"{boot.read()[:8]}/{ticks}" if ticks else ""
    except OSError:
        return ""


def owner_is_gone(found: dict[str, str]) -> bool:
    """Whether the process of a container's labels ran on this machine and runs no more."""
    pid = found.get(f"{LABEL}.pid", "")
    if found.get(f"{LABEL}.host") != this_host() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # a process of somebody else's has the number
    return started(int(pid)) != found.get(f"{LABEL}.started")


@functools.cache
def reap_once(host: str) -> None:
    """What earlier runs have left on that engine (the value of DOCKER_HOST) was removed, once in this process."""
    with contextlib.suppress(Exception):  # the sandbox that is being opened will say better what is wrong
        reap()


def reap() -> list[str]:
    """The containers whose process on this machine is gone are removed; their ids and runs. Others' are left alone.

    A container ends by itself with the process that made it; this finds those that could not (made but never started,
    or the process left children that hold its connections).

    Raises:
        SandboxUnavailable: no engine answers.
    """
    client = connect()
    try:
        found = client.containers(all=True, filters={"label": f"{LABEL}=sandbox"})
        gone = [each for each in found if owner_is_gone(each.get("Labels") or {})]
        for each in gone:
            remove(client, each["Id"])
        return [f"{each['Id'][:12]} of run {each['Labels'].get(f'{LABEL}.run')}" for each in gone]
    finally:
        client.close()


def remove(client: APIClient, container: str) -> None:
    """The container is no more, nor its processes and volumes; it need not be there."""
    from docker.errors import APIError, NotFound

    try:
        client.remove_container(container, force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:  # 409: it is being removed by the engine itself
            raise
        try:
            client.wait(container, timeout=10, condition="removed")
        except NotFound:
            return
