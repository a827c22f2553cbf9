"""The entropy bonus, its adaptive coefficient, the entropy quantile, and the load-balancing loss, step by step."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_worker
import pytest
import torch
import train_kit as kit
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agentrl.errors import ConfigurationError
from agentrl.objective import entropy_threshold
from agentrl.train.entropy import EntropyControl, EntropySettings, entropy_settings, keep_top
from agentrl.train.rows import TrainItem
from agentrl.train.setup import check_router

BY_GROUP = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.3}


def trained(folder: Path, model: Any, samples: kit.Fixed | None = None, resume: str | None = None, **args: Any):
    """The trainer after `train()`."""
    made = kit.trainer(model, kit.fixed() if samples is None else samples, kit.config(folder, **args))
    made.train(resume_from_checkpoint=resume)
    made.close()
    return made


# --- a step without any of agentrl's code ----------------------------------------------
def micro_batches(samples: kit.Fixed) -> list[list[tuple[list[int], list[int], float]]]:
    """Prompt, completion and advantage of each rollout, one micro-batch per group."""
    out = []
    for prompt, members in samples.table.items():
        rewards = torch.tensor([r for _, r in members], dtype=torch.float64)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        out.append([(samples.prompt_ids(prompt), ids, a) for (ids, _), a in zip(members, advantages, strict=True)])
    return out


def numbers(model: Any, prompt: list[int], completion: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of a completion's tokens."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    known = torch.distributions.Categorical(logits=logits)
    return known.log_prob(torch.tensor(completion)), known.entropy()


def plain_step(model: Any, batches: list[Any], coef: float = 0.0, quantile: float = 1.0) -> float:
    """Gradients of dapo's first step in the model (ratio 1: clipping does nothing); returns the loss."""
    policy, bonus = [], []
    total = sum(len(ids) for batch in batches for _, ids, _ in batch)
    for batch in batches:
        found = [(*numbers(model, prompt, ids), advantage) for prompt, ids, advantage in batch]
        every = torch.cat([entropy for _, entropy, _ in found]).detach().double()
        threshold = torch.quantile(every, 1.0 - quantile) if quantile < 1 else -math.inf
        for log_probs, entropy, advantage in found:
            keep = entropy.detach().double() >= threshold
            policy.append((-(log_probs - log_probs.detach()).exp() * advantage)[keep])
            bonus.append(entropy[keep])
    loss = torch.cat(policy).sum() / total - coef * torch.cat(bonus).mean()
    loss.backward()
    return loss.item()


def sgd(model: Any, learning_rate: float = 0.1) -> torch.Tensor:
    return torch.cat([(p - learning_rate * p.grad).detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("coef", [0.0, 0.7])
@pytest.mark.parametrize("quantile", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("cut", [{}, BY_GROUP])
def test_one_step_is_the_plain_one(tmp_path: Path, coef: float, quantile: float, cut: dict[str, int]):
    """A micro-batch has its own threshold; the bonus is the mean over all kept tokens of the step."""
    samples, model = kit.fixed(), kit.policy()
    batches = micro_batches(samples)
    batches = batches if cut else [batches[0] + batches[1]]
    want_loss = plain_step(model, batches, coef, quantile)
    made = trained(tmp_path, kit.policy(), samples, entropy_coef=coef, top_entropy_quantile=quantile, **cut)
    moved, want = kit.weights(made.model) - kit.weights(kit.policy()), sgd(model) - kit.weights(kit.policy())
    assert (moved - want).norm() < 1e-5 * want.norm() and want.norm() > 1e-3
    (log,) = made.state.log_history[:1]
    assert log["loss"] == pytest.approx(want_loss, abs=1e-5)
    assert ("policy_loss" in log) == ("entropy_coef" in log) == (coef > 0)
    if coef:
        without = plain_step(kit.policy(), batches, 0.0, quantile)
        assert log["entropy_coef"] == coef and log["policy_loss"] == pytest.approx(without, abs=1e-5)


def test_groups_with_equal_rewards_have_a_gradient_where_there_is_a_bonus(tmp_path: Path):
    equal = kit.Fixed({prompt: [(ids, 1.0) for ids, _ in m] for prompt, m in kit.fixed().table.items()})
    start = kit.weights(kit.policy())
    off = trained(tmp_path, kit.policy(), equal)
    assert torch.equal(kit.weights(off.model), start)
    assert kit.logs_with(off, "agentrl/no_signal_steps") == [1.0]
    model = kit.policy()
    want = plain_step(model, micro_batches(equal), coef=0.5)
    made = trained(tmp_path, kit.policy(), equal, entropy_coef=0.5)
    torch.testing.assert_close(kit.weights(made.model), sgd(model), atol=1e-6, rtol=0)
    assert kit.logs_with(made, "loss")[0] == pytest.approx(want, abs=1e-5)
    assert kit.logs_with(made, "entropy")[0] == pytest.approx(-2 * want, abs=1e-5)


def test_the_bonus_is_the_same_for_every_loss_and_every_cut(tmp_path: Path):
    """What it adds to the first step: the difference to the step without it."""
    added = {}
    for loss_type in ("dapo", "grpo", "dr_grpo", "luspo", "cispo"):
        level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
        for cut in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
            with_it, without = (
                kit.weights(trained(tmp_path, kit.policy(), entropy_coef=c, loss_type=loss_type, **level, **cut).model)
                for c in (0.5, 0.0)
            )
            added[loss_type, bool(cut)] = with_it - without
    want = added["dapo", False]
    assert want.norm() > 1e-2
    for key, one in added.items():
        assert (one - want).norm() < 1e-4 * want.norm(), key


def test_dropped_tokens_keep_their_kl_term(tmp_path: Path):
    """With all policy terms 0, the KL to a reference that the policy has left moves it the same with every quantile."""
    samples = kit.fixed()
    equal = kit.Fixed({prompt: [(ids, 1.0) for ids, _ in m] for prompt, m in samples.table.items()})
    ends = []
    for quantile in (1.0, 0.2):
        torch.manual_seed(0)
        args = {"beta": 1.0, "num_iterations": 2, "max_steps": 2, "entropy_coef": 0.0}
        made = kit.trainer(kit.policy(), equal, kit.config(tmp_path, top_entropy_quantile=quantile, **args))
        made.buffer.batch(0)  # reference and old log-probs are those of the start
        with torch.no_grad():
            for p in made.model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        moved = kit.weights(made.model)
        made.buffer._next_step = 0
        made.train()
        made.close()
        ends.append(kit.weights(made.model))
        assert (ends[-1] - moved).norm() > 1e-2
    torch.testing.assert_close(ends[0], ends[1], atol=1e-6, rtol=0)


# --- the quantile ----------------------------------------------------------------------
def test_each_micro_batch_has_its_own_threshold_by_hand():
    """Shares 0.5 of (1, 2, 3) and (10, 20, 30, 40): medians 2 and 25; a rollout that trains nothing is in neither."""
    items = [TrainItem(i, (), 0.0, True) for i in range(4)]
    entropies = [torch.tensor([3.0, 1.0]), torch.tensor([2.0]), torch.tensor([10.0, 40.0, 20.0, 30.0])]
    entropy_of = {id(item): entropy for item, entropy in zip(items, entropies, strict=False)}
    kept = keep_top(items, [0, 0, 1, 1], 2, entropy_of, 0.5, world=1)
    assert [kept.mask_of[id(item)].tolist() for item in items[:3]] == [
        [True, False],
        [True],
        [False, True, False, True],
    ]
    assert kept.total == 4 and id(items[3]) not in kept.mask_of
    assert keep_top(items, [0, 0, 0, 1], 2, entropy_of, 0.5, world=1).total == 4  # 7 tokens, median 10: 10 to 40


def test_a_token_that_is_the_threshold_is_kept():
    """(1 - 0.7) x 10 is a little more than 3 in floating point."""
    ordered = torch.arange(11.0) / 7
    assert entropy_threshold(ordered, 0.7) == float(ordered.double()[3])
    assert int((ordered.double() >= entropy_threshold(ordered, 0.7)).sum()) == 8


def test_the_quantile_costs_a_forward_and_off_costs_none(tmp_path: Path):
    """All rollouts of the step fit into one row, and all of them have an advantage."""
    for quantile, want in ((1.0, 1), (0.5, 2)):
        model, calls = kit.policy(), []
        made = kit.trainer(model, kit.fixed(), kit.config(tmp_path, top_entropy_quantile=quantile))
        made.policy_forward.probe()
        batch = made.buffer.batch(0)
        model.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made.step_runner.run(model, batch, made.window["train"])
        made.close()
        assert len(calls) == want


def test_the_first_tokens_of_a_group_are_kept_together():
    """They have the same entropy up to rounding; a share that would end among them keeps all four."""
    entropy = torch.tensor([2.0, 2.0000002, 1.9999998, 2.0, 1.0, 3.0])
    kept = entropy >= entropy_threshold(entropy, 0.5)
    assert kept.tolist() == [True, True, False, True, False, True]  # rounding would choose
    item = TrainItem(0, (), 0.0, True)
    masks = keep_top([item], [0], 1, {id(item): entropy}, 0.5, world=1)
    assert masks.mask_of[id(item)].tolist() == [True, True, True, True, False, True] and masks.total == 5


# --- the adaptive coefficient ----------------------------------------------------------
def test_the_coefficient_by_hand():
    """Target 1: no bonus before a measurement; 0.5 nats raise it, 2 nats lower it and switch it off, bounds hold."""
    control = EntropyControl(entropy_settings(1.0, 0.01, True, 0.0, 0.02, 0.006, 1.0))
    seen = []
    for total, tokens in ((2.0, 4), (3.0, 6), (8.0, 4), (0.0, 0), (4.0, 4), (40.0, 4), (40.0, 4), (40.0, 4), (40.0, 4)):
        seen.append(round(control.active, 9))
        control.measured(total, tokens, world=1)
        seen.append(round(control.coef, 9))
    assert seen[:10] == [0.0, 0.016, 0.016, 0.02, 0.02, 0.014, 0.0, 0.014, 0.0, 0.02]
    assert seen[10:] == [0.02, 0.014, 0.0, 0.008, 0.0, 0.002, 0.0, 0.0]
    fixed = EntropyControl(EntropySettings(coef=0.3))
    fixed.measured(1.0, 1, world=1)
    assert (fixed.active, fixed.coef, fixed.regularises) == (0.3, 0.3, True)
    assert not EntropyControl(EntropySettings()).regularises


@pytest.mark.parametrize("target", [9.0, 4.914, 0.1])
@pytest.mark.parametrize("cut", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}])
def test_steps_follow_the_measured_entropy(tmp_path: Path, target: float, cut: dict[str, int]):
    """Replayed from the log: what a step's loss had of the bonus, and the coefficient after it."""
    made = trained(tmp_path, kit.policy(), max_steps=4, entropy_target=target, **ADAPTIVE, **cut)
    coef, last = 0.05, math.inf
    for log in made.state.log_history[:4]:
        bonus = coef if last <= target else 0.0
        assert log["loss"] == pytest.approx(log["policy_loss"] - bonus * log["entropy"], abs=1e-4)
        last = log["entropy"]
        coef = min(coef + 0.3, 1.0) if last <= target else max(coef - 0.3, 0.0)
        assert log["entropy_coef"] == pytest.approx(coef)
    assert any(log["loss"] != pytest.approx(log["policy_loss"], abs=1e-3) for log in made.state.log_history[:4]) == (
        target > 1
    )


def test_with_a_quantile_the_target_is_for_the_kept_tokens(tmp_path: Path):
    """All tokens are below it, the kept ones above."""
    samples = kit.fixed()
    every = torch.cat([numbers(kit.policy(), p, ids)[1] for batch in micro_batches(samples) for p, ids, _ in batch])
    target = every.mean().item() + 0.02
    kept = every[every >= every.quantile(0.8) - 1e-5].mean().item()
    assert every.quantile(0.8).item() > target
    for quantile, goal, want in ((1.0, target, 0.35), (0.2, target, 0.0), (0.2, kept + 1e-3, 0.35)):
        args = {"entropy_target": goal, "top_entropy_quantile": quantile}
        made = trained(tmp_path, kit.policy(), samples, **args, **ADAPTIVE)
        assert kit.logs_with(made, "entropy_coef") == [pytest.approx(want)]
        assert kit.logs_with(made, "entropy") == [pytest.approx(every.mean().item(), abs=1e-4)]  # over all, always


def test_a_resumed_run_goes_on_with_its_coefficient(tmp_path: Path):
    args = {"max_steps": 4, "entropy_target": 9.0, "save_strategy": "steps", "save_steps": 2, **ADAPTIVE}
    args["entropy_coef_delta"] = 0.1
    whole = trained(tmp_path, kit.policy(), **args)
    resumed = trained(tmp_path, kit.policy(), resume=str(tmp_path / "checkpoint-2"), **args)
    assert kit.logs_with(whole, "entropy_coef") == pytest.approx([0.15, 0.25, 0.35, 0.45])
    for name in ("entropy_coef", "loss", "policy_loss", "entropy"):
        assert kit.logs_with(resumed, name)[-2:] == pytest.approx(kit.logs_with(whole, name)[-2:], abs=1e-5)
    torch.testing.assert_close(kit.weights(resumed.model), kit.weights(whole.model), atol=1e-6, rtol=0)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["agentrl_entropy"]["coef"] == pytest.approx(0.25)
    low = trained(tmp_path, kit.policy(), resume=str(tmp_path / "checkpoint-2"), **args | {"entropy_coef_max": 0.2})
    assert kit.logs_with(low, "entropy_coef")[-2:] == pytest.approx([0.2, 0.2])  # the new bound holds
    loss, policy, entropy = (kit.logs_with(low, name)[-2] for name in ("loss", "policy_loss", "entropy"))
    assert loss == pytest.approx(policy - 0.2 * entropy, abs=1e-4)  # already in the first step, 0.25 before


def test_another_run_begins_with_the_coefficient_that_is_asked_for(tmp_path: Path):
    made = kit.trainer(kit.policy(), kit.fixed(), kit.config(tmp_path, max_steps=2, entropy_target=9.0, **ADAPTIVE))
    for _ in range(2):
        made.train()
        assert kit.logs_with(made, "entropy_coef") == pytest.approx([0.35, 0.65])
    made.close()


def test_an_adapter_is_trained_with_bonus_and_quantile(tmp_path: Path):
    """LoRA: the same change however the step is cut, and another one without the bonus."""
    from peft import LoraConfig, get_peft_model

    ends = []
    for changes in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {"entropy_coef": 0.0}):
        torch.manual_seed(0)
        model = get_peft_model(kit.policy(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_alpha=8))
        args = {"max_steps": 3, "entropy_coef": 0.5} | changes
        ends.append(kit.weights(trained(tmp_path, model, **args).model))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=0)
    assert (ends[0] - ends[2]).abs().max() > 1e-4


# --- options ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"top_entropy_quantile": 1.5}, r"top_entropy_quantile must be between 0 and 1"),
        ({"top_entropy_quantile": -0.1}, r"top_entropy_quantile"),
        ({"top_entropy_quantile": math.nan}, r"top_entropy_quantile"),
        ({"entropy_coef": -0.1}, r"entropy_coef must be 0 or more"),
        ({"entropy_coef": math.nan}, r"entropy_coef"),
        ({"use_adaptive_entropy": True, "entropy_coef": 2.0}, r"entropy_coef \(2\.0\).*entropy_coef_max \(1\.0\)"),
        ({"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_min": 0.2}, r"entropy_coef_min \(0\.2\)"),
        ({"use_adaptive_entropy": True, "entropy_coef_min": 2.0}, r"entropy_coef_min \(2\.0\).*entropy_coef_max"),
        ({"use_adaptive_entropy": True, "entropy_coef_delta": -1.0}, r"entropy_coef_delta"),
        ({"use_adaptive_entropy": True, "entropy_target": math.nan}, r"entropy_target"),
        ({"entropy_target": 5.0, "entropy_coef": 0.1}, r"entropy_target do nothing without use_adaptive_entropy"),
        ({"router_aux_loss_coef": -0.1}, r"router_aux_loss_coef"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, changes: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=says):
        kit.config(tmp_path, **changes)


# --- the load-balancing loss -----------------------------------------------------------
def moe(**changes: Any) -> Any:
    ends = {"eos_token_id": kit.stop(), "vocab_size": len(kit.tokenizer()), "max_position_embeddings": 2048}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return kit.build("Qwen3Moe", **(ends | experts | changes))


def router_loss(model: Any, batch: list[Any]) -> torch.Tensor:
    """transformers' own, over the tokens of a micro-batch whose sequences ran one at a time."""
    inputs = [torch.tensor([prompt + ids]) for prompt, ids, _ in batch]
    layers = [model(input_ids=one, output_router_logits=True).router_logits for one in inputs]
    return load_balancing_loss_func(tuple(torch.cat(one) for one in zip(*layers, strict=True)), 4, 2)  # type: ignore[return-value]


@pytest.mark.parametrize("cut", [{}, BY_GROUP])
def test_a_step_with_a_load_balancing_loss_is_the_plain_one(tmp_path: Path, cut: dict[str, int]):
    """The mean over micro-batches of each one's own; rollouts with equal rewards take part in it."""
    samples, model = kit.fixed(), moe()
    table = dict(samples.table)
    table["question 0: "] = [(ids, 1.0) for ids, _ in table["question 0: "]]
    samples = kit.Fixed(table)
    batches = micro_batches(samples)
    batches = batches if cut else [batches[0] + batches[1]]
    policy = plain_step(model, batches)
    extra = torch.stack([router_loss(model, batch) for batch in batches]).mean()
    (0.5 * extra).backward()
    made = trained(tmp_path, moe(), samples, router_aux_loss_coef=0.5, **cut)
    moved, want = kit.weights(made.model) - kit.weights(moe()), sgd(model) - kit.weights(moe())
    assert (moved - want).norm() < 1e-4 * want.norm()
    assert kit.logs_with(made, "aux_loss") == [pytest.approx(extra.item(), abs=1e-5)]
    assert kit.logs_with(made, "loss")[0] == pytest.approx(policy + 0.5 * extra.item(), abs=1e-5)
    assert not kit.logs_with(made, "policy_loss")


def test_the_coefficient_is_the_models_own_unless_it_is_given(tmp_path: Path):
    ends = {}
    for name, own, given in (("own", 0.5, None), ("given", 0.0, 0.5), ("off", 0.5, 0.0), ("none", 0.0, None)):
        made = trained(tmp_path, moe(router_aux_loss_coef=own), router_aux_loss_coef=given)
        ends[name] = kit.weights(made.model)
        assert bool(kit.logs_with(made, "aux_loss")) == (name in ("own", "given"))
    assert torch.equal(ends["own"], ends["given"]) and torch.equal(ends["off"], ends["none"])
    assert (ends["own"] - ends["off"]).abs().max() > 1e-4


def test_a_load_balancing_loss_that_a_model_cannot_have_is_refused(tmp_path: Path):
    for value in (0.1, 0.0):
        with pytest.raises(ConfigurationError, match="router_aux_loss_coef is set but the model is no mixture"):
            check_router(kit.policy(), kit.config(tmp_path, router_aux_loss_coef=value))
    dense = kit.policy()
    dense.config.router_aux_loss_coef = 0.001  # a family's config, as in dense members of families with experts
    assert check_router(dense, kit.config(tmp_path)) == 0.0
    with pytest.raises(ConfigurationError, match=r"Qwen3ForCausalLM: it gives no router logits"):
        check_router(dense, kit.config(tmp_path, router_aux_loss_coef=0.1))
    doge = kit.build("Doge", is_moe=True, num_experts=4, num_experts_per_tok=1, router_aux_loss_coef=0.01)
    with pytest.raises(ConfigurationError, match=r"Doge.*no load-balancing loss.*router_aux_loss_coef=0\.0"):
        check_router(doge, kit.config(tmp_path))
    assert check_router(doge, kit.config(tmp_path, router_aux_loss_coef=0.0)) == 0.0


# --- beside the PyPI package trl -------------------------------------------------------
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dr_grpo", "entropy_coef": 0.3},
        {"loss_type": "dapo", "entropy_coef": 0.1, "beta": 0.5, "num_iterations": 2},
        {"loss_type": "dapo", "entropy_target": 4.912, "max_steps": 4, **ADAPTIVE},
        {"loss_type": "dapo", "top_entropy_quantile": 0.3, "beta": 0.2, "num_iterations": 2},
        {"loss_type": "grpo", "top_entropy_quantile": 0.3, "entropy_coef": 0.2, "mask_truncated_completions": True},
        {"loss_type": "grpo", "top_entropy_quantile": 0.3, **BY_GROUP},
        {"loss_type": "bnpo", "top_entropy_quantile": 0.3, **BY_GROUP},
        {"loss_type": "dapo", "top_entropy_quantile": 0.3, "entropy_target": 9.0, **ADAPTIVE},
        {"loss_type": "dapo", "router_aux_loss_coef": 1.0},
        {"loss_type": "grpo", "router_aux_loss_coef": 1.0, **BY_GROUP},
    ],
    ids=lambda changes: "-".join(str(v) for v in changes.values()),
)
def test_three_steps_are_trls(tmp_path: Path, changes: dict[str, Any]):
    """The change of the weights agrees to 1e-4, and is another one without the option."""
    import datasets

    trl = pytest.importorskip("trl", reason="the oracle of this test; pip install -e '.[dev]'")
    samples, where = kit.fixed(truncated=(1, 6)), str(tmp_path / "model")
    make = moe if "router_aux_loss_coef" in changes else kit.policy
    make().save_pretrained(where)
    start = kit.weights(AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32))
    settings = {
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "max_steps": 3, "num_generations": 4,
        "max_completion_length": 16, "report_to": "none", "save_strategy": "no", "beta": 0.0, "disable_tqdm": True,
        "logging_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
        "gradient_checkpointing": False, "shuffle_dataset": False, "log_level": "error",
    }  # fmt: skip
    other = trl.GRPOTrainer(
        where, reward_funcs=kit.score, args=trl.GRPOConfig(str(tmp_path / "trl"), **(settings | changes)),
        train_dataset=datasets.Dataset.from_list(samples.rows), processing_class=kit.fresh_tokenizer(),
        rollout_func=lambda prompts, trainer: samples(list(dict.fromkeys(prompts)), trainer),
    )  # fmt: skip
    other.train()
    mine = trained(tmp_path, where, samples, **({"max_steps": 3} | changes))
    want, moved = (kit.weights(one.model) - start for one in (other, mine))
    assert (moved - want).norm() < 1e-4 * want.norm()
    names = ["loss", "grad_norm", *({"policy_loss", "entropy_coef", "aux_loss"} & set(other.state.log_history[0]))]
    for a, b in zip(mine.state.log_history, other.state.log_history[: len(mine.state.log_history) - 1], strict=False):
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, abs=3e-5, rel=1e-3)
    options = ("entropy_coef", "top_entropy_quantile", "router_aux_loss_coef")
    off = changes | dict.fromkeys(options[:1], 0.0) | {"top_entropy_quantile": 1.0, "use_adaptive_entropy": False}
    off = {k: v for k, v in off.items() if k not in ("entropy_target", "entropy_coef_delta")}
    off |= {"router_aux_loss_coef": 0.0} if make is moe else {}
    without = kit.weights(trained(tmp_path, where, samples, **({"max_steps": 3} | off)).model) - start
    assert (without - want).norm() > 1e-2 * want.norm()


# --- two processes ---------------------------------------------------------------------
FEW = {"groups": 1, "size": 8, "truncated": [4, 5, 6, 7]}  # all of the second rank's rollouts are masked
MASKED = {"num_generations": 8, "mask_truncated_completions": True, "gradient_checkpointing": True, "max_steps": 3}
JOBS: dict[str, dict[str, Any]] = {
    "bonus": {"groups": 2, "size": 4, "quiet": ["question 0: "], "args": {"entropy_coef": 0.4, "max_steps": 2}},
    "few bonus": {**FEW, "args": {"entropy_coef": 0.4, **MASKED}},
    "adaptive": {"groups": 2, "size": 4, "args": {"max_steps": 4, "entropy_target": 4.915, **ADAPTIVE}},
    "quantile": {"groups": 2, "size": 4, "args": {"top_entropy_quantile": 0.3, "max_steps": 2}},
    "few all": {**FEW, "args": {"top_entropy_quantile": 0.4, "entropy_target": 9.0, "beta": 0.1, **ADAPTIVE, **MASKED}},
    "two cuts": {"groups": 4, "size": 4, "args": {"top_entropy_quantile": 0.3, "gradient_accumulation_steps": 2,
                                                  "entropy_target": 9.0, "max_steps": 3, **ADAPTIVE}},
}  # fmt: skip


def moe_step(folder: Path, cut: dict[str, int]) -> dict[str, Any]:
    """One micro-batch per group, on one rank after the other or on one rank each."""
    made = trained(folder, moe(), max_steps=2, router_aux_loss_coef=0.5, entropy_coef=0.1, **cut)
    return {"weights": kit.weights(made.model), "log": made.state.log_history}


def main() -> None:
    """One of two processes. Argument: the folder for `<rank>.pt`."""
    folder = Path(sys.argv[1])
    out = {name: distributed_worker.train(job, folder, world=2) for name, job in JOBS.items()}
    out["moe"] = moe_step(folder, {"per_device_train_batch_size": 4})
    torch.save(out, folder / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes made of all jobs."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    everywhere = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    everywhere |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    everywhere |= {"PYTHONPATH": str(Path(__file__).parent.parent)}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)], env=os.environ | everywhere | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(texts)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_alike(two: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    for rank in two:
        torch.testing.assert_close(rank[name]["weights"], one["weights"], atol=2e-6, rtol=0)
    assert torch.equal(two[0][name]["weights"], two[1][name]["weights"])
    for entry, single in zip(two[0][name]["log"], one["log"], strict=True):
        assert set(entry) == set(single)
        keep = kit.lasting(single)
        assert {k: entry[k] for k in keep} == pytest.approx(keep, abs=3e-6, rel=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_are_one(tmp_path: Path, two: list[dict[str, Any]], name: str):
    """A micro-batch spans the ranks: one threshold, one mean entropy, one coefficient, also where a rank is idle."""
    assert_alike(two, distributed_worker.train(JOBS[name], tmp_path, world=1), name)


@pytest.mark.slow
def test_two_processes_average_the_load_balancing_loss(tmp_path: Path, two: list[dict[str, Any]]):
    """A rank's micro-batch counts like one of the two that a single process accumulates."""
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    one = moe_step(tmp_path, cut)
    torch.testing.assert_close(two[0]["moe"]["weights"], one["weights"], atol=2e-6, rtol=0)
    for a, b in zip(two[0]["moe"]["log"][:2], one["log"][:2], strict=True):
        for name in ("loss", "aux_loss", "policy_loss", "entropy", "grad_norm"):
            assert a[name] == pytest.approx(b[name], abs=3e-6, rel=3e-5), name


if __name__ == "__main__":
    main()
