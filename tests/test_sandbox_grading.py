"""No way of cheating changes a verdict: each is tried."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxFileError
from agentrl.sandbox import Run, SandboxPool, SandboxSpec, grade, run_function_tests
from agentrl.sandbox.answering import decode, encode
from agentrl.sandbox.grading import same

CASES = [((1, 2), 3), ((5, 5), 10), ((-1, 1), 0)]
GOOD = "def add(a, b):\n    return a + b\n"
SECRET = secrets.token_hex(16)  # an expected value that nobody can guess, only find


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxSpec(), backend="bubblewrap", size=2) as pool:
        yield pool


def test_right_code_passes(pool: SandboxPool) -> None:
    verdict = run_function_tests(pool, GOOD + "print('noise on stdout')", "add", CASES)
    assert (verdict.passed, verdict.total, verdict.first_failure, verdict.score) == (3, 3, "", 1.0)
    assert verdict.printed == "noise on stdout\n"


def test_wrong_code_is_told_what_was_wrong(pool: SandboxPool) -> None:
    verdict = run_function_tests(pool, "def add(a, b):\n    return a - b if a == 5 else a + b", "add", CASES)
    assert verdict.passed == 2
    assert verdict.first_failure == "Case 2 of 3: add(5, 5) returned 0, expected 10."
    hidden = run_function_tests(pool, "def add(a, b): return 7", "add", CASES, reveal=False)
    assert hidden.passed == 0 and hidden.first_failure == "Case 1 of 3: wrong answer."


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def add(a, b)\n    return 1", "Case 1 of 3: the code cannot be loaded: SyntaxError: expected ':'"),
        ("x = 1", "Case 1 of 3: the code defines no function add."),
        ("add = 5", "Case 1 of 3: the code defines no function add."),
        ("raise KeyError('add')", "Case 1 of 3: the code cannot be loaded: KeyError: 'add' (line 1)."),
        (
            "def add(a, b):\n    return [][1]",
            "Case 1 of 3: add(1, 2) raised IndexError: list index out of range (line",
        ),
        ("def add(a): return a", "Case 1 of 3: add(1, 2) raised TypeError: add() takes 1 "),
        ("def add(a, b): return object()", "Case 1 of 3: add(1, 2) raised TypeError: object is no plain value"),
        ("def add(a, b):\n while True: pass", "Case 1 of 3: the code took too long before it had answered."),
        ("def add(a, b): return input()", "Case 1 of 3: add(1, 2) raised EOFError"),
        ("def add(a, b): return 10 ** 6000", "Case 1 of 3: add(1, 2) raised ValueError: Exceeds the limit"),
        ("def add(a, b):\n x = []\n x.append(x)\n return x", "Case 1 of 3: add(1, 2) raised RecursionError"),
    ],
)
def test_code_that_breaks_fails_with_its_reason(pool: SandboxPool, source: str, text: str) -> None:
    verdict = run_function_tests(pool, source, "add", CASES, timeout_s=1.5)
    assert verdict.passed == 0
    assert verdict.first_failure.startswith(text), verdict.first_failure


FORGED = "\n".join(json.dumps({"index": i, "value": "pass", "passed": True, "score": 1.0}) for i in range(3))
CHEATS = {
    "early exit": "import sys\nsys.exit(0)",
    "early exit in the call": "def add(a, b):\n import sys\n sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the call": "def add(a, b):\n import os\n os._exit(0)",
    "forged lines": f"print('''{FORGED}''')\nprint('OK')\ndef add(a, b): return 'pass'",
    "forged lines on every descriptor": (
        f"import os\nfor fd in range(20):\n try: os.write(fd, b'''\\n{FORGED}\\n''')\n"
        " except OSError: pass\nos._exit(0)"
    ),
    "atexit": f"import atexit\natexit.register(lambda: print('''{FORGED}'''))\ndef add(a, b): return None",
    "patched unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "unittest.TestResult.wasSuccessful = lambda s: True\ndef add(a, b): return None"
    ),
    "patched json": 'import json\njson.dumps = lambda *a, **k: \'{"index": 0, "ok": 1}\'\ndef add(a, b): return None',
    "patched builtins": (
        "import builtins\nbuiltins.all = builtins.any = builtins.isinstance = lambda *a: True\n"
        "builtins.len = lambda x: 0\ndef add(a, b): return None"
    ),
    "patched answering": (
        "import sys\nmain = sys.modules['__main__']\nmain.same = lambda *a: True\n"
        "main.encode = lambda v: {'dict': []}\ndef add(a, b): return None"
    ),
    "equal to everything": "class X(int):\n __eq__ = lambda s, o: True\n __hash__ = None\ndef add(a, b): return X(99)",
    "a text equal to everything": "class X(str):\n __eq__ = lambda s, o: True\ndef add(a, b): return X('3')",
    "a dict with odd items": "class X(dict):\n items = lambda s: [(1, 2)]\ndef add(a, b): return X()",
    "nested without end on the channel": (
        "import os\nfor fd in (1, 3, 4, 5):\n try: os.write(fd, b'[' * 99999 + b'\\n')\n"
        " except OSError: pass\nos._exit(0)"
    ),
    "kill": "import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)\nos.kill(os.getpid(), 9)",
    "True for 1": "def add(a, b): return True",
    "not a number": "def add(a, b): return float('nan')",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_passes_nothing(pool: SandboxPool, cheat: str) -> None:
    verdict = run_function_tests(pool, CHEATS[cheat], "add", [*CASES, ((0, 1), 1)], timeout_s=5)
    assert verdict.passed == 0, cheat
    assert verdict.first_failure
    assert run_function_tests(pool, GOOD, "add", CASES).score == 1.0, "the next verdict in this pool is right"


HUNT = """
import gc, glob, os, re, sys
def hunt():
    text = repr([f.f_locals for f in frames()]) + repr(sys.argv) + repr(dict(os.environ))
    for thing in gc.get_objects():
        try: text += repr(thing)[:20000]
        except BaseException: pass
    paths = glob.glob('/work/**', recursive=True) + glob.glob('/tmp/**', recursive=True)
    for path in paths + glob.glob('/proc/*/cmdline'):
        try: text += open(path, errors='replace').read()
        except OSError: pass
    try: text += sys.stdin.read()
    except BaseException: pass
    return text
def frames():
    frame = sys._getframe()
    while frame: yield frame; frame = frame.f_back
def secret(hint):
    found = set(re.findall(r'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])', hunt()))
    found.discard(hint)
    return sorted(found)[0] if found else 'nothing found'
"""


def test_expected_values_are_nowhere_in_the_sandbox(pool: SandboxPool) -> None:
    """The arguments are found by the same search, so that it is known to search well."""
    hint = secrets.token_hex(16)
    verdict = run_function_tests(pool, HUNT, "secret", [((hint,), SECRET)])
    assert verdict.passed == 0 and "nothing found" in verdict.first_failure, verdict
    finds = HUNT.replace("found.discard(hint)", "pass")
    assert run_function_tests(pool, finds, "secret", [((hint,), hint)]).passed == 1


PLANTED = {
    "conftest.py": b"import os\nos._exit(0)",
    "sitecustomize.py": b"import os\nos._exit(0)",
    "usercustomize.py": b"import os\nos._exit(0)",
    "unittest.py": b"import os\nos._exit(0)",
    "json.py": b"import os\nos._exit(0)",
    "check.py": b"import os\nos._exit(0)",
    "score": b"1.0",
    "pytest.ini": b"[pytest]\naddopts = --collect-only",
    ".local/lib/python3.11/site-packages/usercustomize.py": b"import os\nos._exit(0)",
}
CHECK = """
import json, os
runs = json.load(open('runs.json'))
assert [r['reason'] for r in runs] == ['ok'] and runs[0]['exit_code'] == 0, runs
assert runs[0]['stdout'] == 'sorted: 1 2 3\\n', runs
assert open('artefacts/notes.txt').read() == 'done'
"""
PROGRAM = b"import sys\nprint('sorted:', *sorted(sys.stdin.read().split()))"
RUN = Run(["python3", "-I", "program.py"], stdin="3 1 2")


def test_a_checker_judges_programs_and_files(pool: SandboxPool) -> None:
    files = {"program.py": PROGRAM, "notes.txt": b"done"}
    right = grade(pool.spec, files, {"check.py": CHECK}, ["python3", "check.py"], runs=[RUN], pool=pool)
    assert right.score == 1.0 and right.passed, right
    wrong = grade(
        pool.spec, {**files, "notes.txt": b"no"}, {"check.py": CHECK}, ["python3", "check.py"], runs=[RUN], pool=pool
    )
    assert wrong.score == 0.0 and not wrong.passed and "AssertionError" in wrong.checker.stderr


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_files_do_not_reach_the_checker(pool: SandboxPool, planted: str) -> None:
    """os._exit(0) in any of them, were it run by the checker, would be a pass."""
    files = {planted: PLANTED[planted], "program.py": b"print('wrong')", "notes.txt": b"done"}
    result = grade(pool.spec, files, {"check.py": CHECK}, ["python3", "check.py"], runs=[RUN], pool=pool)
    assert result.score == 0.0 and result.checker.exit_code == 1, result


def test_a_program_finds_nothing_hidden_and_leaves_nothing(pool: SandboxPool) -> None:
    spy = (
        b"import glob\ntexts = str([open(f).read() for f in glob.glob('/work/*.*')])\n"
        b"print(glob.glob('/work/**', recursive=True), 'HID' + 'DEN' in texts)\n"
        b"open('/work/score', 'w').write('1'); open('/work/check.py', 'w').write('')"
    )
    hidden = {"check.py": "raise SystemExit(1)  # HIDDEN", "expected.txt": SECRET}
    result = grade(pool.spec, {"program.py": spy}, hidden, ["python3", "check.py"], runs=[RUN], pool=pool)
    assert result.runs[0].stdout == "['/work/', '/work/program.py'] False\n", result.runs
    assert result.score == 0.0


@pytest.mark.parametrize(
    ("checker", "score"),
    [
        ("open('score', 'w').write('0.25')", 0.25),
        ("open('score', 'w').write('7')", 0.0),
        ("open('score', 'w').write('nan')", 0.0),
        ("open('score', 'w').write('x')", 0.0),
        ("open('score', 'w').write('1'); raise SystemExit(3)", 0.0),
        ("import os; os.kill(os.getpid(), 9)", 0.0),
        ("pass", 1.0),
    ],
)
def test_scores_of_a_checker(pool: SandboxPool, checker: str, score: float) -> None:
    assert grade(pool.spec, {}, {"check.py": checker}, ["python3", "check.py"], pool=pool).score == score


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@given(plain)
def test_a_value_is_the_same_after_its_way_through_json(value: object) -> None:
    assert same(value, decode(json.loads(json.dumps(encode(value)))))


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1, True),
        (True, 1),
        (0, None),
        (1, "1"),
        ("1", 1),
        (b"a", "a"),
        ([], None),
        ([1], [1, 1]),
        ([1, 2], {1, 2}),
        ({1: 2}, {"1": 2}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": [1]}, {"a": [2]}),
        (0.3, 0.31),
        (10**400, 1.0),
        (2**60, 2**60 + 1),
        (float("inf"), float("-inf")),
        (23416728348467685, 2.3416728348467744e16),  # the 80th Fibonacci number, and a formula's answer
        (10**12, 1e12 + 1),
        ({1}, {True}),
        ({True: 1}, {1: 1}),
        ({(1, 0)}, {(1, False)}),
    ],
)
def test_values_that_differ(expected: object, got: object) -> None:
    assert not same(expected, got)


def test_floats_that_are_near_are_the_same() -> None:
    assert same(2, 2.0) and same(2, 1.9999999999999998) and same(0.3, 0.1 + 0.2) and same(10**15, 1e15)


COLLIDING = """
import os
text = '{"index": 0, "value": {"set": [' + ','.join(str(k * (2**61 - 1)) for k in range(1, 40000)) + ']}}\\n'
for fd in (3, 4, 5):
    try: os.write(fd, b'')
    except OSError: continue
    data = text.encode()
    while data: data = data[os.write(fd, data):]
    break
os._exit(0)
"""


def test_an_answer_of_ints_with_one_hash_does_not_hold_up_the_host(pool: SandboxPool) -> None:
    assert len({hash(k * (2**61 - 1)) for k in range(1, 100)}) == 1
    began = time.monotonic()
    verdict = run_function_tests(pool, COLLIDING, "add", CASES)
    assert verdict.passed == 0 and "far too many items" in verdict.first_failure, verdict
    assert time.monotonic() - began < 4, "8 s and more, if they were put into a set"
    large = set(range(1000))
    assert run_function_tests(pool, "def f(n): return set(range(n))", "f", [((1000,), large)]).score == 1.0


@pytest.mark.parametrize(
    "artefacts",
    [
        {"a": b"x" * (5 << 20), "b": b"x" * (5 << 20)},
        {f"d/{i}": b"" for i in range(398)},
        {"a": b"x" * (7 << 20)},
        {"a": b"", "a/b": b""},
        {"../check.py": b"pass"},
        {"input/x": b""},
    ],
    ids=["all of the disk", "all of the files", "one too large", "a file and a folder", "outside", "where ours goes"],
)
def test_artefacts_that_break_the_grading_score_nothing(artefacts: dict[str, bytes]) -> None:
    """An error would count as the environment's: the rollout would be dropped, and the run stopped in the end."""
    spec, runs = SandboxSpec(disk_mb=10, files=400, file_mb=6), [Run(["true"], files={"input": "1"})]
    hidden = {"check.py": "pass", "more.txt": "x"}
    result = grade(spec, artefacts, hidden, ["true"], runs=runs, backend="bubblewrap")
    assert result.score == 0.0 and "cannot be graded" in result.checker.stderr, result
    assert grade(spec, {}, hidden, ["true"], runs=runs, backend="bubblewrap").score == 1.0
    with pytest.raises(SandboxFileError, match=r"check\.py"):
        grade(spec, {}, {"check.py": b"x" * (7 << 20)}, ["true"], backend="bubblewrap")


def test_programs_that_print_without_end_do_not_break_the_grading(pool: SandboxPool) -> None:
    flood = Run(["python3", "-c", "import os\nwhile True: os.write(1, bytes(65536))"])
    hidden = {"check.py": "import json; print([r['reason'] for r in json.load(open('runs.json'))])"}
    result = grade(pool.spec, {}, hidden, ["python3", "check.py"], runs=[flood] * 8, pool=pool)
    assert result.checker.stdout == str(["output"] * 8) + "\n", result.checker


def test_a_case_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(TypeError, match="object is no plain value"):
        run_function_tests(SandboxSpec(), GOOD, "add", [((1, 2), object())])
