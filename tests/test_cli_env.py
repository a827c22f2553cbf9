"""`agentrl env`: list, info, check, play, init."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time

import pytest

from agentrl.cli.env.lines import read_turn
from agentrl.cli.main import main
from agentrl.errors import ConfigurationError

HUNT = "agentrl/Hunt-v0"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Each test in a folder of its own, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run_json(capsys, *words: str):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


# --- without torch ---------------------------------------------------------------------
def test_no_command_needs_torch_that_could_do_without(tmp_path):
    (tmp_path / "bad.toml").write_text("version = 1\n[model]\ntini = true\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from agentrl.cli.main import main\n"
        f"for words in (['env', 'list'], ['env', 'info', '{HUNT}'], ['env', 'check', '{HUNT}', '--episodes', '2'],\n"
        f"              ['env', 'play', '{HUNT}'], ['env', 'init', 'fast_game'], ['eval', '{HUNT}', '-n', '4']):\n"
        "    assert main(words) == 0, words\n"
        "assert main(['train', 'bad.toml']) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "Did you mean 'tiny'?" in done.stderr


# --- list and info ---------------------------------------------------------------------
def test_list_shows_ready_environments_and_on_request_those_of_gymnasium(capsys):
    code, rows = run_json(capsys, "env", "list")
    assert code == 0 and {"agentrl/Courier-v0", HUNT} <= {row["id"] for row in rows}
    assert {row["kind"] for row in rows} == {"conversation"}
    code, rows = run_json(capsys, "env", "list", "--gymnasium")
    assert {"id": "CartPole-v1", "kind": "gymnasium"}.items() <= next(
        r for r in rows if r["id"] == "CartPole-v1"
    ).items()


def test_a_package_that_cannot_be_imported_does_not_hide_the_others(own_folder, capsys):
    (own_folder / "broken_envs").mkdir()
    (own_folder / "broken_envs/__init__.py").write_text("import no_such_thing\n")
    assert main(["env", "list"]) == 0
    captured = capsys.readouterr()
    assert HUNT in captured.out and "'broken_envs' could not be imported: ModuleNotFoundError" in captured.err


def test_info_names_tools_arguments_and_tokens(capsys):
    code, shown = run_json(capsys, "env", "info", HUNT)
    assert code == 0 and shown["class"] == "agentrl_envs.hunt.Hunt" and shown["get_reward"] is True
    assert [tool["name"] for tool in shown["tools"]] == ["search"]
    assert "cave" in shown["tools"][0]["parameters"]["properties"]["place"]["enum"]
    assert shown["tool_tokens"] > 100 and "byte" in shown["tokenizer"]
    assert main(["env", "info", HUNT]) == 0
    text = capsys.readouterr().out
    assert "hops" in text and "search: Search a place." in text and "seed" in text


def test_a_tokenizer_of_ones_own_counts(own_folder, capsys, tiny):
    tiny.make().save_pretrained(own_folder / "tok")
    _, mine = run_json(capsys, "env", "info", HUNT, "--tokenizer", "tok")
    _, bytes_only = run_json(capsys, "env", "info", HUNT)
    assert mine["tokenizer"] == "tok" and mine["tool_tokens"] < bytes_only["tool_tokens"]
    assert main(["env", "info", HUNT, "--tokenizer", "nowhere"]) == 2
    assert "No tokenizer 'nowhere'" in capsys.readouterr().err


# --- check -----------------------------------------------------------------------------
def test_check_of_a_sound_environment(capsys):
    code, shown = run_json(capsys, "env", "check", HUNT, "--episodes", "8", "--strict")
    assert code == 0 and shown["ok"] is True and shown["environment"] == "Hunt"
    assert {finding["level"] for finding in shown["findings"]} == {"note"}
    assert shown["rewards"]["no-op"] == {"episodes": 4, "mean": 0.0, "least": 0.0, "most": 0.0}
    assert shown["rewards"]["random"]["episodes"] == 8
    assert set(shown["milliseconds"]) == {"reset", "get_reward", "search"}
    assert 0 < shown["tokens"]["tools"] < shown["tokens"]["prompt"]
    assert main(["env", "check", HUNT]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert sum("tokens of a first prompt, with the byte-level tokenizer" in line for line in lines) == 1


FAULTY = '''
from agentrl import Environment

class Leaky(Environment):
    """Keeps what the last episode heard."""

    def __init__(self): self.heard = []
    def reset(self, seed=0, **row): return f"Say something, {seed}."
    def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: Which one.
        """
        self.heard.append(word)
        return " ".join(self.heard)
    def get_reward(self): return 0.0

class Chance(Environment):
    """Not seeded."""

    def reset(self, **row):
        import random
        return str(random.random())
    def get_reward(self): return 0.0
'''


def test_check_fails_on_errors_and_with_strict_on_warnings(own_folder, capsys):
    (own_folder / "faulty_world.py").write_text(FAULTY)
    code, shown = run_json(capsys, "env", "check", "faulty_world:Leaky")
    assert code == 1 and shown["ok"] is False
    assert any(f["level"] == "error" and "left over" in f["what"] for f in shown["findings"])
    assert main(["env", "check", "faulty_world:Chance"]) == 0
    assert "warning: Chance.reset() started differently" in capsys.readouterr().out
    assert main(["env", "check", "faulty_world:Chance", "--strict"]) == 1


HANGING = """
import time
from agentrl import Environment

class Sleeps(Environment):
    def reset(self, seed=0, **row):
        return "Wake it."
    def wake(self) -> str:
        'Wake it.'
        time.sleep(5)
    def get_reward(self): return 0.0

class Spins(Sleeps):
    run_inline = True
"""


@pytest.mark.parametrize("name", ["Sleeps", "Spins"])
def test_what_hangs_ends_the_command_in_bounded_time(own_folder, name):
    (own_folder / "hanging_world.py").write_text(HANGING)
    command = [sys.executable, "-m", "agentrl", "env", "check", f"hanging_world:{name}", "--timeout", "0.2"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and f"error: {name}.wake did not return within 0.2 s" in done.stdout, done.stdout
    assert "Traceback" not in done.stderr and time.monotonic() - started < 15


def test_check_resets_with_rows(own_folder, capsys):
    (own_folder / "rows.jsonl").write_text('{"prompt": "Go. ", "hint": 1}\n{"prompt": "Run. ", "hint": 2}\n')
    (own_folder / "row_world.py").write_text(
        "class Rows:\n    def reset(self, hint, seed): return f'{hint}'\n    def get_reward(self): return 0.5\n"
    )
    assert main(["env", "check", "row_world:Rows", "--data", "rows.jsonl"]) == 0
    assert main(["env", "check", "row_world:Rows"]) == 1
    assert "needs 'hint'" in capsys.readouterr().out
    assert main(["env", "check", "row_world:Rows", "--data", "no.jsonl"]) == 2


# --- what is wrong is said in a sentence ------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env", "check", "agentrl/Hnt-v0"], "Did you mean 'agentrl/Hunt-v0'?"),
        (["env", "play", HUNT, "hop=2"], "Did you mean 'hops'?"),
        (["env", "info", HUNT, "hops"], "must look like name=value"),
        (["env", "info", "no_such_module_here:X"], "There is no module 'no_such_module_here'"),
        (["env", "info", "agentrl_envs.hunt:Hnut"], "Did you mean 'Hunt'?"),
        (["env", "info", "world.py:X"], "'world:ClassName'"),
        (["env", "info", "broken_world:X"], "No module named 'no_such_thing'"),
        (["env", "info", "garbled_world:X"], "garbled_world.py"),
        (["env", "init", "My-Game"], "cannot be a namespace"),
        (["env", "init", "agentrl"], "is taken"),
        (["env", "init", "there"], "exists already"),
        (["env", "chek", HUNT], "chek"),
    ],
)
def test_errors_are_one_line(own_folder, capsys, words, said):
    (own_folder / "broken_world.py").write_text("import no_such_thing\n")
    (own_folder / "garbled_world.py").write_text("def f(:\n")
    (own_folder / "there").mkdir()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert captured.err.startswith("Error: ") and captured.out == ""


# --- play ------------------------------------------------------------------------------
def test_play_shows_what_a_model_sees_and_scores_the_end_of_the_input(own_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("?\nsearch place=cave\nsearch nowhere\nserch cave please\n"))
    assert main(["env", "play", HUNT, "--output", "played.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "search place=cave|forest|lake|mill|shrine|tower" in out and "Call a tool:" in out
    assert "[user] find the treasure" in out and "[tool] search:" in out
    assert "place" in out and "Over (finished) after 3 turns. Reward: " in out
    (record,) = [json.loads(line) for line in (own_folder / "played.jsonl").read_text().splitlines()]
    assert [call["error"] for call in record["tool_calls"]] == [None, "bad_arguments"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["env", "play", HUNT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"reward": 0.0, "outcome": "finished", "turns": 1}


TOOLS = {
    "search": {"name": "search", "parameters": {"properties": {"place": {"type": "string", "enum": ["cave"]}}}},
    "move": {
        "name": "move",
        "parameters": {"properties": {"x": {"type": "integer"}, "fast": {"type": "boolean"}, "to": {"type": "string"}}},
    },
    "wait": {"name": "wait", "parameters": {"properties": {}}},
}


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("search place=cave", ("search", {"place": "cave"})),
        ("search cave", ("search", {"place": "cave"})),
        ("search the dark cave", ("search", {"place": "the dark cave"})),
        ('search {"place": "cave"}', ("search", {"place": "cave"})),
        ('{"name": "search", "arguments": {"place": "cave"}}', ("search", {"place": "cave"})),
        ("move 3 true 7", ("move", {"x": 3, "fast": True, "to": "7"})),
        ("move to='far away' x=-1", ("move", {"to": "far away", "x": -1})),
        ("move x=far", ("move", {"x": "far"})),
        ("wait", ("wait", {})),
    ],
)
def test_lines_that_are_calls(line, meant):
    (call,) = read_turn(line, TOOLS)["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == meant


def test_lines_that_are_answers_or_mistakes():
    assert read_turn("the cave", TOOLS) == {"role": "assistant", "content": "the cave"}
    assert read_turn("say wait", TOOLS) == {"role": "assistant", "content": "wait"}
    for line, said in (
        ("move 1 2 3 4", "move x=... fast=... to=..."),
        ("{no", "not JSON"),
        ('{"a": 1}', "A call in JSON"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            read_turn(line, TOOLS)


# --- init ------------------------------------------------------------------------------
def test_a_new_package_passes_the_check_untouched(own_folder, capsys, monkeypatch):
    assert main(["env", "init", "safe_game"]) == 0
    assert "agentrl env check safe_game/SafeGame-v0" in capsys.readouterr().out
    monkeypatch.chdir(own_folder / "safe_game")
    assert main(["env", "check", "safe_game/SafeGame-v0", "--strict"]) == 0
    out = capsys.readouterr().out
    assert "no errors, no warnings" in out and "The gold policy in SafeGame gets reward mean 1, least 1, most 1" in out
    _, rows = run_json(capsys, "env", "list")
    assert "safe_game/SafeGame-v0" in [row["id"] for row in rows]


def test_the_tests_of_a_new_package_pass(own_folder):
    assert main(["env", "init", "other_game"]) == 0
    check = [sys.executable, "-m", "agentrl", "env", "check", "other_game/OtherGame-v0", "--strict"]
    checked = subprocess.run(check, cwd=own_folder / "other_game", capture_output=True, text=True)
    assert checked.returncode == 0 and "The gold policy in OtherGame" in checked.stdout, checked.stdout
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=own_folder / "other_game", capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    lint = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=own_folder / "other_game")
    assert lint.returncode == 0
