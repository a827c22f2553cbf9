"""Many sandboxes at a time, the pool, and that nothing is left of a run, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox import SandboxPool, SandboxSpec, bubblewrap, reap
from agentrl.sandbox.bubblewrap import BubblewrapSandbox, cgroup, lease, machine
from agentrl.sandbox.bubblewrap import run as run_module
from tests import sandbox_kit as kit
from tests.sandbox_abuse import py
from tests.sandbox_kit import AS_ROOT, assert_gone, new

shared, box, nothing_is_left = kit.shared, kit.box, kit.nothing_is_left


# ---- two at a time


def test_two_sandboxes_share_nothing() -> None:
    with new() as one, new() as other:
        assert one._lease.number != other._lease.number
        assert one._lease.uid != other._lease.uid or not AS_ROOT
        waiting = threading.Thread(target=lambda: results.append(other.exec(["sleep", "1.5"], timeout_s=20)))
        results: list[object] = []
        waiting.start()
        time.sleep(0.5)
        py(one, "import os\nos.kill(-1, 9)")
        one.close()
        waiting.join()
        assert getattr(results[0], "exit_code", None) == 0, results
        one_file = new()
        with one_file:
            other.upload({"x": "x"})
            assert one_file.list_files() == []


def test_no_process_of_a_sandbox_is_roots(box: BubblewrapSandbox) -> None:
    """bwrap itself included: the rights that a process has outside of its namespaces are those of its uid."""
    seen: set[str] = set()

    def watch() -> None:
        time.sleep(0.4)
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if b"4321" in words or lease.mark(box._lease) in words:
                    status = Path(f"/proc/{name}/status").read_text().splitlines()
                    seen.update(line for line in status if line.startswith(("Uid:", "Gid:", "Groups:")))
            except OSError:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    box.exec(["sleep", "4321"], timeout_s=1)
    watcher.join()
    uid = box._lease.uid if AS_ROOT else os.getuid()
    ids = "\t".join([str(uid)] * 4)
    assert {line.rstrip() for line in seen} >= {f"Uid:\t{ids}", f"Gid:\t{ids}"}
    assert len(seen) == 3, seen
    assert uid != 0


def test_another_run_gets_other_numbers(box: BubblewrapSandbox) -> None:
    """Leases are the machine's, not the process's; what lives is not reaped."""
    with child("print(box._lease.number, flush=True); input(); print(box.exec(['echo', 'lives']).stdout)") as process:
        number = int(process.stdout.readline())  # type: ignore[union-attr]
        assert number != box._lease.number
        assert lease.take(number) is None
        reap()
        assert process.communicate(b"\n")[0] == b"lives\n\n"
    assert_gone(number)


def test_sixty_four_at_once_and_none_is_left() -> None:
    def one(index: int) -> str:
        with new() as sandbox:
            numbers.append(sandbox._lease.number)
            gate.wait(60)  # all are open before the first runs
            return sandbox.exec(["sh", "-c", f"echo {index}"], timeout_s=60).stdout

    numbers: list[int] = []
    gate = threading.Barrier(64)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(one, range(64))) == [f"{i}\n" for i in range(64)]
    assert len(set(numbers)) == 64
    for number in numbers:
        assert_gone(number)
    assert len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left open"


# ---- the pool


def test_the_pool_hands_out_what_is_as_good_as_new() -> None:
    with SandboxPool(SandboxSpec(), backend="bubblewrap", size=1) as pool:
        first, second = pool.acquire(), pool.acquire()
        assert first is not second
        first.upload({"left": "over"})
        pool.release(first)
        pool.release(second)
        assert not second.alive(), "only as many as `size` are kept"
        with pool.lend() as again:
            assert again is first and again.list_files() == []


def test_the_pool_replaces_the_dead_and_closes_the_lent() -> None:
    pool = SandboxPool(SandboxSpec(), backend="bubblewrap", size=2)
    pool.warm()
    warm = list(pool._warm)
    assert len(warm) == 2 and len({id(box) for box in warm}) == 2
    for sandbox in warm:
        sandbox._holder.process.kill()  # type: ignore[attr-defined]
        sandbox._holder.process.wait()  # type: ignore[attr-defined]
    lent = pool.acquire()
    assert lent not in warm and lent.alive()
    broken = pool.acquire()
    broken.close()
    pool.release(broken)
    assert pool._warm == []
    pool.close()
    pool.close()
    assert not lent.alive()
    pool.release(lent)
    with pytest.raises(SandboxError, match="pool of sandboxes is closed"):
        pool.acquire()


# ---- however a run ends


class child:
    """A Python process that has opened `box` and runs `code`; killed at the end of the block."""

    def __init__(self, code: str) -> None:
        start = "from agentrl.sandbox import open_sandbox, SandboxSpec\nimport threading, time\n"
        start += "box = open_sandbox(SandboxSpec(labels={'episode': '7'}), backend='bubblewrap')\n"
        root = str(Path(__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-c", start + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()


HOLDS = """
boxes = [box, open_sandbox(backend='bubblewrap')]
for each in boxes:
    command = ['sh', '-c', 'setsid sleep 1000 & sleep 1000']
    threading.Thread(target=each.exec, args=(command,), kwargs={'timeout_s': 500}).start()
time.sleep(0.7)
print(*[each._lease.number for each in boxes], flush=True)
"""


def test_F167_what_a_killed_run_has_left_is_reaped() -> None:
    with child(HOLDS + "time.sleep(500)") as process:
        numbers = [int(word) for word in process.stdout.readline().split()]  # type: ignore[union-attr]
        uid = lease.FIRST_UID + numbers[0] if AS_ROOT else os.getuid()
        assert len(list(lease.processes(lease.Lease(numbers[0], uid if AS_ROOT else None, -1)))) >= 3
        process.send_signal(signal.SIGKILL)
        process.wait()
    # And what the kernel does not end by itself: a process that has escaped the fate of its namespaces.
    drop = lease.Lease(numbers[0], uid, -1).drop() if AS_ROOT else []
    stray = subprocess.Popen([*drop, "sh", "-c", "read wait", f"agentrl-sandbox-{numbers[0]}"], stdin=subprocess.PIPE)
    time.sleep(0.1)
    said = "\n".join(reap())
    assert stray.wait(5) == -signal.SIGKILL
    if cgroup.parents()[1]:
        assert f"bubblewrap sandbox {numbers[0]} (run {process.pid}-" in said and "episode 7" in said, said
    for number in numbers:
        assert_gone(number)


@pytest.mark.parametrize(
    ("code", "how", "status"),
    [
        (HOLDS + "time.sleep(500)", signal.SIGTERM, -signal.SIGTERM),
        (HOLDS + "time.sleep(500)", signal.SIGINT, None),
        ("print(box._lease.number, flush=True)", None, 0),
        ("print(box._lease.number, flush=True)\nraise RuntimeError('crash')", None, 1),
    ],
    ids=["SIGTERM", "SIGINT", "end", "crash"],
)
def test_F167_a_run_that_ends_cleans_up_by_itself(code: str, how: signal.Signals | None, status: int | None) -> None:
    if how is signal.SIGINT:
        code = code.replace("threading.Thread(", "threading.Thread(daemon=True, ")
    with child(code) as process:
        numbers = [int(word) for word in process.stdout.readline().split()]  # type: ignore[union-attr]
        if how is not None:
            process.send_signal(how)
        process.wait(20)
        assert status is None or process.returncode == status
    assert numbers
    for number in numbers:
        assert_gone(number)


def test_a_handler_that_a_program_has_for_sigterm_is_left_alone() -> None:
    code = "import signal\nprint(signal.getsignal(signal.SIGTERM).__name__, flush=True)\n"
    script = "import signal\ndef mine(*args): pass\nsignal.signal(signal.SIGTERM, mine)\n"
    script += "from agentrl.sandbox import open_sandbox\nopen_sandbox(backend='bubblewrap').close()\n" + code
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.stdout == "mine\n"


def test_a_bwrap_or_a_kernel_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "bwrap_version", lambda: (0, 4, 1))
    assert (bubblewrap.missing() or "").startswith("bwrap is older than 0.5;")
    monkeypatch.setattr(machine, "bwrap_version", lambda: (0, 6, 1))
    assert bubblewrap.missing() is None
    with new() as sandbox:
        code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        code += "print(libc.unshare(0x10000000), ctypes.get_errno())"
        assert py(sandbox, code).stdout == "-1 1\n", "without --disable-userns the filter still denies it"
    monkeypatch.setattr(machine, "_kernel", lambda: (4, 18))
    assert "needs Linux 5.3" in (bubblewrap.missing() or "")


def test_an_interrupted_command_leaves_nothing(box: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the thread in the middle of an exec: while bwrap starts, and later."""
    with monkeypatch.context() as patch:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(run_module, "_first_process", interrupted)
        with pytest.raises(KeyboardInterrupt):
            box.exec(["sh", "-c", "sleep 30"], timeout_s=60)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.005, 0.02, 0.3):
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(KeyboardInterrupt):
                box.exec(["sh", "-c", "setsid sleep 1000 & sleep 1000"], timeout_s=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    box.reset()
    assert len(list(lease.processes(box._lease))) == 1, "the holder alone"
    assert box.exec(["echo", "here"]).stdout == "here\n"


def test_all_numbers_in_use_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "COUNT", 2)
    monkeypatch.setattr(lease, "take", lambda number: None)
    with pytest.raises(SandboxUnavailable, match="All 2 sandboxes"):
        lease.lease()
    assert bubblewrap.missing() is None
