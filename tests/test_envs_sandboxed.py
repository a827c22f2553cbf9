"""The environments that need a sandbox: tasks, rewards, and every known way of cheating, tried on bubblewrap."""

from __future__ import annotations

import contextlib
import csv
import functools
import inspect
import io
import json
import os
import pickle
import random
import re
import secrets
import sys
from collections import Counter, defaultdict
from pathlib import Path

import gymnasium
import pytest
from agentrl_envs import register_all
from agentrl_envs.coding import Coding
from agentrl_envs.coding.tasks import EMPTY, KINDS, Task, make_task
from agentrl_envs.data import Data, is_right
from agentrl_envs.data.questions import DRAFTS, make_question
from agentrl_envs.data.tables import as_files, make_tables
from agentrl_envs.shell import Shell
from agentrl_envs.shell.goals import Answer, Script
from agentrl_envs.shell.scripts import SCRIPTS
from agentrl_envs.shell.tasks import TASKS
from agentrl_envs.shell.tasks import make_task as shell_task

from agentrl import Outcome, RolloutEngine, RolloutSettings, check_environment, make
from agentrl.environment import discover_tools
from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.pool import EnvironmentPool
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer
from agentrl.sampler.scripted import ScriptedSampler
from agentrl.sandbox import episode as sandboxes
from agentrl.sandbox import image
from agentrl.sandbox.docker_engine import connect, engine_problem
from agentrl.testing import gold_episode
from agentrl.types import Task as Row

ENVS = [Coding, Shell, Data]
RUN = {Coding: "run_code", Shell: "bash", Data: "python"}
LAST = {Coding: ("submit", "x"), Shell: ("submit",), Data: ("answer", "x")}
each = pytest.mark.parametrize("env_class", ENVS, ids=lambda cls: cls.__name__)
# AGENTRL_REQUIRE_DOCKER=1 (CI sets it) says that an engine must be there: without one the tests fail
ENGINE = os.environ.get("AGENTRL_REQUIRE_DOCKER") == "1" or engine_problem() is None


def engine(test):
    """A test that needs a Docker engine: collected where one is, or must be."""
    return test if ENGINE else None


def factory(cls, **knobs):
    return functools.partial(cls, backend="bubblewrap", **knobs)


@pytest.fixture(scope="module")
def held():
    made = {cls: cls(backend="bubblewrap") for cls in ENVS}
    yield made
    for env in made.values():
        env.close()
    assert sandboxes._shared == {}, "the pool of clean sandboxes is closed with the last environment"


@pytest.fixture
def coding(held):
    return held[Coding]


@pytest.fixture
def shell(held):
    return held[Shell]


@pytest.fixture
def data(held):
    return held[Data]


def step(env, turn):
    (made,) = turn["tool_calls"]
    return getattr(env, made["name"])(**made["arguments"])


def gold(env, **row):
    """(first observation, answers, reward) of an episode of the gold policy."""
    first, answers = env.reset(**row), []
    while not env.done:
        answers.append(step(env, env._gold()))
        assert len(answers) < 5
    assert env._gold() == "Done."
    return first, answers, env.get_reward()


# --- what holds for each of them -------------------------------------------------------
@pytest.mark.slow
@each
def test_its_check_is_clean(env_class):
    assert [str(f) for f in check_environment(factory(env_class)) if f.level != "note"] == []


@each
def test_gold_gets_the_top_reward_through_the_engine(env_class):
    assert gold_episode(factory(env_class), seed=77).reward == 1.0 == env_class.reward_range[1]


@each
def test_nothing_is_left_over_and_a_copy_needs_its_own_reset(env_class, held):
    env = held[env_class]
    clean = gold(env, seed=5)
    env.reset(seed=6)
    run = RUN[env_class]
    write = "echo left > left.txt" if env_class is Shell else "open('left.txt', 'w').write('left')"
    getattr(env, run)(write)
    assert "left.txt" in env._box.list_files()
    copy = pickle.loads(pickle.dumps(env))
    with pytest.raises(SandboxError, match="call reset first"):
        getattr(copy, run)("1")
    assert gold(env, seed=5) == clean
    assert "left.txt" not in env._box.list_files()
    try:
        assert gold(copy, seed=5) == clean
    finally:
        copy.close()


@each
def test_calls_after_the_end_and_too_many_calls(env_class, held):
    env = held[env_class]
    env.reset(seed=1, max_calls=2)
    run = getattr(env, RUN[env_class])
    run("true")
    assert not env.done
    run("true")
    assert (env.done, env.get_reward()) == (True, 0.0)
    assert run("true") == "The episode is over."
    name, *arguments = LAST[env_class]
    assert (getattr(env, name)(*arguments), env.get_reward()) == ("The episode is over.", 0.0)


@pytest.mark.parametrize(
    ("env_class", "knobs", "message"),
    [(Coding, {"kind": "sets"}, "kind must be one of any, numbers, text, words, number, not 'sets'."),
     (Coding, {"hidden": 3}, "hidden must be a whole number from 10 to 60, not 3."),
     (Shell, {"task": "hack"}, "task must be one of any, count, edit, find, fix, rename, sum, not 'hack'."),
     (Shell, {"files": 5}, "files must be a whole number from 6 to 60, not 5."),
     (Data, {"depth": 5}, "depth must be a whole number from 1 to 4, not 5."),
     (Data, {"form": "xls"}, "form must be one of any, csv, sqlite, not 'xls'.")],
)  # fmt: skip
def test_bad_difficulty_names_the_range(env_class, knobs, message):
    for wrong in (lambda: env_class(**knobs), lambda: env_class().reset(seed=0, **knobs)):
        with pytest.raises(ValueError, match=re.escape(message)):
            wrong()


def test_a_dead_sandbox_is_an_outcome_of_the_environment_and_never_a_reward():
    """F151-like: the rollout fails without a reward, is tried again on a fresh instance, and nothing is left."""

    class Dying(Shell):
        def bash(self, command: str) -> str:
            """Run a command.

            Args:
                command: For bash.
            """
            assert self._box._sandbox is not None
            self._box._sandbox.close()
            return super().bash(command)

    pool = EnvironmentPool(functools.partial(Dying, backend="bubblewrap"))
    script = [{"role": "assistant", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}, "Done."]
    settings = RolloutSettings(max_completion_length=None, max_attempts=2, min_survivors=0)
    rollouts = RolloutEngine(ScriptedSampler(script), None, {None: pool}, settings=settings)
    (group,) = play_and_close(rollouts, Scorer([]), [GroupPlan("g", Row(index=0, epoch=0, seed=0, row={}), 1)])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.attempts, rollout.reward) == (Outcome.TOOL_FAILED, 2, None)
    assert "SandboxError" in rollout.error
    assert pool.built >= 2


def test_an_environment_whose_sandbox_died_opens_another_at_its_next_reset(shell):
    shell.reset(seed=1)
    shell.bash("ls")
    shell._box._sandbox.close()
    with pytest.raises(SandboxError):
        shell.bash("ls")
    assert gold(shell, seed=1)[2] == 1.0


@each
def test_without_a_sandbox_the_first_reset_says_what_is_missing(env_class, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    env = env_class(backend="docker")  # building one opens nothing
    with pytest.raises(SandboxUnavailable, match="No Docker engine answers at unix:///nowhere"):
        env.reset(seed=0)
    env.close()


# --- coding: the tasks -----------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_words_the_source_and_the_answers_of_a_task_agree(kind, depth):
    """Each step is implemented twice, in other ways; the sources are our own, so that they may run here."""
    for seed in range(25):
        task = make_task(seed, kind, depth, 3, 20)
        names = {}
        exec(task.solution, names)
        cases = [*task.examples, *task.hidden]
        for arguments, expected in cases:
            got = names["solve"](*pickle.loads(pickle.dumps(arguments)))
            assert got == expected and type(got) is type(expected), (task, arguments)
        assert len({repr(arguments) for arguments, _ in cases}) == 23, "no hidden case is shown"
        assert task.hidden[-1][0] == (EMPTY[kind],)
        assert task.text.count("\n") == depth + 1 + 3
        assert max(Counter(repr(expected) for _, expected in task.hidden).values()) <= 8, "no constant does it"


def test_a_task_by_hand(coding):
    task = make_task(3, "any", 3, 3, 20)
    assert task.text.split("\n")[:5] == [
        "Write a Python function solve(numbers). It gets a list of whole numbers and does this, in this order:",
        "1. Drop the numbers that are divisible by 4.",
        "2. Keep only the numbers that are divisible by 5.",
        "3. Replace each number n by the remainder of n divided by 6 (never negative, as % in Python).",
        "4. Return the largest number, or 0 if there is none.",
    ]
    for (numbers,), expected in task.hidden:
        assert expected == max([n % 6 for n in numbers if n % 4 and n % 5 == 0] or [0])
    assert make_task(3, "any", 3, 3, 20) == task != make_task(4, "any", 3, 3, 20)


def test_coding_answers_and_rewards_by_hand(coding):
    coding.reset(seed=0)
    add = "def solve(a):\n    return a + 1\n"
    coding._task = Task("", (((1,), 2), ((5,), 6)), tuple(((n,), n + 1) for n in range(10)), add)
    assert coding.run_tests(add + "print('hi')") == "2 of 2 examples are right.\nIt printed: hi"
    assert coding.run_tests("def solve(a): return 2") == (
        "1 of 2 examples are right.\nCase 2 of 2: solve(5) returned 2, expected 6."
    )
    assert coding.run_code("print(2 + 3)") == "5"
    assert coding.run_code("1/0").endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert coding.run_code("x" * 20_001).startswith("The code has 20001 characters")
    assert coding.get_reward() == 0.0
    assert coding.submit("def solve(a): return a + 1 if a < 4 else 0") == "4 of 10 hidden cases are right."
    assert (coding.done, coding.get_reward()) == (True, 0.4)


def test_runs_are_bounded(coding, monkeypatch):
    monkeypatch.setattr("agentrl_envs.coding.RUN_S", 0.7)
    monkeypatch.setattr("agentrl_envs.coding.TEST_S", 0.7)
    coding.reset(seed=0)
    assert coding.run_code("while True: pass") == "[stopped: it took too long]"
    flood = coding.run_code("while True: print('x' * 1000)")
    assert flood.endswith("[stopped: it printed too much]") and len(flood) < 2200
    assert "emory" in coding.run_code("x = bytearray(10**9)")
    assert coding.run_tests("while True: pass").endswith("the code took too long before it had answered.")
    coding.submit("def solve(x):\n    while True: pass")
    assert (coding.done, coding.get_reward()) == (True, 0.0)


# --- coding: cheating ------------------------------------------------------------------
EXIT = "import os\nos._exit(0)\n"
PLANTED = ["conftest.py", "sitecustomize.py", "usercustomize.py", "json.py", "unittest.py", "solution.py", "test_it.py"]
FORGED = "\n".join(json.dumps({"index": i, "value": 1, "passed": True}) for i in range(20))
CHEATS = {
    "early exit 0": "import sys\nsys.exit(0)",
    "early exit 0 in the call": "def solve(x):\n import os\n os._exit(0)",
    "patched unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "unittest.TestResult.wasSuccessful = lambda self: True\ndef solve(x): return None"
    ),
    "forged results": (
        f"import os\nfor fd in range(9):\n try: os.write(fd, b'''\\n{FORGED}\\n''')\n except OSError: pass"
    ),
    "equal to everything": "class X(str):\n __eq__ = lambda s, o: True\n __hash__ = None\ndef solve(x): return X('?')",
    "written reward": "open('/work/score', 'w').write('1')\nopen('/work/reward.txt', 'w').write('1')",
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_coding_cheats_get_nothing(coding, cheat):
    coding.reset(seed=8)
    coding.submit(CHEATS[cheat])
    assert (coding.done, coding.get_reward()) == (True, 0.0)


def test_coding_planted_files_and_processes_reach_no_verdict(coding):
    """conftest.py and modules by names that a judge imports; a process that waits for the verdict."""
    coding.reset(seed=8)
    wait = "import subprocess; subprocess.Popen(['sh', '-c', 'while :; do cp /work/json.py /tmp; done'])\n"
    coding.run_code(f"for name in {PLANTED}: open(name, 'w').write({EXIT!r})\n{wait}")
    assert set(PLANTED) <= set(coding._box.list_files()), "they were planted"
    assert coding.run_tests(coding._task.solution) == "3 of 3 examples are right."
    coding.submit(coding._task.solution)
    assert coding.get_reward() == 1.0


LOOK = """
import glob, os, subprocess
seen = [repr(dict(os.environ))]
paths = glob.glob('/work/**', recursive=True) + glob.glob('/tmp/**', recursive=True)
for path in paths + glob.glob('/proc/*/cmdline'):
    try: seen.append(path + ': ' + open(path, errors='replace').read(4000))
    except OSError: pass
for command in ('git -C /work log -p', 'find / -name .git', 'find / -iname "*agentrl*" -not -path "/proc/*"',
                'python3 -c "import agentrl_envs"', 'cat /proc/self/mountinfo'):
    seen.append(command + ': ' + subprocess.run(command, shell=True, capture_output=True, text=True).stdout)
"""
FRAMES = """
import gc, re, sys
def solve(x):
    frame, text = sys._getframe(), ''
    while frame: text += repr(frame.f_locals); frame = frame.f_back
    for thing in gc.get_objects():
        try: text += repr(thing)[:20000]
        except BaseException: pass
    found = set(re.findall(r'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])', text)) - set(x.split())
    return sorted(found)[0] if found else 'nothing found'
"""


def test_coding_hidden_cases_are_nowhere_in_the_sandbox(coding):
    """Reading the tests: files, environment, processes, git history, the package; stack frames and memory."""
    coding.reset(seed=8)
    secret = [secrets.token_hex(16) for _ in range(10)]
    coding._task = Task("", ((("a",), "b"),), tuple(((str(i),), value) for i, value in enumerate(secret)), "")
    seen = coding.run_code(LOOK + "print(len(seen))\nopen('seen.txt', 'w').write('\\n'.join(seen))")
    assert int(seen) > 5
    text = coding._box.download("seen.txt").decode()
    assert not any(value in text for value in secret)
    assert "agentrl" not in text.split("find / -iname")[1].split("\npython3 -c")[0].partition(": ")[2]
    assert "HOME" in text and "/main/.git" not in text
    coding.submit(FRAMES)
    assert coding.get_reward() == 0.0
    coding.reset(seed=8)
    coding._task = Task("", ((("a",), "b"),), tuple(((f"{value} x",), value) for value in secret), "")
    coding.submit(FRAMES.replace("- set(x.split())", "& set(x.split())"))
    assert coding.get_reward() == 1.0, "the search finds what is there: the arguments"


# --- shell -----------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS)
def test_shell_gold_by_a_single_command(shell, task):
    for seed, files, depth in ((1, 6, 1), (2, 40, 4)):
        first, answers, reward = gold(shell, seed=seed, task=task, files=files, depth=depth)
        assert (answers, reward) == (["(no output)", "right"], 1.0), first


@pytest.mark.parametrize("task", ["count", "find", "sum"])
def test_shell_answers_by_a_second_implementation(task):
    for seed in range(40):
        made = shell_task(seed, task, 6 + seed, 1 + seed % 4)
        assert isinstance(made.goal, Answer) and "answer.txt" not in made.files
        assert len(made.files) == 6 + seed
        lines = [(path, line) for path, text in made.files.items() for line in text.splitlines()]
        if task == "count":
            word = re.search(r"contain (\w+), in", made.text)[1]
            told = str(sum(path.endswith(".log") and word in line for path, line in lines))
        elif task == "find":
            wanted = re.search(r"'(code: \d+)'", made.text)[1]
            (path,) = [path for path, line in lines if line == wanted]
            told = path if "its path" in made.text else str(made.files[path].count("\n"))
        else:
            name = re.search(r"amounts of (\w+),", made.text)[1]
            cells = [line.split(",") for path, line in lines if path.endswith(".csv")]
            told = str(sum(int(amount) for _, who, amount in cells if who == name))
        assert made.goal.expected == told
    assert shell_task(3, task, 12, 2) == shell_task(3, task, 12, 2) != shell_task(4, task, 12, 2)


def printed(source, given):
    """What a script of ours prints, and None where it breaks."""
    out, stdin = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(given)
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, "report.py", "exec"), {"__name__": "__main__"})
    except Exception:
        return None
    finally:
        sys.stdin = stdin
    return out.getvalue()


@pytest.mark.parametrize("script", SCRIPTS, ids=["totals", "measures", "above"])
def test_every_bug_shows_in_every_input_and_the_right_script_has_none(script):
    for seed in range(30):
        lines = script.draw(random.Random(seed))
        given, expected = "\n".join(lines) + "\n", "\n".join(script.run(lines)) + "\n"
        assert printed(script.source, given) == expected
        for right, wrong in script.bugs:
            assert script.source.count(right) >= 1
            assert printed(script.source.replace(right, wrong, 1), given) != expected, (wrong, given)


def test_no_hidden_output_of_a_script_is_shown_or_another_s():
    for seed in range(200):
        made = shell_task(seed, "fix", 12, 2)
        outputs = [made.files["expected.txt"], *(expected for _, expected in made.goal.runs)]
        assert len({output.strip() for output in outputs}) == 4 and len(set(made.files)) == 12


def test_shell_partial_rewards_by_hand(shell):
    shell.reset(seed=3, task="rename", files=9)
    (old, new), *rest = shell._task.goal.units
    other = next(path for path in shell._task.files if path.endswith(".md"))
    assert len(rest) == 5
    shell.bash(f"mv {old} {new}")
    assert shell.submit() == "partly right"
    assert shell.get_reward() == pytest.approx(1 / 6)
    for command, reward in (
        (f"mv {old} {new}; echo x >> {other}", 0.0),  # another file was changed
        (shell._task.command + f"; rm {other}", 5 / 6),
        (shell._task.command + "; echo x > box/more.txt", 5 / 6),
        ("rm -r box", 0.0),
        (shell._task.command.replace("mv ", "cp "), 0.0),  # the old ones are still there
        ("true", 0.0),
    ):
        shell.reset(seed=3, task="rename", files=9)
        shell.bash(command)
        shell.submit()
        assert shell.get_reward() == pytest.approx(reward), command
    shell.reset(seed=3, task="count")
    shell.bash("echo many > answer.txt")
    assert (shell.submit(), shell.get_reward()) == ("partly right", 0.1)
    shell.reset(seed=3, task="count")
    assert (shell.submit(), shell.get_reward()) == ("not right", 0.0)


def test_shell_takes_paths_as_people_write_them(shell):
    seed = next(s for s in range(9) if "its path" in shell_task(s, "find", 12, 2).text)
    for before in ("./", "/work/"):
        shell.reset(seed=seed, task="find")
        shell.bash(f"printf ' {before}{shell._task.goal.expected}\n\n' > answer.txt")
        shell.submit()
        assert shell.get_reward() == 1.0


def test_shell_cheats_get_nothing(shell):
    """Planted modules, early exit, printing what is expected of the shown input, links and pipes in place of files."""
    fix = "cat > report.py <<'END'\n{}\nEND"
    cheats = {
        "early exit 0": ("fix", fix.format("import sys; sys.exit(0)")),
        "prints the shown output": ("fix", 'printf \'print("""%s""")\' "$(cat expected.txt)" > report.py'),
        "reads the shown output": ("fix", fix.format("print(open('/work/expected.txt').read())")),
        "a module beside the script": ("fix", "cat > report.py <<< 'import help'; cat > help.py <<< 'print(1)'"),
        "another file that does it": (
            "fix",
            fix.format("exec(open('/work/other.py').read())") + f"\ncat > other.py <<'END'\n{SCRIPTS[1].source}END",
        ),
        "written reward": ("fix", "echo 1 > score; echo 1.0 > reward.txt"),
        "a link": ("count", "ln -s /etc/hostname answer.txt"),
        "a pipe": ("count", "mkfifo answer.txt"),
        "a folder": ("count", "mkdir answer.txt"),
        "a huge file": ("count", "head -c 9000000 /dev/zero > answer.txt"),
        "no text": ("count", "printf '\\xff\\xfe' > answer.txt"),
        "many files": ("rename", "cd box; touch $(seq 1500)"),
    }
    for name, (task, command) in cheats.items():
        shell.reset(seed=11, task=task)
        shell.bash(command)
        assert shell.submit() == "not right", name
        assert shell.get_reward() == 0.0, name


def test_shell_planted_modules_do_not_break_a_right_script(shell):
    shell.reset(seed=11, task="fix")
    shell.bash(f"for name in sitecustomize usercustomize sys codecs io; do printf '{EXIT!r}' > $name.py; done")
    shell.bash(shell._task.command)
    shell.submit()
    assert shell.get_reward() == 1.0


def test_shell_hidden_inputs_and_answers_are_not_inside(shell):
    shell.reset(seed=11, task="fix")
    goal = shell._task.goal
    assert isinstance(goal, Script) and len(goal.runs) == 3
    everything = shell.bash("cat $(find /work -type f) | tr '\\n' ' '; find / -name .git 2>/dev/null; git log 2>&1")
    for given, expected in goal.runs:
        assert given.replace("\n", " ") not in everything and expected.replace("\n", " ") not in everything
    assert ".git/" not in everything and "commit" not in everything


def test_shell_commands_are_bounded_and_answered(shell, monkeypatch):
    monkeypatch.setattr("agentrl_envs.shell.COMMAND_S", 0.7)
    shell.reset(seed=1)
    assert shell.bash("sleep 60") == "[stopped: it took too long]"
    assert shell.bash("yes").endswith("[stopped: it printed too much]")
    assert shell.bash("cat /etc/shadow").endswith("[exit code 1]")
    assert shell.bash("a\0b") == "Nothing was run: a command has at most 8000 characters, and no NUL character."
    assert shell.bash("echo '\ud800'") == "?"
    assert shell.bash("cd / && pwd") == "/" and shell.bash("pwd") == "/work"


# --- data ------------------------------------------------------------------------------
def read_tables(files):
    """The rows of each CSV as dicts."""
    return {name.removesuffix(".csv"): list(csv.DictReader(io.StringIO(text.decode()))) for name, text in files.items()}


def answer_of(text, tables):
    """What a reader of the question gets with loops over the rows; a second implementation."""
    customers = {row["id"]: row for row in tables["customers"]}
    products = {row["id"]: row for row in tables["products"]}
    orders = [
        {"n": int(o["quantity"]), "p": products[o["product_id"]], "c": customers[o["customer_id"]], "day": o["day"]}
        for o in tables["orders"]
    ]
    prices = [(float(p["price"]), p["name"], p["category"]) for p in tables["products"]]
    year = (re.search(r"in the year (\d{4})|of the year (\d{4})", text) or [""])[0][-4:]
    category = (re.search(r"of the category (\w+)", text) or ["", ""])[1]
    city = (re.search(r"customers from (\w+)", text) or ["", ""])[1]
    kept = [o for o in orders if o["day"].startswith(year) and category in ("", o["p"]["category"])]
    kept = [o for o in kept if city in ("", o["c"]["city"])]
    worth = lambda o: float(o["p"]["price"]) * o["n"]  # noqa: E731

    def sums(key, value):
        found = defaultdict(float)
        for order in kept:
            found[key(order)] += value(order)
        return found

    def best(key, value):
        found = sums(key, value)
        first, *others = sorted(found.values(), reverse=True)
        assert not others or first > others[0] + 0.001, "the answer is in doubt"
        return max(found, key=lambda name: found[name])

    match text.split("?")[0].split()[:6]:
        case ["How", "many", "different", "customers", "ordered", _]:
            return len({o["c"]["id"] for o in kept})
        case ["How", "many", "different", "products" | "customers" as what, *_]:
            return len({o[what[0]]["id"] for o in orders})
        case ["What", "is", "the", "mean", "price", _]:
            picked = [price for price, _, kind in prices if category in ("", kind)]
            return sum(picked) / len(picked)
        case ["What", "is", "the", "sum", *_]:
            return sum(o["n"] for o in kept)
        case ["What", "is", "the", "name", "of", "the"] if "product with" in text:
            return (max if "highest" in text else min)(prices)[1]
        case ["In", "how", "many", *_]:
            return len({c["city"] for c in tables["customers"]})
        case ["How", "many", "orders", *_]:
            return sum(o["n"] >= int(re.search(r"least (\d+)", text)[1]) for o in orders)
        case ["How", "many", "customers", *_]:
            since = int(re.search(r"since (\d+)", text)[1])
            return sum(c["city"] == city or int(c["since"]) >= since for c in tables["customers"])
        case ["How", "many", "pieces", *_]:
            return sum(o["n"] for o in kept)
        case ["How", "much", *_]:
            return sum(map(worth, kept))
        case ["The", "customers", "of", "which", "city", _]:
            return best(lambda o: o["c"]["city"], worth)
        case ["What", "is", "the", "name", "of", "the"]:
            return best(lambda o: o["c"]["name"], lambda o: o["n"])
        case ["In", "which", "month", *_]:
            return best(lambda o: o["day"][5:7], lambda o: o["n"])
        case ["Take", "the", *_]:
            spent = sums(lambda o: o["c"]["id"], worth).values()
            return sum(value > sum(spent) / len(spent) for value in spent)
    raise AssertionError(text)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_data_answers_by_a_second_implementation(depth):
    asked = set()
    for seed in range(100):
        rng = random.Random(seed)
        tables = make_tables(rng, 20 + 20 * (seed % 20))
        question = make_question(tables, depth, rng)
        told = answer_of(question.text, read_tables(as_files(tables, "csv")))
        assert is_right(str(told), question.answer), (question, told)
        asked.add(" ".join(question.text.split()[:6]))
    assert len(asked) >= len(DRAFTS[depth]), "every kind of question was met"


@pytest.mark.parametrize("form", ["csv", "sqlite"])
def test_data_gold_computes_in_the_sandbox(data, form):
    for depth, rows in ((1, 20), (4, 2000)):
        first, answers, reward = gold(data, seed=depth, depth=depth, rows=rows, form=form)
        assert (answers[1], reward) == ("right", 1.0)
        assert is_right(answers[0], data._question.answer)
        assert ("shop.db" in first) == (form == "sqlite")
        assert data._box.list_files() == (
            ["shop.db"] if form == "sqlite" else ["customers.csv", "orders.csv", "products.csv"]
        )


def test_data_rewards_by_hand(data):
    for code, reward in (
        ("1/0", 0.0),
        ("x = 1", 0.0),  # nothing was printed
        ("print('hello')", 0.05),
        ("print({}, 'orders')", 0.05),
        ("print('it is'); print({})", 0.35),
        ("print({}); print('bye')", 0.05),  # not last
        ("print({}); raise SystemExit(1)", 0.0),
    ):
        data.reset(seed=4)
        data.python(code.format(repr(data._question.answer)))
        assert data.get_reward() == pytest.approx(reward), code
    data.python("1/0")
    assert data.answer("no idea") == "wrong" and data.get_reward() == 0.0
    data.reset(seed=4)
    assert data.answer(f" {data._question.answer} ") == "right" and data.get_reward() == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [("12", 12, True), ("12.004", 12, True), ("12.01", 12, False), ("nan", 12, False), ("inf", 12, False),
     ("1e400", 12, False), ("", 12, False), ("twelve", 12, False), ("LINZ", "Linz", True), ("'Linz'.", "Linz", True),
     ("Linz or Gent", "Linz", False), ("09", "09", True), ("9", "09", False), ("x" * 10**6, "Linz", False)],
)  # fmt: skip
def test_data_answers_are_compared_as_values(text, answer, right):
    assert is_right(text, answer) is right


# --- Docker ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def default_image():
    with contextlib.closing(connect()) as client:
        if not client.images(image.DEFAULT_IMAGE):
            image.build_image()


@engine
@each
def test_gold_gets_the_top_reward_on_docker(env_class, default_image):
    rows = {Coding: [{}], Shell: [{"task": "fix"}, {"task": "sum"}], Data: [{"form": "csv"}, {"form": "sqlite"}]}
    for row in rows[env_class]:
        assert gold_episode(functools.partial(env_class, backend="docker"), row, seed=7).reward == 1.0


# --- their pages -----------------------------------------------------------------------
def page(env_class):
    return (Path(inspect.getfile(env_class)).parent / "README.md").read_text()


def played(env_class, seed):
    """A transcript as the pages have it."""
    found = gold_episode(factory(env_class), seed=seed)
    lines = []
    for message in found.messages:
        text = message["content"]
        if message["role"] == "assistant":
            made = message["tool_calls"][0]["function"]
            shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in made["arguments"].items())
            text = f"{made['name']}({shown})"
        lines.append(f"{message['role']:<11}" + text.replace("\n", "\n" + " " * 11))
    return "\n".join([*lines, f"reward     {found.reward:g}"])


@each
def test_a_page_shows_what_is_played(env_class):
    (seed,) = re.findall(r"The gold policy on seed (\d+):", page(env_class))
    (transcript,) = re.findall(r"```text\n(.*?)\n```", page(env_class), re.DOTALL)
    assert transcript == played(env_class, int(seed))


@each
def test_a_page_lists_every_knob_with_its_default_and_range(env_class):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", page(env_class), re.MULTILINE)
    parameters = inspect.signature(env_class).parameters
    assert [name for name, _, _ in rows] == [name for name in parameters if name != "backend"]
    knobs = sys.modules[env_class.__module__].__dict__["KNOBS"]
    for name, default, told in rows:
        assert json.loads(default) == parameters[name].default
        allowed = knobs[name]
        words = isinstance(allowed[0], str)
        wanted = ", ".join(f'"{word}"' for word in allowed) if words else f"{allowed[0]} to {allowed[-1]}"
        assert told == wanted, name


def test_the_page_of_ready_environments_has_each_with_its_tools_and_knobs():
    text = (Path(__file__).parent.parent / "docs" / "environments-ready.md").read_text()
    register_all()
    ids = {id for id in gymnasium.registry if id.startswith("agentrl/")}
    assert ids == set(re.findall(r"`(agentrl/\w+-v0)`", text))
    rows = re.findall(r"^\| \[`(agentrl/\w+-v0)`\]\(.*?\) \| .*? \| (.*?) \| (.*?) \| (.*?) \|", text, re.MULTILINE)
    assert len(rows) == len(ids) - 3
    for id, tools, reward, knobs in rows:
        env = make(id)
        assert re.findall(r"\w+", tools) == list(discover_tools(env)), id
        assert reward == "{:g} to {:g}".format(*env.reward_range), id
        assert re.findall(r"\w+", knobs) == [n for n in inspect.signature(type(env)).parameters if n != "backend"], id
