"""Evaluation, what a run shows and writes, precision, and bad input named at construction."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import train_kit as kit
from peft import LoraConfig
from train_kit import Door, Lamp, length, make
from transformers import TrainerCallback

from agentrl import GRPOTrainer
from agentrl.errors import ConfigurationError, ToolDefinitionError


# --- evaluation ------------------------------------------------------------------------
def test_evaluation_with_a_dataset_a_dict_and_none(tmp_path: Path):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    settings = {
        "train_dataset": rows,
        "reward_funcs": lambda completions, **kw: [float(len(completions))] * len(completions),
    }
    args = {"num_generations_eval": 2}
    made = make(tmp_path, ["ok"], eval_dataset=rows, args=args, **settings)
    metrics = made.evaluate()
    assert metrics["eval_reward"] == 2.0 and metrics["eval_completions/mean_length"] == 3.0
    assert len(made.player.engine.sampler.requests) == 6
    both = made.evaluate({"x": rows, "y": rows[:1]})
    assert {"eval_x_reward", "eval_y_reward"} <= set(both)
    assert "test_reward" in made.evaluate(rows[:1], metric_key_prefix="test")
    parts = datasets.DatasetDict({"z": datasets.Dataset.from_list(rows)})
    assert "eval_z_reward" in make(tmp_path, ["ok"], eval_dataset=parts, args=args, **settings).evaluate()
    nothing = make(tmp_path, ["ok"], args=args, **settings)
    with pytest.raises(ConfigurationError, match="eval_dataset"):
        nothing.evaluate()
    with pytest.raises(ConfigurationError, match="eval_dataset"):
        make(tmp_path, args={"eval_strategy": "steps", "eval_steps": 1}, **settings)


def test_evaluation_during_training_also_without_data(tmp_path: Path):
    args = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "num_generations_eval": 2}
    made = make(tmp_path, ["ok"], environment_factory=Door, args=args)
    made.train()
    assert kit.logs_with(made, "eval_reward") == [0.0, 0.0]
    evaluations = [r for r in made.player.engine.sampler.requests if r.conversation_id.startswith("eval")]
    assert len(evaluations) == 2 * 8
    starts = [{r.messages[0]["content"] for r in evaluations[i : i + 8]} for i in (0, 8)]
    assert starts[0] == starts[1]  # the same start states each time
    assert len(kit.logs_with(made, "reward")) == 2


def test_evaluation_leaves_training_as_it_was(tmp_path: Path):
    """The same weights with and without: no random stream and no metric of training is touched."""
    rows = [{"prompt": f"row {i}"} for i in range(4)]
    ended = []
    for evaluates in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        args = {"max_steps": 3, "logging_steps": 3, "max_completion_length": 5, "learning_rate": 0.05, **evaluates}
        made = make(tmp_path, train_dataset=rows, eval_dataset=rows, reward_funcs=length, args=args)
        made.train()
        ended.append((kit.weights(made.model), kit.logs_with(made, "reward"), kit.logs_with(made, "num_tokens")))
    assert torch.equal(ended[0][0], ended[1][0]) and ended[0][1:] == ended[1][1:]


# --- what is shown and written ---------------------------------------------------------
def test_episodes_are_written_once_each(tmp_path: Path):
    args = {"max_steps": 2, "record_episodes": True, "num_iterations": 2, "max_completion_length": 4}
    made = make(tmp_path, train_dataset=[{"prompt": "a"}] * 4, reward_funcs=length, args=args)
    made.train()
    made.close()
    lines = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and len({line["id"] for line in lines}) == 8
    assert all(line["advantage"] is not None for line in lines)


@pytest.mark.slow
def test_a_default_run_shows_no_warning(tmp_path: Path):
    """Everything at its default except the length of the run; in a process of its own, so nothing is hidden."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import train_kit as kit\n"
        "from agentrl.train.config import GRPOConfig; from agentrl.train.trainer import GRPOTrainer\n"
        "def reward(completion_ids, **kwargs): return [float(ids[0] % 3) for ids in completion_ids]\n"
        "args = GRPOConfig(output_dir=sys.argv[2], max_steps=2, report_to='none', disable_tqdm=True,\n"
        "                  max_completion_length=8, logging_steps=1)\n"
        "rows = [{'prompt': 'a'}, {'prompt': [{'role': 'user', 'content': 'b'}]}]\n"
        "t = GRPOTrainer(kit.policy(), reward, args, rows, processing_class=kit.tokenizer())\n"
        "t.train(); t.save_model()\n"
    )
    strict = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    command = [sys.executable, *strict, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()]
    assert [line for line in lines if not line.startswith("Writing model shards")] == []  # transformers' progress bar


def test_two_trainers_on_one_model(tmp_path: Path):
    model, samples = kit.policy(), kit.fixed()
    first = kit.trainer(model, samples, kit.config(tmp_path))
    second = kit.trainer(model, samples, kit.config(tmp_path))
    second.train()
    second.close()
    first.train()
    first.close()
    assert torch.isfinite(model(input_ids=torch.tensor([[3, 4]])).logits).all()


def test_a_model_by_its_path_brings_its_tokenizer(tmp_path: Path):
    kit.policy().save_pretrained(tmp_path / "m")
    kit.tokenizer().save_pretrained(tmp_path / "m")
    settings = {"model": str(tmp_path / "m"), "processing_class": None, "train_dataset": ROWS * 2}
    made = make(tmp_path, ["ok"], reward_funcs=length, **settings)
    made.train()
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    args = {"model_init_kwargs": {"dtype": "bfloat16"}}
    half = make(tmp_path, reward_funcs=length, args=args, **settings)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("adapter", [False, True])
def test_mixed_precision_has_one_precision_for_policy_old_and_reference(tmp_path: Path, adapter: bool):
    """Old and reference log-probs come from forwards in bf16, as the policy's do: the first KL is exactly 0."""
    args = {"bf16": True, "use_cpu": True, "num_iterations": 2, "max_steps": 2, "beta": 0.1, "learning_rate": 1e-2}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapter else None
    made = make(tmp_path, train_dataset=ROWS * 2, reward_funcs=length, args=args, peft_config=lora)
    made.train()
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    first, second = kit.logs_with(made, "kl")
    assert first == 0.0 and second > 0.0
    assert kit.logs_with(made, "loss")[0] == pytest.approx(0.0, abs=1e-6)  # ratio 1: equal lengths, advantages sum to 0


class _Seen(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"begin {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "reward" in logs:
            self.events.append(f"log {state.global_step}")


def test_callbacks_work_as_in_transformers(tmp_path: Path):
    seen = _Seen()
    kit.trainer(
        kit.policy(),
        kit.fixed(groups=4),
        kit.config(tmp_path, max_steps=2, gradient_accumulation_steps=1),
        callbacks=[seen],
    ).train()
    assert seen.events == ["begin 0", "log 1", "begin 1", "log 2"]


# --- bad input: one or two sentences, at construction ----------------------------------
def untyped(place) -> str:
    """Go.

    Args:
        place: Where.
    """
    return place


def undocumented(place: str) -> str:
    return place


class NoReset:
    def get_reward(self) -> float:
        return 1.0


class OneReset:
    def reset(self) -> None: ...


ROWS = [{"prompt": "a"}]
LAMP = Lamp()
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no reward", {"train_dataset": ROWS}, r"no source of reward: pass reward_funcs, or an environment_factory"),
    ("no reward from env", {"environment_factory": OneReset}, r"no source of reward"),
    ("nothing to play", {"reward_funcs": length}, r"nothing to play: pass train_dataset"),
    ("untyped", {"train_dataset": ROWS, "reward_funcs": length, "tools": [untyped]}, r"untyped.*place|place.*untyped"),
    ("undocumented", {"train_dataset": ROWS, "reward_funcs": length, "tools": [undocumented]}, r"undocumented"),
    ("twice", {"train_dataset": ROWS, "reward_funcs": length, "tools": [LAMP.switch] * 2}, r"Two tools"),
    ("clash", {"environment_factory": Lamp, "tools": [LAMP.switch]}, r"'switch' is both"),
    ("no column", {"train_dataset": [{"question": "a"}], "reward_funcs": length}, r"no 'prompt' column.*question"),
    ("empty", {"train_dataset": [], "reward_funcs": length}, r"dataset is empty"),
    ("empty eval", {"train_dataset": ROWS, "eval_dataset": [], "reward_funcs": length}, r"dataset is empty"),
    ("eval column", {"train_dataset": ROWS, "eval_dataset": [{"x": 1}], "reward_funcs": length}, r"no 'prompt' column"),
    ("instance", {"environment_factory": Door()}, r"instance|factory"),
    ("dict of instances", {"environment_factory": {"a": Door()}, "train_dataset": [{"environment": "a"}]}, r"factory"),
    ("no reset", {"environment_factory": NoReset}, r"NoReset.*reset|reset.*NoReset"),
    ("F091 unknown", {"environment_factory": {"a": Door, "b": Lamp},
                      "train_dataset": [{"environment": e} for e in ("a", "b", "c", None)]}, r"None.*'c'|'c'.*None"),
    ("F091 column", {"environment_factory": {"a": Door}, "train_dataset": ROWS}, r"'environment' column"),
    ("empty dict", {"environment_factory": {}, "train_dataset": ROWS}, r"empty dict"),
    ("weights", {"train_dataset": ROWS, "reward_funcs": length, "args": {"reward_weights": [1.0, 2.0]}},
     r"2 values for 1"),
    ("reward model", {"train_dataset": ROWS, "reward_funcs": "./no/judge"}, r"no folder './no/judge'"),
    ("not callable", {"train_dataset": ROWS, "reward_funcs": [3]}, r"Reward function 0 is a int"),
    ("model", {"model": 3, "train_dataset": ROWS, "reward_funcs": length}, r"model must be .* not a int"),
    ("tokenizer", {"processing_class": None, "train_dataset": ROWS, "reward_funcs": length}, r"processing_class"),
    ("typo", {"environment_factory": "agentrl/Hunnt-v0"}, r"Hunt-v0"),
    ("small vocabulary", {"model": kit.build("Qwen3", vocab_size=100), "train_dataset": ROWS, "reward_funcs": length},
     r"resize_token_embeddings"),
    ("no MoE", {"args": {"router_aux_loss_coef": 0.1}, "train_dataset": ROWS, "reward_funcs": length},
     r"router_aux_loss_coef is set but"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named_at_construction(tmp_path: Path, settings: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=rf"(?s){says}") as error:
        make(tmp_path, **settings)
    text = str(error.value)
    assert len(text) < 400 and text.count("\n") <= 1
    assert isinstance(error.value, ToolDefinitionError) == (settings.get("tools") in ([untyped], [undocumented]))


def test_an_unset_pad_token_becomes_the_end_token(tmp_path: Path):
    tok = kit.fresh_tokenizer()
    tok.pad_token = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path, processing_class=tok, train_dataset=ROWS, reward_funcs=length)
    assert tok.pad_token == tok.eos_token


def test_args_of_another_kind_are_named():
    with pytest.raises(ConfigurationError, match="args must be a GRPOConfig, not a dict"):
        GRPOTrainer("anything", reward_funcs=len, args={"output_dir": "x"}, train_dataset=[{"prompt": "a"}])  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match="There is no folder '/nowhere/model'"):
        GRPOTrainer("/nowhere/model", reward_funcs=lambda completions: [0.0], train_dataset=[{"prompt": "a"}])
