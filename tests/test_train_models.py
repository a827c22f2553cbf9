"""The model of a trainer: how it is loaded, adapted, padded, saved and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, BitsAndBytesConfig

from agentrl.errors import ConfigurationError
from agentrl.train import setup
from agentrl.train.log_probs import PolicyForward, padded
from agentrl.train.reward_models import load_reward_models
from agentrl.train.rows import TrainItem, filled, make_row
from agentrl.types import TrainingSequence

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def saved(folder: Path, **changes: Any) -> str:
    """A tiny policy and its tokenizer on disk."""
    kit.policy(**changes).save_pretrained(folder)
    kit.fresh_tokenizer().save_pretrained(folder)
    return str(folder)


def run(model: Any, folder: Path, resume: Path | None = None, settings: Any = None, **args: Any) -> Any:
    made = kit.trainer(model, kit.fixed(), kit.config(folder, **args), **(settings or {}))
    made.train(resume_from_checkpoint=str(resume) if resume else None)
    made.close()
    return made


# --- loading ---------------------------------------------------------------------------
def test_a_string_loads_float32_unless_a_dtype_is_named(tmp_path: Path):
    """Also where the files are in bf16, which from_pretrained alone would take."""
    kit.policy().to(torch.bfloat16).save_pretrained(tmp_path)
    where = str(tmp_path)

    def dtype(given: Any) -> set[torch.dtype]:
        args = kit.config(tmp_path, model_init_kwargs=given)
        return {p.dtype for p in setup.load_model(where, args).parameters()}

    assert dtype(None) == {torch.float32}
    assert (
        dtype({"dtype": "auto"}) == dtype({"dtype": "bfloat16"}) == dtype({"dtype": torch.bfloat16}) == {torch.bfloat16}
    )
    assert dtype('{"dtype": "float16"}') == {torch.float16}
    with pytest.raises(ConfigurationError, match="model_init_kwargs names the dtype 'half32'"):
        dtype({"dtype": "half32"})


def test_model_init_kwargs_reach_the_model(tmp_path: Path):
    args = kit.config(tmp_path, model_init_kwargs={"attn_implementation": "eager", "attention_dropout": 0.25})
    model = setup.load_model(saved(tmp_path), args)
    assert model.config._attn_implementation == "eager" and model.config.attention_dropout == 0.25


def test_options_of_loading_are_ignored_with_a_warning_for_a_loaded_model(tmp_path: Path):
    model, quantized = kit.policy(), BitsAndBytesConfig(load_in_8bit=True)
    args = kit.config(tmp_path, model_init_kwargs={"dtype": "float16"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = kit.trainer(model, kit.fixed(), args, quantization_config=quantized)
    made.close()
    says = [str(w.message) for w in caught if "already loaded" in str(w.message)]
    assert says == [
        "quantization_config is ignored: the model is already loaded.",
        "model_init_kwargs is ignored: the model is already loaded.",
    ]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_quantization_config_reaches_a_model_that_is_loaded_by_name(tmp_path: Path):
    """Without the package (or an accelerator) it is transformers that says what is missing."""
    with pytest.raises((ImportError, RuntimeError, ValueError), match=r"(?i)bitsandbytes|8-bit"):
        setup.load_model(saved(tmp_path), kit.config(tmp_path), BitsAndBytesConfig(load_in_8bit=True))


SITE = """
import sys, torch, warnings
sys.path.insert(0, sys.argv[1])
import train_kit as kit
from agentrl import GRPOTrainer
made = GRPOTrainer("me/policy", reward_funcs="me/judge", train_dataset=[{"prompt": "x"}],
                   args=kit.config(sys.argv[2], model_init_kwargs={"revision": "second"}))
reward = made.player.scorer.sources[0]
print(reward.name, made.model.config.marker, made.processing_class.chat_template,
      reward.function.model.config.marker, reward.function.tokenizer.chat_template)
"""


@pytest.mark.slow
def test_revision_reaches_models_tokenizers_and_reward_models(tmp_path: Path):
    """A hub cache with two revisions of each, read without a network."""
    for name, model in (("policy", kit.policy()), ("judge", kit.judge())):
        for revision in ("main", "second"):
            folder = tmp_path / "hub" / f"models--me--{name}"
            model.config.marker = f"{name}-{revision}"
            tokenizer = kit.fresh_tokenizer()
            tokenizer.chat_template = f"{name}-{revision}-template"
            commit = f"{len(revision):040d}"
            model.save_pretrained(folder / "snapshots" / commit)
            tokenizer.save_pretrained(folder / "snapshots" / commit)
            (folder / "refs").mkdir(exist_ok=True)
            (folder / "refs" / revision).write_text(commit)
    paths = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent)])
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", SITE, str(Path(__file__).parent), str(tmp_path / "out")],
        capture_output=True, text=True, env=os.environ | offline,
    )  # fmt: skip
    want = "judge policy-second policy-second-template judge-second judge-second-template"
    assert done.stdout.split() == want.split(), done.stderr[-2000:]


OWN_CODE = """
from transformers import {config}, {model}
class MineConfig({config}):
    model_type = "mine"
class Mine({model}):
    config_class = MineConfig
"""


def own_code(folder: Path, model: Any, auto: str) -> str:
    """The model saved with Python code of its own."""
    model.save_pretrained(folder)
    kit.fresh_tokenizer().save_pretrained(folder)
    code = OWN_CODE.format(config=type(model.config).__name__, model=type(model).__name__)
    (folder / "modeling_mine.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["Mine"]}
    config["auto_map"] = {"AutoConfig": "modeling_mine.MineConfig", auto: "modeling_mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = "from transformers import PreTrainedTokenizerFast\nclass MineTokenizer(PreTrainedTokenizerFast): pass\n"
    (folder / "tokenization_mine.py").write_text(tokens)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "MineTokenizer"}
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_mine.MineTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_trust_remote_code_reaches_the_model_and_reward_models(tmp_path: Path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertForSequenceClassification(BertConfig(vocab_size=len(kit.tokenizer()), num_labels=1, **small))
    policy = own_code(tmp_path / "policy", kit.policy(), "AutoModelForCausalLM")
    reward = own_code(tmp_path / "reward", bert, "AutoModelForSequenceClassification")
    trusting, careful = kit.config(tmp_path, trust_remote_code=True), kit.config(tmp_path)
    model = setup.load_model(policy, trusting)
    assert type(model).__name__ == "Mine"
    assert type(setup.load_tokenizer(None, model, trusting)).__name__ == "MineTokenizer"
    (made,) = load_reward_models(reward, None, trusting)
    assert type(made.model).__name__ == "Mine" and type(made.tokenizer).__name__ == "MineTokenizer"
    assert made(["a"], ["b"])[0] is not None
    with pytest.raises(ValueError, match="trust_remote_code"):
        setup.load_model(policy, careful)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_reward_models(reward, None, careful)


# --- dropout ---------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["Qwen3", "GPT2", "adapter"])
def test_disable_dropout_silences_every_kind(tmp_path: Path, kind: str):
    """Attention dropout (an attribute), embedding and residual dropout (modules), an adapter's: all are 0."""

    def make(disable: bool) -> Any:
        model, settings = kit.policy(attention_dropout=0.5 * (kind == "Qwen3")), {}
        if kind == "GPT2":
            rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
            model = kit.build("GPT2", vocab_size=len(kit.tokenizer()), **rates)
        if kind == "adapter":
            settings["peft_config"] = LoraConfig(**LORA, lora_dropout=0.5, init_lora_weights=False)
        return kit.trainer(model, kit.fixed(), kit.config(tmp_path, disable_dropout=disable), **settings)

    def twice(made: Any) -> list[torch.Tensor]:
        made.model.train()
        ids = torch.tensor([[5, 6, 7, 8]])
        out = [made.model(input_ids=ids).logits.detach() for _ in range(2)]
        made.close()
        return out

    assert not torch.equal(*twice(make(False)))
    assert torch.equal(*twice(make(True)))


# --- padding ---------------------------------------------------------------------------
def items(*lengths: int) -> list[TrainItem]:
    def one(i: int, n: int) -> TrainingSequence:
        return TrainingSequence([3 + (7 * i + t) % 250 for t in range(n)], [t > 1 for t in range(n)], [0.0] * n)

    return [TrainItem(i, (one(i, n),), 1.0, True) for i, n in enumerate(lengths)]


def test_filled_rows_by_hand():
    row = make_row(items(5, 4), torch.device("cpu"))
    assert filled(row, 1) is row and filled(row, 9) is row and filled(row, 3) is row
    more = filled(row, 4)
    assert more.lengths == (5, 4, 3) and more.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert torch.equal(more.scored_by_N, row.scored_by_N) and torch.equal(more.targets_N, row.targets_N)


def test_padded_sequences_are_a_multiple_long():
    inputs, where = padded(make_row(items(5, 3), torch.device("cpu")), True, 4)
    assert inputs["input_ids"].shape == (2, 8) and inputs["attention_mask"].sum(1).tolist() == [5, 3]
    assert inputs["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert where.tolist() == [0, 1, 2, 3, 4, 8, 9, 10]


@pytest.mark.parametrize(("kind", "packs"), [("Qwen3", True), ("GPT2", False)])
def test_padding_to_a_multiple_changes_shapes_and_no_number(kind: str, packs: bool):
    """What the decoder sees is a multiple; log-probs, entropies and the gradient are those without padding.

    The longest sequence fills the model's context, so padding must not ask for a position that it does not have.
    """
    row = make_row(items(128, 5, 30), torch.device("cpu"))
    found, seen = [], []
    for multiple in (1, 50):
        model = kit.build(kind, **({} if packs else {"attn_implementation": "eager"}))
        embedding = model.get_input_embeddings()
        embedding.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
        forward = PolicyForward(model, 1.0, multiple=multiple)
        forward.probe()
        assert forward.packs == packs
        seen.clear()
        with forward.context(row):
            out = forward.run(row)
            out.log_probs_N.sum().backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        found.append((out.log_probs_N.detach(), out.entropy_N, gradient))
        assert {tuple(shape) for shape in seen} == {(1, 163 if multiple == 1 else 200)} if packs else {(3, 128)}
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_padded_step_is_the_same_step(tmp_path: Path, accumulation: int):
    options = {
        "num_iterations": 2, "max_steps": 2, "beta": 0.1, "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation, "gradient_checkpointing": True,
    }  # fmt: skip
    one, two = kit.policy(), kit.policy()
    plain = run(one, tmp_path / "a", **options, pad_to_multiple_of=None)
    other = run(two, tmp_path / "b", **options, pad_to_multiple_of=64)
    assert (plain.policy_forward.multiple, other.policy_forward.multiple) == (1, 64) and other.policy_forward.packs
    torch.testing.assert_close(kit.weights(two), kit.weights(one), atol=1e-6, rtol=0)
    assert kit.logs_with(other, "loss") == pytest.approx(kit.logs_with(plain, "loss"), abs=1e-6)


def test_pad_to_multiple_of_is_read_as_documented():
    def multiple(value: Any) -> int:
        return setup.row_multiple(kit.config("unused", pad_to_multiple_of=value))

    assert [multiple(value) for value in ("auto", None, 1, 8, "16")] == [1, 1, 1, 8, 16]
    for wrong in (0, -8, "many", 2.5):
        with pytest.raises(ConfigurationError, match="pad_to_multiple_of must be a whole number"):
            multiple(wrong)


# --- adapters --------------------------------------------------------------------------
@pytest.mark.parametrize("given", ["peft_config", "ready"])
def test_an_adapter_is_saved_alone_and_resumed(tmp_path: Path, given: str):
    """A checkpoint holds the adapter and no weight of the base model; a resumed run is the uninterrupted one."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
    options |= {"num_iterations": 2, "beta": 0.1}

    def start() -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(7)
        config = LoraConfig(**LORA, init_lora_weights=given != "ready")
        return (
            (get_peft_model(kit.policy(), config), {}) if given == "ready" else (kit.policy(), {"peft_config": config})
        )

    model, settings = start()
    whole = run(model, tmp_path / "whole", settings=settings, **options)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    weights = load_file(checkpoint / "adapter_model.safetensors")
    assert weights and all("lora_" in name for name in weights)
    assert not (checkpoint / "model.safetensors").exists() and (checkpoint / "tokenizer.json").exists()
    model, settings = start()
    resumed = run(model, tmp_path / "resumed", checkpoint, settings=settings, **options)
    torch.testing.assert_close(kit.weights(resumed.model), kit.weights(whole.model), atol=1e-7, rtol=0)
    assert kit.logs_with(resumed, "kl")[-2:] == pytest.approx(kit.logs_with(whole, "kl")[-2:], abs=1e-7)
    whole.save_model(str(tmp_path / "final"))
    again = PeftModel.from_pretrained(kit.policy(), tmp_path / "final")
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(again(input_ids=ids).logits, whole.model(input_ids=ids).logits, atol=1e-6, rtol=0)
    assert not torch.allclose(again(input_ids=ids).logits, kit.policy()(input_ids=ids).logits, atol=1e-3)


def test_peft_config_for_a_model_that_has_an_adapter_is_refused(tmp_path: Path):
    model = get_peft_model(kit.policy(), LoraConfig(**LORA))
    with pytest.raises(ConfigurationError, match="already has an adapter; leave peft_config out"):
        kit.trainer(model, kit.fixed(), kit.config(tmp_path), peft_config=LoraConfig(**LORA))


def test_an_adapter_on_a_model_by_its_path_brings_the_tokenizer(tmp_path: Path):
    where = saved(tmp_path / "m")
    made = kit.make(
        tmp_path, ["ok"], model=where, processing_class=None, peft_config=LoraConfig(**LORA), reward_funcs=kit.length,
        train_dataset=[{"prompt": "Once"}, {"prompt": "Twice"}],
    )  # fmt: skip
    made.train()
    made.close()
    assert made.processing_class.vocab_size == kit.tokenizer().vocab_size
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}


# --- rewards that nobody can train on --------------------------------------------------
def test_F005_nothing_to_train_also_with_a_reference(tmp_path: Path):
    """Loss exactly 0, no gradient, no weight moved (weight decay neither), no KL, and a metric says so."""
    samples, model = kit.fixed(truncated=range(8)), kit.policy()
    before = kit.weights(model)
    options = {"beta": 0.5, "mask_truncated_completions": True, "optim": "adamw_torch", "weight_decay": 0.1}
    made = kit.trainer(model, samples, kit.config(tmp_path, max_steps=2, num_iterations=2, **options))
    made.train()
    made.close()
    assert torch.equal(kit.weights(model), before)
    assert kit.logs_with(made, "loss") == [0.0, 0.0] and kit.logs_with(made, "agentrl/no_signal_steps") == [1.0, 1.0]
    assert kit.logs_with(made, "kl") in ([], [0.0, 0.0]) and kit.logs_with(made, "grad_norm") == [0.0, 0.0]


def test_F187_the_reward_metric_is_raw_and_the_advantage_is_another_number(tmp_path: Path):
    """Rewards 0 and 10: reward 5, spread 7.07; advantages -0.7071 and 0.7071 are what is trained."""
    table = {"a": [([20, kit.stop()], 0.0), ([21, kit.stop()], 10.0)] * 2}
    model, groups = kit.policy(), []
    made = kit.trainer(model, kit.Fixed(table), kit.config(tmp_path, per_device_train_batch_size=4))
    keep = made.played
    made.played = lambda got, mode="train": (groups.extend(got), keep(got, mode))[1]
    made.train()
    made.close()
    (logs,) = (entry for entry in made.state.log_history if "reward" in entry)
    std = (100 / 3) ** 0.5  # of 0, 10, 0, 10
    assert logs["reward"] == logs["rewards/score/mean"] == 5.0 and logs["reward_std"] == pytest.approx(std)
    assert [r.reward for r in groups[0].rollouts] == [0.0, 10.0, 0.0, 10.0]
    assert [r.advantage for r in groups[0].rollouts] == pytest.approx([-5 / (std + 1e-4), 5 / (std + 1e-4)] * 2)


@pytest.mark.parametrize(
    ("value", "says"),
    [(float("inf"), "'judge' returned inf .* must be finite"), (-float("inf"), "must be finite"), ("1", "returned '1'"),
     (True, None), (float("nan"), None), (None, None)],
)  # fmt: skip
def test_F101_one_wrong_value_in_training(tmp_path: Path, value: Any, says: str | None):
    """Infinite and non-numbers stop the run and name the function; NaN and None mean not scored, True means 1."""

    def judge(completions: list[str]) -> list[Any]:
        return [value, 0.5, 0.25, 0.75]

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    made = kit.make(tmp_path, ["x"], reward_funcs=judge, train_dataset=rows)
    try:
        if says is not None:
            with pytest.raises(ConfigurationError, match=says):
                made.train()
            return
        made.train()
        assert kit.logs_with(made, "rewards/unscored_frac") == [0.0 if value is True else 0.25]
        assert kit.logs_with(made, "reward") == [pytest.approx((1.5 + 1.0) / 4 if value is True else 0.5)]
    finally:
        made.close()


ROWS = [{"prompt": "Say a word."}] * 4


# --- nothing to train, and adapters that cannot be ---
def test_a_policy_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No parameter of the model requires a gradient"):
        kit.make(tmp_path, model=kit.policy().requires_grad_(False), train_dataset=ROWS, reward_funcs=kit.length)
    frozen = LoraConfig(r=2, target_modules=["q_proj"], inference_mode=True)
    with pytest.raises(ConfigurationError, match=r"is_trainable=True"):
        kit.make(tmp_path, peft_config=frozen, train_dataset=ROWS, reward_funcs=kit.length)


def test_virtual_tokens_are_refused_by_name(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigurationError, match=r"PromptTuningConfig puts virtual tokens"):
        kit.make(tmp_path, peft_config=config, train_dataset=ROWS, reward_funcs=kit.length)


def test_a_fresh_adapter_follows_from_the_seed(tmp_path: Path) -> None:
    def first(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        config = LoraConfig(r=2, target_modules=["q_proj"])
        made = kit.make(tmp_path, peft_config=config, train_dataset=ROWS, reward_funcs=kit.length, args={"seed": seed})
        return next(p.detach().clone() for n, p in made.model.named_parameters() if "lora_A" in n)

    assert torch.equal(first(3, 1), first(3, 2)) and not torch.equal(first(3, 1), first(4, 1))
