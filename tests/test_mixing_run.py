"""Several environments through the whole trainer: without a dataset, with a broken one, with settings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_mixing import Crashing
from train_kit import Door, make

from agentrl import EnvironmentSpec
from agentrl.environment import Environment
from agentrl.errors import ConfigurationError


class Torch(Environment):
    """Another environment with a tool of its own."""

    def reset(self) -> str:
        self._on = False
        return "it is dark"

    def get_reward(self) -> float:
        return float(self._on)

    def switch(self) -> str:
        """Switch it."""
        self._on = not self._on
        return "on" if self._on else "off"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def test_a_run_without_a_dataset_mixes_by_weight_beside_standalone_tools(tmp_path: Path, capsys: Any):
    def tell(word: str) -> str:
        """Say a word.

        Args:
            word: Which.
        """
        return word

    def script(request: Any) -> Any:
        if request.messages[-1]["role"] == "tool":
            return "done"
        names = {tool["function"]["name"] for tool in request.tools}
        assert "tell" in names and len(names) == 2
        return call("push", times=2) if "push" in names else call("tell", word="hm")

    environments = {"door": EnvironmentSpec(Door, weight=3), "lamp": EnvironmentSpec(Torch, deadlines={"tool_s": 5.0})}
    args = {"max_completion_length": 300, "max_steps": 2, "per_device_train_batch_size": 16, "num_generations": 4}
    made = make(tmp_path, script, environment_factory=environments, tools=[tell], args=args)
    made.train()
    logs = made.state.log_history[0]
    assert (logs["mixture/door/asked_frac"], logs["mixture/door/realised_frac"]) == (0.75, 0.75)
    assert (logs["env/door/reward"], logs["env/lamp/reward"], logs["tools/tell/call_count"]) == (2.0, 0.0, 4)
    assert "door 2.000 (75%, asked 75%)  lamp 0.000 (25%, asked 25%)" in capsys.readouterr().out
    made.args.per_device_eval_batch_size = 16
    shown = made.evaluate()
    assert (shown["eval_mixture/lamp/asked_frac"], shown["eval_env/door/reward"]) == (0.25, 2.0)
    made.close()


def test_in_a_run_the_realised_mixture_shows_what_a_broken_environment_costs(tmp_path: Path):
    environments = {"door": Door, "bad": EnvironmentSpec(Crashing, max_failures_in_row=100)}
    rows = [{"environment": "door", "prompt": "p"}, {"environment": "bad", "prompt": "q"}]
    made = make(
        tmp_path, ["ok"], train_dataset=rows, environment_factory=environments, args={"max_completion_length": 300}
    )
    made.train()
    logs = made.state.log_history[0]
    made.close()
    assert (logs["mixture/bad/asked_frac"], logs["mixture/bad/realised_frac"]) == (0.5, 0.0)
    assert logs["mixture/door/realised_frac"] == 1.0 and logs["env/bad/outcome/reset_failed_count"] == 4
    assert "env/bad/reward" not in logs


def test_a_weight_beside_a_train_dataset_is_refused_and_beside_evaluation_rows_is_fine(tmp_path: Path):
    environments = {"door": EnvironmentSpec(Door, weight=2), "lamp": Torch}
    with pytest.raises(ConfigurationError, match="'door' has a weight, and there is a train_dataset"):
        make(tmp_path, ["ok"], train_dataset=[{"environment": "door"}], environment_factory=environments)
    made = make(tmp_path, ["ok"], environment_factory=environments, eval_dataset=[{"environment": "lamp"}],
                args={"max_completion_length": 300})  # fmt: skip
    assert "eval_env/lamp/reward" in made.evaluate()
    made.close()


def test_a_single_environment_may_have_settings_too(tmp_path: Path):
    made = make(tmp_path, [call("push", times=1)] * 9, environment_factory=EnvironmentSpec(Door, max_turns=1),
                args={"max_completion_length": 300})  # fmt: skip
    made.train()
    assert made.state.log_history[0]["tools/loop_exhausted_frac"] == 1.0
    made.close()
