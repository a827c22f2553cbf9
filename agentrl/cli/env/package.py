"""The files of a new environment package."""

from __future__ import annotations

from string import Template

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "${dashed}-envs"
version = "0.1.0"
description = "An environment for agentrl."
requires-python = ">=3.11"
dependencies = []  # and agentrl, installed from its clone: on PyPI that name belongs to somebody else

# agentrl imports the package when an id of this namespace is first used.
[project.entry-points."agentrl.environments"]
${name} = "${name}_envs"

[tool.hatch.build.targets.wheel]
packages = ["${name}_envs"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
"""

PACKAGE = '''\
"""Environments of ${name}, registered when this package is imported."""

from agentrl import register

register("${name}/${cls}-v0", "${name}_envs.${name}:${cls}")
'''

ENVIRONMENT = '''\
"""A safe with one dial: every wrong number says in which direction to go on."""

import random
from typing import Any

from agentrl import Environment


class ${cls}(Environment):
    """Open a safe by its number from 1 to 100, in as few tries as possible.

    Args:
        max_tries: Tries after which the episode is over.
    """

    reward_range = (0.0, 1.0)
    run_inline = True  # the tools are cheap: they need no thread of their own

    def __init__(self, max_tries: int = 7) -> None:
        self._max_tries = max_tries

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The prompt of a new safe; the same seed gives the same safe, so that a group plays one task."""
        self._number = random.Random(seed).randint(1, 100)
        self._tries = 0
        self._nearest = 99
        self._low, self._high = 1, 100
        self.done = False
        parity = "even" if self._number % 2 == 0 else "odd"
        return f"Open the safe. Its number is between 1 and 100 and {parity}. You have {self._max_tries} tries."

    def dial(self, number: int) -> str:
        """Try a number.

        Args:
            number: Between 1 and 100.

        Returns:
            Whether the safe opens, and if not, in which direction its number lies.
        """
        self._tries += 1
        self._nearest = min(self._nearest, abs(number - self._number))
        self.done = number == self._number or self._tries >= self._max_tries
        if number == self._number:
            return "The safe opens."
        if number < self._number:
            self._low = max(self._low, number + 1)
        else:
            self._high = min(self._high, number - 1)
        return f"{number} is too {'low' if number < self._number else 'high'}."

    def get_reward(self) -> float:
        """1 for an open safe; less, but something, for having come near: steps that a policy can learn from."""
        if self._nearest == 0:
            return 1.0
        return max(0.0, 0.5 * (1.0 - self._nearest / 99))

    def _gold(self) -> dict[str, Any]:
        """The next turn of a policy that opens every safe: it shows the check that this can be done."""
        middle = (self._low + self._high) // 2
        return {"tool_calls": [{"name": "dial", "arguments": {"number": middle}}]}
'''

TEST = '''\
"""The environment keeps its promises, and its rewards are what its docs say."""

import agentrl
from agentrl.testing import assert_environment, gold_episode

from ${name}_envs.${name} import ${cls}


def call(number: int) -> dict:
    return {"tool_calls": [{"name": "dial", "arguments": {"number": number}}]}


def test_it_can_be_trained_on():
    report = assert_environment("${name}/${cls}-v0")  # fails with a line for each error and each warning
    assert report.rewards["random"].mean < report.rewards["gold"].mean == 1.0


def test_halving_the_range_opens_every_safe():
    for seed in range(20):
        episode = gold_episode(${cls}, seed=seed)
        assert episode.reward == 1.0
        assert 1 <= len(episode.tool_calls) <= 7


def test_an_episode_as_a_model_plays_it():
    episode = agentrl.play_episode(${cls}, [call(50), "I give up."], seed=3)
    assert 0.0 <= episode.reward < 1.0
    assert episode.outcome is agentrl.Outcome.FINISHED
    assert "too" in episode.messages[2]["content"]
'''

README = """\
# ${dashed}-envs

One environment for agentrl: `${name}/${cls}-v0`.

    agentrl env check ${name}/${cls}-v0     # does it keep its promises?
    agentrl env play ${name}/${cls}-v0      # be the policy yourself
    python -m pytest                        # its tests
    agentrl train train.toml --dry-run      # what a training run would cost
    agentrl train train.toml                # train a tiny policy, on this machine's CPU

In this folder these commands work as they are; `pip install --no-deps -e .` makes them work everywhere, beside an
agentrl that was installed from its clone (on PyPI that name belongs to somebody else).

Change `${name}_envs/${name}.py`: `reset` returns the prompt, every public method is a tool, `get_reward` scores the
episode within `reward_range`, and `_gold` shows how it is done: the check plays it. Register further environments in
`${name}_envs/__init__.py`.
"""

TRAIN = """\
version = 1

[model]
tiny = true

[environment]
id = "${name}/${cls}-v0"

[train]
output_dir = "outputs/${name}"
max_steps = 40
num_generations = 8
per_device_train_batch_size = 32
learning_rate = 1.5e-3
max_completion_length = 256
gradient_checkpointing = false
logging_steps = 1
save_strategy = "no"
report_to = "none"
"""


def files_of(name: str) -> dict[str, str]:
    """The files of the package `name`, by their paths."""
    cls = "".join(part.capitalize() for part in name.split("_"))
    values = {"name": name, "cls": cls, "dashed": name.replace("_", "-")}
    templates = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        "train.toml": TRAIN,
        f"{name}_envs/__init__.py": PACKAGE,
        f"{name}_envs/{name}.py": ENVIRONMENT,
        f"tests/test_{name}.py": TEST,
    }
    return {path: Template(text).substitute(values) for path, text in templates.items()}
