"""A folder in a sandbox that stays for an episode, and the tools of somebody who works in it."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.environment import Environment
from agentrl.errors import SandboxFileError
from agentrl.sandbox import SandboxSpec
from agentrl.sandbox.episode import EpisodeSandbox
from agentrl.sandbox.open import DEFAULT
from agentrl.sandbox.shown import MOST, cut, shown
from agentrl_tools.limits import MOST_SENT, too_much, words_of

MOST_LINES = 200  # of a file, that one look shows
MOST_PATH = 400  # characters
TOO_LONG = f"A path has at most {MOST_PATH} characters."
TIMEOUT_S = 10.0


class Workspace(Environment):
    """Derive an environment from it: its methods become tools, beside those that you add.

    Call `_start` in `reset`; look at `_files` in `get_reward`, and judge with `agentrl.sandbox.grade` or
    `run_function_tests`, in another sandbox. For a single conversation an instance may be used by itself:
    `tools=[workspace.python, workspace.bash]` after `workspace._start()`; rollouts at the same time would share it.

    Args:
        spec: Of the sandbox.
        backend: See `agentrl.sandbox.open_sandbox`.
    """

    def __init__(self, spec: SandboxSpec = DEFAULT, *, backend: str | None = None) -> None:
        self._box = EpisodeSandbox(spec, backend=backend)

    def _start(self, files: Mapping[str, bytes | str] | None = None) -> None:
        """The workspace has these files and nothing else."""
        self._box.start(files)

    def _files(self, *paths: str) -> dict[str, bytes]:
        """The content of those of these files that there are: the artefacts that are judged."""
        found = {}
        for path in paths:
            try:
                found[path] = self._box.download(path)
            except SandboxFileError:
                continue
        return found

    def close(self) -> None:
        """The sandbox is gone."""
        self._box.close()

    def python(self, code: str) -> str:
        """Run a Python program in the workspace. Its files stay, its variables do not.

        Args:
            code: The whole program; it shows only what it prints.

        Returns:
            What it printed, and how it ended.
        """
        return too_much(code) or shown(self._box.exec(["python3", "-"], stdin=code, timeout_s=TIMEOUT_S), MOST)

    def bash(self, command: str) -> str:
        """Run a command in bash, in the workspace. Files stay; each command begins in the same folder.

        Args:
            command: One or more lines for bash.

        Returns:
            What it printed, and how it ended.
        """
        return too_much(command) or shown(self._box.exec(words_of(command), timeout_s=TIMEOUT_S), MOST)

    def view(self, path: str, first_line: int = 1) -> str:
        """Show a file with the numbers of its lines, or the files of the workspace.

        Args:
            path: Of the file, such as src/main.py; "." lists all files.
            first_line: The line to begin with, from 1.

        Returns:
            At most 200 lines of it.
        """
        if path.strip() in ("", ".", "/work", "/work/"):
            return cut("\n".join(self._box.list_files()), MOST) or "There are no files."
        text, problem = self._read(path)
        if problem:
            return problem
        lines = text.splitlines()
        start = max(first_line, 1)
        part = lines[start - 1 : start - 1 + MOST_LINES]
        if not part:
            return f"{path} has {len(lines)} lines." if lines else f"{path} is empty."
        numbered = "\n".join(f"{number:>5} {line[:500]}" for number, line in enumerate(part, start))
        left = len(lines) - (start - 1 + len(part))
        return f"{numbered}\n[{left} more lines]" if left > 0 else numbered

    def create(self, path: str, content: str) -> str:
        """Write a file; one that is there by that name is replaced, and folders are made.

        Args:
            path: Of the file, such as src/main.py.
            content: All of its text.

        Returns:
            That it was written, or why not.
        """
        return too_much(content) or self._write(path, content) or f"{path} was written."

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a part of a file, which must occur in it exactly once.

        Args:
            path: Of the file.
            old: The text to replace, with its spaces and line ends; take enough lines around it to make it unique.
            new: The text in its place.

        Returns:
            That it was replaced, or why not.
        """
        text, problem = self._read(path)
        if problem or too_much(new):
            return problem or too_much(new)
        count = text.count(old) if old else 0
        if count != 1:
            how = "is empty" if not old else "does not occur" if count == 0 else f"occurs {count} times"
            hint = "Give more of the lines around it." if count > 1 else "Look at the file again."
            return f"Nothing was replaced: that text {how} in {path}. {hint}"
        return self._write(path, text.replace(old, new)) or f"{path} was changed."

    def _read(self, path: str) -> tuple[str, str]:
        """(text, "") or ("", why it cannot be had)."""
        if len(path) > MOST_PATH:
            return "", TOO_LONG
        try:
            return self._box.download(path, 4 * MOST_SENT).decode(), ""
        except SandboxFileError as error:
            return "", str(error)
        except UnicodeDecodeError:
            return "", f"{path} is no text in UTF-8."

    def _write(self, path: str, text: str) -> str:
        """Why it was not written; empty where it was."""
        if len(path) > MOST_PATH:
            return TOO_LONG
        try:
            self._box.upload({path: text.encode("utf-8", "replace")})
        except SandboxFileError as error:
            return str(error)
        return ""
