"""What code in a sandbox tries, and what must come of it: one suite for every backend.

Each row is a function of an open sandbox (made from SPEC). After it the next exec must work, which `assert_usable`
checks. Times are three times what the notes ask for, because the machine that runs the tests is shared.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from agentrl.errors import SandboxFileError
from agentrl.sandbox import ExecResult, Sandbox, SandboxSpec

SPEC = SandboxSpec(memory_mb=256, processes=64, disk_mb=32, files=512, file_mb=8, env={"ONLY": "this"})
SECRET = "AGENTRL_TEST_HOST_SECRET"


def required_backends() -> set[str]:
    """Backends whose tests must run (and fail where there is no such backend): AGENTRL_REQUIRE_SANDBOX, by commas."""
    return {name for name in os.environ.get("AGENTRL_REQUIRE_SANDBOX", "").split(",") if name}


def py(box: Sandbox, code: str, **options: object) -> ExecResult:
    """The result of Python code in the sandbox."""
    return box.exec(["python3", "-I", "-c", code], **options)  # type: ignore[arg-type]


def assert_usable(box: Sandbox) -> None:
    result = py(box, "print(6 * 7)")
    assert (result.reason, result.exit_code, result.stdout) == ("ok", 0, "42\n"), result
    assert box.alive()


def processes(box: Sandbox) -> int:
    """How many processes with LEFTOVER in their command line are there. (The asking one must not have the word.)"""
    code = (
        "import os\nprint(sum(b'LEFT' + b'OVER' in open(f'/proc/{p}/cmdline','rb').read() for p in os.listdir('/proc') "
    )
    return int(py(box, code + "if p.isdigit() and p != 'self'))").stdout)


def memory_bomb(box: Sandbox) -> None:
    result = py(box, "b = []\nwhile True: b.append(bytearray(16 << 20))")
    assert result.reason == "oom", result
    assert result.duration_s < 3, result


def memory_of_many(box: Sandbox) -> None:
    """Each child is small, all together are not: the limit is for the sandbox."""
    code = (
        "import os, time\n"
        "for i in range(20):\n if os.fork() == 0:\n  b = bytearray(40 << 20); time.sleep(20); os._exit(0)\n"
        "try:\n while True: assert os.wait()[1] == 0\nexcept ChildProcessError: print('all lived')\n"
    )
    result = py(box, code, timeout_s=15)
    assert "all lived" not in result.stdout
    assert result.reason == "oom", result


def fill_disk(box: Sandbox) -> None:
    for folder, at_least in (("/work", 1), ("/tmp", 1), ("/dev/shm", 1)):
        code = (
            "n = 0\ntry:\n for i in range(100):\n  f = open(f'{F}/big{i}', 'wb', buffering=0)\n"
            "  for _ in range(7): n += f.write(b'x' * (1 << 20))\nexcept OSError as e: print(e.strerror, n >> 20)\n"
            "import os\nfor i in range(100):\n try: os.remove(f'{F}/big{i}')\n except OSError: pass\n"
        ).replace("{F}", folder)
        result = py(box, code)
        what, _, megabytes = result.stdout.strip().rpartition(" ")
        assert what == "No space left on device", (folder, result)
        assert at_least <= int(megabytes) <= SPEC.disk_mb, (folder, result)


def many_files(box: Sandbox) -> None:
    code = (
        "n = 0\ntry:\n while n < 5000: open(f'/work/f{n}', 'w').close(); n += 1\n"
        "except OSError as e: print(e.strerror)\n"
        "import os\nfor i in range(n): os.remove(f'/work/f{i}')\nprint(n)"
    )
    result = py(box, code)
    assert result.stdout.splitlines()[0] == "No space left on device", result
    assert int(result.stdout.splitlines()[1]) <= SPEC.files


def huge_file(box: Sandbox) -> None:
    code = (
        "import os\nf = open('/work/big', 'wb', buffering=0); n = 0\n"
        "try:\n while True: n += f.write(b'x' * (1 << 20))\nexcept OSError as e: print(e.strerror, n >> 20)\n"
        "os.remove('/work/big')"
    )
    assert py(box, code).stdout == f"File too large {SPEC.file_mb}\n"


def many_forks(box: Sandbox) -> None:
    code = (
        "import os, time\nn = 0\nfor i in range(500):\n try: p = os.fork()\n"
        " except OSError as e: print(e.strerror); break\n if p == 0: time.sleep(30); os._exit(0)\n n += 1\nprint(n)"
    )
    result = py(box, code)
    lines = result.stdout.splitlines()
    assert lines[0] == "Resource temporarily unavailable", result
    assert SPEC.processes // 2 <= int(lines[1]) <= SPEC.processes
    assert result.duration_s < 5, "exec waited for the children"


def recursive_forks(box: Sandbox) -> None:
    result = py(box, "import os\nwhile True:\n try: os.fork()\n except OSError: pass", timeout_s=1.5)
    assert result.reason == "timeout" and result.exit_code is None, result
    assert result.duration_s < 6, result


def many_threads(box: Sandbox) -> None:
    code = (
        "import threading, time, os\nn = 0\ntry:\n for i in range(500):\n"
        "  threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); n += 1\n"
        "except RuntimeError as e: print(e)\nprint(n, flush=True)\nos._exit(0)"
    )
    lines = py(box, code).stdout.splitlines()
    assert lines[0] == "can't start new thread"
    assert int(lines[1]) <= SPEC.processes


def many_open_files(box: Sandbox) -> None:
    code = (
        "f = []\ntry:\n while len(f) < 5000: f.append(open('/dev/null'))\n"
        "except OSError as e: print(e.strerror, len(f))"
    )
    what, _, number = py(box, code).stdout.strip().rpartition(" ")
    assert what == "Too many open files" and int(number) < SPEC.open_files


def output_flood(box: Sandbox) -> None:
    result = py(box, "import sys\nwhile True: sys.stdout.write('y' * 65536)", max_output_bytes=20000)
    assert result.reason == "output" and result.truncated and result.exit_code is None, result
    assert len(result.stdout) + len(result.stderr) == 20000
    assert result.duration_s < 2
    both = py(
        box, "import os\nfor _ in range(9): os.write(1, b'o' * 100); os.write(2, b'e' * 100)", max_output_bytes=900
    )
    assert both.reason == "output" and len(both.stdout + both.stderr) == 900


def no_flood_is_no_truncation(box: Sandbox) -> None:
    result = py(box, "print('x' * 999)", max_output_bytes=1000)
    assert (result.reason, result.truncated, len(result.stdout)) == ("ok", False, 1000)


def F151_deadline(box: Sandbox) -> None:
    deaf = "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
    deaf += " except (OSError, ValueError): pass\n"
    for code in ("while True: pass", "import time\ntime.sleep(60)", deaf + "while True: signal.pause()"):
        result = py(box, code, timeout_s=1)
        assert result.reason == "timeout" and result.exit_code is None, (code, result)
        assert 0.9 < result.duration_s < 4, result
    partial = py(box, "import time\nprint('before', flush=True)\ntime.sleep(60)", timeout_s=1)
    assert partial.stdout == "before\n", "what was written before the deadline is kept"


def F151_tree_is_dead_after_the_deadline(box: Sandbox) -> None:
    script = "setsid sh -c 'trap \"\" TERM HUP; : LEFTOVER; sleep 77' & sh -c ': LEFTOVER; sleep 77'"
    assert box.exec(["sh", "-c", script], timeout_s=1).reason == "timeout"
    assert processes(box) == 0


def daemonised_grandchild(box: Sandbox) -> None:
    code = (
        "import os, time, signal, sys\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  signal.signal(15, signal.SIG_IGN); n = os.open('/dev/null', 2); [os.dup2(n, i) for i in range(3)]\n"
        "  os.execvp('python3', ['python3', '-c', '\"LEFTOVER\"; import time; time.sleep(60)'])\n os._exit(0)\n"
        "os.wait(); time.sleep(0.2); print('parent done')"
    )
    assert py(box, code).stdout == "parent done\n"
    assert processes(box) == 0


def F153_F169_child_keeps_the_pipe(box: Sandbox) -> None:
    result = box.exec(["sh", "-c", "sleep 1000 & echo hi"], timeout_s=20)
    assert (result.reason, result.exit_code, result.stdout) == ("ok", 0, "hi\n"), result
    assert result.duration_s < 4, result


def no_network(box: Sandbox) -> None:
    with host_listeners() as (port, abstract):
        targets = [("1.1.1.1", 53), ("169.254.169.254", 80), ("192.0.2.1", 80), ("127.0.0.1", port)]
        code = (
            f"import socket\nfor host in {targets!r}:\n s = socket.socket(); s.settimeout(2)\n"
            " try: s.connect(host); print('CONNECTED', host)\n except OSError as e: print('refused')\n"
            f"s = socket.socket(socket.AF_UNIX)\ntry: s.connect({chr(0) + abstract!r}); print('CONNECTED')\n"
            "except OSError: print('refused')\n"
        )
        assert py(box, code, timeout_s=20).stdout == "refused\n" * 5


@contextlib.contextmanager
def host_listeners() -> Iterator[tuple[int, str]]:
    """A TCP port on the host's loopback and an abstract socket; both really answer on the host."""
    name = f"agentrl-test-{os.getpid()}-{threading.get_ident()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind("\0" + name)
        unix.listen()
        for address, family in ((tcp.getsockname(), socket.AF_INET), ("\0" + name, socket.AF_UNIX)):
            with socket.socket(family) as client:
                client.connect(address)
        yield tcp.getsockname()[1], name


def nothing_of_the_host(box: Sandbox) -> None:
    os.environ[SECRET] = "host-secret"
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        code = (
            "import os, json\nseen = ''\nfor p in os.listdir('/proc'):\n"
            " if p.isdigit():\n  try: seen += open(f'/proc/{p}/environ').read() + open(f'/proc/{p}/cmdline').read()\n"
            "  except OSError: pass\n"
            "unreadable = []\nfor path in ('/etc/shadow', '/root', '/home'):\n"
            " try: found = os.listdir(path) if os.path.isdir(path) else open(path).read()\n"
            " except OSError: found = ''\n"
            " if found and path != '/etc/shadow' or 'root:$' in str(found): unreadable.append(path)\n"
            "fds = [f for f in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + f)]\n"
            "print(json.dumps([dict(os.environ), seen, unreadable, fds, os.getuid()]))"
        )
        import json

        env, seen, readable, fds, uid = json.loads(py(box, code).stdout)
    finally:
        os.close(secret)
        del os.environ[SECRET]
    assert set(env) - {"LC_CTYPE"} <= {"PATH", "HOME", "LANG", "ONLY", "PWD", "HOSTNAME", "PYTHONDONTWRITEBYTECODE"}, (
        env
    )
    assert env["ONLY"] == "this" and uid != 0
    assert SECRET not in seen and "host-secret" not in seen
    assert readable == []
    assert set(fds) <= {"0", "1", "2", "3"}, fds


def kill_everything(box: Sandbox) -> None:
    for pid in (1, os.getpid()):
        code = f"import os\ntry: os.kill({pid}, 9)\nexcept OSError: pass\nimport time\ntime.sleep(0.2)\nprint('lived')"
        assert py(box, code).stdout == "lived\n"
    parent = py(
        box, "import os, time\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ntime.sleep(0.2); print('lived')"
    )
    assert parent.reason in ("ok", "killed"), parent
    assert_usable(box)
    rest = py(box, "import os, signal\nos.kill(-1, 9)\nprint('lived')")
    assert rest.reason in ("ok", "killed"), rest
    assert_usable(box)
    suicide = py(box, "import os\nprint('x', flush=True)\nos.kill(os.getpid(), 9)")
    assert (suicide.reason, suicide.exit_code, suicide.stdout) == ("killed", 137, "x\n"), suicide


def system_is_read_only(box: Sandbox) -> None:
    code = (
        "import os\nfor path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/usr/x', '/dev/x', '/etc/x',"
        " '/x', '/proc/sys/vm/overcommit_memory', '/sys/x'):\n"
        " try: open(path, 'w').write('x'); print('WRITTEN', path)\n except OSError as e: pass\nprint('done')"
    )
    assert py(box, code).stdout == "done\n"


def system_calls(box: Sandbox) -> None:
    machine = os.uname().machine
    numbers = {  # unshare, mount, bpf, io_uring_setup, keyctl, ptrace(TRACEME aside), perf_event_open, userfaultfd
        "x86_64": [(272, 0x10000000), (272, 0x40000000), (165, 0), (321, 0), (425, 1), (250, 0), (298, 0), (323, 0)],
        "aarch64": [(97, 0x10000000), (97, 0x40000000), (40, 0), (280, 0), (425, 1), (219, 0), (241, 0), (282, 0)],
    }[machine]
    code = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for n, a in {numbers!r}:\n r = libc.syscall(n, ctypes.c_long(a), 0, 0, 0, 0, 0)\n"
        " print(r, errno.errorcode.get(ctypes.get_errno()))"
    )
    for line in py(box, code).stdout.splitlines():
        assert line in ("-1 EPERM", "-1 ENOSYS", "-1 EACCES"), line


def no_privileges(box: Sandbox) -> None:
    code = "wanted = 'CapEff:', 'CapPrm:', 'CapBnd:', 'NoNewPr'\n"
    code += "print([l.split()[1] for l in open('/proc/self/status') if l[:7] in wanted])"
    assert py(box, code).stdout == f"{['0' * 16, '0' * 16, '0' * 16, '1']}\n"
    assert (
        py(box, "print([l.split()[1] for l in open('/proc/self/status') if l[:8] == 'Seccomp:'])").stdout == "['2']\n"
    )


def links_and_pipes(box: Sandbox) -> None:
    made = py(
        box,
        "import os\nos.symlink('/etc/passwd', '/work/link'); os.symlink('/etc', '/work/folder')\n"
        "os.symlink('/work/real', '/work/inner'); os.mkfifo('/work/pipe'); os.mkdir('/work/dir')\n"
        "open('/work/real', 'w').write('content'); open('/work/large', 'wb').write(b'x' * 5000)\n"
        "os.symlink('/tmp', '/work/dir/out')\nprint('made')",
    )
    assert made.stdout == "made\n", made
    assert box.download("real") == b"content"
    for path in (
        "link",
        "folder/passwd",
        "inner",
        "pipe",
        "dir",
        "../etc/passwd",
        "/etc/passwd",
        "dir/../../etc/passwd",
        "",
        "absent",
    ):
        with pytest.raises(SandboxFileError, match=r"."):
            box.download(path)
    with pytest.raises(SandboxFileError, match="4096"):
        box.download("large", max_bytes=4096)
    for path in ("folder/x", "dir/out/x", "../x", "/x", "", ".", "a/../../x", "pipe/x"):
        with pytest.raises(SandboxFileError):
            box.upload({path: "x"})
    box.upload({"link": "mine"})  # in place of the link, not through it
    assert box.download("link") == b"mine"
    box.upload({"pipe": "no pipe"})
    assert box.download("pipe") == b"no pipe"
    assert box.list_files() == ["large", "link", "pipe", "real"]
    assert (
        py(box, "import os\nprint(os.path.exists('/tmp/x'), open('/etc/passwd').read() == 'mine')").stdout
        == "False False\n"
    )


Row = Callable[[Sandbox], None]
ROWS: list[Row] = [
    memory_bomb,
    memory_of_many,
    fill_disk,
    many_files,
    huge_file,
    many_forks,
    recursive_forks,
    many_threads,
    many_open_files,
    output_flood,
    no_flood_is_no_truncation,
    F151_deadline,
    F151_tree_is_dead_after_the_deadline,
    daemonised_grandchild,
    F153_F169_child_keeps_the_pipe,
    no_network,
    nothing_of_the_host,
    kill_everything,
    system_is_read_only,
    system_calls,
    no_privileges,
    links_and_pipes,
]
