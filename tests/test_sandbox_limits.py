"""The filter of system calls against an interpreter of its language, cgroup v2 in a pretended tree, the watchdog."""

from __future__ import annotations

import os
import platform
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox import SandboxSpec
from agentrl.sandbox.bubblewrap import cgroup, seccomp, watchdog

X86, ARM = seccomp.MACHINES["x86_64"][1], seccomp.MACHINES["aarch64"][1]


def judge(program: bytes, arch: int, number: int, *arguments: int) -> str:
    """What the kernel would do with a call, by running the filter as linux/filter.h defines it."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    for _ in range(10_000):
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:  # BPF_RET | BPF_K
            return {0x7FFF: "allow", 0x8000: "kill", 0x0005: f"errno {value & 0xFFFF}"}[value >> 16]
        else:  # BPF_JMP with JEQ, JGE, JSET
            hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: accumulator & value != 0}[operation]
            at += if_true if hit else if_false
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    ("machine", "arch", "call", "verdict"),
    [
        ("x86_64", X86, (0, 0), "allow"),  # read
        ("x86_64", X86, (272, 0), "errno 1"),  # unshare
        ("x86_64", X86, (321, 0), "errno 1"),  # bpf
        ("x86_64", X86, (435, 0), "errno 38"),  # clone3: glibc then uses clone
        ("x86_64", X86, (56, 0x3D0F00), "allow"),  # clone as for a thread
        ("x86_64", X86, (56, 17), "allow"),  # fork
        ("x86_64", X86, (56, 17 | 0x10000000), "errno 1"),  # with CLONE_NEWUSER
        ("x86_64", X86, (56, 17 | 0x00020000), "errno 1"),  # with CLONE_NEWNS
        ("x86_64", X86, (0x40000000 | 321, 0), "errno 38"),  # bpf by its x32 number
        ("x86_64", ARM, (0, 0), "kill"),
        ("x86_64", 0x40000003, (0, 0), "kill"),  # 32-bit calls of the same processor
        ("x86_64", X86, (41, 1), "allow"),  # socket(AF_UNIX)
        ("x86_64", X86, (41, 2), "allow"),  # AF_INET
        ("x86_64", X86, (41, 10), "allow"),  # AF_INET6
        ("x86_64", X86, (41, 16), "allow"),  # AF_NETLINK
        ("x86_64", X86, (41, 40), "errno 97"),  # AF_VSOCK
        ("x86_64", X86, (41, 38), "errno 97"),  # AF_ALG
        ("x86_64", X86, (53, 1), "allow"),  # socketpair
        ("x86_64", X86, (16, 0, 0x5401), "allow"),  # ioctl(TCGETS)
        ("x86_64", X86, (16, 0, 0x5412), "errno 1"),  # ioctl(TIOCSTI)
        ("aarch64", ARM, (63, 0), "allow"),  # read
        ("aarch64", ARM, (97, 0), "errno 1"),  # unshare
        ("aarch64", ARM, (220, 0x10000000), "errno 1"),  # clone(CLONE_NEWUSER)
        ("aarch64", ARM, (198, 40), "errno 97"),  # socket(AF_VSOCK)
        ("aarch64", X86, (63, 0), "kill"),
    ],
)
def test_the_filter_lets_through_and_denies(machine: str, arch: int, call: tuple[int, ...], verdict: str) -> None:
    number, *arguments = call
    assert judge(seccomp.program(counted=True, machine=machine), arch, number, *arguments) == verdict


def test_memory_that_no_cgroup_counts_is_denied() -> None:
    for number in (319, 29, 68, 64):  # memfd_create, shmget, msgget, semget
        assert judge(seccomp.program(counted=True, machine="x86_64"), X86, number) == "allow"
        assert judge(seccomp.program(counted=False, machine="x86_64"), X86, number) == "errno 1"


def test_every_denied_call_is_denied_and_has_the_number_of_the_kernels_headers() -> None:
    program = seccomp.program(counted=True, machine="x86_64")
    for name, (number, _) in seccomp.DENIED.items():
        assert number is not None and judge(program, X86, number) == "errno 1", name
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if header.exists():
        numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
        for name, (number, _) in {**seccomp.DENIED, **seccomp.UNCOUNTED}.items():
            assert numbers.get(name) == str(number), name


def test_an_unknown_machine_is_sent_to_docker() -> None:
    with pytest.raises(SandboxUnavailable, match="x86_64 and aarch64, not of riscv64; use Docker"):
        seccomp.program(counted=True, machine="riscv64")
    assert platform.machine() in seccomp.MACHINES


# ---- cgroup v2, which this machine may not have: a folder of files in its place


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cgroup tree in which /a/b is ours and only /a gives its controllers to its children."""
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a/b"):
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.subtree_control").write_text("memory pids cpu io" if folder.name == "a" else "")
    (tmp_path / "a/b/cgroup.subtree_control").chmod(0o444)
    real = cgroup._lines
    fake = {"/proc/self/cgroup": ["0::/a/b"], "/proc/self/mounts": [f"none {tmp_path} cgroup2 rw 0 0"]}
    monkeypatch.setattr(cgroup, "_lines", lambda path: fake.get(path) or real(path))
    monkeypatch.setattr(cgroup, "_works", lambda folders, version: True)
    monkeypatch.setattr(cgroup, "_delegates", lambda folder: folder == tmp_path / "a")
    cgroup.parents.cache_clear()
    yield tmp_path
    cgroup.parents.cache_clear()


def test_version_two_takes_the_nearest_folder_that_delegates(v2: Path) -> None:
    assert cgroup.parents() == (2, dict.fromkeys(("memory", "pids", "cpu"), v2 / "a"))
    group = cgroup.create(7, SandboxSpec(memory_mb=100, processes=10, cpus=1.5))
    folder = v2 / "a/agentrl-7"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "memory.max": str(100 << 20),
        "pids.max": "12",
        "cpu.max": "150000 100000",
    }
    assert group.entry()[4:] == [str(folder / "cgroup.procs"), "--"], "one folder, entered once"
    (folder / "memory.events").write_text("low 0\nhigh 0\noom 3\noom_kill 2\n")
    assert group.oom_kills() == 2


def test_a_controller_is_asked_for_where_it_is_not_on(tmp_path: Path) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("pids")
    assert not cgroup._delegates(tmp_path), "a plain file does not turn into a list of controllers"
    assert control.read_text() == "+memory +cpu"
    control.write_text("cpu memory pids")
    assert cgroup._delegates(tmp_path)


# ---- the watchdog


def test_the_watchdog_counts_what_forks_share_once() -> None:
    code = (
        "import os, sys, time\nblock = b'x' * (60 << 20)\nfor _ in range(5):\n"
        " if os.fork() == 0: time.sleep(60)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        assert len(watchdog.tree(parent.pid)) == 6
        assert sum(map(watchdog._resident, watchdog.tree(parent.pid))) > 350 << 20
        assert watchdog.Watchdog(parent.pid, 250 << 20)() is None
        assert watchdog.Watchdog(parent.pid, 50 << 20)() == "oom"
    finally:
        os.killpg(parent.pid, 9)
        parent.communicate()
    time.sleep(0.01)
    assert watchdog.Watchdog(parent.pid, 1)() is None, "nobody is left"
