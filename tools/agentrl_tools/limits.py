"""What a model may send into a sandbox."""

from __future__ import annotations

MOST_SENT = 50_000  # characters of a program, a command or a file


def too_much(text: str) -> str:
    """What the model reads where the text is not taken; empty where it is.

    >>> too_much("x" * 50_001)
    'Nothing was done: that has 50001 characters; at most 50000 are taken, and no NUL character.'
    """
    if len(text) <= MOST_SENT and "\0" not in text:
        return ""
    return f"Nothing was done: that has {len(text)} characters; at most {MOST_SENT} are taken, and no NUL character."


def words_of(command: str) -> list[str]:
    """The command line that runs it; half a surrogate pair, which no command line may have, is a question mark.

    >>> words_of("ls \\ud800")
    ['bash', '-c', 'ls ?']
    """
    return ["bash", "-c", command.encode("utf-8", "replace").decode()]
