"""Ready tools: what each answers, by hand; hostile arguments; alone in a run, and inside of an environment."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction

import pytest
from agentrl_tools import Clock, SandboxTools, Search, Workspace, calculator, clock
from agentrl_tools.calculator import CONSTANTS, FUNCTIONS, ExpressionError, evaluate, shown
from hypothesis import given, settings
from hypothesis import strategies as st
from test_envs_games import expressions

from agentrl import Environment, check_environment
from agentrl.check import bad_arguments
from agentrl.check.player import schema_of
from agentrl.environment import Instance, discover_tools
from agentrl.errors import ConfigurationError, MissingDependency, SandboxError
from agentrl.pool import EnvironmentPool
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer
from agentrl.sampler.scripted import ScriptedSampler
from agentrl.sandbox import SandboxSpec
from agentrl.tool_schema import build_tool, build_tools
from agentrl.types import Task


# --- calculator ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "answer"),
    [("2+3*4", "14"), ("(2+3)*4", "20"), ("-2**2", "-4"), ("2**-1", "0.5"), ("2**3**2", "512"), ("7//2", "3"),
     ("-7//2", "-4"), ("-7%3", "2"), ("1/3*3", "1"), ("0.1+0.2", "0.3"), ("10÷4×2−1", "4"), ("2^5", "32"),
     (" .5 * 4. ", "2"), ("1/3", "0.333333333333"), ("--3", "3"), ("sqrt(16)", "4"), ("sqrt(2)**2", "2"),
     ("round(2.675, 2)", "2.68"), ("round(-2.5)", "-2"), ("floor(-0.5)", "-1"), ("ceil(0.5)", "1"),
     ("max(1, 2/3, pi)", "3.14159265359"), ("min(3, 2)", "2"), ("log(e)", "1"), ("log(8, 2)", "3"),
     ("sin(pi / 6)", "0.5"), ("factorial(20)", "2432902008176640000"), ("abs(-1/8)", "0.125"), ("1e3", "1000"),
     ("10**-5", "0.00001"), ("1e-20", "1e-20"), ("2**64", "18446744073709551616"), ("-" * 300 + "1", "1")],
)  # fmt: skip
def test_calculator_by_hand(text, answer):
    assert calculator(text) == answer


@pytest.mark.parametrize(
    ("text", "part"),
    [("9**9**9", "The result of ** is too large"), ("2**99999", "too large"), ("(1/3)**9999", "too large"),
     ("factorial(999)", "from 0 to 500"), ("factorial(0.5)", "whole number"), ("exp(1000)", "too large"),
     ("1e308*1e308*1e308*1e308*1e308", "The result of * is too large"), ("1e400", "A number is too large"),
     ("sin(2**3000)", "too large"), ("1/0", "Division by zero, at '/'"), ("5%(2-2)", "Division by zero, at '%'"),
     ("0**-1", "no negative power"), ("sqrt(-1)", "sqrt has no value for -1"), ("log(0)", "log has no value for 0"),
     ("(-8)**(1/3)", "no real root"), ("max()", "max takes at least 1 numbers, not 0"), ("", "That is no arithmetic"),
     ("sqrt(1, 2)", "sqrt takes 1 numbers, not 2"), ("round(1, 10**9)", "from -100 to 100"), ("2 +", "no arithmetic"),
     ("1,234", "'(1, 234)' is no arithmetic"), ("x+1", "'x' is no arithmetic"), ("2(3)", "'2(3)' is no arithmetic"),
     ("'a'*9", "is no arithmetic"), ("True", "'True' is no arithmetic"), ("1j", "'1j' is no arithmetic"),
     ("[1][0]", "no arithmetic"), ("1 if 1 else 2", "no arithmetic"), ("(lambda: 1)()", "no arithmetic"),
     ("max(*[1])", "no arithmetic"), ("sqrt(x=1)", "no arithmetic"), ("sqrt.__class__", "no arithmetic"),
     ("__import__('os').system('id')", "no arithmetic"), ("(x := 1)", "no arithmetic"), ("1;2", "no arithmetic"),
     ("\0", "no arithmetic"), ("\ud800", "no arithmetic"), ("(" * 300, "no arithmetic"),
     ("1+" * 300, "600 characters")],
)  # fmt: skip
def test_calculator_explains_what_it_does_not_compute(text, part):
    answer = calculator(text)
    assert answer.startswith("error: ") and part in answer


@given(expressions)
@settings(max_examples=200, deadline=None)
def test_calculator_is_exact_where_python_is_made_to_be(text):
    tokens = "".join(f"F({word})" if word.isdigit() else word for word in _split(text))
    try:
        expected = eval(tokens, {"F": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="Division by zero"):
            evaluate(text)
        return
    assert evaluate(text) == expected


def _split(text):
    words = [""]
    for letter in text:
        if not (letter.isdigit() and words[-1].isdigit()):
            words.append("")
        words[-1] += letter
    return words


@given(st.text(max_size=60) | st.text("0123456789.*/+-()e ,sqrtminfacol", max_size=60))
@settings(max_examples=400, deadline=2000)
def test_any_text_is_answered_soon(text):
    assert calculator(text)


def test_calculator_names_what_it_knows():
    answer = calculator("nothing")
    assert all(name in answer for name in [*FUNCTIONS, *CONSTANTS])
    assert math.isclose(float(evaluate("tan(atan(2)) + asin(1) + acos(1) + log2(8) + log10(1000)")), 8 + math.pi / 2)
    assert shown(Fraction(10**40)) == "1" + "0" * 40


# --- clock -----------------------------------------------------------------------------
def test_clock_tells_the_time_it_was_given_and_else_that_of_the_machine():
    moment = datetime(2024, 2, 29, 23, 59, 58, tzinfo=timezone(timedelta(hours=-5)))
    assert Clock(moment).clock() == "2024-03-01 04:59:58 UTC, Friday"
    ticks = iter([moment, moment + timedelta(seconds=2)])
    stepping = Clock(lambda: next(ticks))
    assert [stepping.clock()[11:19] for _ in range(2)] == ["04:59:58", "05:00:00"]
    told = datetime.strptime(clock()[:19], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - told).total_seconds()) < 5
    with pytest.raises(ConfigurationError, match="has no time zone"):
        Clock(datetime(2024, 2, 29))


# --- search ----------------------------------------------------------------------------
DOCUMENTS = {
    "fox.txt": "The red fox jumps over the lazy dog.",
    "whale.txt": "Blue whales swim; a whale is no fish. " + "Water is wet. " * 30,
    "dog.txt": "A dog barks at the other dog.",
}


def test_search_finds_the_best_first_and_reads():
    tools = Search(DOCUMENTS)
    assert tools.find("dog") == ["dog.txt", "fox.txt"]
    assert tools.find("WHALE zebra") == ["whale.txt"]
    assert Search(DOCUMENTS, results=1).find("dog") == ["dog.txt"]
    first, second = tools.search("dog").split("\n")
    assert (first, second) == (
        "dog.txt: A dog barks at the other dog.",
        "fox.txt: The red fox jumps over the lazy dog.",
    )
    assert tools.search("fish").startswith("whale.txt: Blue whales swim; a whale is no fish. Water")
    assert tools.search("fish").endswith("...")
    assert tools.search("zebra") == tools.search("") == "No document has any of these words; try others."
    assert tools.read(" fox.txt ") == DOCUMENTS["fox.txt"]
    assert tools.read("cat\n.txt") == "There is no document 'cat .txt'. Give a name that a search has shown."
    assert Search({"long": "x" * 9000}).read("long").endswith("x\n[cut: it has 9000 characters]")


def test_search_over_a_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_bytes(b"caf\xe9 and tea")
    (tmp_path / "b.md").write_text("tea")
    assert Search.folder(tmp_path).find("tea") == ["deep/a.txt"]
    assert set(Search.folder(tmp_path, "**/*").find("tea")) == {"deep/a.txt", "b.md"}
    with pytest.raises(ConfigurationError, match=r"No file in .* fits '\*.csv'"):
        Search.folder(tmp_path, "*.csv")


def test_search_refuses_what_is_no_corpus_and_names_the_package(monkeypatch):
    for wrong in ({}, {"a": 1}):
        with pytest.raises(ConfigurationError, match="a mapping of names to texts"):
            Search(wrong)
    with pytest.raises(ConfigurationError, match="results must be from 1 to 10, not 0"):
        Search(DOCUMENTS, results=0)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingDependency, match=r"Search needs the package 'bm25s'.*\[search\]"):
        Search(DOCUMENTS)


# --- python and bash, alone ------------------------------------------------------------
@pytest.fixture(scope="module")
def sandbox_tools():
    with SandboxTools(SandboxSpec(memory_mb=256), files={"data.csv": "1,2\n"}, backend="bubblewrap", size=2) as tools:
        yield tools


def test_each_call_has_a_clean_sandbox_with_the_given_files(sandbox_tools):
    assert sandbox_tools.python("print(open('data.csv').read()); open('left', 'w').write('x')") == "1,2"
    assert sandbox_tools.bash("ls; exit 3") == "data.csv\n[exit code 3]"
    assert sandbox_tools.bash("echo x > data.csv; cat data.csv") == "x"
    assert sandbox_tools.bash("cat data.csv") == "1,2"
    assert sandbox_tools.python("1/0").endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert sandbox_tools.python("pass") == "(no output)"
    assert sandbox_tools.bash("echo '\ud800'") == "?"
    assert "at most 50000 are taken" in sandbox_tools.python("x" * 50_001)
    assert "no NUL character" in sandbox_tools.bash("a\0")
    long = sandbox_tools.python("print('ab' * 5000)")
    assert long.startswith("abab") and "[6000 characters are left out]" in long and len(long) < 4100


def test_rollouts_at_the_same_time_share_the_tools_and_nothing_else(sandbox_tools):
    """Standalone tools are not told whose call they get: 6 rollouts, each writes a file and looks for others'."""
    code = "import os, time; open('mine', 'w'); time.sleep(0.2); print(sorted(os.listdir('.')))"
    script = [{"role": "assistant", "tool_calls": [{"name": "python", "arguments": {"code": code}}] * 2}, "Done."]
    engine = RolloutEngine(
        ScriptedSampler(script), None, {None: EnvironmentPool(None)}, tools=build_tools(sandbox_tools.tools()),
        settings=RolloutSettings(max_completion_length=None, min_survivors=0),
    )  # fmt: skip
    plan = GroupPlan("g", Task(index=0, epoch=0, seed=0, row={"prompt": "Go."}), 6)
    (group,) = play_and_close(engine, Scorer([]), [plan])
    results = [call.content for rollout in group.rollouts for call in rollout.tool_calls]
    assert results == ["['data.csv', 'mine']"] * 12


def test_closed_tools_fail_as_the_environment_s_side():
    tools = SandboxTools(backend="bubblewrap")
    tools.close()
    tools.close()
    with pytest.raises(SandboxError, match="pool of sandboxes is closed"):
        tools.bash("ls")


# --- a workspace -----------------------------------------------------------------------
class Fix(Workspace):
    """An environment of one's own, with the tools of a workspace."""

    reward_range = (0.0, 1.0)

    def __init__(self) -> None:
        super().__init__(SandboxSpec(memory_mb=256, env={"PYTHONHASHSEED": "0"}), backend="bubblewrap")

    def reset(self, seed: int = 0) -> str:
        self.done = False
        self._start({"main.py": f"print({seed})\nprint({seed})\n"})
        return f"main.py prints {seed} twice. Make it print 'ok' and {seed}."

    def finish(self) -> str:
        """Say that it is done."""
        self.done = True
        return "It is over."

    def get_reward(self) -> float:
        return float(self._files("main.py", "no.py").get("main.py", b"").startswith(b"print('ok')\n"))

    def _gold(self):
        if self.get_reward():
            return {"tool_calls": [{"name": "finish", "arguments": {}}]}
        content = self.view("main.py").split("\n")[1].split(maxsplit=1)[1]
        arguments = {"path": "main.py", "content": f"print('ok')\n{content}\n"}
        return {"tool_calls": [{"name": "create", "arguments": arguments}]}


@pytest.fixture(scope="module")
def workspace():
    made = Fix()
    yield made
    made.close()


def test_a_derived_environment_has_the_tools(workspace):
    assert list(discover_tools(Fix)) == ["python", "bash", "view", "create", "edit", "finish"]
    workspace.reset(seed=7)
    assert workspace.python("import main") == "7\n7"


@pytest.mark.slow
def test_a_derived_environment_passes_its_check():
    assert [str(f) for f in check_environment(Fix) if f.level != "note"] == []


def test_view_create_and_edit_by_hand(workspace):
    workspace.reset(seed=7)
    assert workspace.view(".") == workspace.view("/work") == "main.py"
    assert workspace.view("main.py") == "    1 print(7)\n    2 print(7)"
    assert workspace.view("main.py", first_line=2) == "    2 print(7)"
    assert workspace.view("main.py", first_line=9) == "main.py has 2 lines."
    assert workspace.edit("main.py", "print(7)", "x") == (
        "Nothing was replaced: that text occurs 2 times in main.py. Give more of the lines around it."
    )
    assert workspace.edit("main.py", "print(8)", "x") == (
        "Nothing was replaced: that text does not occur in main.py. Look at the file again."
    )
    assert workspace.edit("main.py", "", "x").startswith("Nothing was replaced: that text is empty in main.py.")
    assert workspace.edit("main.py", "print(7)\nprint", "print('é')\nprint") == "main.py was changed."
    assert workspace.bash("cat main.py; echo; mkdir -p a; ln -s /etc/passwd a/link") == "print('é')\nprint(7)\n"[:-1]
    assert workspace.create("a/b/c.txt", "") == "a/b/c.txt was written."
    assert workspace.view("a/b/c.txt") == "a/b/c.txt is empty."
    assert workspace.create("many", "line\n" * 250) == "many was written."
    assert workspace.view("many").endswith("  200 line\n[50 more lines]")
    assert workspace.view(".") == "a/b/c.txt\nmain.py\nmany"


def test_paths_that_lead_out_or_nowhere_are_answered_in_text(workspace):
    workspace.reset(seed=7)
    workspace.bash(
        "ln -s /etc/passwd link; mkfifo pipe; mkdir folder; head -c 300000 /dev/zero > big; printf '\\xff' > raw"
    )
    for path, part in (
        ("/etc/passwd", "is no file below /work"), ("../x", "is no file below /work"), ("no.txt", "does not exist"),
        ("link", "symbolic link"), ("pipe", "is no regular file"), ("folder", "is a folder"),
        ("big", "at most 200000 may be downloaded"), ("raw", "is no text in UTF-8"), ("main.py/x", "is no folder"),
        ("a\0b", "is no file below /work"), ("x" * 401, "A path has at most 400 characters."),
    ):  # fmt: skip
        assert part in workspace.view(path), path
        assert part in workspace.edit(path, "a", "b"), path
    assert "is no file below /work" in workspace.create("/etc/passwd", "x")
    workspace.bash("for i in 1 2 3; do head -c 30000000 /dev/zero > fill$i; done")
    assert workspace.create("x", "x" * 40_000) == "'x' does not fit: /work is full (SandboxSpec.disk_mb and files)."
    assert "at most 50000 are taken" in workspace.create("x", "x" * 50_001)


# --- hostile arguments, for all of them ------------------------------------------------
def test_hostile_arguments_are_answered_in_text(sandbox_tools, workspace):
    search = Search(DOCUMENTS)
    workspace.reset(seed=1)
    lone = [calculator, clock, search.search, search.read, sandbox_tools.python, workspace.view, workspace.edit]

    async def run():
        instance = Instance(None)
        for function in lone:
            tool = build_tool(function)
            for arguments in bad_arguments(schema_of(tool), random.Random(0)):
                result = await instance.call(tool, arguments)
                assert result.error in (None, "bad_arguments"), (tool.name, str(arguments)[:80], result)
                assert isinstance(result.content, str) and len(result.content) < 5000
        await instance.close()

    asyncio.run(run())


def test_tools_are_cheap_to_describe_and_mark_what_needs_no_thread():
    assert [build_tool(one).inline for one in (calculator, clock, Clock().clock)] == [True, True, True]
    tools = build_tools([calculator, clock, *Search(DOCUMENTS).tools()])
    assert list(tools) == ["calculator", "clock", "search", "read"]
    assert isinstance(Workspace(), Environment)
