"""Names to environments."""

from __future__ import annotations

import functools
import subprocess
import sys

import gymnasium
import pytest

from agentrl.errors import ConfigurationError
from agentrl.registry import make, register, resolve


class Env:
    def __init__(self, size: int = 1, color: str = "red"):
        self.size, self.color = size, color

    def reset(self): ...


@pytest.fixture
def registered():
    register("tests/Thing-v0", Env, size=2)
    yield "tests/Thing-v0"
    gymnasium.registry.pop("tests/Thing-v0", None)


def test_make_gives_the_conversational_environment(registered):
    env = make(registered, color="blue")
    assert (type(env), env.size, env.color) == (Env, 2, "blue")
    assert make(registered, size=5).size == 5
    assert make(registered) is not make(registered)


def test_resolve_takes_every_kind_of_spec(registered):
    assert resolve(Env) is Env
    factory = functools.partial(Env, 4)
    assert resolve(factory) is factory
    assert type(resolve(registered)()) is Env
    assert resolve("agentrl_envs.hunt:Hunt")().__class__.__name__ == "Hunt"
    assert type(resolve("agentrl/Courier-v0")()).__name__ == "Courier"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("tests/Thnig-v0", "Did you mean 'tests/Thing-v0'"),
        ("Thing-v0", "Did you mean 'tests/Thing-v0'"),
        ("agentrl/Hnt-v0", "Did you mean 'agentrl/Hunt-v0'"),
        ("agentrl_envs.hunt:Hnt", "Did you mean 'Hunt'"),
        ("agentrl_envs.hunt:PLACES", "not a class or a function"),
        ("no.such.module:Env", "There is no module 'no.such.module'"),
        ("CartPole-v1", r"gymnasium\.make"),
        ("", "No environment is registered as ''"),
        (Env(), "Got an instance of Env"),
        (3, "not 3"),
    ],
)
def test_F091_what_is_not_there_is_named_with_a_proposal(registered, spec, says):
    with pytest.raises(ConfigurationError, match=says):
        resolve(spec)


def test_a_module_that_is_there_but_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        resolve("half_there:Env")


@pytest.mark.parametrize(
    ("id", "entry_point"),
    [("NoNamespace-v0", Env), ("a/NoVersion", Env), (3, Env), ("a/B-v0", 3), ("a/B-v0", "no colon")],
)
def test_registrations_that_cannot_work_are_refused(id, entry_point):
    with pytest.raises(ConfigurationError):
        register(id, entry_point)


def test_gymnasium_make_says_what_to_do(registered):
    with pytest.raises(ConfigurationError, match=r"agentrl\.make\('tests/Thing-v0'\)"):
        gymnasium.make(registered)


def test_registering_twice_does_not_warn(registered, recwarn):
    register(registered, Env, size=2)
    assert not recwarn.list


def test_importing_the_registry_imports_no_gymnasium():
    code = "import sys, agentrl.registry as r; r.resolve('json:dumps'); assert 'gymnasium' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
