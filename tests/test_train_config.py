"""`GRPOConfig`: documented names and defaults, and nothing accepted that would be ignored."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from agentrl.errors import ConfigurationError
from agentrl.train.config import GRPOConfig
from agentrl.train.options import UNAVAILABLE
from agentrl.train.setup import make_renderer
from tests.families import template_text
from tests.families import tokenizer as family_tokenizer

DOCUMENTED = json.loads((Path(__file__).parent / "data" / "grpo_config_defaults.json").read_text())
FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}


def make(tmp_path: Path, **changes: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), **changes)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_field_has_its_default(name: str):
    default = FIELDS[name].default
    assert (default, type(default)) == (DOCUMENTED[name], type(DOCUMENTED[name]))


def test_nothing_is_named_that_is_not_documented():
    own = set(FIELDS) - {field.name for field in dataclasses.fields(TrainingArguments)}
    assert own - set(DOCUMENTED) == {
        "record_episodes", "reset_timeout", "tool_timeout", "reward_timeout", "turn_timeout", "episode_timeout",
        "rollout_attempts", "min_group_survivors", "max_failures_in_row", "chat_template",
        "token_budget",  # the asynchronous trainer's, here too
    }  # fmt: skip
    assert all(FIELDS[name].metadata.get("help") for name in own)


def test_defaults_work_on_this_machine(tmp_path: Path):
    """No accelerator: fp32 and no pinned memory, without a flag or a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = make(tmp_path)
    if not torch.cuda.is_available():
        assert (args.bf16, args.fp16, args.dataloader_pin_memory) == (False, False, False)
    assert args.steps_per_generation == args.gradient_accumulation_steps == 1
    assert args.generation_batch_size == args.per_device_train_batch_size == args.num_generations == 8


# --- the command line ------------------------------------------------------------------
def test_HfArgumentParser_reads_every_kind_of_field(tmp_path: Path):
    line = (
        f"--output_dir {tmp_path} --num_generations 4 --per_device_train_batch_size 4 --loss_type grpo --beta 0.1 "
        '--scale_rewards batch --reward_weights 1.0 0.5 --bf16 false --model_init_kwargs {"dtype":"float32"} '
        "--shuffle_dataset false --max_completion_length 99 --min_p 0.1 --mask_truncated_completions "
        '--learning_rate 2e-5 --chat_template_kwargs {"enable_thinking":false}'
    )
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(line.split())
    assert (args.num_generations, args.loss_type, args.beta, args.scale_rewards) == (4, "grpo", 0.1, "batch")
    assert (args.reward_weights, args.bf16, args.shuffle_dataset) == ([1.0, 0.5], False, False)
    assert (args.max_completion_length, args.min_p, args.mask_truncated_completions) == (99, 0.1, True)
    assert args.model_init_kwargs == {"dtype": "float32"}
    assert args.chat_template_kwargs == {"enable_thinking": False}


def test_HfArgumentParser_defaults_are_the_constructors(tmp_path: Path):
    (parsed,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(["--output_dir", str(tmp_path)])
    want = make(tmp_path)
    for name in DOCUMENTED:
        assert getattr(parsed, name) == getattr(want, name), name


def test_F173_an_unknown_key_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="random_seed"):
        make(tmp_path, random_seed=3)
    with pytest.raises(ValueError, match="random_seed"):
        HfArgumentParser(GRPOConfig).parse_dict({"output_dir": str(tmp_path), "random_seed": 3})


# --- what this version does not have ---------------------------------------------------
OTHER_VALUE: dict[str, Any] = {
    "pad_to_multiple_of": 8, "log_completions_hub_repo": "me/x",
    "neftune_noise_alpha": 5.0, "fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 2}},
    "use_liger_kernel": True, "train_sampling_strategy": "sequential",
}  # fmt: skip


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_an_option_that_does_nothing_yet_is_refused_when_set(tmp_path: Path, name: str):
    default = FIELDS[name].default
    value = OTHER_VALUE.get(name)
    if value is None:
        assert isinstance(default, (bool, int, float)), name
        value = not default if isinstance(default, bool) else default + 1
    with pytest.raises(ConfigurationError, match=name) as error:
        make(tmp_path, **{name: value})
    assert "not" in str(error.value) and len(str(error.value)) < 300


def test_every_documented_option_is_either_used_or_refused():
    """An option that no file of the package reads is an option that is accepted and ignored."""
    package = Path(__file__).parent.parent / "agentrl"
    files = [*package.glob("train/*.py"), *package.glob("objective/*.py"), *package.glob("rollout/*.py")]
    code = "\n".join(f.read_text() for f in files if f.name != "options.py")
    unused = [name for name in DOCUMENTED if name not in UNAVAILABLE and code.count(name) < 2]
    assert unused == []


def test_deprecated_options_warn_and_map(tmp_path: Path):
    with pytest.warns(FutureWarning, match="use_transformers_continuous_batching"):
        args = make(tmp_path, use_transformers_paged=True)
    assert args.use_transformers_continuous_batching
    with pytest.warns(FutureWarning, match="clip_max"):
        args = make(tmp_path, vllm_importance_sampling_cap=2.0)
    assert args.sampler_correction().clip_max == 2.0


# --- the generation batch --------------------------------------------------------------
def test_generation_batch_size_and_steps_per_generation_must_agree(tmp_path: Path):
    args = make(tmp_path, generation_batch_size=16, steps_per_generation=2)
    assert (args.generation_batch_size, args.steps_per_generation) == (16, 2)
    for batch, steps in ((16, 3), (8, 2), (12, 2)):
        with pytest.raises(ConfigurationError, match=f"size={batch} and steps_per_generation={steps} exclude each"):
            make(tmp_path, generation_batch_size=batch, steps_per_generation=steps)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, (4, 16)),  # gradient_accumulation_steps
        ({"steps_per_generation": 6}, (6, 24)),
        ({"generation_batch_size": 8}, (2, 8)),
    ],
)
def test_one_follows_from_the_other(tmp_path: Path, given: dict[str, int], want: tuple[int, int]):
    args = make(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=4, **given)
    assert (args.steps_per_generation, args.generation_batch_size) == want


def test_a_generation_batch_that_cannot_be_cut_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"generation_batch_size \(12\) must be a multiple of .* \(8\)"):
        make(tmp_path, generation_batch_size=12)


def test_num_generations_that_does_not_divide_names_the_values_that_do(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"num_generations \(5\).*12 rollouts.*\[2, 3, 4, 6, 12\]"):
        make(tmp_path, per_device_train_batch_size=12, num_generations=5)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"delta": 1.1}, r"delta \(1.1\) must be above 1 \+ epsilon \(1.2\)"),
        ({"delta": 1.5, "epsilon": 0.5}, r"delta \(1.5\) must be above 1 \+ epsilon"),
        ({"delta": float("inf")}, "delta"),
        ({"loss_type": "sapo", "sapo_temperature_pos": float("nan")}, "sapo_temperature_pos"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg"),
        ({"loss_type": "vespo", "vespo_k_pos": float("nan")}, "vespo_k_pos"),
        ({"loss_type": "vespo", "vespo_k_neg": -1.0}, "vespo_k_neg"),
        ({"loss_type": "vespo", "vespo_lambda_pos": float("inf")}, "vespo_lambda_pos"),
        ({"loss_type": "vespo", "vespo_lambda_neg": -0.1}, "vespo_lambda_neg"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"beta": -0.1}, "beta"),
        ({"num_iterations": 0}, "num_iterations"),
        ({"num_generations": 0}, "num_generations"),
        ({"num_generations": 1}, "num_generations"),
        ({"num_generations_eval": 0}, "num_generations_eval"),
        ({"scale_rewards": "std"}, "scale_rewards"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"multi_objective_aggregation": "mean"}, "multi_objective_aggregation"),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, "scale_rewards"),
        ({"steps_per_generation": 0}, "steps_per_generation"),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], names: str):
    with pytest.raises(ConfigurationError, match=names):
        make(tmp_path, **changes)


@pytest.mark.parametrize(("value", "want"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_booleans(tmp_path: Path, value: Any, want: str):
    assert make(tmp_path, scale_rewards=value).scale_rewards == want


def test_a_config_survives_copying_and_pickling(tmp_path: Path):
    args = make(tmp_path, steps_per_generation=2)
    again = dataclasses.replace(args)
    copies = [copy.deepcopy(args), pickle.loads(pickle.dumps(args)), again, dataclasses.replace(again),
              GRPOConfig(**args.to_dict()), GRPOConfig(**json.loads(args.to_json_string()))]  # fmt: skip
    for other in copies:
        assert (other.steps_per_generation, other.generation_batch_size) == (2, 16)
        assert other.to_dict() == args.to_dict()
    assert dataclasses.replace(args, max_steps=3).max_steps == 3
    assert json.loads(args.to_json_string())["loss_type"] == "dapo"


def test_without_an_accelerator_no_flag_is_needed_to_train_in_several_processes(tmp_path):
    """transformers looks for torchrun's processes on a CPU only where use_cpu is set."""
    assert make(tmp_path).use_cpu == (not torch.accelerator.is_available())


def test_the_chat_template_may_be_the_original_a_text_or_a_file(tmp_path: Path) -> None:
    tok = family_tokenizer("qwen3")

    def chosen(template: str | None) -> str:
        config = GRPOConfig(output_dir=str(tmp_path), chat_template=template)
        return make_renderer(tok, config, with_tools=True).verdict.template

    assert chosen(None) == "qwen3" and chosen("original") == "original"
    own = tmp_path / "mine.jinja"
    own.write_text(template_text("qwen2_5"), encoding="utf-8")
    assert chosen(str(own)) == "custom" and chosen(template_text("qwen2_5")) == "custom"
    with pytest.raises(ConfigurationError, match=r"missing\.jinja.*no such file"):
        chosen(str(tmp_path / "missing.jinja"))


def test_fp16_without_an_accelerator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigurationError, match="fp16=True needs an accelerator"):
        make(tmp_path, fp16=True, use_cpu=True)
    assert make(tmp_path, bf16=True, use_cpu=True).bf16


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 has no effect with loss_type='dapo'"),
        ({"loss_type": "vespo", "epsilon": 0.1}, "epsilon=0.1 has no effect with loss_type='vespo'"),
        ({"use_bias_correction_kl": False}, "use_bias_correction_kl=False has no effect with beta=0"),
        (
            {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_max": 2.0},
            "vllm_importance_sampling_clip_max=2.0 has no effect with vllm_importance_sampling_correction=False",
        ),
    ],
)
def test_an_option_that_does_nothing_beside_the_others_is_named(tmp_path: Path, changes: dict[str, Any], names: str):
    with pytest.warns(UserWarning, match=re.escape(names)):
        make(tmp_path, **changes)
