"""The abuse suite on bubblewrap: as root with cgroups, as root without, and as an unprivileged user."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator

import pytest

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox import Sandbox, bubblewrap, open_sandbox
from agentrl.sandbox.bubblewrap import cgroup, lease, machine
from tests.sandbox_abuse import ROWS, SPEC, Row, assert_usable, required_backends

NOBODY = 65534
WAYS = ["root", "without cgroups", "without root"] if os.getuid() == 0 else ["without root"]
HERE = bubblewrap.missing() is None or "bubblewrap" in required_backends()


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with open_sandbox(SPEC, backend="bubblewrap") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def uncounted_box() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroup, "parents", lambda: (1, {}))
        sandbox = open_sandbox(SPEC, backend="bubblewrap")
    with sandbox:
        yield sandbox


if not HERE:

    def test_a_machine_without_bubblewrap_says_so() -> None:
        with pytest.raises(SandboxUnavailable, match="DOCKER_HOST"):
            open_sandbox(SPEC, backend="bubblewrap")

else:

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
    def test_abuse(row: Row, way: str, request: pytest.FixtureRequest) -> None:
        if way == "without root" and os.getuid() == 0:
            return as_nobody(lambda: alone(row))
        sandbox = request.getfixturevalue("uncounted_box" if way == "without cgroups" else "box")
        sandbox.reset()
        row(sandbox)
        assert_usable(sandbox)
        assert len(list(lease.processes(sandbox._lease))) == 1, "only the holder of the folders is left"


def alone(row: Row) -> None:
    with open_sandbox(SPEC, backend="bubblewrap") as sandbox:
        row(sandbox)
        assert_usable(sandbox)
        left = sandbox._lease  # type: ignore[attr-defined]
    assert list(lease.processes(left)) == []


def as_nobody(work: Callable[[], None]) -> None:
    """`work` succeeds in a forked child that has become uid 65534; its traceback is the failure's text.

    A fork, because the interpreter that runs the tests may lie below /root, where that user can start nothing.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(NOBODY)
            work()
            text = ""
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode()[-60000:])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        failure = pipe.read().decode()
    os.waitpid(child, 0)
    if failure:
        pytest.fail(failure)


def become(uid: int) -> None:
    import ctypes

    for cached in (cgroup.parents, machine.reap_once):
        cached.cache_clear()
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after an exec: /proc/self is its own again
    os.environ.clear()
    os.environ["PATH"] = "/usr/bin:/bin"
    assert os.getuid() == uid
