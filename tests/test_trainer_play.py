"""`GRPOTrainer` from dataset, environment and tools to rewards, evaluation and what is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest
import train_kit as kit
from train_kit import Door, Lamp, length, make
from transformers import TrainerState

from agentrl.errors import ConfigurationError, RunStopped
from agentrl.record import read_episodes, rollout_from_dict


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    Door.log = []
    yield


# --- environments ----------------------------------------------------------------------
def test_F093_reset_is_called_once_per_rollout_with_the_rows_columns_and_the_groups_seed(tmp_path: Path):
    rows = [{"prompt": f"p{i}", "level": i, "environment": "ignored"} for i in range(4)]
    made = make(tmp_path, ["fine"], args={"max_steps": 2}, train_dataset=rows, environment_factory=Door)
    made.train()
    made.close()
    assert len(Door.log) == 16
    assert {tuple(sorted(kwargs)) for kwargs in Door.log} == {("level", "seed")}
    seeds = {(kwargs["level"], kwargs["seed"]) for kwargs in Door.log}
    assert len(seeds) == 4 and len({seed for _, seed in seeds}) == 4  # one seed per group, another in each


def test_an_environment_without_data_writes_the_prompts(tmp_path: Path):
    made = make(tmp_path, ["fine"], args={"max_steps": 2}, environment_factory=Door)
    made.train()
    requests = made.player.engine.sampler.requests
    assert len(requests) == 16
    assert all(r.messages[0]["content"].startswith("The door is closed, ") for r in requests)
    assert len({r.messages[0]["content"] for r in requests}) == 4  # groups
    assert [t["function"]["name"] for t in requests[0].tools] == ["push"]
    assert len({r.seed for r in requests}) == 16


def test_reset_text_is_added_to_the_prompt_and_done_ends_the_episode(tmp_path: Path):
    rows = [{"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Open it."}]}] * 2
    seen: list[Any] = []

    def judge(prompts: list[Any], completions: list[Any], environments: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, [type(e) for e in environments], strict=True))
        return [0.5] * len(prompts)

    script = [call("push", times=1), call("push", times=2), "never said"]
    made = make(
        tmp_path, script, train_dataset=rows, environment_factory=Door, reward_funcs=judge,
        args={"max_completion_length": 300},
    )  # fmt: skip
    made.train()
    prompt, completion, kind = seen[0]
    assert kind is Door and len(seen) == 8
    assert prompt[1]["content"].startswith("Open it.") and "The door is closed" in prompt[1]["content"]
    assert [m["role"] for m in completion] == ["assistant", "tool", "assistant", "tool"]
    assert completion[-1]["content"] == "pushed 3"
    last = made.state.log_history[0]
    assert last["rewards/Door/mean"] == 3.0 and last["rewards/judge/mean"] == 0.5 and last["reward"] == 3.5
    assert last["tools/call_frequency"] == 2.0 and last["tools/failure_frequency"] == 0.0
    assert last["rollout/turns_mean"] == 2.0 and last["tools/loop_exhausted_frac"] == 0.0


def test_tool_results_are_context_and_never_counted_or_trained(tmp_path: Path):
    rows = [{"prompt": "go"}] * 2
    made = make(tmp_path, [call("push", times=1), "ok"], train_dataset=rows, environment_factory=Door,
                args={"max_completion_length": 300, "record_episodes": True})  # fmt: skip
    made.train()
    made.close()
    rollout = rollout_from_dict(next(read_episodes(tmp_path / "episodes.jsonl")))
    sampled = sum(len(turn.output_ids or ()) for turn in rollout.turns)
    (sequence,) = rollout.sequences
    assert len(rollout.turns) == 2 and sum(sequence.completion_mask) == sampled < len(sequence.input_ids)
    assert made.state.log_history[0]["completions/mean_length"] == sampled


def test_failing_and_unknown_tools_are_text_for_the_model(tmp_path: Path):
    script = [call("pull"), call("push", times="many"), "ok"]
    rows = [{"prompt": "go"}] * 2
    made = make(tmp_path, script, train_dataset=rows, environment_factory=Door, args={"max_completion_length": 600})
    made.train()
    last = made.state.log_history[0]
    assert last["tools/call_frequency"] == 2.0 and last["tools/failure_frequency"] == 1.0
    assert last["rollout/failed_frac"] == 0.0


@pytest.mark.parametrize(("limit", "calls", "exhausted"), [(0, 0.0, 1.0), (1, 1.0, 1.0), (None, 2.0, 0.0)])
def test_max_tool_calling_iterations_is_exact(tmp_path: Path, limit: int | None, calls: float, exhausted: float):
    script = [call("push", times=1), call("push", times=1), "ok"]
    rows = [{"prompt": "go"}] * 2
    args = {"max_completion_length": 300, "max_tool_calling_iterations": limit}
    made = make(tmp_path, script, train_dataset=rows, environment_factory=Door, args=args)
    made.train()
    last = made.state.log_history[0]
    assert (last["tools/call_frequency"], last["tools/loop_exhausted_frac"]) == (calls, exhausted)
    assert last["rewards/Door/mean"] == calls


def test_several_environments_show_only_their_own_tools(tmp_path: Path):
    rows = [{"prompt": "a door", "environment": "door"}, {"prompt": "a lamp", "environment": "lamp"}]

    def script(request: Any) -> Any:
        if request.messages[-1]["role"] == "tool":
            return "done"
        return call("switch") if "lamp" in str(request.messages) else call("push", times=2)

    made = make(tmp_path, script, train_dataset=rows, environment_factory={"door": Door, "lamp": Lamp},
                args={"max_completion_length": 300})  # fmt: skip
    made.train()
    tools = {r.messages[0]["content"].split(",")[0]: [t["function"]["name"] for t in r.tools]
             for r in made.player.engine.sampler.requests}  # fmt: skip
    assert tools == {"a doorThe door is closed": ["push"], "a lamp": ["switch"]}
    last = made.state.log_history[0]
    assert last["rewards/Door/mean"] == 2.0 and last["rewards/Lamp/mean"] == 1.0 and last["reward"] == 1.5


def test_rows_with_nothing_but_an_environment(tmp_path: Path):
    rows = [{"environment": "door"}, {"environment": "other"}]
    factories = {"door": Door, "other": lambda: Door()}
    made = make(tmp_path, ["ok"], train_dataset=rows, environment_factory=factories)
    made.train()
    assert all(r.messages[0]["content"].startswith("The door") for r in made.player.engine.sampler.requests)


def test_a_registered_environment_by_its_id(tmp_path: Path):
    import agentrl_envs  # noqa: F401 (registers)

    made = make(tmp_path, environment_factory="agentrl/Hunt-v0", args={"max_steps": 1})
    made.train()
    assert "rewards/Hunt/mean" in made.state.log_history[0]


def test_tools_sync_and_async_beside_an_environment(tmp_path: Path):
    async def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        await asyncio.sleep(0.001)
        return f"rain in {city}"

    def add(a: int, b: int) -> int:
        """The sum.

        Args:
            a: One.
            b: Two.
        """
        return a + b

    said: list[str] = []

    def judge(completions: list[Any], **kwargs: Any) -> list[float]:
        said.extend(m["content"] for c in completions for m in c if m["role"] == "tool")
        return [1.0] * len(completions)

    calls = [call("weather", city="Bern"), call("add", a=2, b=3), call("push", times=1)]
    both = {"tool_calls": [one["tool_calls"][0] for one in calls]}
    rows = [{"prompt": [{"role": "user", "content": "go"}]}] * 2
    made = make(tmp_path, [both, "ok"], train_dataset=rows, environment_factory=Door, tools=[weather, add],
                reward_funcs=judge, args={"max_completion_length": 600})  # fmt: skip
    made.train()
    assert said[:3] == ["rain in Bern", "5", "pushed 1"]
    assert made.state.log_history[0]["tools/call_frequency"] == 3.0
    alone = make(tmp_path, [both, "ok"], train_dataset=rows, tools=[weather, add], reward_funcs=judge,
                 args={"max_completion_length": 600})  # fmt: skip
    alone.train()
    assert alone.state.log_history[0]["tools/failure_frequency"] == pytest.approx(1 / 3)


class Flaky(Door):
    """Every third reset of the process fails, for good on retry of the same rollout."""

    broken: ClassVar[set[str]] = set()

    def reset(self, rollout_id: str, seed: int = -1) -> str:
        if rollout_id.endswith(".1"):
            raise ConnectionError("no network")
        return super().reset(seed)


def test_a_failed_rollout_is_in_no_baseline_and_is_counted(tmp_path: Path):
    made = make(tmp_path, [call("push", times=1), "ok"], environment_factory=Flaky, args={"max_completion_length": 300})
    made.train()
    last = made.state.log_history[0]
    assert last["rollout/failed_frac"] == 0.25
    assert last["reward"] == 1.0 and last["rewards/unscored_frac"] == 0.25
    assert last["rollout/attempts_mean"] == 1.5  # the failing quarter was tried three times


class Dead:
    def reset(self) -> str:
        raise ConnectionError("the server is gone")

    def get_reward(self) -> float:
        return 0.0


def test_an_environment_that_always_fails_stops_the_run_with_its_error(tmp_path: Path):
    made = make(tmp_path, ["ok"], environment_factory=Dead)
    with pytest.raises(RunStopped, match=r"Dead[\s\S]*the server is gone"):
        made.train()


# --- data ------------------------------------------------------------------------------
def test_iterable_data_with_max_steps(tmp_path: Path):
    def rows() -> Iterator[dict[str, str]]:
        for i in range(3):
            yield {"prompt": f"row {i}"}

    stream = datasets.IterableDataset.from_generator(rows)
    seen: list[str] = []

    def judge(prompts: list[str], **kwargs: Any) -> list[float]:
        seen.append(prompts[0])
        return [0.0] * len(prompts)

    make(tmp_path, ["ok"], train_dataset=stream, reward_funcs=judge, args={"max_steps": 2}).train()
    assert sorted(seen) == ["row 0", "row 0", "row 1", "row 2"]  # two groups each in two steps: it begins again
    with pytest.raises(ConfigurationError, match="max_steps"):
        make(tmp_path, train_dataset=stream, reward_funcs=length, args={"max_steps": -1})


def test_F125_seed_reaches_the_sampler_and_data_seed_the_order(tmp_path: Path):
    rows = [{"prompt": f"row {i}"} for i in range(6)]

    def run(**args: Any) -> tuple[list[str], dict[str, list[list[int]]]]:
        order: list[str] = []
        drawn: dict[str, list[list[int]]] = {}

        def judge(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
            order.append(prompts[0])
            drawn[prompts[0]] = completion_ids
            return [0.0] * len(prompts)

        made = make(tmp_path, train_dataset=rows, reward_funcs=judge,
                    args={"shuffle_dataset": True, "max_steps": 3, "max_completion_length": 5, **args})  # fmt: skip
        made.train()
        return order, drawn

    first, again, seed, data_seed = run(seed=1), run(seed=1), run(seed=2, data_seed=1), run(seed=1, data_seed=9)
    assert first == again
    assert sorted(first[0]) == sorted(row["prompt"] for row in rows) != first[0]
    assert seed[1] != first[1]
    assert sorted(data_seed[0]) == sorted(first[0]) and data_seed[0] != first[0]
    unshuffled = run(seed=1, shuffle_dataset=False)[0]
    assert sorted(unshuffled[:2]) == ["row 0", "row 1"]  # F133: a curriculum's order is kept


def test_plain_string_prompts_get_no_template_and_rewards_get_strings(tmp_path: Path):
    got: dict[str, Any] = {}

    def judge(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        got.update(prompt=prompts[0], completion=completions[0])
        return [0.0] * len(prompts)

    made = make(tmp_path, ["world"], train_dataset=[{"prompt": "hello"}] * 2, reward_funcs=judge)
    made.train()
    assert got == {"prompt": "hello", "completion": "world"}
    (ids,) = {tuple(r.prompt_ids) for r in made.player.engine.sampler.requests}
    assert list(ids) == kit.tokenizer().encode("hello", add_special_tokens=False)


def test_remove_unused_columns_keeps_two(tmp_path: Path):
    got: set[str] = set()

    def judge(prompts: list[Any], **kwargs: Any) -> list[float]:
        got.update(kwargs)
        return [0.0] * len(prompts)

    rows = [{"prompt": "hello", "answer": "x"}] * 2
    for data in (rows, datasets.Dataset.from_list(rows)):
        for remove in (True, False):
            got.clear()
            args = {"remove_unused_columns": remove}
            make(tmp_path, ["ok"], train_dataset=data, reward_funcs=judge, args=args).train()
            assert ("answer" in got) != remove


# --- rewards ---------------------------------------------------------------------------
def test_reward_functions_get_every_documented_keyword(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"prompt": "a", "answer": "A"}, {"prompt": "b", "answer": "B"}]
    seen: dict[str, Any] = {}

    def strict(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == 4
        assert answer == [prompts[0].upper()] * 4
        assert isinstance(trainer_state, TrainerState) and trainer_state.global_step == 0
        log_extra("golden", answer)
        log_metric("accuracy", 0.25 if prompts[0] == "a" else 0.75)
        return [1.0, 2.0, 3.0, 4.0]

    async def slow(completions: list[str], **kwargs: Any) -> list[float | None]:
        seen.update(kwargs)
        await asyncio.sleep(0.001)
        return [None, 1.0, None, 1.0]

    args = {"reward_weights": [2.0, 10.0], "log_completions": True, "num_completions_to_print": 2}
    made = make(tmp_path, ["ok"], train_dataset=rows, reward_funcs=[strict, slow], args=args)
    made.train()
    assert {"prompts", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"} <= set(seen)
    assert "environments" not in seen
    last = made.state.log_history[0]
    assert last["accuracy"] == 0.5
    assert (last["rewards/strict/mean"], last["rewards/slow/mean"]) == (2.5, 1.0)
    assert last["reward"] == pytest.approx(2 * 2.5 + 10 * 0.5)
    printed = capsys.readouterr().out
    assert "golden" in printed and "strict" in printed and printed.count("finished") == 2


@pytest.mark.parametrize("answer", [[1.0], 1.0, (x for x in [1.0] * 4), "abcd", ["a"] * 4, [float("inf")] * 4])
def test_F101_wrong_reward_shapes_name_the_function(tmp_path: Path, answer: Any):
    def broken(completions: list[str], **kwargs: Any) -> Any:
        return answer

    made = make(tmp_path, ["ok"], train_dataset=[{"prompt": "a"}] * 2, reward_funcs=broken)
    with pytest.raises(ConfigurationError, match="'broken' returned"):
        made.train()


# --- context ---------------------------------------------------------------------------
def test_F127_a_first_prompt_that_cannot_fit_is_an_error_at_construction(tmp_path: Path):
    rows = [{"prompt": "short"}, {"prompt": "x" * 40}]
    model = kit.policy(max_position_embeddings=32)
    with pytest.raises(ConfigurationError, match=r"row 1 has 40 tokens, but the model sees 32"):
        make(tmp_path, model=model, train_dataset=rows, reward_funcs=length)


def test_F127_growth_beyond_the_context_truncates_the_rollout(tmp_path: Path):
    """28 prompt tokens in a context of 32: the budget is clipped to 4, whatever max_completion_length says."""
    model = kit.policy(max_position_embeddings=32)
    rows = [{"prompt": "x" * 28}] * 2
    made = make(tmp_path, [[20] * 50], model=model, train_dataset=rows, reward_funcs=length,
                args={"max_completion_length": 100})  # fmt: skip
    made.train()
    last = made.state.log_history[0]
    assert (last["completions/max_length"], last["completions/clipped_ratio"]) == (4, 1.0)
