"""What is installed by `pip install agentrl`: the wheel, unpacked and imported from where it lies."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"agentrl", "agentrl_envs", "agentrl_tools"}
    files = {str(p.relative_to(ROOT)) for p in ROOT.glob("agentrl/**/*.py")}
    files |= {str(p.relative_to(ROOT / "envs")) for p in ROOT.glob("envs/**/*.py")}
    files |= {str(p.relative_to(ROOT / "tools")) for p in ROOT.glob("tools/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == files
    templates = {str(p.relative_to(ROOT)) for p in ROOT.glob("agentrl/**/*.jinja")}
    assert templates and templates <= set(names)


def test_the_wheel_carries_its_licence_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"agentrl = agentrl.cli.main:main" in archive.read(f"{info}/entry_points.txt")
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata


def test_the_unpacked_wheel_works(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import agentrl, agentrl_envs, agentrl_tools, agentrl.record\n"
        "from agentrl.cli.main import main\n"
        "for module in (agentrl, agentrl_envs, agentrl_tools): assert module.__file__.startswith(sys.argv[1]), module\n"
        "sys.exit(main(['--help']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
