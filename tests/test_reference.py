"""The reference of the KL term: the policy as it was given, still or moved, alone, as an adapter, and resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.train.reference import FILE, Reference

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def adapted(*, ready: bool = True) -> Any:
    """A PeftModel; `ready`: whose adapter has already learnt something."""
    torch.manual_seed(0)
    return get_peft_model(kit.policy(), LoraConfig(**LORA, init_lora_weights=not ready))


def mean_kl(model: Any, reference: Any, samples: kit.Fixed) -> float:
    """k3 per token over all of `samples`, times the ratio 1."""
    terms = []
    with torch.no_grad():
        for prompt, members in samples.table.items():
            for ids, _ in members:
                now, then = (kit.log_probs(m, samples.prompt_ids(prompt), ids) for m in (model, reference))
                terms.append((then - now).exp() - (then - now) - 1)
    return torch.cat(terms).mean().item()


class _Snapshots(TrainerCallback):
    """Copies of the model at the end of each step."""

    def __init__(self) -> None:
        self.models: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.models.append(copy.deepcopy(model))


def run(model: Any, folder: Path, resume: Path | None = None, **args: Any) -> tuple[Any, list[Any]]:
    """The trainer, and the model after each step."""
    seen = _Snapshots()
    given = {"beta": 0.5, "max_steps": 3} | args
    made = kit.trainer(model, kit.fixed(), kit.config(folder, **given), callbacks=[seen])
    made.train(resume_from_checkpoint=str(resume) if resume else None)
    made.policy_forward.restore()
    return made, seen.models


def plain(model: Any) -> Any:
    """A copy of a model with its own forward."""
    model.__dict__.pop("forward", None)
    for module in model.modules():
        module.__dict__.pop("forward", None)
        module.__dict__.pop("_agentrl_policy_forward", None)
    return model


# --- the object ------------------------------------------------------------------------
class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        self.frozen = torch.nn.Parameter(torch.tensor([5.0]), requires_grad=False)
        self.drop = torch.nn.Dropout(0.5)


def test_move_by_hand():
    """0.6 x 3 + 0.4 x 1 = 2.2, then 0.6 x 3 + 0.4 x 2.2 = 2.68; a share of 1 is the policy, of 0 changes nothing."""
    model = Two()
    reference = Reference(model)
    with torch.no_grad():
        model.trained.copy_(torch.tensor([3.0, -1.0]))
    for share, want in ((0.6, 2.2), (0.6, 2.68), (0.0, 2.68), (1.0, 3.0)):
        reference.move(share)
        with reference.in_place():
            assert model.trained.tolist() == pytest.approx([want, -1.0], abs=1e-6)
        assert model.trained.tolist() == [3.0, -1.0]


def test_in_place_the_model_is_the_reference_and_afterwards_the_policy_again():
    model = Two().train()
    reference, parameter, storage = Reference(model), model.trained, model.trained.data_ptr()
    with torch.no_grad():
        model.trained += 1
    with pytest.raises(ZeroDivisionError), reference.in_place():
        assert model.trained.tolist() == [1.0, -1.0] and not model.drop.training
        raise ZeroDivisionError
    assert model.trained.tolist() == [2.0, 0.0] and model.drop.training
    assert model.trained is parameter and model.trained.data_ptr() == storage  # what optimizers and DDP hold on to


def test_only_what_is_trained_is_held_and_later_unfreezing_is_refused(tmp_path: Path):
    model = Two()
    reference = Reference(model)
    reference.save(tmp_path)
    assert set(load_file(tmp_path / FILE)) == {"trained"}
    model.frozen.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="'frozen' was frozen"), reference.in_place():
        raise AssertionError("not reached")


def test_a_saved_reference_of_another_model_is_refused(tmp_path: Path):
    Reference(torch.nn.Linear(2, 2)).save(tmp_path)
    with pytest.raises(ConfigurationError, match="another model or adapter"):
        Reference(Two()).restore(tmp_path)


# --- which model it is -----------------------------------------------------------------
@pytest.mark.parametrize("ready", [True, False])
def test_with_an_adapter_it_is_the_model_as_given_not_the_base_model(tmp_path: Path, ready: bool):
    """A ready adapter's first KL is 0, though the base model is far away; the second is to the starting point."""
    start, samples = adapted(ready=ready), kit.fixed()
    made, after = run(adapted(ready=ready), tmp_path, max_steps=2)
    kl = kit.logs_with(made, "kl")
    assert kl == pytest.approx([0.0, mean_kl(plain(after[0]), start, samples)], abs=1e-6)
    assert kl[1] > 1e-4
    distance = mean_kl(start, kit.policy(), samples)
    assert distance > 0.1 if ready else distance == 0.0
    saved = {name for name, _ in made.model.named_parameters() if "lora" in name}
    assert set(made.reference._held) == saved  # no second copy of the model


def test_peft_config_that_changes_the_base_weights_starts_at_kl_0(tmp_path: Path):
    """PiSSA moves a part of the weights into the adapter: switching it off is another model than the one given."""
    lora = LoraConfig(**LORA | {"init_lora_weights": "pissa"})
    made = kit.trainer(kit.policy(), kit.fixed(), kit.config(tmp_path, beta=0.5, max_steps=2), peft_config=lora)
    made.train()
    made.close()
    first, second = kit.logs_with(made, "kl")
    assert first == pytest.approx(0.0, abs=1e-6) and second > 1e-4


def test_dropout_of_the_policy_is_not_in_the_reference(tmp_path: Path):
    """Two references of one policy with dropout are the same numbers."""
    made = kit.trainer(kit.policy(attention_dropout=0.5), kit.fixed(), kit.config(tmp_path, beta=0.5))
    made.policy_forward.probe()
    made.model.train()
    items = [item for part in made.buffer._play(0) for item in part.items]
    again = [item for part in made.buffer._play(0) for item in part.items]
    made.close()
    assert all(torch.equal(a.ref_N, b.ref_N) for a, b in zip(items, again, strict=True))


# --- moved towards the policy ----------------------------------------------------------
@pytest.mark.parametrize("adapter", [False, True])
def test_sync_ref_model_mixes_every_few_steps(tmp_path: Path, adapter: bool):
    """Each logged KL is to the reference made here by hand: 0.25 x policy + 0.75 x reference after steps 2 and 4."""
    make = adapted if adapter else kit.policy
    options = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.25, "ref_model_sync_steps": 2, "max_steps": 5}
    made, after = run(make(), tmp_path, **options)
    policies = [make(), *(plain(model) for model in after)]
    reference, want = make(), []
    for step in range(5):
        want.append(mean_kl(policies[step], reference, kit.fixed()))
        if step in (1, 3):
            with torch.no_grad():
                for r, p in zip(reference.parameters(), policies[step + 1].parameters(), strict=True):
                    r.copy_(0.25 * p + 0.75 * r)
    assert kit.logs_with(made, "kl") == pytest.approx(want, rel=1e-3, abs=1e-6)
    still, _ = run(make(), tmp_path / "still", max_steps=5)
    assert kit.logs_with(still, "kl")[:2] == kit.logs_with(made, "kl")[:2]
    assert kit.logs_with(still, "kl")[4] > 1.2 * want[4]


def test_a_move_within_a_generation_phase_reaches_the_next_phase(tmp_path: Path):
    """Reference log-probs are made when rollouts are played; moving at every step changes nothing before that."""
    options = {"num_iterations": 2, "max_steps": 4, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    made, _ = run(kit.policy(), tmp_path / "a", sync_ref_model=True, **options)
    still, _ = run(kit.policy(), tmp_path / "b", num_iterations=2, max_steps=4)
    kl, kl_still = kit.logs_with(made, "kl"), kit.logs_with(still, "kl")
    assert kl[:2] == kl_still[:2] and kl[1] > 0
    assert kl[2] == pytest.approx(0.0, abs=1e-6) and kl_still[2] > 1e-4  # a share of 1: the policy itself


# --- checkpoints -----------------------------------------------------------------------
SYNC = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 1, "save_strategy": "steps",
        "save_steps": 2, "max_steps": 4}  # fmt: skip


@pytest.mark.parametrize("adapter", [False, True])
def test_a_moved_reference_survives_resuming(tmp_path: Path, adapter: bool):
    make = adapted if adapter else kit.policy
    whole, _ = run(make(), tmp_path / "whole", **SYNC)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed, _ = run(make(), tmp_path / "resumed", checkpoint, **SYNC)
    torch.testing.assert_close(kit.weights(resumed.model), kit.weights(whole.model), atol=1e-7, rtol=0)
    assert kit.logs_with(resumed, "kl")[-2:] == pytest.approx(kit.logs_with(whole, "kl")[-2:], abs=1e-7)
    (checkpoint / FILE).unlink()
    with pytest.raises(ConfigurationError, match=r"checkpoint-2' holds no reference model"):
        run(make(), tmp_path / "again", checkpoint, **SYNC)


def test_a_random_adapter_is_saved_with_its_start(tmp_path: Path):
    """A fresh adapter that begins at random cannot be made again: its reference is that of the first run."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}

    def fresh() -> Any:
        return get_peft_model(kit.policy(), LoraConfig(**LORA, init_lora_weights=False))

    torch.manual_seed(1)
    whole, _ = run(fresh(), tmp_path / "whole", **options)
    torch.manual_seed(2)
    resumed, _ = run(fresh(), tmp_path / "resumed", tmp_path / "whole" / "checkpoint-1", **options)
    assert kit.logs_with(resumed, "kl")[-1] == pytest.approx(kit.logs_with(whole, "kl")[-1], abs=1e-7)


def test_a_full_model_that_does_not_move_is_not_saved_twice(tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole, _ = run(kit.policy(), tmp_path, **options)
    assert not (tmp_path / "checkpoint-1" / FILE).exists()
    resumed, _ = run(kit.policy(), tmp_path / "resumed", tmp_path / "checkpoint-1", **options)
    assert kit.logs_with(resumed, "kl") == pytest.approx(kit.logs_with(whole, "kl"), abs=1e-7)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sync_ref_model": True}, "sync_ref_model needs beta > 0"),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 1.5}, r"ref_model_mixup_alpha must be in \[0"),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 0}, "ref_model_sync_steps must be at least 1"),
        ({"beta": 0.1, "ref_model_mixup_alpha": 0.5}, "do nothing without sync_ref_model=True"),
        ({"beta": 0.1, "ref_model_sync_steps": 5}, "do nothing without sync_ref_model=True"),
    ],
)
def test_contradictory_options_are_named(options: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=says):
        kit.config("unused", **options)


# --- beside trl ------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("adapter", "changes"),
    [
        (False, {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}),
        (True, {}),
        (True, {"use_bias_correction_kl": False}),
        (False, {"use_bias_correction_kl": False, "loss_type": "grpo"}),
    ],
    ids=["sync", "ready-adapter", "ready-adapter-uncorrected", "uncorrected"],
)
def test_three_steps_are_trls(tmp_path: Path, adapter: bool, changes: dict[str, Any]):
    """The change of the weights after three steps with a strong KL term; the reference decides it."""
    trl = pytest.importorskip("trl", reason="the oracle of this test; pip install -e '.[dev]'")
    import datasets

    samples, where = kit.fixed(), str(tmp_path / "model")
    kit.policy().save_pretrained(where)

    def make() -> Any:
        if not adapter:
            return where
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
        return get_peft_model(base, LoraConfig(**LORA, init_lora_weights=False))

    settings = {
        "output_dir": str(tmp_path / "trl"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8,
        "max_steps": 3, "num_generations": 4, "max_completion_length": 16, "report_to": "none", "save_strategy": "no",
        "beta": 1.0, "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant",
        "optim": "sgd", "max_grad_norm": 0.0, "gradient_checkpointing": False, "shuffle_dataset": False,
    }  # fmt: skip
    theirs = trl.GRPOTrainer(
        make(), reward_funcs=kit.score, args=trl.GRPOConfig(**(settings | changes)),
        train_dataset=datasets.Dataset.from_list(samples.rows), processing_class=kit.fresh_tokenizer(),
        rollout_func=lambda prompts, trainer: samples(list(dict.fromkeys(prompts)), trainer),
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in theirs.model.named_parameters() if p.requires_grad}
    theirs.train()
    ours = kit.trainer(make(), samples, kit.config(tmp_path / "a", beta=1.0, max_steps=3, **changes))
    ours.train()
    ours.close()
    other = dict(theirs.model.named_parameters())
    moved = torch.cat([(other[n].detach() - p).reshape(-1) for n, p in before.items()])
    mine = dict(ours.model.named_parameters())
    gap = torch.cat([(mine[n].detach() - other[n].detach()).reshape(-1) for n in before])
    assert gap.norm() < 1e-4 * moved.norm()
    kl = [entry["kl"] for entry in theirs.state.log_history if "kl" in entry]
    assert kit.logs_with(ours, "kl") == pytest.approx(kl, rel=1e-3, abs=1e-6) and kl[2] > 1e-3
