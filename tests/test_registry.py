"""Names to environments."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import sys

import gymnasium
import pytest

from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.registry import make, register, resolve
from agentrl.rollout.play import play_episode


class Env:
    def __init__(self, size: int = 1, color: str = "red"):
        self.size, self.color = size, color

    def reset(self): ...


class Sized(Env):
    def reset(self, seed=None):
        return f"{self.size} {self.color}"


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
        ("CartPol-v1", "Did you mean 'CartPole-v1'"),
        ("CartPole-v7", "Did you mean 'CartPole-v1'"),
        ("frozenlake-v1", "Did you mean 'FrozenLake-v1'"),
        ("FrozenLake", "Did you mean 'FrozenLake-v1'"),
        ("agentrl_envs:agentrl/Hnt-v0", "Did you mean 'agentrl/Hunt-v0'"),
        ("no_such_module:tests/Thing-v0", "There is no module 'no_such_module'"),
        ("", "No environment is registered as ''"),
        (Env(), "Got an instance of Env"),
        (3, "not 3"),
    ],
)
def test_F091_what_is_not_there_is_named_with_a_proposal(registered, spec, says):
    with pytest.raises(ConfigurationError, match=says):
        resolve(spec)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import not_installed_at_all\n", r"failed at .*half_there.py:1: .*not_installed_at_all"),
        ("x = 1\nclass Env(:\n", r"failed at .*half_there.py:2: SyntaxError"),
        ("\n\nx = 1 / 0\n", r"failed at .*half_there.py:3: ZeroDivisionError"),
        ("from agentrl_envs.hunt import Hnt\n", r"failed at .*half_there.py:1: ImportError"),
    ],
)
@pytest.mark.parametrize("spec", ["half_there:Env", "half_there:tests/Env-v0"])
def test_a_module_that_does_not_import_is_said_in_a_sentence_with_the_line(tmp_path, monkeypatch, source, says, spec):
    (tmp_path / "half_there.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=says) as caught:
        resolve(spec)
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value)


def test_an_entry_point_that_does_not_import_is_known_when_it_is_built(tmp_path, monkeypatch):
    (tmp_path / "later.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    register("tests/Later-v0", "later:Env")
    try:
        with pytest.raises(ConfigurationError, match="Importing 'later'"):
            EnvironmentPool(resolve("tests/Later-v0"))
        with pytest.raises(ConfigurationError, match="Importing 'later'"):
            gymnasium.make("tests/Later-v0")
    finally:
        gymnasium.registry.pop("tests/Later-v0")


def test_a_package_before_the_id_is_imported_and_registers_it(tmp_path, monkeypatch):
    (tmp_path / "my_games.py").write_text(
        "from agentrl.registry import register\n"
        "class Coin:\n"
        "    def reset(self, seed=None): return 'heads or tails?'\n"
        "register('mine/Coin-v0', Coin)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert make("my_games:mine/Coin-v0").reset() == "heads or tails?"
        env = gymnasium.make("my_games:mine/Coin-v0")
        assert env.reset(seed=0)[0] == "heads or tails?"
        env.close()
        assert type(make("agentrl_envs:agentrl/Hunt-v0")).__name__ == "Hunt"
    finally:
        gymnasium.registry.pop("mine/Coin-v0", None)
        sys.modules.pop("my_games", None)


@pytest.mark.parametrize("value", ["plugged", "plugged:announce"])
def test_an_installed_package_announces_its_namespace(tmp_path, monkeypatch, value):
    """What pip writes for the entry point `games = "plugged"` of the group agentrl.environments."""
    at_import = "" if ":" in value else "announce()\n"
    (tmp_path / "plugged.py").write_text(
        "from agentrl.registry import register\n"
        "class Coin:\n"
        "    def reset(self): return 'heads or tails?'\n"
        "def announce(): register('games/Coin-v0', Coin)\n" + at_import
    )
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[agentrl.environments]\ngames = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert make("games/Coin-v0").reset() == "heads or tails?"
        with pytest.raises(ConfigurationError, match="Did you mean 'games/Coin-v0'"):
            make("games/Cion-v0")
    finally:
        gymnasium.registry.pop("games/Coin-v0", None)
        sys.modules.pop("plugged", None)


def test_our_own_package_announces_its_environments():
    (found,) = importlib.metadata.entry_points(group="agentrl.environments", name="agentrl")
    assert found.value == "agentrl_envs"


def test_a_gymnasium_id_is_a_conversational_environment():
    env = make("FrozenLake-v1", is_slippery=False, describe="Get to G.")
    assert env.reset(seed=0).startswith("FrozenLake: Get to G.")
    env.close()
    episode = play_episode(
        "Blackjack-v1", [{"tool_calls": [{"name": "act", "arguments": {"action": "stick"}}]}], seed=1
    )
    assert episode.reward in (-1.0, 0.0, 1.0) and episode.environment == "Blackjack"
    pool = EnvironmentPool(resolve(gymnasium.envs.toy_text.FrozenLakeEnv))
    assert (pool.name, list(pool.tools)) == ("FrozenLake", ["act"])
    with pytest.raises(ConfigurationError, match="Got the Gymnasium object"):
        resolve(gymnasium.make("FrozenLake-v1"))
    pool = EnvironmentPool(resolve("Taxi-v4"))
    assert (pool.name, list(pool.tools), pool.has_reward) == ("Taxi", ["act"], True)


@pytest.mark.parametrize(
    ("id", "entry_point"),
    [("NoNamespace-v0", Env), ("a/NoVersion", Env), (3, Env), ("a/B-v0", 3), ("a/B-v0", "no colon")],
)
def test_registrations_that_cannot_work_are_refused(id, entry_point):
    with pytest.raises(ConfigurationError):
        register(id, entry_point)


def test_gymnasium_make_gives_a_gymnasium_environment(registered):
    register("tests/Sized-v0", Sized, size=2)
    try:
        env = gymnasium.make("tests/Sized-v0", color="blue")
        assert isinstance(env, gymnasium.Env) and env.reset(seed=3)[0] == "2 blue"
        assert make("tests/Sized-v0").reset() == "2 red"
        env.close()
    finally:
        gymnasium.registry.pop("tests/Sized-v0")


def test_registering_twice_does_not_warn(registered, recwarn):
    register(registered, Env, size=2)
    assert not recwarn.list


def test_importing_the_registry_imports_no_gymnasium():
    code = "import sys, agentrl.registry as r; r.resolve('json:dumps'); assert 'gymnasium' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_environment_that_cannot_be_built_is_named_by_its_id():
    with pytest.raises(
        ConfigurationError, match=r"Building an environment with agentrl/Hunt-v0 failed: ValueError: hops"
    ):
        EnvironmentPool(functools.partial(resolve("agentrl/Hunt-v0"), hops=0))
