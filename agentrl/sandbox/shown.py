"""What a model reads of a command that it ran: the same text for the same doing, without times."""

from __future__ import annotations

from agentrl.sandbox.types import ExecResult

MOST = 4000  # characters of a command's output that a model reads


def shown(result: ExecResult, most: int = MOST) -> str:
    """Output, errors and, in brackets, how it ended where that was not with exit code 0.

    >>> shown(ExecResult(1, "7\\n", "no such file\\n", False, "ok", 0.1))
    '7\\nno such file\\n[exit code 1]'
    >>> shown(ExecResult(0, "", "", False, "ok", 0.1))
    '(no output)'
    """
    out, err = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    half = most // 2
    room = most - min(len(err), half)
    parts = [cut(out, room), cut(err, most - min(len(out), room))]
    ended = {
        "timeout": "[stopped: it took too long]",
        "oom": "[stopped: it used too much memory]",
        "output": "[stopped: it printed too much]",
        "killed": "[it was killed]",
    }.get(result.reason)
    if ended is None and result.exit_code != 0:
        ended = f"[exit code {result.exit_code}]"
    return "\n".join(part for part in [*parts, ended] if part) or "(no output)"


def cut(text: str, most: int) -> str:
    """The text, or its two ends with a note on what is missing between them.

    >>> cut("abcdefgh", 4)
    'ab\\n[4 characters are left out]\\ngh'
    """
    if len(text) <= most:
        return text
    head = most - most // 2
    return f"{text[:head]}\n[{len(text) - most} characters are left out]\n{text[len(text) - most // 2 :]}"
