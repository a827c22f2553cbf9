"""The house rules that a machine can check: style, types, who imports whom, public names, doctests, sizes."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("agentrl/**/*.py"), *ROOT.glob("envs/**/*.py"), *ROOT.glob("tools/**/*.py")])
MAX_FILE, MAX_FUNCTION = 400, 100
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("envs", "tools"):
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in SOURCES]


def tool(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- tools -----------------------------------------------------------------------------
def test_ruff_finds_nothing():
    tool("ruff", "check", ".")
    tool("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_pyright_finds_nothing():
    # pyright looks for packages in the python of PATH unless told; the venv need not be activated
    tool("pyright", "--pythonpath", sys.executable)


def test_imports_go_one_way():
    script = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert script, "import-linter is missing: pip install -e '.[dev]'"
    done = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- public names ----------------------------------------------------------------------
def test_every_public_name_exists_and_is_found():
    assert agentrl.__all__ and len(set(agentrl.__all__)) == len(agentrl.__all__)
    assert not [name for name in agentrl.__all__ if getattr(agentrl, name, None) is None]
    assert set(agentrl.__all__) <= set(dir(agentrl))
    with pytest.raises(AttributeError, match="no_such_name"):
        agentrl.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_are_documented():
    undocumented = [n for n in agentrl.__all__ if callable(getattr(agentrl, n)) and not getattr(agentrl, n).__doc__]
    assert not undocumented


def test_import_agentrl_is_lazy():
    code = "import agentrl, sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "gymnasium", "accelerate"} & set(json.loads(done.stdout))


def test_nothing_below_train_and_objective_needs_torch():
    """import-linter reads the files; this imports every module that must work without torch, without torch."""
    (contract,) = (c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("torch only"))
    allowed = [line.removesuffix(" -> torch").removesuffix(".**") for line in contract["ignore_imports"]]
    modules = [m for m in MODULES if not any(m == room or m.startswith(room + ".") for room in allowed)]
    assert len(modules) > 10
    code = (
        "import sys, importlib, json; sys.modules['torch'] = None\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(modules)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- doctests --------------------------------------------------------------------------
WITH_DOCTESTS = [module_name(path) for path in SOURCES if ">>>" in path.read_text()]


@pytest.mark.parametrize("name", WITH_DOCTESTS)
def test_doctests(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example that writes a file writes it here
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed


# --- sizes and words -------------------------------------------------------------------
def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1


def test_files_and_functions_are_short():
    long = [(str(p.relative_to(ROOT)), n) for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_FILE]
    assert not long
    assert not [(name, lines) for path in SOURCES for name, lines in functions(path) if lines > MAX_FUNCTION]


def test_nothing_is_left_for_later():
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error"]
    unfinished = re.compile(rf"\b({'|'.join(words)})\b")
    found = [(str(p.relative_to(ROOT)), m.group()) for p in SOURCES if (m := unfinished.search(p.read_text()))]
    assert not found


def test_every_module_says_what_it_is():
    assert not [m for m, p in zip(MODULES, SOURCES, strict=True) if not ast.get_docstring(ast.parse(p.read_text()))]


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) == 202


def test_the_tested_versions_are_pinned():
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no local versions, files or addresses
    assert "torch==2.13.0" in lines and lines == sorted(lines, key=str.lower)
