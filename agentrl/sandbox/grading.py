"""Verdicts that the code under test cannot write: it answers in one sandbox, and is judged outside of it.

Two ways. `run_function_tests`: a function is called in a clean sandbox, and its answers are compared here on the host;
the expected values never go in. `grade`: programs run in one clean sandbox with the artefacts, and a hidden checker
runs in a second one, which has what they printed and the artefacts as data, and where none of the agent's code runs.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxFileError
from agentrl.sandbox import answering
from agentrl.sandbox.open import open_sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.types import ExecResult, Reason, Sandbox, SandboxSpec

ANSWERING = Path(answering.__file__).read_text(encoding="utf-8")
PYTHON = ("python3", "-I")  # no user site, no PYTHON* variables, no module of the folder it runs in
MOST_ANSWERS = 4 << 20  # bytes
ENDED = {
    "timeout": "took too long",
    "oom": "used too much memory",
    "output": "printed too much",
    "killed": "was killed",
}


@dataclass(frozen=True, slots=True)
class FunctionVerdict:
    """How many cases the function passed. `first_failure` is a sentence on the first that it did not, or empty.

    `printed` is what the code wrote to standard output and error, and `reason` how its process ended.
    """

    passed: int
    total: int
    first_failure: str
    printed: str
    reason: Reason

    @property
    def score(self) -> float:
        """The share of cases passed, in [0, 1]; 0 without cases."""
        return self.passed / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A program of the agent's that `grade` runs with the artefacts in /work, before the checker."""

    argv: Sequence[str]
    stdin: str = ""
    files: Mapping[str, bytes | str] | None = None  # inputs that lie in /work too


@dataclass(frozen=True, slots=True)
class Grade:
    """What the hidden checker said: `score` is 0 unless it exits with 0, then what it wrote to /work/score or 1."""

    score: float
    checker: ExecResult
    runs: tuple[ExecResult, ...]

    @property
    def passed(self) -> bool:
        return self.score == 1.0


def run_function_tests(
    where: SandboxSpec | SandboxPool,
    source: str,
    function: str,
    cases: Sequence[tuple[Sequence[Any], Any]],
    timeout_s: float = 10.0,
    *,
    backend: str | None = None,
    reveal: bool = True,
) -> FunctionVerdict:
    """The verdict on `function(*args) == expected` for each case, with the source in a clean sandbox of its own.

    Values are None, bool, int, float, str, bytes, lists or tuples (the same to it), dicts and sets. bool is not int;
    floats may differ by 1e-9 of their size. All cases share one process and the deadline; what is not answered is not
    passed. With `reveal=False` the sentence on a failure names neither arguments nor values. TypeError for a case
    whose values are of another type; SandboxError where the sandbox breaks.
    """
    calls = [answering.encode(list(arguments)) for arguments, _ in cases]
    for _, expected in cases:
        answering.encode(expected)
    job = json.dumps({"source": source, "function": function, "calls": calls})
    with borrow(where, backend) as sandbox:
        done = sandbox.exec([*PYTHON, "-c", ANSWERING], stdin=job, timeout_s=timeout_s, max_output_bytes=MOST_ANSWERS)
    answers, failed = _answers(done.stdout)
    failures = []
    for index, (arguments, expected) in enumerate(cases):
        told = answers.get(index, {"missing": failed or _ending(done)})
        if "value" in told and same(expected, told["value"]):
            continue
        call = f"{function}({', '.join(map(_short, arguments))})"
        failures.append(f"Case {index + 1} of {len(cases)}: {_failure(call, expected, told, reveal)}.")
    first = failures[0] if failures else ""
    return FunctionVerdict(len(cases) - len(failures), len(cases), first, done.stderr, done.reason)


def grade(
    spec: SandboxSpec,
    artefacts: Mapping[str, bytes],
    hidden: Mapping[str, bytes | str],
    argv: Sequence[str],
    timeout_s: float = 30.0,
    *,
    runs: Sequence[Run] = (),
    backend: str | None = None,
    pool: SandboxPool | None = None,
) -> Grade:
    """The score that the hidden checker `argv` gives to the artefacts.

    Each of `runs` is executed in a sandbox that has the artefacts in /work, and nothing hidden. The checker then runs
    in another clean one: the hidden files are in /work, the artefacts are data below /work/artefacts, and
    /work/runs.json is a list of `{"exit_code", "stdout", "stderr", "reason", ...}` of the runs. It must never execute
    or import an artefact. Exit code 0 is a pass; it may write a number from 0 to 1 to /work/score. `timeout_s` holds
    for each command. What the checker's own failure means: 0. SandboxError where a sandbox breaks.
    """
    where = pool if pool is not None else spec
    results = []
    for run in runs:
        with borrow(where, backend) as sandbox:
            sandbox.upload(artefacts)
            sandbox.upload(run.files or {})
            results.append(sandbox.exec(run.argv, stdin=run.stdin, timeout_s=timeout_s, max_output_bytes=1 << 20))
    with borrow(where, backend) as sandbox:
        sandbox.upload({f"artefacts/{path}": content for path, content in artefacts.items()})
        sandbox.upload({**hidden, "runs.json": json.dumps([asdict(result) for result in results])})
        done = sandbox.exec(argv, timeout_s=timeout_s, max_output_bytes=1 << 20)
        passed = done.reason == "ok" and done.exit_code == 0
        return Grade(_score(sandbox) if passed else 0.0, done, tuple(results))


def _score(sandbox: Sandbox) -> float:
    try:
        score = float(sandbox.download("score", max_bytes=100))
    except SandboxFileError:
        return 1.0
    except ValueError:
        return 0.0
    return score if 0.0 <= score <= 1.0 else 0.0


@contextlib.contextmanager
def borrow(where: SandboxSpec | SandboxPool, backend: str | None = None) -> Iterator[Sandbox]:
    """A clean sandbox, of the pool or opened for the length of the block."""
    if isinstance(where, SandboxPool):
        with where.lend() as sandbox:
            yield sandbox
    else:
        with open_sandbox(where, backend=backend) as sandbox:
            yield sandbox


def same(expected: Any, got: Any) -> bool:
    """Whether an answer is the expected value; what is compared is led by the expected one, whatever the answer holds.

    >>> same((1, 0.3), [1, 0.1 + 0.2]), same(1, True), same({"a": {1}}, {"a": {1}})
    (True, False, True)
    """
    if expected is None or isinstance(expected, (bool, str, bytes, bytearray)):
        return type(got) is type(expected) and got == expected
    if isinstance(expected, (int, float)):
        return type(got) in (int, float) and _close(expected, got)
    if isinstance(expected, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(expected) and all(map(same, expected, got))
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same(v, got[k]) for k, v in expected.items())
        )
    return isinstance(got, set) and got == expected


def _close(expected: float, got: float) -> bool:
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    try:
        return math.isclose(expected, got, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(expected) and math.isnan(got))
    except OverflowError:  # an int that no float can hold
        return False


def _answers(text: str) -> tuple[dict[int, dict[str, Any]], str]:
    """The lines by the number of their call, values decoded, and why there are none; what is malformed is left out."""
    answers: dict[int, dict[str, Any]] = {}
    failed = ""
    for line in text.splitlines():
        try:
            told = json.loads(line)
            if isinstance(told.get("failed"), str):
                failed = told["failed"]
            if "value" in told:
                told["value"] = answering.decode(told["value"])
            if type(told.get("index")) is int:
                answers[told["index"]] = told
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return answers, failed


def _ending(done: ExecResult) -> str:
    if done.reason != "ok":
        return f"the code {ENDED[done.reason]} before it had answered"
    return f"the process ended (exit code {done.exit_code}) before it had answered"


def _failure(call: str, expected: Any, told: dict[str, Any], reveal: bool) -> str:
    if "value" not in told:
        why = str(told.get("error") or told.get("missing") or "no answer")[:600]
        if not reveal:
            return why.partition(":")[0] if "error" in told else why
        return f"{call} raised {why}" if "error" in told else why
    return f"{call} returned {_short(told['value'])}, expected {_short(expected)}" if reveal else "wrong answer"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of too many digits, or nested without end
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 300 else text[:300] + "..."
