"""Servers that this process starts: awaited, explained when they fail, and never left behind.

The servers here are `vllm_stand_in.py`; tests/on_vllm/test_launch.py starts the real one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from agentrl.errors import ConfigurationError, MissingDependency
from agentrl.sampler.vllm import launch, launch_log, launch_ports, launch_server

STAND_IN = Path(__file__).with_name("vllm_stand_in.py")


def start(mode: str, log: Path, *, port: int | None = None, timeout_s: float = 20, host: str = "127.0.0.1"):
    return launch.launch(
        lambda chosen: [sys.executable, str(STAND_IN), mode, str(chosen)],
        host=host, port=port, log=log, timeout_s=timeout_s, env=os.environ,
    )  # fmt: skip


def processes(mark: str) -> list[int]:
    """The living processes whose environment holds the mark."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes() and state not in "ZX":
                found.append(int(name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def gone(mark: str, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not processes(mark):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """A text that only the processes of this test have in their environment; none of them is left at its end."""
    text = f"AGENTRL_TEST_MARK={tmp_path}"
    monkeypatch.setenv(*text.split("=", 1))
    yield text
    left = processes(text)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


def fails(mode: str, log: Path, error: type[Exception] = ConfigurationError, **kwargs) -> str:
    with pytest.raises(error) as caught:
        start(mode, log, **kwargs)
    return str(caught.value)


# --- a server that works ---------------------------------------------------------------
def test_a_slow_server_is_awaited_and_stopped_with_its_grandchildren(tmp_path, mark):
    log = tmp_path / "run" / "vllm.log"
    with start("slow", log) as server:
        assert urllib.request.urlopen(f"{server.base_url}/health").status == 200
        assert server.poll() is None and server.failure() is None and not server.stranger()
        assert len(processes(mark)) == 4  # keeper, server, child, and a grandchild in a session of its own
        before = time.monotonic()
    assert not processes(mark) and time.monotonic() - before < 4
    assert "loading" in log.read_text() and "asked" in log.read_text()
    server.stop()  # again is no error
    assert server.failure() is None  # it did not fail: it was stopped


def test_a_server_that_ignores_sigterm_is_killed(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(launch_server, "GRACE_S", 0.5)
    server = start("stubborn", tmp_path / "log")
    server.stop()
    assert server.poll() == 128 + signal.SIGKILL and not processes(mark)


def test_a_server_whose_keeper_hangs_is_killed(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(launch_server, "GRACE_S", -9)  # one second is waited for the keeper
    server = start("quick", tmp_path / "log")
    keeper = launch_ports.holder(server.port)
    assert keeper is not None
    os.kill(os.getsid(keeper[0]), signal.SIGSTOP)
    server.stop()
    assert server.poll() == -signal.SIGKILL
    for pid in processes(mark):  # in a session of its own: only the keeper could have found it
        assert b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGKILL)
    assert gone(mark, 2)


def test_a_killed_keeper_takes_the_server_along(tmp_path, mark):
    server = start("quick", tmp_path / "log")
    found = launch_ports.holder(server.port)
    assert found is not None
    os.kill(os.getsid(found[0]), signal.SIGKILL)
    server.wait()
    until = time.monotonic() + 5
    while (pid := launch_ports.holder(server.port)) and time.monotonic() < until:
        time.sleep(0.05)
    assert pid is None
    for left in processes(mark):
        os.kill(left, signal.SIGKILL)
    assert gone(mark, 2)


def test_two_servers_append_to_one_log_and_explain_themselves_by_their_own_part(tmp_path, mark):
    log = tmp_path / "log"
    fails("dies", log)
    assert "No room" in log.read_text()
    said = fails("mute", log)
    assert "No room" in log.read_text() and "No room" not in said


# --- servers that fail at start --------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "ended with exit code 1: ValueError: No room for the cache blocks. (log: "),
        ("killed", "was ended by signal 9 (mostly because memory ran out): loading None (log: "),
        ("mute", "ended with exit code 3: loading None (log: "),
    ],
)
def test_a_server_that_dies_is_explained_at_once(tmp_path, mark, mode, said):
    before = time.monotonic()
    message = fails(mode, tmp_path / "log")
    assert said in message and str(tmp_path / "log") in message and "\n" not in message
    assert time.monotonic() - before < 5


def test_a_server_that_prints_garbage_and_dies_is_explained_in_one_short_line(tmp_path, mark):
    message = fails("noise", tmp_path / "log")
    assert "exit code 4" in message and "\n" not in message and len(message) < 900


def test_a_command_that_cannot_be_started_is_named(tmp_path, mark):
    with pytest.raises(ConfigurationError, match=r"FileNotFoundError.*no-such-program"):
        launch.launch(lambda port: ["/no-such-program"], host="127.0.0.1", port=None, log=tmp_path / "log",
                      timeout_s=20, env=os.environ)  # fmt: skip


@pytest.mark.parametrize("mode", ["never", "garbage"])
def test_a_server_that_is_never_ready_is_stopped(tmp_path, mark, mode):
    before = time.monotonic()
    message = fails(mode, tmp_path / "log", ConnectionError, timeout_s=2)
    assert "was not ready after 2 s" in message and str(tmp_path / "log") in message
    assert not processes(mark) and time.monotonic() - before < 8


# --- ports -----------------------------------------------------------------------------
def test_a_taken_port_is_refused_with_who_holds_it(tmp_path, mark):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        message = fails("quick", tmp_path / "log", port=port)
    assert f"Port {port} is taken by process {os.getpid()} (" in message and "python" in message
    assert not (tmp_path / "log").exists()  # nothing was started


def test_a_named_port_that_was_free_is_used(tmp_path, mark):
    port = launch_ports.free_port("127.0.0.1")
    with start("quick", tmp_path / "log", port=port) as server:
        assert server.base_url == f"http://127.0.0.1:{port}"


def test_a_lost_race_for_a_free_port_is_tried_again(tmp_path, mark):
    ports = []

    def made(port: int) -> list[str]:
        ports.append(port)
        return [sys.executable, str(STAND_IN), "port" if len(ports) == 1 else "quick", str(port)]

    with launch.launch(made, host="127.0.0.1", port=None, log=tmp_path / "log", timeout_s=20, env=os.environ) as server:
        assert len(ports) == 2 and server.port == ports[1]


def test_a_race_that_is_always_lost_ends(tmp_path, mark):
    assert "Address already in use" in fails("port", tmp_path / "log")
    assert (tmp_path / "log").read_text().count("loading") == launch.ATTEMPTS


@pytest.mark.parametrize("named", [True, False])
def test_another_server_that_answers_on_the_port_is_not_taken_for_ours(tmp_path, mark, named):
    """It takes the port after that was found free and before our server, still loading, tries to."""
    strangers = []

    def made(port: int) -> list[str]:
        strangers.append(start("quick", tmp_path / "stranger", port=port))
        return ["sleep", "60"]

    port = launch_ports.free_port("127.0.0.1") if named else None
    said = "Port .* is taken by process .*vllm_stand_in" if named else "Port .* was taken by another process"
    with pytest.raises(ConfigurationError, match=said):
        launch.launch(made, host="127.0.0.1", port=port, log=tmp_path / "log", timeout_s=9, env=os.environ)
    assert len(strangers) == (1 if named else launch.ATTEMPTS)
    for stranger in strangers:
        assert stranger.healthy()
        stranger.stop()


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("203.0.113.7", 8000, "203.0.113.7"),
        ("no.such.host.invalid", 8000, "no.such.host"),
        ("127.0.0.1", 70000, "70000"),
    ],
)
def test_an_address_that_is_not_ours_is_refused(host, port, said):
    with pytest.raises(ConfigurationError, match=said):
        launch_ports.check_free(host, port)


def test_a_port_of_a_server_that_has_just_ended_is_free():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        held.accept()[0].close()  # who closes first is left in TIME_WAIT
    client.close()
    launch_ports.check_free("127.0.0.1", port)


# --- the end of the parent -------------------------------------------------------------
PARENT = """
import os, signal, sys, threading, time
from pathlib import Path
from agentrl.sampler.vllm.launch import launch
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the tests' processes would ignore it
made = []
def begin():
    made.append(launch(lambda port: [sys.executable, {stand_in!r}, "quick", str(port)], host="127.0.0.1", port=None,
                       log=Path({log!r}), timeout_s=20, env=os.environ))
thread = threading.Thread(target=begin)  # a server outlives the thread that started it
thread.start(); thread.join()
time.sleep(0.5)
assert made[0].healthy()
print("ready", flush=True)
{then}
"""


def parent(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    code = PARENT.format(stand_in=str(STAND_IN), log=str(tmp_path / "log"), then=textwrap.dedent(then))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None and (line := child.stdout.readline()) == "ready\n", line + child.stdout.read()
    return child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_parent_that_a_signal_ends_leaves_no_process(tmp_path, mark, number):
    child = parent(tmp_path, "time.sleep(60)")
    assert len(processes(mark)) == 5
    child.send_signal(number)
    child.wait(10)
    assert gone(mark, 5)


def test_ctrl_c_while_a_server_is_awaited_leaves_no_process(tmp_path, mark):
    code = PARENT.format(stand_in=str(STAND_IN), log=str(tmp_path / "log"), then="").replace('"quick"', '"never"')
    code = code.replace("thread = ", "begin()  # ")
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while len(processes(mark)) < 5:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in child.communicate(timeout=10)[1]
    assert gone(mark, 5)


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "raise RuntimeError('a defect')", "os._exit(1)"])
def test_a_parent_that_ends_leaves_no_process(tmp_path, mark, then):
    parent(tmp_path, then).wait(10)
    assert gone(mark, 5)


def test_a_fork_of_the_parent_does_not_stop_the_server(tmp_path, mark):
    then = """
    if os.fork() == 0:
        made[0].stop()
        sys.exit(0)  # with exit functions
    os.wait()
    time.sleep(0.5)
    print(made[0].poll(), made[0].healthy(), flush=True)
    """
    child = parent(tmp_path, then)
    assert child.stdout is not None and "None True" in child.stdout.read()
    child.wait(10)
    assert gone(mark, 5)


# --- logs ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""),
        ("usage: api_server.py [-h]\n   [--error {a,b}]\napi_server.py: error: unrecognized arguments: --x",
         "unrecognized arguments: --x"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
         "  Value error, max_model_len (9) is too long. [type=value_error, input_value=...]\n"
         "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
         "max_model_len (9) is too long."),
        ("(APIServer pid=1) ValueError: first\nDuring handling of the above exception, another exception occurred:\n"
         "huggingface_hub.errors.HFValidationError: Repo id\n", "huggingface_hub.errors.HFValidationError: Repo id"),
        ("ModuleNotFoundError: No module named 'plugin_of_others'\nINFO 11-30 00:25:50 [a.py:1] goes on\n"
         "OSError: [Errno 98] Address already in use", "OSError: [Errno 98] Address already in use"),
        ("ERROR 11-30 00:25:50 [a.py:1] the last thing said\nnanobind: leaked 3 types!\n - leaked type \"x\"\n",
         "the last thing said"),
        ("ValueError: " + "x" * 9000, "ValueError: " + "x" * 385 + "..."),
    ],
)  # fmt: skip
def test_the_cause_in_a_log(text, why):
    assert launch_log.cause(text) == why


def test_the_tail_of_a_log(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a" * 10 + b"\xff" + b"b" * 10)
    assert launch_log.tail(path, 12) == "b" * 9
    assert launch_log.tail(path, limit=3) == "bbb"
    assert launch_log.tail(path, 9).startswith("a�b")
    assert launch_log.tail(tmp_path / "none") == ""


# --- what it needs ---------------------------------------------------------------------
def test_without_vllm_the_extra_is_named(tmp_path):
    with pytest.raises(MissingDependency, match=r"needs the package 'vllm'.*\[vllm(-cpu)?\]"):
        launch.start_server("M", dtype="float32", log=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_starting_imports_neither_torch_nor_vllm():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = sys.modules['aiohttp'] = None\n"
        "import agentrl.sampler.vllm.launch\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the documented installation -------------------------------------------------------
def test_the_documented_steps_are_those_of_the_script():
    """`.ci/vllm-cpu` runs them with quieter output, in a folder of choice, and with what the tests need."""
    root = Path(__file__).parent.parent
    page, script = (root / "docs/vllm.md").read_text(), (root / ".ci/vllm-cpu").read_text()
    steps = page.partition("```text\npython3 -m venv")[2].partition("```")[0].splitlines()[1:]
    assert len(steps) == 3
    script = script.replace(" -q", "").replace('"$folder/', '".venv-vllm/').replace('"', "").replace("dev,", "")
    for step in steps:
        assert step.replace(" > ", " >") in script
