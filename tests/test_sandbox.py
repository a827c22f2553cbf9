"""The sandbox room's door: what a command, a file, a dead sandbox and a machine that lacks something come to."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import ConfigurationError, SandboxError, SandboxFileError, SandboxUnavailable
from agentrl.sandbox import Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox import open as opening
from agentrl.sandbox.bubblewrap import box as box_module
from agentrl.sandbox.bubblewrap import cgroup, holder, layout, lease
from tests import sandbox_kit as kit
from tests.sandbox_abuse import host_listeners, py
from tests.sandbox_kit import AS_ROOT, new

shared, box, nothing_is_left = kit.shared, kit.box, kit.nothing_is_left


# ---- exec


def test_what_a_program_says_is_the_result(box: Sandbox) -> None:
    result = box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert (result.reason, result.truncated) == ("ok", False)
    assert 0 < result.duration_s < 5
    assert box.exec(["sh", "-c", "kill -SEGV $$"]).exit_code == 128 + signal.SIGSEGV


def test_input_environment_and_folder(box: Sandbox) -> None:
    assert box.exec(["cat"], stdin="häl\0lo").stdout == "häl\0lo"
    assert box.exec(["cat"], stdin=b"bytes").stdout == "bytes"
    assert box.exec(["cat"]).stdout == "", "no input is an empty one"
    assert box.exec(["sh", "-c", "echo $HOME $LANG $MINE; pwd"], env={"MINE": "a b"}, cwd="/tmp").stdout == (
        "/work C.UTF-8 a b\n/tmp\n"
    )
    large = b"x" * (3 << 20)
    assert box.exec(["wc", "-c"], stdin=large).stdout == f"{3 << 20}\n"
    assert box.exec(["true"], stdin=large).exit_code == 0, "input that nobody reads does not hold it up"


def test_F153_malformed_utf8_is_replaced(box: Sandbox) -> None:
    assert box.exec(["printf", r"a\377b\303"]).stdout == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


def test_commands_that_cannot_start_are_results(box: Sandbox) -> None:
    absent = box.exec(["no-such-program"])
    assert (absent.exit_code, absent.stderr, absent.reason) == (127, "no-such-program: command not found\n", "ok")
    box.upload({"data.txt": "x"})
    assert box.exec(["./data.txt"]).exit_code == 126
    assert box.exec(["true"], cwd="/no/such").stderr == "/no/such: No such file or directory\n"
    fake = box.exec(["sh", "-c", "echo 'bwrap: execvp x: No such file or directory' >&2; exit 1"])
    assert (fake.exit_code, fake.reason) == (1, "ok"), "a program that says the same is not taken for bwrap"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"argv": "ls -l"}, "argv must be a list of str"),
        ({"argv": []}, "argv must be a list of str"),
        ({"argv": ["ls", 1]}, "argv must be a list of str"),
        ({"argv": ["ls", "a\0b"]}, "NUL"),
        ({"argv": [""]}, "must not be empty"),
        ({"argv": ["ls"], "timeout_s": 0}, "timeout_s is 0"),
        ({"argv": ["ls"], "timeout_s": float("nan")}, "timeout_s is nan"),
        ({"argv": ["ls"], "max_output_bytes": -1}, "max_output_bytes -1"),
        ({"argv": ["ls"], "env": {"A=B": "c"}}, "'A=B' is no name"),
        ({"argv": ["ls"], "env": {"A": 1}}, "A must be a text"),
        ({"argv": (word for word in ["ls"])}, "argv must be a list of str"),
        ({"argv": ["ls"], "cwd": "/work\0--bind\0/root\0/tmp"}, "cwd must be a path"),
    ],
)
def test_arguments_that_cannot_work_are_named(box: Sandbox, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        box.exec(**arguments)  # type: ignore[arg-type]


def test_a_command_line_of_any_length_is_a_result(box: Sandbox) -> None:
    for argv in (["echo", "x" * 131072], ["echo", *(["x" * 1000] * 4000)]):
        refused = box.exec(argv)
        assert (refused.reason, refused.exit_code, refused.stderr) == ("ok", 126, "echo: Argument list too long\n")
    assert box.exec(["true", "x" * 131071]).exit_code == 0
    assert box.exec(["true"], env={"A": "x" * 200_000}).exit_code == 126


def test_half_a_pair_of_utf16_is_no_crash(box: Sandbox) -> None:
    """JSON can spell it, and so can a model."""
    assert box.exec(["echo", "a\ud800b\udc00"], env={"A": "\udfff"}, stdin="\ud800").stdout == "a?b?\n"
    assert box.exec(["printf", "%s", "\udcff"]).stdout == "\N{REPLACEMENT CHARACTER}", "a byte that is no text stays"
    for work in (box.download, lambda path: box.upload({path: "x"})):
        with pytest.raises(SandboxFileError, match="no file's name can have"):
            work("\ud800.txt")
        with pytest.raises(SandboxFileError, match="too long"):
            work("x/" * 201 + "y")
    with pytest.raises(SandboxFileError, match="text, not int"):
        box.upload({5: "x"})  # type: ignore[dict-item]


def at_once(work: Callable[[], object], count: int = 12) -> list[object]:
    """What came of the work in so many threads that begin together."""
    gate, before = threading.Barrier(count), sys.getswitchinterval()

    def one(_: int) -> object:
        gate.wait()
        try:
            return work()
        except Exception as error:
            return error

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(one, range(count)))
    finally:
        sys.setswitchinterval(before)


def test_threads_that_open_the_first_sandboxes_together_find_the_same_cgroups() -> None:
    alone = cgroup.parents()
    cgroup.parents.cache_clear()
    assert at_once(cgroup.parents) == [alone] * 12 and cgroup.parents() == alone


def test_what_a_killed_search_for_cgroups_has_left_is_removed() -> None:
    _, found = cgroup.parents()
    child = subprocess.Popen(["true"])
    child.wait()
    old = [folder / f"{cgroup.PREFIX}try-{child.pid}" for folder in found.values()]
    for folder in old:
        folder.mkdir()
    cgroup.parents.cache_clear()
    assert cgroup.parents()[1] == found and not any(folder.exists() for folder in old)


def test_threads_that_write_the_first_files_of_etc_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        state = tmp_path / str(number)
        (state / "etc").mkdir(parents=True)
        monkeypatch.setattr(layout, "state_dir", lambda state=state: state)
        assert at_once(layout._etc) == [state / "etc"] * 12


@pytest.mark.parametrize("name", ["memory_mb", "cpus", "processes", "open_files", "disk_mb", "files", "file_mb"])
def test_no_limit_can_be_switched_off(name: str) -> None:
    for value in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match=f"SandboxSpec.{name}"):
            SandboxSpec(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no name"):
        SandboxSpec(env={"": "x"})


# ---- files


def test_files_stay_between_commands_and_go_with_a_reset(box: Sandbox) -> None:
    box.upload({"src/deep/a.py": "print('a')", "b.bin": b"\0\xff", "/work/c": "c"})
    assert box.exec(["python3", "src/deep/a.py"]).stdout == "a\n"
    assert box.exec(["sh", "-c", "echo more >> c; echo t > /tmp/t; echo s > /dev/shm/s; mkdir d"]).exit_code == 0
    assert box.exec(["cat", "/tmp/t", "/dev/shm/s"]).stdout == "t\ns\n"
    assert box.list_files() == ["b.bin", "c", "src/deep/a.py"]
    assert (box.download("b.bin"), box.download("./src//deep/a.py")) == (b"\0\xff", b"print('a')")
    box.reset()
    assert box.list_files() == []
    assert box.exec(["ls", "-A", "/work", "/tmp", "/dev/shm"]).stdout == "/dev/shm:\n\n/tmp:\n\n/work:\n"


def test_a_full_disk_is_one_sentence(box: Sandbox) -> None:
    with pytest.raises(
        SandboxFileError, match=r"^'b3' does not fit: /work is full \(SandboxSpec.disk_mb and files\)\.$"
    ):
        box.upload({f"b{i}": b"x" * (20 << 20) for i in range(5)})
    assert box.list_files() == ["b0", "b1", "b2"], "what did not fit leaves no half of a file"
    with pytest.raises(SandboxFileError, match="file_mb allows 32 MB"):
        box.upload({"large": b"x" * (33 << 20)})
    with pytest.raises(SandboxFileError, match="is int; give bytes or str"):
        box.upload({"x": 5})  # type: ignore[dict-item]


def test_files_that_a_program_has_locked_up_are_not_opened_with_the_rights_of_root(box: Sandbox) -> None:
    box.upload({"secret": "x"})
    box.exec(["sh", "-c", "chmod 000 secret; mkdir closed; touch closed/in; chmod 000 closed"])
    with pytest.raises(SandboxFileError, match="Permission denied"):
        box.download("secret")
    assert box.list_files() == ["secret"]
    box.upload({"new": "after that this thread is itself again"})
    assert Path("/etc/hostname").read_text() is not None and os.access("/root" if AS_ROOT else "/tmp", os.R_OK)


def test_odd_names_are_listed_or_left_out(box: Sandbox) -> None:
    box.exec(["python3", "-c", r"open(b'\xff\xfe','w'); open('new\nline','w'); open('ä b','w')"])
    deep = "import os\nfor i in range(600): os.mkdir('d'); os.chdir('d')\nopen('f', 'w')"
    box.exec(["python3", "-c", deep])
    names = box.list_files()
    assert names[-1] == "ä b" and len(names) == 2 and names[0].count("/") == 600


# ---- dead and closed


def test_a_closed_sandbox_says_so() -> None:
    sandbox = new()
    assert sandbox.alive()
    sandbox.close()
    sandbox.close()
    assert not sandbox.alive()
    for use in (lambda: sandbox.exec(["true"]), lambda: sandbox.download("x"), lambda: sandbox.reset()):
        with pytest.raises(SandboxError, match="closed"):
            use()


def test_a_sandbox_whose_process_was_killed_is_no_fault_of_the_models() -> None:
    with new() as sandbox:
        assert sandbox._holder is not None
        sandbox._holder.process.kill()
        sandbox._holder.process.wait()
        assert not sandbox.alive()
        with pytest.raises(SandboxError, match="Open another one"):
            sandbox.exec(["true"])


def test_a_sandbox_outlives_the_thread_that_opened_it() -> None:
    """A death signal would come when that thread ends."""
    with ThreadPoolExecutor(1) as threads:
        sandbox = threads.submit(new).result()
        threads.submit(sandbox.exec, ["true"]).result()
    with sandbox:
        time.sleep(0.1)
        assert sandbox.exec(["echo", "here"]).stdout == "here\n"


def test_a_child_of_a_fork_leaves_its_parents_sandboxes_alone(box: Sandbox) -> None:
    child = os.fork()
    if child == 0:
        from agentrl.sandbox.reaper import close_all

        try:
            close_all()
            box.close()  # as the end of a `with` block would, or a pool that the child closes
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert box.alive() and box.exec(["echo", "here"]).stdout == "here\n"


# ---- which backend


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every uid can read; pytest's own are for one user."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_backend_is_named_or_found_and_never_the_unsafe_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="no sandbox backend 'jail'"):
        open_sandbox(backend="jail")
    monkeypatch.setenv("AGENTRL_SANDBOX", "jail")
    with pytest.raises(ConfigurationError, match="no sandbox backend 'jail'"):
        open_sandbox()
    monkeypatch.delenv("AGENTRL_SANDBOX")
    opening.chosen.cache_clear()
    monkeypatch.setattr(opening, "docker_missing", lambda: None)
    assert opening.choose() == "docker"
    monkeypatch.setattr(opening, "docker_missing", lambda: "No engine answers.")
    assert opening.choose() == "bubblewrap"
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: None if tool == "bwrap" else f"/usr/bin/{tool}")
    with pytest.raises(SandboxUnavailable) as refused:
        open_sandbox()
    assert str(refused.value) == (
        "Nothing here can run untrusted code safely. bwrap is not installed. Install it (Debian, Ubuntu: apt-get "
        "install bubblewrap), or use Docker: a local engine, or a remote one named by DOCKER_HOST. "
        "(Docker: No engine answers.)"
    )


def test_other_systems_are_sent_to_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match=r"which darwin does not have\. Use Docker: .*DOCKER_HOST"):
        open_sandbox(backend="bubblewrap")


def test_a_machine_without_namespaces_says_so(monkeypatch: pytest.MonkeyPatch, public: Path) -> None:
    fake = public / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(holder, "CLEAN_PATH", f"{public}:{lease.CLEAN_PATH}")
    with pytest.raises(SandboxUnavailable) as refused:
        new()
    assert "unshare failed: Operation not permitted" in str(refused.value) and "DOCKER_HOST" in str(refused.value)


def test_bwrap_that_fails_says_why_and_is_not_the_programs_doing(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "NAMESPACES", [*box_module.NAMESPACES, "--no-such-option"])
    with pytest.raises(SandboxError, match="could not start a program: bwrap: Unknown option --no-such-option"):
        box.exec(["true"])
    monkeypatch.setattr(box_module, "_proven", set())
    with pytest.raises(SandboxUnavailable, match="Unknown option --no-such-option"):
        new()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: folder / "absent", "absent' is no folder"),
        (lambda folder: folder, "has no folder proc, dev, tmp, work to mount on"),
    ],
)
def test_a_bad_image_is_one_sentence(make: Callable[[Path], Path], text: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=text):
        new(image=str(make(tmp_path)))


def test_an_image_without_programs_is_one_sentence(public: Path) -> None:
    for name in ("proc", "dev", "tmp", "work"):
        (public / name).mkdir()
    with pytest.raises(SandboxUnavailable, match="cannot run `true`: true: command not found"):
        new(image=str(public))


def test_an_image_is_all_that_a_sandbox_sees(public: Path) -> None:
    for name in ("proc", "dev", "tmp", "work", "usr/bin"):
        (public / name).mkdir(parents=True)
    for program in ("sh", "true", "ls"):
        for path in [Path(shutil.which(program) or ""), *libraries(program)]:
            target = public / str(path).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.resolve(), target)
    with new(image=str(public)) as sandbox:
        names = set(sandbox.exec(["ls", "/"]).stdout.split())
        assert names <= {"proc", "dev", "tmp", "work", "usr", "lib", "lib64", "bin"}
        assert sandbox.exec(["sh", "-c", "echo x > /usr/x || echo read-only"]).stdout == "read-only\n"


def libraries(program: str) -> list[Path]:
    words = subprocess.run(
        ["ldd", shutil.which(program) or ""], capture_output=True, text=True, check=True
    ).stdout.split()
    return [Path(word) for word in words if word.startswith("/")]


def test_a_copy_of_this_python_serves_where_the_system_has_none(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = public / "python"
    layout.copy_python(copy)
    monkeypatch.setattr(layout, "system_python", lambda: None)
    monkeypatch.setattr(layout, "copied_python", lambda: copy)
    with new() as sandbox:
        result = py(sandbox, "import sys, json, unittest, ctypes; print(sys.version.split()[0], sys.executable)")
        assert result.stdout == f"{sys.version.split()[0]} /opt/python/bin/python3\n", result


def test_a_full_disk_leaves_no_half_of_a_python(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(SandboxUnavailable, match=r"cannot be copied to .*/python: No space left on device\.$"):
        layout.copy_python(public / "python")
    assert list(public.iterdir()) == []


def test_a_state_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slots").write_text("a file in place of the folder")
    monkeypatch.setattr(lease, "_state_path", lambda: tmp_path)
    with pytest.raises(SandboxUnavailable, match=rf"^The sandbox cannot use its folder {tmp_path}: File exists\.$"):
        lease.state_dir()
    (tmp_path / "slots").unlink()
    tmp_path.chmod(0o777)
    with pytest.raises(
        SandboxUnavailable, match=rf"^{tmp_path} is not a folder that only uid {os.getuid()} can change"
    ):
        lease.state_dir()


def test_the_unsafe_one_warns_and_has_the_same_interface() -> None:
    with pytest.warns(RuntimeWarning, match="does not protect this machine"):
        sandbox = open_sandbox(SandboxSpec(env={"MINE": "x"}), backend="unsafe-subprocess")
    with sandbox:
        assert isinstance(sandbox, Sandbox)
        sandbox.upload({"a/b": "text"})
        assert sandbox.exec(["sh", "-c", "cat a/b; echo $MINE; exit 4"]).stdout == "textx\n"
        assert sandbox.exec(["no-such"]).exit_code == 127
        assert sandbox.exec(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.3).reason == "timeout"
        assert sandbox.exec(["yes"], max_output_bytes=10).stdout == "y\n" * 5
        assert (sandbox.download("a/b"), sandbox.list_files()) == (b"text", ["a/b"])
        sandbox.reset()
        assert sandbox.list_files() == []
    with pytest.raises(SandboxError):
        sandbox.exec(["true"])


def test_network_only_where_it_is_asked_for() -> None:
    code = "import socket\ns = socket.socket(); s.settimeout(3)\ns.connect(('127.0.0.1', {}))\nprint('connected')"
    with host_listeners() as (port, _):
        with new(network=True) as sandbox:
            assert py(sandbox, code.format(port)).stdout == "connected\n"
        with new() as sandbox:
            assert "refused" in py(sandbox, code.format(port)).stderr
