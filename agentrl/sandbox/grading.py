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
MOST_HASHED = 256  # items of sets and dicts in an answer, where the expected value has fewer
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
    floats may differ by 1e-9 of their size, and a float for an int must round to it. All cases share one process and
    the deadline; what is not answered is not passed. With `reveal=False` the sentence on a failure names neither
    arguments nor values. TypeError for a case whose values are of another type; SandboxError where the sandbox breaks.
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
        told = _decoded(answers.get(index, {}), expected) or {"missing": failed or _ending(done)}
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
    for each command. What the checker's own failure means: 0, and so do artefacts that leave no room for the files of
    the grading (`checker.stderr` says so). SandboxError where a sandbox breaks.
    """
    where = pool if pool is not None else spec
    results: list[ExecResult] = []
    # A byte may take six in runs.json, which must fit however much the programs print.
    most = min(1 << 20, (min(2 * spec.file_mb, spec.disk_mb) << 20) // (16 * max(1, len(runs))))
    for run in runs:
        with borrow(where, backend) as sandbox:
            if why := _put(sandbox, artefacts, run.files or {}):
                return Grade(0.0, why, tuple(results))
            results.append(sandbox.exec(run.argv, stdin=run.stdin, timeout_s=timeout_s, max_output_bytes=most))
    with borrow(where, backend) as sandbox:
        told = {**hidden, "runs.json": json.dumps([asdict(result) for result in results])}
        if why := _put(sandbox, {f"artefacts/{path}": content for path, content in artefacts.items()}, told):
            return Grade(0.0, why, tuple(results))
        done = sandbox.exec(argv, timeout_s=timeout_s, max_output_bytes=1 << 20)
        passed = done.reason == "ok" and done.exit_code == 0
        return Grade(_score(sandbox) if passed else 0.0, done, tuple(results))


def _put(sandbox: Sandbox, artefacts: Mapping[str, bytes], ours: Mapping[str, bytes | str]) -> ExecResult | None:
    """The artefacts are in place, and our files over them; else, where only ours would be, what is wrong with them.

    Otherwise an agent could escape its score by artefacts that break the grading.
    """
    try:
        sandbox.upload(artefacts)
        sandbox.upload(ours)
    except SandboxFileError as error:
        sandbox.reset()
        sandbox.upload(ours)
        return ExecResult(None, "", f"The artefacts cannot be graded: {error}", False, "killed", 0.0)
    return None


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
            and set(map(_typed, got)) == set(map(_typed, expected))
            and all(same(v, got[k]) for k, v in expected.items())
        )
    return isinstance(got, set) and set(map(_typed, got)) == set(map(_typed, expected))


def _typed(item: Any) -> Any:
    """An item of a set that equals another only where both are bool or neither is."""
    if isinstance(item, tuple):
        return tuple(map(_typed, item))
    return ("bool", item) if isinstance(item, bool) else item


def _close(expected: float, got: float) -> bool:
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    try:
        if not math.isclose(expected, got, rel_tol=1e-9, abs_tol=1e-12):
            return math.isnan(expected) and math.isnan(got)
        # 1e-9 of a large int is more than 1: a formula in floats is no answer to a question about ints.
        return round(got) == expected if isinstance(expected, int) else True
    except OverflowError:  # an int that no float can hold
        return False


def _answers(text: str) -> tuple[dict[int, dict[str, Any]], str]:
    """The lines by the number of their call, and why there are none; what is malformed is left out."""
    answers: dict[int, dict[str, Any]] = {}
    failed = ""
    for line in text.splitlines():
        try:
            told = json.loads(line)
            if isinstance(told.get("failed"), str):
                failed = told["failed"]
            if type(told.get("index")) is int:
                answers[told["index"]] = told
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return answers, failed


def _decoded(told: dict[str, Any], expected: Any) -> dict[str, Any]:
    """The line with its value decoded; empty where that is no value.

    Code can write ints that all have one hash, and a set of many of them costs hours here: it is counted first.
    """
    if "value" not in told:
        return told
    if _hashed(told["value"]) > max(MOST_HASHED, _hashed(answering.encode(expected))):
        return {"missing": "the answer has far too many items in sets or dicts"}
    try:
        return {**told, "value": answering.decode(told["value"])}
    except (ValueError, TypeError, RecursionError):
        return {}


def _hashed(value: Any) -> int:
    """How many items of sets and dicts decoding this value means."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            count += sum(len(content) for content in each.values() if isinstance(content, list))
            left += each.values()
        elif isinstance(each, list):
            left += each
    return count


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
