"""What an episode in a shell must have left, judged outside of the agent's sandbox from the files that are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agentrl.errors import SandboxFileError
from agentrl.sandbox.episode import CleanSandboxes, EpisodeSandbox

ANSWER = "answer.txt"
WROTE = 0.1  # for an answer that is not the right one
MOST_BYTES = 1 << 16  # of a file that is judged
RUN_S = 5.0  # for each input of a script


class Goal(Protocol):
    """What is to be reached."""

    def score(self, box: EpisodeSandbox, clean: CleanSandboxes) -> float:
        """From 0 to 1; `box` is the agent's, from which only files are read, and `clean` are for running them."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A text in answer.txt."""

    expected: str

    def score(self, box: EpisodeSandbox, clean: CleanSandboxes) -> float:
        """1 for the right one, a little for another."""
        written = _read(box, ANSWER)
        if written is None or not (text := written.strip()):
            return 0.0
        return 1.0 if text.removeprefix("/work/").removeprefix("./") == self.expected else WROTE


@dataclass(frozen=True, slots=True)
class Tree:
    """Files below a folder. `units` are the changes: each is right where all of its paths are as expected."""

    folder: str
    expected: Mapping[str, str]
    units: tuple[tuple[str, ...], ...]

    def score(self, box: EpisodeSandbox, clean: CleanSandboxes) -> float:
        """The share of the changes that are right, less one change for each other file that is not as it was."""
        paths = [path for path in box.list_files() if path.startswith(f"{self.folder}/")]
        if len(paths) > 2 * len(self.expected) + 10:
            return 0.0
        found = {path: _read(box, path) for path in paths}
        wrong = {path for path in found.keys() | self.expected.keys() if found.get(path) != self.expected.get(path)}
        right = sum(not wrong.intersection(unit) for unit in self.units)
        harmed = wrong.difference(*self.units)
        return max(0, right - len(harmed)) / len(self.units)


@dataclass(frozen=True, slots=True)
class Script:
    """A Python script that prints what it should for inputs that nobody has seen."""

    path: str
    runs: tuple[tuple[str, str], ...]  # standard input, what should be printed

    def score(self, box: EpisodeSandbox, clean: CleanSandboxes) -> float:
        """The share of the inputs; only the script is taken along, into a sandbox without what should be printed."""
        script = _read(box, self.path)
        if script is None:
            return 0.0
        right = 0
        with clean.lend() as judge:
            for given, expected in self.runs:
                judge.upload({self.path: script})
                done = judge.exec(["python3", "-I", self.path], stdin=given, timeout_s=RUN_S)
                right += done.reason == "ok" and done.exit_code == 0 and done.stdout.rstrip() == expected.rstrip()
                judge.reset()
        return right / len(self.runs)


def _read(box: EpisodeSandbox, path: str) -> str | None:
    """The text of a file; None where there is no such regular file, or it is no text or too large."""
    try:
        return box.download(path, MOST_BYTES).decode()
    except (SandboxFileError, UnicodeDecodeError):
        return None
