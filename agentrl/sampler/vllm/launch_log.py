"""Why a vLLM server ended, out of a log that is hundreds of lines long."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

# "(EngineCore pid=17) ERROR 11-30 00:25:50 [core.py:1510] ", every part of which may be missing
PREFIX = re.compile(r"^(\(\w+ pid=\d+\) ?)?((ERROR|WARNING|INFO|DEBUG|CRITICAL) [\d: -]+\[[^\]]*\] ?)?")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
EXCEPTION = re.compile(r"^([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt|NotFound)(: .*)?$")
USAGE = re.compile(r"^[\w.]+\.py: error: (.*)$")
# raised by who waits for the process that failed, or said while the interpreter is torn down
WRAPPERS = ("Engine core initialization failed", "WorkerProc initialization failed", "KeyboardInterrupt")
NOISE = re.compile(r"leaked|nanobind|resource_tracker|warnings\.warn|errors\.pydantic\.dev|^\W*$|skipped remainder")
LONGEST = 400


def cause(text: str) -> str:
    """The line of a server's log that says why it ended; "" where there is none.

    That is the last exception that is not merely the news of another process's; else what the parser of arguments
    said, else the last line that means something.

    >>> cause("ValueError: no room\\nRuntimeError: Engine core initialization failed. See root cause above.")
    'ValueError: no room'
    >>> cause("usage: api_server.py [--a]\\napi_server.py: error: unrecognized arguments: --b")
    'unrecognized arguments: --b'
    """
    lines = [PREFIX.sub("", COLOUR.sub("", line)).rstrip() for line in text.splitlines()]
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if usage := USAGE.match(line):
            return _short(usage[1])
        if EXCEPTION.match(line) and not any(word in line for word in WRAPPERS):
            return _short(_validation(lines[number : number + 2]) or line)
    return _short(next((line for line in reversed(lines) if not NOISE.search(line)), ""))


def tail(path: Path, start: int = 0, limit: int = 200_000) -> str:
    """The end of a log file, of what was written from the byte `start` on; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def address_in_use(text: str) -> bool:
    """Whether the server ended because somebody else has its port."""
    return "address already in use" in text.lower()


def _validation(lines: Iterable[str]) -> str | None:
    """What pydantic says in the line below "1 validation error for ModelConfig"."""
    first, second = [*lines, ""][:2]
    if "validation error" not in first or not second.startswith("  "):
        return None
    return second.strip().removeprefix("Value error, ").partition(" [type=")[0]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
