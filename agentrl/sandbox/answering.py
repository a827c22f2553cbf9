"""Runs inside of a sandbox: calls a function of untrusted source with given arguments and tells what came back.

Its text is sent into the sandbox, so it needs nothing but Python 3.9. It decides nothing: whoever forges a line on
its channel has only given another answer, which the host compares with values that never come in here.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def encode(value: Any) -> Any:
    """A JSON value from which `decode` makes the same value; tuples become lists. TypeError for other types.

    >>> encode({1: (2.5, None)})
    {'dict': [[1, [2.5, None]]]}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    raise TypeError(f"{type(value).__name__} is no plain value (None, bool, int, float, str, bytes, list, dict, set)")


def decode(value: Any) -> Any:
    """The value that `encode` was given; ValueError or TypeError for JSON that it did not make.

    >>> decode(encode({"a": {1, 2}, (1, 2): b"x"}))
    {'a': {1, 2}, (1, 2): b'x'}
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_hashable(decode(key)): decode(item) for key, item in content}
    if kind == "set":
        return {_hashable(decode(item)) for item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    raise ValueError(f"{kind!r} is no kind of value")


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def main() -> None:
    """One line of JSON for each call of the job on standard input; what the source prints goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.buffer.read())

    def answer(line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    module: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(job["source"], "solution.py", "exec"), module)
    except BaseException as error:
        return answer(json.dumps({"failed": f"the code cannot be loaded: {_told(error)}"}))
    function = module.get(job["function"])
    if not callable(function):
        return answer(json.dumps({"failed": f"the code defines no function {job['function']}"}))
    for index, arguments in enumerate(job["calls"]):
        try:
            line = json.dumps({"index": index, "value": encode(function(*decode(arguments)))})
        except BaseException as error:
            line = json.dumps({"index": index, "error": _told(error)})
        answer(line)


def _told(error: BaseException) -> str:
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "solution.py":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:500] + (f" (line {lines[-1]})" if lines else "")


if __name__ == "__main__":
    main()
