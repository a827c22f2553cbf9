"""Every claim in the docs is executed: Python blocks, commands, examples, links.

The Python blocks of one page run in order in one namespace, in a folder of their own; `python no-run` marks a block
that needs hardware and is only compiled, `python file=NAME` is also written to that file, and `python notebook` is a
cell: it runs in the thread of a running event loop, and may await. Commands of `agentrl` run through its own `main`; a
quickstart is cut to two batches. Other commands must be of the known kinds below, most of which `.ci/run` executes. An
example that needs minutes says in its first line "# tested by tests/...", and that file runs it.
"""

from __future__ import annotations

import ast
import asyncio
import re
import runpy
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
HEAVY = {path: found[1] for path in EXAMPLES if (found := re.match(r"# tested by (tests/\w+\.py)\b", path.read_text()))}
LANGUAGES = {"python", "bash", "text", "json", "toml", "yaml", ""}
NOT_RUN_HERE = re.compile(
    r"(git clone|cd|python3 -m venv|(\.venv/bin/|/tmp/pins/bin/)?pip (install|freeze)|(\.venv(-vllm)?/bin/)?pytest"
    r"|apt-get install|(\.venv/bin/)?(ruff|pyright|lint-imports)|bash \.ci/run|\.ci/run|source|sed|sort)\b"
)


@dataclass(frozen=True)
class Block:
    language: str
    tags: tuple[str, ...]
    line: int  # of the first line of code, counted from 1
    code: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, lines = [], page.read_text(encoding="utf-8").split("\n")
    number = 0
    while number < len(lines):
        fence = re.match(r"^(\s*)(`{3,}|~{3,})\s*(.*)$", lines[number])
        number += 1
        if not fence:
            continue
        indent, mark, info = fence.groups()
        start = number
        while number < len(lines) and lines[number].strip() != mark:
            number += 1
        assert number < len(lines), f"{page.name}:{start}: this block is never closed"
        code = "\n".join(line.removeprefix(indent) for line in lines[start:number])
        words = info.split() or [""]
        found.append(Block(words[0], tuple(words[1:]), start + 1, code))
        number += 1
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("docs_page")  # classes defined on the page must be found by their module's name
    monkeypatch.setitem(sys.modules, "docs_page", module)
    for block in blocks(page):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: tag this block as one of {sorted(LANGUAGES)}"
        if block.language == "python":
            run_python(block, page, module.__dict__)
        elif block.language == "bash":
            for command in commands(block.code):
                run_command(command, where)


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    for tag in block.tags:
        if tag.startswith("file="):
            Path(tag.removeprefix("file=")).write_text(block.code + "\n")
    notebook = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if "notebook" in block.tags else 0
    # empty lines in front: a traceback names the line of the page
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", flags=notebook)
    if "no-run" in block.tags:
        return
    if not notebook:
        exec(code, names)
        return

    async def cell() -> None:
        awaited = eval(code, names)  # a coroutine where the cell awaits something
        if awaited is not None:
            await awaited

    asyncio.run(cell())


def commands(code: str) -> list[list[str]]:
    """The simple commands of a shell block, split at newlines, `&&`, `|` and `;`; comments are dropped."""
    found = []
    for line in code.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in ("&&", "|", ";"):
                words.append(word)
            elif words:
                found.append(words)
                words = []
    return found


def run_command(words: list[str], where: str) -> None:
    program = words[0].removeprefix(".venv/bin/")
    if program == "agentrl":
        arguments = words[1:]
        if arguments[:1] == ["quickstart"] and "--batches" not in arguments:
            arguments = [*arguments, "--batches", "2"]
        assert main(arguments) == 0, f"{where}: '{' '.join(words)}' failed"
    elif program in ("python", "python3") and words[1].endswith(".py"):
        assert (ROOT / words[1]) in EXAMPLES, f"{where}: there is no example {words[1]}"  # it runs below
    else:
        assert NOT_RUN_HERE.match(" ".join(words)), f"{where}: nothing tests the command '{' '.join(words)}'"


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path not in HEAVY], ids=name_of)
def test_example(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("example", HEAVY, ids=name_of)
def test_a_heavy_example_is_named_in_the_test_that_runs_it(example):
    assert name_of(example) in (ROOT / HEAVY[example]).read_text()


def test_the_test_command_is_the_one_that_ci_runs():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    for part in (".venv/bin/pip install -q -c constraints.txt -e '.[dev]'", ".venv/bin/pytest -n 2"):
        assert part in readme and part in ci


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)}: the link to {target} is broken"


def test_blocks_by_hand(tmp_path):
    page = tmp_path / "p.md"
    page.write_text("a\n```python no-run\nx = 1\n```\n  ```bash\n  agentrl show f && ls | wc # c\n  ```\n")
    assert blocks(page) == [
        Block("python", ("no-run",), 3, "x = 1"),
        Block("bash", (), 6, "agentrl show f && ls | wc # c"),
    ]
    assert commands("agentrl show 'a b' && ls | wc # c\n\n# d") == [["agentrl", "show", "a b"], ["ls"], ["wc"]]
