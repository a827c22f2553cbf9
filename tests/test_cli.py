"""The command: what it prints, where, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys

import pytest

from agentrl.cli.main import main
from agentrl.record import EpisodeWriter
from agentrl.types import Outcome, Rollout, Task, TurnRecord


@pytest.fixture
def run_folder(tmp_path):
    """Six episodes of steps 0, 0, 1, 1, 2, 2 with rewards 0.2, none, 1.0, 0.0, 1.0, 0.5."""
    message = {"role": "assistant", "content": "hello"}
    rollout = Rollout(
        "r", "g", 0, Task(0, 0, 7), "Hunt", "hi", [{"role": "user", "content": "hi"}, message], "hello", [5],
        (TurnRecord([1], [5], [-0.25], message, "stop"),), (), (), Outcome.FINISHED,
    )  # fmt: skip
    with EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        for n, reward in enumerate([0.2, None, 1.0, 0.0, 1.0, 0.5]):
            writer.write(dataclasses.replace(rollout, id=f"r{n}", reward=reward), step=n // 2)
    return tmp_path


def shell(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentrl.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


# --- start-up --------------------------------------------------------------------------
def test_help_is_quick_and_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from agentrl.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "assert 'datasets' not in sys.modules and 'gymnasium' not in sys.modules\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout and "show" in done.stdout
    assert "╭" not in done.stdout  # plain where stdout is not a terminal
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5


def test_no_arguments_print_the_help(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agentrl {version('agentrl')}\n"


# --- show ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "r0"),
        (["--index", "3"], "r3"),
        (["--index", "-1"], "r5"),
        (["--index", "-6"], "r0"),
        (["--step", "1"], "r2"),
        (["--step", "1", "--index", "1"], "r3"),
        (["--best"], "r2"),
        (["--worst"], "r3"),
        (["--best", "--step", "2"], "r4"),
        (["--worst", "--step", "2"], "r5"),
    ],
)
def test_show_selects(run_folder, capsys, options, shown):
    assert main(["show", str(run_folder), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == shown
    assert main(["show", str(run_folder / "episodes.jsonl"), *options]) == 0
    assert f"episode {shown} " in capsys.readouterr().out


def test_show_ids(run_folder, capsys):
    assert main(["show", str(run_folder)]) == 0
    assert "5(-0.25)" not in capsys.readouterr().out
    assert main(["show", str(run_folder), "--ids"]) == 0
    assert "5(-0.25)" in capsys.readouterr().out


def test_show_full(run_folder, capsys):
    path = run_folder / "long.jsonl"
    message = {"role": "user", "content": "x" * 3000}
    with EpisodeWriter(path) as writer:
        writer.write(Rollout("r", "g", 0, Task(0, 0, 7), None, "", [message], "", [], (), (), (), Outcome.TRUNCATED))
    assert main(["show", str(path)]) == 0
    assert "(1000 more characters)" in capsys.readouterr().out
    assert main(["show", str(path), "--full"]) == 0
    assert capsys.readouterr().out.count("x") == 3000


def test_show_list(run_folder, capsys):
    assert main(["show", str(run_folder), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[2].split()[:3] == ["1", "0", "-"]
    assert main(["show", str(run_folder), "--list", "--step", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["id"], row["reward"]) for row in rows] == [("r4", 1.0), ("r5", 0.5)]


def _on_a_terminal(folder, **environment: str) -> str:
    master, slave = os.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color", **environment}
    command = [sys.executable, "-m", "agentrl.cli.main", "show", str(folder)]
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.DEVNULL, env=env) as process:
        os.close(slave)
        chunks = []
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the last writer has closed the terminal
                break
            if not chunk:
                break
            chunks.append(chunk)
        assert process.wait() == 0
    os.close(master)
    return b"".join(chunks).decode()


def test_colours_on_a_terminal_only(run_folder):
    assert "\x1b[" in _on_a_terminal(run_folder)
    assert "\x1b[" not in _on_a_terminal(run_folder, NO_COLOR="1")
    piped = shell("show", str(run_folder))
    assert piped.returncode == 0 and "\x1b[" not in piped.stdout


def test_a_reader_that_leaves_is_no_error(run_folder):
    with EpisodeWriter(run_folder / "many.jsonl") as writer:
        record = json.loads((run_folder / "episodes.jsonl").read_text().splitlines()[0])
        for _ in range(3000):
            writer.write_record(record)
    command = f"'{sys.executable}' -m agentrl.cli.main show '{run_folder}/many.jsonl' --list | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 1


def test_output_survives_an_ascii_terminal(run_folder):
    done = shell("show", str(run_folder), env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and r"\xb7" in done.stdout


# --- errors ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "/no/such/file"], "There is no file '/no/such/file'"),
        (["show", "FOLDER", "--index", "9"], "there are 6, counted from 0, and --index was 9"),
        (["show", "FOLDER", "--index", "-9"], "there are 6 and --index was -9"),
        (["show", "FOLDER", "--step", "8"], "no such episode of step 8"),
        (["show", "FOLDER", "--step", "8", "--best"], "best of 0 scored"),
        (["show", "FOLDER", "--best", "--worst"], "--best and --worst exclude each other"),
        (["show", "FOLDER", "--list", "--index", "1"], "--index and --list exclude each other"),
        (["show", "FOLDER", "--index", "x"], "--index"),
        (["show"], "Missing argument"),
        (["shwo"], "shwo"),
        (["show", "FOLDER", "--no-such-option"], "--no-such-option"),
        (["quickstart", "--seed", "-1"], "--seed"),
        (["quickstart", "--batches", "0"], "--batches"),
    ],
)
def test_errors_are_one_or_two_sentences(run_folder, capsys, arguments, said):
    words = [str(run_folder) if word == "FOLDER" else word for word in arguments]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err
    assert captured.err.startswith("Error: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err


def test_garbage_in_a_file_names_the_line(run_folder, capsys):
    path = run_folder / "episodes.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes())
    assert main(["show", str(path)]) == 2
    assert "line 1: this is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--debug", "show", "/no/such"], ["show", "/no/such", "--debug"]])
def test_debug_shows_the_traceback(capsys, words):
    assert main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_environment_of_the_quickstart_is_named(tmp_path):
    done = shell("quickstart", "--env", "no-such-place", "--output-dir", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "no-such-place" in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") <= 2
