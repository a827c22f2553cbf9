"""The Docker backend, against a real engine where one answers: the abuse suite, its own traps, and what is left after.

AGENTRL_REQUIRE_DOCKER=1 (CI sets it) says that an engine must be there: without one these tests fail.
`.ci/docker-engine FOLDER` starts one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest

from agentrl.errors import MissingDependency, SandboxError, SandboxFileError, SandboxUnavailable
from agentrl.sandbox import SandboxSpec, docker_engine, image
from agentrl.sandbox.docker import DockerSandbox
from agentrl.sandbox.docker_engine import connect, engine_problem, labels, owner_is_gone, reap, why_no_engine
from agentrl.sandbox.docker_exec import _Output
from agentrl.sandbox.docker_seccomp import profile
from tests.sandbox_abuse import ROWS, SPEC, assert_usable, py, required_backends

ROOT = Path(__file__).parent.parent
REQUIRED = os.environ.get("AGENTRL_REQUIRE_DOCKER") == "1" or "docker" in required_backends()
HERE = REQUIRED or engine_problem() is None


def engine(test: Any) -> Any:
    """A test that needs an engine: collected where one is, or must be."""
    return test if HERE else None


@pytest.fixture(scope="module")
def default_image() -> str:
    client = connect()
    with contextlib.closing(client):
        if not client.images(image.DEFAULT_IMAGE):
            image.build_image()
    return image.DEFAULT_IMAGE


@pytest.fixture(scope="module")
def shared(default_image: str) -> Iterator[DockerSandbox]:
    with DockerSandbox(SPEC, "tests") as sandbox:
        yield sandbox


@pytest.fixture
def box(shared: DockerSandbox) -> Iterator[DockerSandbox]:
    yield shared
    shared.reset()


def containers(run: str = "") -> list[str]:
    """The containers of a run of these tests, or all that this process has made."""
    client = connect()
    with contextlib.closing(client):
        wanted = [f"agentrl.run={run}"] if run else [f"agentrl.pid={os.getpid()}"]
        return [each["Id"] for each in client.containers(all=True, filters={"label": wanted})]


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


# --- abuse -------------------------------------------------------------------------------
@engine
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_abuse(row, box):
    before = box._id
    row(box)
    assert_usable(box)
    assert box._id == before, "the same container still works"
    assert until(lambda: len(box._client.top(box._id)["Processes"]) == 1), "only process 1 is left, and no runner"


# --- what a container may do ----------------------------------------------------------------
@engine
def test_every_limit_reaches_the_engine(box):
    found = box._client.inspect_container(box._id)
    host, config = found["HostConfig"], found["Config"]
    assert host["NetworkMode"] == "none" and host["IpcMode"] == "none" and host["LogConfig"]["Type"] == "none"
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert host["CpuQuota"] / host["CpuPeriod"] == 1.0
    assert host["PidsLimit"] == 64 + 4
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["AutoRemove"] and not host["Privileged"]
    assert "no-new-privileges" in host["SecurityOpt"] and "seccomp=unconfined" not in host["SecurityOpt"]
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]} == {"nofile": 256, "fsize": 8 << 20, "core": 0}
    assert set(host["Tmpfs"]) == {"/work", "/tmp", "/dev/shm"}
    assert not host["Binds"] and not found["Mounts"], "a remote engine has none of our folders"
    assert config["User"] == "1000:1000"
    assert config["Labels"]["agentrl.run"] == "tests" and config["Labels"]["agentrl.pid"] == str(os.getpid())


@engine
def test_network_is_asked_for_by_name(default_image):
    with DockerSandbox(SandboxSpec(network=True)) as sandbox:
        assert sandbox._client.inspect_container(sandbox._id)["HostConfig"]["NetworkMode"] == "bridge"


@engine
def test_an_image_brings_no_variables_no_volume_and_no_command_of_its_own(default_image):
    dockerfile = (
        f'FROM {default_image}\nENV FROM_IMAGE=1\nVOLUME /data\nENTRYPOINT ["false"]\nHEALTHCHECK CMD touch /tmp/x\n'
    )
    client = connect()
    with contextlib.closing(client):
        answer = b"".join(client.build(fileobj=io.BytesIO(dockerfile.encode()), tag="agentrl-sandbox-odd", rm=True))
        assert b"Successfully built" in answer, answer
    with DockerSandbox(SandboxSpec(image="agentrl-sandbox-odd")) as sandbox:
        assert "FROM_IMAGE" not in sandbox.exec(["env"]).stdout
        full = sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero >/data/big"])
        assert "No space left" in full.stderr, "a volume would have no limit"
        assert "Health" not in sandbox._client.inspect_container(sandbox._id)["State"]


@engine
def test_an_engine_that_drops_a_limit_is_refused(default_image, monkeypatch):
    create = docker.APIClient.create_container
    warning = "Your kernel does not support memory limit capabilities. Limitation discarded."
    monkeypatch.setattr(
        docker.APIClient, "create_container", lambda *a, **k: {**create(*a, **k), "Warnings": [warning]}
    )
    with pytest.raises(SandboxUnavailable, match=r"cannot hold a sandbox to its limits"):
        DockerSandbox(run_id="dropped-limit")
    assert not containers("dropped-limit")


@engine
def test_a_limit_that_the_engine_refuses_is_one_sentence(default_image):
    with pytest.raises(SandboxUnavailable, match=r"refuses a sandbox of 'agentrl-sandbox': .*6MB"):
        DockerSandbox(SandboxSpec(memory_mb=1), run_id="too-small")
    assert not containers("too-small")


@engine
def test_the_environment_is_what_was_given(default_image):
    with DockerSandbox(SandboxSpec(env={"A": "from the spec", "B": "x"})) as sandbox:
        lines = sandbox.exec(["env"], env={"B": "two\nlines", "C": "=$HOME"}).stdout
    assert sorted(lines.splitlines()) == sorted(
        ["PATH=/usr/local/bin:/usr/bin", "HOME=/work", "LANG=C.UTF-8", "A=from the spec", "B=two", "lines", "C==$HOME"]
    )


# --- commands ----------------------------------------------------------------------------
@engine
def test_input_and_output_of_any_size_and_content(box):
    data = os.urandom(1 << 20).hex()
    copied = box.exec(["cat"], stdin=data, max_output_bytes=1 << 22)
    assert (copied.reason, copied.stdout) == ("ok", data)
    assert box.exec(["true"], stdin=b"x" * (4 << 20)).reason == "ok", "input that nobody reads"
    assert box.exec(["cat"]).stdout == box.exec(["cat"], stdin="").stdout == "", "no input is an empty one"
    assert box.exec(["wc", "-c"], stdin=b"\0\xff\n").stdout.strip() == "3"
    both = box.exec(["sh", "-c", "head -c 300000 /dev/zero; echo end; echo err >&2"], max_output_bytes=1 << 20)
    assert both.stdout == "\0" * 300000 + "end\n" and both.stderr == "err\n"


@engine
def test_F153_malformed_utf8_is_replaced(box):
    assert box.exec(["printf", r"a\377b"]).stdout == "a�b"


@engine
@pytest.mark.parametrize(
    "argv, code, text",
    [
        (["sh", "-c", "exit 3"], 3, ""),
        (["no-such-program"], 127, "env: 'no-such-program': No such file or directory\n"),
        (["/etc/passwd"], 126, "env: '/etc/passwd': Permission denied\n"),
        (["a=b"], 127, "sh: 1: exec: a=b: not found\n"),
        (["echo", "x" * 200_000], 126, "echo: Argument list too long\n"),
        (["sh", "-c", "kill -TERM $$"], 143, ""),
    ],
)
def test_exit_codes(argv, code, text, box):
    result = box.exec(argv)
    assert (result.reason, result.exit_code, result.stdout, result.stderr) == ("ok", code, "", text)


@engine
def test_working_directory(box):
    box.upload({"a/b": "x"})
    assert box.exec(["ls"], cwd="/work/a").stdout == "b\n"
    nowhere = box.exec(["ls"], cwd="/work/none")
    assert nowhere.exit_code == 126 and "/work/none" in nowhere.stderr


@engine
def test_fractions_of_a_second_are_deadlines(box):
    result = box.exec(["sleep", "30"], timeout_s=0.3)
    assert result.reason == "timeout" and 0.3 <= result.duration_s < 2


FORGED = """
import os, re, time
secret = b''
for pid in filter(str.isdigit, os.listdir('/proc')):
    if b'read -r secret' not in open(f'/proc/{pid}/cmdline', 'rb').read() or int(pid) == os.getpid():
        continue
    memory = open(f'/proc/{pid}/mem', 'rb', 0)
    for line in open(f'/proc/{pid}/maps'):
        start, end = (int(part, 16) for part in line.split()[0].split('-'))
        if 'rw-p' in line:
            memory.seek(start)
            found = re.findall(b'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])', memory.read(end - start))
            secret = secret or b''.join(found[:1])
print(len(secret), flush=True)
if os.fork():
    os.write(1, secret), os.write(2, secret + b' 7 0')
    time.sleep(30)
os.setsid()
while True:
    with open('/work/alive', 'a') as file: file.write('x')
    time.sleep(0.02)
"""


@engine
def test_code_that_says_the_last_words_itself_is_dead_all_the_same(box):
    box.exec(["python3", "-c", FORGED], timeout_s=3)
    assert until(lambda: len(box._client.top(box._id)["Processes"]) == 1), "process 1, and nothing of the code's"
    assert_usable(box)


@engine
def test_last_words_that_come_late_are_no_output(box):
    for timeout_s in (0.001, 0.02, 0.03, 0.05):
        result = box.exec(["true"], timeout_s=timeout_s)
        assert (result.stdout, result.stderr) == ("", ""), result


@engine
def test_a_command_line_of_any_length_is_a_result(box):
    for argv in (["echo", "x" * 131072], ["echo", *(["x" * 1000] * 4000)]):
        assert (box.exec(argv).reason, box.exec(argv).exit_code) == ("ok", 126)
    assert box.exec(["true", *(["\x01" * 100_000] * 5)]).exit_code == 0


@engine
def test_an_interrupted_command_is_killed(box, monkeypatch):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.sandbox.docker_exec._talk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            box.exec(["sleep", "30"])
    assert until(lambda: len(box._client.top(box._id)["Processes"]) == 1)
    assert_usable(box)


@pytest.mark.parametrize("cut", [1, 2, 7, 8, 9, 30, 1000])
def test_frames_may_be_cut_anywhere(cut):
    frames = [(1, b"out"), (2, b"err"), (1, b""), (1, b"put SECRET"), (2, b"or SECRET 7 2")]
    stream = b"".join(bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for kind, data in frames)
    output = _Output(b"SECRET")
    for start in range(0, len(stream), cut):
        assert output.last_words() is None
        output.feed(stream[start : start + cut])
    assert (output.out, output.err) == (b"output SECRET", b"error SECRET 7 2")
    assert output.last_words() == (7, 2)


def test_last_words_need_both_streams_and_the_secret():
    almost = [(b"", b"SECRET 0 0"), (b"SECRET", b""), (b"secret", b"secret 0 0"), (b"SECRET", b"SECRET 0 0\n")]
    for out, err in almost:
        assert _Output(b"SECRET", bytearray(out), bytearray(err)).last_words() is None


@engine
def test_upload_says_what_did_not_fit(box):
    with pytest.raises(SandboxFileError, match=r"full"):
        box.upload({f"f{number}": b"x" * (7 << 20) for number in range(6)})
    with pytest.raises(SandboxFileError, match=r"file_mb allows 8"):
        box.upload({"large": b"x" * (9 << 20)})


# --- process 1 ---------------------------------------------------------------------------
INITS = {
    "bash": docker_engine._INIT,
    "python": ["sh", "-c", 'exec python3 -ISc "$0"', docker_engine._PYTHON_INIT],
}


@engine
@pytest.mark.parametrize("init", INITS)
def test_process_1_reaps_sweeps_and_cannot_be_killed(init, default_image, monkeypatch):
    monkeypatch.setattr(docker_engine, "_INIT", INITS[init])
    with DockerSandbox(SPEC) as sandbox:
        first = sandbox._id
        # USR1 is the one it listens to: whoever sends it ends itself
        every = "import os, signal\nfor n in range(1, 65):\n if n not in (10, 32, 33): os.kill(1, n)\nprint('sent')"
        assert py(sandbox, every).stdout == "sent\n"
        own = py(sandbox, "import os, time\nos.kill(1, 10)\ntime.sleep(9)")
        assert (own.reason, own.exit_code) == ("killed", 137)
        orphans = (
            "import os, time\nfor i in range(200):\n if os.fork() == 0:\n  os.fork()\n  os._exit(0)\n os.wait()\n"
            "time.sleep(0.3)\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))"
        )
        assert int(py(sandbox, orphans, timeout_s=30).stdout) < 10, "zombies would fill the limit"
        # without the runner nothing inside ends this, and no new process can be started
        bomb = py(
            sandbox, "import os\nos.kill(-1, 9)\nwhile True:\n try: os.fork()\n except OSError: pass", timeout_s=1
        )
        assert bomb.reason == "timeout"
        assert_usable(sandbox)
        assert sandbox._id == first


@engine
def test_code_that_destroys_process_1_gets_a_result_and_a_new_container(default_image):
    vandal = (
        "m = open('/proc/1/mem', 'r+b', buffering=0)\nimport os, time\nfor line in open('/proc/1/maps'):\n"
        " if '[heap]' in line or '[stack]' in line:\n  a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "  m.seek(a); m.write(bytes(b - a))\nos.kill(1, 10)\ntime.sleep(5)"
    )
    with DockerSandbox(SPEC, "vandal") as sandbox:
        sandbox.upload({"x": "x"})
        assert py(sandbox, vandal).reason == "killed"
        assert_usable(sandbox)
        assert sandbox.list_files() == []
    assert not containers("vandal")


@engine
def test_an_image_without_bash_and_python_is_refused(default_image, monkeypatch):
    poor = [*docker_engine._INIT]
    poor[2] = poor[2].replace("bash", "no-bash", 1).replace("python3", "no-python", 1)
    monkeypatch.setattr(docker_engine, "_INIT", poor)
    with pytest.raises(SandboxUnavailable, match=r"cannot be a sandbox: it has neither bash nor python3"):
        DockerSandbox(run_id="poor")
    assert not containers("poor")


@engine
def test_files_of_the_agent_that_fill_the_memory_are_its_own_oom(default_image):
    with DockerSandbox(SandboxSpec(memory_mb=48, disk_mb=200, file_mb=400)) as sandbox:
        fill = sandbox.exec(["sh", "-c", "cat /dev/zero >/work/x; echo survived"])
        assert fill.reason == "oom", fill
        sandbox.reset()
        assert_usable(sandbox)


# --- broken from outside -----------------------------------------------------------------
@engine
def test_a_removed_container_is_a_sandbox_error_and_no_result(default_image):
    sandbox = DockerSandbox(run_id="removed")
    sandbox._client.remove_container(sandbox._id, force=True)
    assert not sandbox.alive()
    for call in (lambda: sandbox.exec(["true"]), lambda: sandbox.upload({"x": "y"}), sandbox.list_files):
        with pytest.raises(SandboxError, match=r"The sandbox is broken: .*No such container"):
            call()
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match=r"closed"):
        sandbox.exec(["true"])


@engine
def test_closing_while_a_command_runs_leaves_nothing(default_image):
    sandbox = DockerSandbox(run_id="closing")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(sandbox.exec, ["sleep", "30"], timeout_s=30)
        assert until(lambda: "sleep" in str(sandbox._client.top(sandbox._id)))
        sandbox.close()
        with pytest.raises(SandboxError):
            running.result(timeout=10)
    assert not containers("closing")


@engine
@pytest.mark.parametrize("failures", [1, 2])
def test_a_command_that_the_engine_cannot_start_is_tried_again_and_is_never_a_result(failures, box, monkeypatch):
    create, left = box._client.exec_create, [failures]

    def failing(container: str, command: list[str], **options: Any) -> Any:
        left[0] -= 1
        return create(container, ["no-such-shell"] if left[0] >= 0 else command, **options)

    with monkeypatch.context() as patch:
        patch.setattr(box._client, "exec_create", failing)
        if failures == 1:
            assert box.exec(["echo", "x"]).stdout == "x\n"
        else:
            with pytest.raises(SandboxError, match=r"The sandbox is broken: .*no-such-shell"):
                box.exec(["echo", "x"])
    assert_usable(box)


@contextlib.contextmanager
def relay() -> Iterator[tuple[str, Callable[[], None]]]:
    """An engine at a TCP address, as a remote one is: bytes are carried to the real one, until the second is called."""
    path = (os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock").removeprefix("unix://")
    server, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def carry(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            far.connect(path)
            other = {near: far, far: near}
            while not stop.is_set():
                for ready in select.select([near, far], [], [], 0.1)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    other[ready].sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=carry, args=(server.accept()[0],), daemon=True).start()

    def cut() -> None:
        stop.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}", cut
    finally:
        cut()


@engine
def test_a_remote_engine_works_and_its_loss_is_a_sandbox_error(default_image, monkeypatch):
    with relay() as (address, cut):
        monkeypatch.setenv("DOCKER_HOST", address)
        sandbox = DockerSandbox(SPEC, "remote")
        sandbox.upload({"a/b.txt": "content"})
        assert sandbox.download("a/b.txt") == b"content"
        assert sandbox.exec(["cat"], stdin="x" * 300_000, max_output_bytes=1 << 20).stdout == "x" * 300_000
        assert py(sandbox, "while True: pass", timeout_s=0.5).reason == "timeout"
        cut()
        with pytest.raises(SandboxError):
            sandbox.exec(["true"])
        assert not sandbox.alive()
        sandbox.close()
    monkeypatch.undo()
    assert until(lambda: not containers("remote")), "process 1 ends with its connection"


# --- nothing is left ---------------------------------------------------------------------
CHILD = """
import os, sys, time
from agentrl.sandbox.docker import DockerSandbox
boxes = [DockerSandbox(run_id=sys.argv[1]) for _ in range(2)]
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print("open", flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError
boxes[0].exec(["sleep", "60"], timeout_s=60)
"""


@engine
@pytest.mark.parametrize("end", ["raise", "INT", "TERM", "KILL"])
def test_F167_nothing_is_left_however_the_process_ends(end, default_image):
    run = f"ended-by-{end}"
    child = subprocess.Popen([sys.executable, "-c", CHILD, run, end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None and child.stdout.readline() == b"open\n"
    if end != "raise":
        assert len(containers(run)) == 2
        child.send_signal(getattr(signal, f"SIG{end}"))
    assert child.wait(timeout=20) != 0
    assert until(lambda: not containers(run))


@engine
def test_F167_what_a_killed_run_has_left_is_reaped_and_nothing_else(default_image):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "orphaned", "fork"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == b"open\n"
    with DockerSandbox(run_id="living") as living:
        try:
            reap()
            assert len(containers("orphaned")) == 2, "its process lives"
            child.kill()
            child.wait()
            time.sleep(0.5)
            assert len(containers("orphaned")) == 2, "its child still holds the connections"
            # another test's process may reap at its own start: what is left is ours, and in the end nothing is
            assert {name.split(" of run ")[1] for name in reap()} <= {"orphaned"}
            assert not containers("orphaned")
        finally:
            os.killpg(child.pid, signal.SIGKILL)
        assert not containers("orphaned") and len(containers("living")) == 1
        assert_usable(living)


def test_F167_whose_process_is_gone():
    mine = labels(SandboxSpec(labels={"episode": "7"}), "run")
    assert mine["episode"] == "7" and mine["agentrl"] == "sandbox" and not owner_is_gone(mine)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = {**mine, "agentrl.pid": str(ended.pid)}
    assert owner_is_gone(gone)
    assert owner_is_gone({**mine, "agentrl.started": "another/1"}), "the number was given to a later process"
    assert not owner_is_gone({**gone, "agentrl.host": "elsewhere"}), "pids of other machines say nothing here"
    assert not owner_is_gone({}) and not owner_is_gone({**gone, "agentrl.pid": "x"})


@engine
def test_connections_stay_few_and_end(default_image):
    def sockets() -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))

    before = sockets()
    with DockerSandbox() as sandbox:
        for _ in range(4):
            sandbox.exec(["true"])
            sandbox.upload({"x": "y"})
        sandbox.reset()
        assert sockets() - before <= 3
    assert sockets() <= before


@engine
@pytest.mark.slow
def test_64_sandboxes_at_once(default_image):
    together = threading.Barrier(64)

    def episode(number: int) -> list[str]:
        with DockerSandbox(SandboxSpec(memory_mb=64), "crowd") as sandbox:
            together.wait(timeout=300)
            sandbox.upload({"n": str(number)})
            return [sandbox.exec(["cat", "n"], timeout_s=120).stdout for _ in range(2)]

    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(episode, range(64))) == [[str(number)] * 2 for number in range(64)]
    assert not containers("crowd")


# --- what is missing is said ----------------------------------------------------------------
def test_no_engine(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailable, match=r"No Docker engine answers at unix:///nowhere/docker.sock. Start it"):
        DockerSandbox()
    assert "set DOCKER_HOST" in (engine_problem() or "")


def test_no_remote_engine(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(SandboxUnavailable, match=r"The Docker engine at tcp://127.0.0.1:1 cannot be used: .*refused"):
        DockerSandbox()


def test_an_address_that_is_none(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "nonsense://x")
    with pytest.raises(SandboxUnavailable, match=r"nonsense://x cannot be used: .*Check DOCKER_HOST"):
        DockerSandbox()


def test_a_socket_for_others_only(tmp_path, monkeypatch):
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", denied)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(SandboxUnavailable, match=r"does not let this user in. Add the user to the group docker"):
        DockerSandbox()


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingDependency, match=r"The Docker sandbox needs the package 'docker'.*\[docker\]"):
        DockerSandbox()
    assert "package 'docker'" in (engine_problem() or "")


def test_a_refused_connection_to_a_socket_is_no_engine():
    assert "Start it" in why_no_engine("unix:///s", "ConnectionRefusedError(111, 'Connection refused')")


@engine
def test_no_image(default_image):
    with pytest.raises(SandboxUnavailable, match=r"no image 'no-such-image'. Fetch it with: docker pull no-such-image"):
        DockerSandbox(SandboxSpec(image="no-such-image"))


@engine
def test_no_default_image_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(docker_engine, "DEFAULT_IMAGE", "agentrl-sandbox-absent")
    with pytest.raises(SandboxUnavailable, match=r"Build it with: python -m agentrl\.sandbox\.image"):
        DockerSandbox()


# --- the image ---------------------------------------------------------------------------
@pytest.mark.slow
def test_the_root_file_system_is_ours_alone(tmp_path):
    root = tmp_path / "root"
    image.make_rootfs(root)
    with (tmp_path / "root.tar").open("w+b") as file:
        image.write_tar(root, file)
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            members = {member.name: member for member in tar}
    assert {(m.uid, m.gid) for name, m in members.items() if name != "work"} == {(0, 0)}
    assert members["work"].uid == 1000 and members["tmp"].mode == 0o1777
    changeable = [name for name, member in members.items() if member.mode & 0o6022 and not member.issym()]
    assert changeable == ["tmp"]
    size = sum(member.size for member in members.values())
    assert 20e6 < size < 150e6
    assert not [name for name in members if name.startswith(("root/", "home", "work/", "tmp/"))]
    assert not {"etc/shadow", "etc/hostname", "etc/resolv.conf", "etc/machine-id"} & set(members)


@engine
def test_the_image_has_a_whole_python(box):
    code = "import bz2, ctypes, hashlib, lzma, multiprocessing, sqlite3, ssl, zlib, pytest; print(pytest.__version__)"
    assert py(box, code).stdout == f"{pytest.__version__}\n"
    box.upload({"test_x.py": "def test_x():\n    assert 1 + 1 == 2\n"})
    done = box.exec(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"], timeout_s=60)
    assert done.exit_code == 0 and "1 passed" in done.stdout, done


def test_no_image_without_its_programs(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.image.shutil.which", lambda name, path="": None)
    with pytest.raises(SandboxUnavailable, match=r"needs the program sh"):
        image.make_rootfs(tmp_path / "root")


def test_no_image_elsewhere_than_on_linux(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.image.platform.system", lambda: "Darwin")
    with pytest.raises(SandboxUnavailable, match=r"docker pull python:3.12-slim"):
        image.make_rootfs(tmp_path / "root")


def test_the_command_says_that_there_is_no_engine(monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert image.main([]) == 1
    assert capsys.readouterr().err.startswith("No Docker engine answers")


def test_the_filter_for_old_engines():
    rules = json.loads(profile())["syscalls"]
    denied = {name for rule in rules for name in rule["names"] if "args" not in rule}
    assert {"io_uring_setup", "bpf", "unshare", "mount", "keyctl", "userfaultfd", "perf_event_open", "clone3"} <= denied
    assert not {"read", "clone", "socket", "execve"} & denied
    families = [rule["args"][0] for rule in rules if rule["names"] == ["socket"]]
    refused = {arg["value"] for arg in families if arg["op"].endswith("_EQ")}
    assert refused | {1, 2, 10, 16} == set(range(17))
    assert [arg["value"] for arg in families if arg["op"].endswith("_GT")] == [16]
    flags = [rule["args"][0]["value"] for rule in rules if rule["names"] == ["clone"]]
    assert sum(flags) == 0x7E020000  # CLONE_NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET, and NEWNS


# --- the script that starts an engine --------------------------------------------------------
def test_the_script_wants_a_folder_with_a_short_name(tmp_path):
    script = str(ROOT / ".ci/docker-engine")
    assert "Usage" in subprocess.run([script], capture_output=True, text=True).stderr
    deep = tmp_path / ("x" * 100)
    done = subprocess.run([script, str(deep)], capture_output=True, text=True)
    assert done.returncode == 2 and "shorter folder" in done.stderr


@contextlib.contextmanager
def started(folder: Path) -> Iterator[str]:
    script = str(ROOT / ".ci/docker-engine")
    try:
        yield subprocess.run([script, str(folder)], capture_output=True, text=True, check=True).stdout.strip()
    finally:
        subprocess.run([script, "--stop", str(folder)], check=True)


@(engine if os.getuid() == 0 and shutil.which("dockerd") else lambda test: None)
def test_the_script_starts_an_engine_once_and_beside_a_stale_pid_file(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="engine-", dir="/tmp") as folder:  # pytest's own names are too long
        starts_once(Path(folder), monkeypatch)


def starts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = subprocess.Popen(["sleep", "60"])  # the number in the file now belongs to somebody else
    (tmp_path / "docker.pid").write_text(str(stranger.pid))
    try:
        with started(tmp_path) as address:
            assert address == f"unix://{tmp_path}/docker.sock"
            first = (tmp_path / "docker.pid").read_text()
            assert first != str(stranger.pid)
            again = subprocess.run([ROOT / ".ci/docker-engine", tmp_path], capture_output=True, text=True, check=True)
            assert again.stdout.strip() == address and (tmp_path / "docker.pid").read_text() == first
            monkeypatch.setenv("DOCKER_HOST", address)
            assert engine_problem() is None
            with pytest.raises(SandboxUnavailable, match=r"python -m agentrl\.sandbox\.image"):
                DockerSandbox()
        assert "No Docker engine answers" in (engine_problem() or "")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.slow
@engine
def test_a_command_is_never_killed_by_the_end_of_the_one_before(default_image):
    """Process 1 takes a signal when it gets to it: a sweep that was not needed killed the next command."""

    def commands(number: int) -> list[str]:
        with DockerSandbox(SandboxSpec(), "one-after-another") as sandbox:
            return [sandbox.exec(["python3", "-c", f"print({n})"], timeout_s=60).stdout.strip() for n in range(8)]

    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(commands, range(64))) == [[str(n) for n in range(8)]] * 64
