"""What the tests of the sandbox room share: a sandbox that is reset for each test, and that nothing is left of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.sandbox import SandboxSpec, open_sandbox
from agentrl.sandbox.bubblewrap import BubblewrapSandbox, cgroup, lease

AS_ROOT = os.getuid() == 0


def new(**limits: object) -> BubblewrapSandbox:
    sandbox = open_sandbox(SandboxSpec(**limits), backend="bubblewrap")  # type: ignore[arg-type]
    assert isinstance(sandbox, BubblewrapSandbox)
    return sandbox


@pytest.fixture(scope="module")
def shared() -> Iterator[BubblewrapSandbox]:
    with new() as sandbox:
        yield sandbox


@pytest.fixture
def box(shared: BubblewrapSandbox) -> BubblewrapSandbox:
    shared.reset()
    return shared


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    """Of every sandbox that this file opens: no process, no cgroup, no mount. (Others may have its number by then.)"""
    numbers: set[int] = set()
    lent = lease.lease

    def noted() -> lease.Lease:
        held = lent()
        numbers.add(held.number)
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "lease", noted)
        yield
    for number in numbers:
        assert_gone(number)
    assert f"{lease.state_dir()}/" not in Path("/proc/self/mounts").read_text()


def assert_gone(number: int) -> None:
    held = lease.take(number)
    if held is None:
        return
    try:
        assert list(lease.processes(held)) == []
        assert [folder for folder in cgroup.leftovers(number).folders.values() if folder.exists()] == []
    finally:
        held.release()
