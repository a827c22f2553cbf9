"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # helpers beside the tests: train_kit


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skipped test is a failed session: what was not run was not tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tests/tiny_tokenizers.py: small tokenizers with the control tokens of real families."""
    if "tiny_tokenizers" not in sys.modules:
        path = pathlib.Path(__file__).with_name("tiny_tokenizers.py")
        spec = importlib.util.spec_from_file_location("tiny_tokenizers", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["tiny_tokenizers"] = module
    return sys.modules["tiny_tokenizers"]
