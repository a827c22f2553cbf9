"""One door to every backend."""

from __future__ import annotations

import os
from functools import cache
from typing import cast

from agentrl.errors import ConfigurationError, MissingDependency, SandboxUnavailable
from agentrl.sandbox.types import Sandbox, SandboxSpec

BACKENDS = ("docker", "bubblewrap", "unsafe-subprocess")
DEFAULT = SandboxSpec()


def open_sandbox(spec: SandboxSpec = DEFAULT, *, backend: str | None = None) -> Sandbox:
    """A running sandbox, to be used as a context manager or closed.

    `backend` is "docker", "bubblewrap" or, only ever by name, "unsafe-subprocess". None: what the environment variable
    AGENTRL_SANDBOX names, else Docker where an engine answers, else bubblewrap. Raises SandboxUnavailable, which says
    what is missing, and never runs code without protection instead.

    >>> open_sandbox(backend="chroot")
    Traceback (most recent call last):
    agentrl.errors.ConfigurationError: There is no sandbox backend 'chroot'; use docker, bubblewrap, unsafe-subprocess.
    """
    name = backend or os.environ.get("AGENTRL_SANDBOX") or chosen(os.environ.get("DOCKER_HOST"))
    if name == "docker":
        from agentrl.sandbox.docker import DockerSandbox
        from agentrl.sandbox.reaper import run_id

        return cast(Sandbox, DockerSandbox(spec, run_id=run_id()))
    if name == "bubblewrap":
        from agentrl.sandbox.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(spec)
    if name == "unsafe-subprocess":
        from agentrl.sandbox.unsafe import UnsafeSandbox

        return UnsafeSandbox(spec)
    raise ConfigurationError(f"There is no sandbox backend {name!r}; use {', '.join(BACKENDS)}.")


@cache
def chosen(docker_host: str | None) -> str:
    """What `choose` found the first time: asking an engine that is far away takes long."""
    return choose()


def choose() -> str:
    """The backend that this machine has: "docker" where an engine answers, else "bubblewrap"; or SandboxUnavailable."""
    docker = docker_missing()
    if docker is None:
        return "docker"
    from agentrl.sandbox import bubblewrap

    if (why := bubblewrap.missing()) is None:
        return "bubblewrap"
    raise SandboxUnavailable(f"Nothing here can run untrusted code safely. {why} (Docker: {docker})")


def docker_missing() -> str | None:
    """Why Docker cannot be used here, in one sentence; None where an engine answers."""
    from agentrl.sandbox.docker_engine import engine_problem

    try:
        return engine_problem()
    except MissingDependency as error:
        return str(error)
