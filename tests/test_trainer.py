"""One optimizer step of `GRPOTrainer` on fixed rollouts, against numbers computed token by token elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from peft import LoraConfig

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def trained(model: Any, samples: kit.Fixed, folder: Path, trainer_changes: dict[str, Any] | None = None, **args: Any):
    """The trainer after `train()`, and all parameters of its model."""
    made = kit.trainer(model, samples, kit.config(folder, **args), **(trainer_changes or {}))
    made.train()
    made.close()
    return made, kit.weights(model)


def after_sgd(model: Any, loss: torch.Tensor, rate: float = 0.1) -> torch.Tensor:
    """All parameters after one plain SGD step on `loss`."""
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return kit.weights(model) - rate * torch.cat([g.reshape(-1) for g in gradient])


# --- the step --------------------------------------------------------------------------
@pytest.mark.parametrize("loss_type", LOSSES)
def test_one_step_is_the_gradient_of_the_documented_loss(tmp_path: Path, loss_type: str):
    samples = kit.fixed()
    loss = kit.step_loss(kit.policy(), samples, loss_type)
    model = kit.policy()
    want = after_sgd(model, kit.step_loss(model, samples, loss_type))
    made, got = trained(model, samples, tmp_path, loss_type=loss_type)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert kit.logs_with(made, "loss") == pytest.approx([loss.item()], abs=1e-6)


CUTS = [
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    # several generation phases within one optimizer step
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "generation_batch_size": 4},
    {"gradient_checkpointing": True},
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_F003_F021_the_same_rollouts_make_the_same_step_however_they_are_cut(
    tmp_path: Path, loss_type: str, cut: dict[str, int]
):
    """Lengths differ, so a mean of micro-batch means would show. The logged loss is the same, too."""
    samples = kit.fixed(seed=3)
    whole, want = trained(kit.policy(), samples, tmp_path / "whole", loss_type=loss_type)
    cut_up, got = trained(kit.policy(), samples, tmp_path / "cut", loss_type=loss_type, **cut)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert kit.logs_with(cut_up, "loss") == pytest.approx(kit.logs_with(whole, "loss"), abs=1e-6)
    assert kit.logs_with(cut_up, "grad_norm") == pytest.approx(kit.logs_with(whole, "grad_norm"), rel=1e-5)


def test_bnpo_depends_on_the_cut_as_documented(tmp_path: Path):
    samples = kit.fixed(seed=3)
    _, whole = trained(kit.policy(), samples, tmp_path / "whole", loss_type="bnpo")
    _, cut = trained(kit.policy(), samples, tmp_path / "cut", loss_type="bnpo", **CUTS[1])
    assert not torch.allclose(whole, cut, atol=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_per_generation_spreads_one_phase_over_two_steps(tmp_path: Path, accumulation: int):
    """Both steps together train every rollout of the phase once, the second with its old log-probs frozen."""
    samples = kit.fixed(groups=2, size=4)
    per_step = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    calls = kit.Fixed(samples.table, calls=[])
    made, _ = trained(
        kit.policy(), calls, tmp_path, max_steps=2, steps_per_generation=2 * accumulation, loss_type="grpo", **per_step
    )
    assert len(calls.calls or []) == 1 and sorted(calls.calls[0]) == sorted(samples.table)  # type: ignore[index]
    assert len(kit.logs_with(made, "loss")) == 2
    # each step holds one whole group: its advantages sum to 0, so at ratio 1 grpo's loss is 0 up to the 1e-4
    assert kit.logs_with(made, "loss")[0] == pytest.approx(0.0, abs=1e-6)


def test_one_step_lowers_the_loss_on_a_fixed_batch(tmp_path: Path):
    model, samples = kit.policy(), kit.fixed()
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def old(prompt: list[int], ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return kit.log_probs(frozen, prompt, ids)

    frozen = kit.policy()
    frozen.load_state_dict(start)
    before = kit.step_loss(model, samples, "dapo", old=old).item()
    trained(model, samples, tmp_path, learning_rate=0.02)
    assert kit.step_loss(model, samples, "dapo", old=old).item() < before - 1e-3


def test_F129_gradients_are_clipped_to_max_grad_norm(tmp_path: Path):
    model, samples = kit.policy(), kit.fixed()
    before = kit.weights(model)
    made, after = trained(model, samples, tmp_path, max_grad_norm=1e-3)
    assert (before - after).norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert kit.logs_with(made, "grad_norm")[0] > 0.5  # the norm before clipping


# --- rollouts that train nothing -------------------------------------------------------
@pytest.mark.parametrize("loss_type", LOSSES)
def test_F001_masked_truncated_rollouts_leave_the_normalisers_too(tmp_path: Path, loss_type: str):
    """Two of eight are cut off: their rewards stay in the baseline, their tokens in no numerator and no denominator."""
    samples = kit.fixed(truncated=(1, 6))
    model = kit.policy()
    want = after_sgd(model, kit.step_loss(model, samples, loss_type, masked=(1, 6)))
    made, got = trained(model, samples, tmp_path, loss_type=loss_type, mask_truncated_completions=True)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert kit.logs_with(made, "completions/clipped_ratio") == [0.25]


@pytest.mark.parametrize("loss_type", [*LOSSES, "cispo"])
def test_F005_a_batch_with_everything_masked_changes_nothing_and_says_so(tmp_path: Path, loss_type: str):
    samples = kit.fixed(truncated=range(8))
    model = kit.policy()
    before = kit.weights(model)
    made, after = trained(
        model, samples, tmp_path, loss_type=loss_type, mask_truncated_completions=True, optim="adamw_torch",
        weight_decay=0.1,
    )  # fmt: skip
    assert torch.equal(before, after)
    assert kit.logs_with(made, "loss") == [0.0]
    assert kit.logs_with(made, "agentrl/no_signal_steps") == [1.0]


def test_groups_with_equal_rewards_stay_in_the_normalisers(tmp_path: Path):
    """dapo divides by the tokens of the whole step; the metrics cover the group that trains nothing."""
    samples = kit.fixed()
    quiet = "question 1: x"
    table = samples.table | {quiet: [(ids, 1.0) for ids, _ in samples.table[quiet]]}
    model = kit.policy()
    flat = [len(ids) for members in table.values() for ids, _ in members]
    moving = [len(ids) for ids, _ in table["question 0: "]]
    loss = kit.step_loss(model, kit.Fixed({"question 0: ": table["question 0: "]}), "dapo")
    want = after_sgd(model, loss * sum(moving) / sum(flat))
    logits = [kit.log_probs(model, samples.prompt_ids(p), ids) for p, members in table.items() for ids, _ in members]
    assert sum(len(part) for part in logits) == sum(flat)
    made, got = trained(model, kit.Fixed(table), tmp_path)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert kit.logs_with(made, "frac_reward_zero_std") == [0.5]
    assert kit.logs_with(made, "completions/mean_length") == [pytest.approx(sum(flat) / 8)]


def test_F017_a_rollout_that_nobody_scored_is_in_no_baseline_and_no_loss(tmp_path: Path):
    """Not the same as reward 0: mean and std are those of the three others."""
    samples = kit.fixed()
    first, second = samples.table
    table = samples.table | {first: [(ids, None if m == 1 else r) for m, (ids, r) in enumerate(samples.table[first])]}
    model = kit.policy()
    scored = [member for member in table[first] if member[1] is not None]
    kept = kit.Fixed({first: scored, second: table[second]})
    want = after_sgd(model, kit.step_loss(model, kept, "dapo"))
    made, got = trained(model, kit.Fixed(table), tmp_path)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert kit.logs_with(made, "rewards/unscored_frac") == [0.125]
    rewards = [r for _, r in scored] + [r for _, r in table[second]]
    assert kit.logs_with(made, "reward") == [pytest.approx(sum(rewards) / 7)]


def test_F017_nobody_scored_anything(tmp_path: Path):
    samples = kit.fixed()
    table = {prompt: [(ids, None) for ids, _ in members] for prompt, members in samples.table.items()}
    model = kit.policy()
    before = kit.weights(model)
    made, after = trained(model, kit.Fixed(table), tmp_path)
    assert torch.equal(before, after)
    assert kit.logs_with(made, "rewards/unscored_frac") == [1.0]
    assert kit.logs_with(made, "reward") == []  # no number was given, so none is shown


# --- several iterations ----------------------------------------------------------------
def frozen_copy(model: Any) -> Any:
    other = kit.policy()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("loss_type", LOSSES)
def test_F007_the_second_pass_uses_log_probs_frozen_before_the_first_update(tmp_path: Path, loss_type: str):
    """Pass 1 has ratio 1; pass 2 has exp(new - old) with clipping, computed here step by step."""
    samples, model = kit.fixed(), kit.policy()
    before = frozen_copy(model)

    def old(prompt: list[int], ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return kit.log_probs(before, prompt, ids)

    reference = frozen_copy(model)
    losses = []
    for _ in range(2):
        loss = kit.step_loss(reference, samples, loss_type, old=old)
        losses.append(loss.item())
        gradient = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for p, g in zip(reference.parameters(), gradient, strict=True):
                p -= 0.1 * g
    made, got = trained(model, samples, tmp_path, loss_type=loss_type, num_iterations=2, max_steps=2)
    torch.testing.assert_close(got, kit.weights(reference), atol=3e-6, rtol=0)
    assert kit.logs_with(made, "loss") == pytest.approx(losses, abs=1e-6)
    shares = kit.logs_with(made, "clip_ratio/region_mean")
    assert shares[0] == 0.0 and shares[1] > 0.0
    assert len(kit.logs_with(made, "reward")) == 1  # one generation phase for both steps


def test_F103_clip_metrics_are_extremes_over_rollouts_by_hand(tmp_path: Path):
    """The shares of every rollout, computed one by one after the first step, against what the second step logs."""
    samples, model = kit.fixed(), kit.policy()
    before = frozen_copy(model)
    after_first = frozen_copy(model)
    trained(after_first, samples, tmp_path / "one")
    low, high, region, tokens = [], [], 0, 0
    for prompt, members in samples.table.items():
        rewards = torch.tensor([r for _, r in members])
        for (ids, _), advantage in zip(members, (rewards - rewards.mean()).tolist(), strict=True):
            with torch.no_grad():
                gap = [kit.log_probs(m, samples.prompt_ids(prompt), ids) for m in (after_first, before)]
            ratio = (gap[0] - gap[1]).exp()
            below = (ratio < 0.8) & (advantage < 0)
            above = (ratio > 1.2) & (advantage > 0)
            low.append(below.float().mean().item())
            high.append(above.float().mean().item())
            region += int((below | above).sum())
            tokens += len(ids)
    made, _ = trained(model, samples, tmp_path / "two", num_iterations=2, max_steps=2)
    logged = {name: kit.logs_with(made, f"clip_ratio/{name}")[1] for name in ("low_min", "high_max", "region_mean")}
    assert logged["low_min"] == pytest.approx(min(low), abs=1e-6)
    assert logged["high_max"] == pytest.approx(max(high), abs=1e-6)
    assert logged["region_mean"] == pytest.approx(region / tokens, abs=1e-6)
    assert max(high) > region / tokens  # the extremes are not the mean


# --- the reference model ---------------------------------------------------------------
def kl_loss(model: Any, reference: Any, samples: kit.Fixed, beta: float) -> tuple[torch.Tensor, float]:
    """dapo's loss with beta x k3, and the mean KL per token."""
    extra, n = [], 0
    for prompt, members in samples.table.items():
        for ids, _ in members:
            now = kit.log_probs(model, samples.prompt_ids(prompt), ids)
            with torch.no_grad():
                gap = kit.log_probs(reference, samples.prompt_ids(prompt), ids)
            k3 = (gap - now).exp() - (gap - now) - 1
            extra.append(k3 * (now - now.detach()).exp())  # use_bias_correction_kl: times the ratio
            n += len(ids)
    total = torch.cat(extra).sum() / n
    return kit.step_loss(model, samples, "dapo") + beta * total, total.item()


@pytest.mark.parametrize("given", ["instance", "string"])
def test_beta_with_the_model_as_instance_or_string(tmp_path: Path, given: str):
    """Two steps: the reference is the policy as it was given, so the first KL is 0 and the second is not."""
    samples = kit.fixed()
    start = kit.policy()
    start.save_pretrained(tmp_path / "model")
    one_step = kit.policy()
    trained(one_step, samples, tmp_path / "one", beta=0.5)
    want_loss, want_kl = kl_loss(one_step, start, samples, 0.5)
    want = after_sgd(one_step, want_loss)
    model = kit.policy() if given == "instance" else str(tmp_path / "model")
    made = kit.trainer(model, samples, kit.config(tmp_path / "two", beta=0.5, max_steps=2))
    made.train()
    torch.testing.assert_close(kit.weights(made.model), want, atol=2e-6, rtol=0)
    assert kit.logs_with(made, "kl") == pytest.approx([0.0, want_kl], abs=1e-6)
    assert want_kl > 1e-4


def test_peft_config_trains_an_adapter_only(tmp_path: Path):
    model = kit.policy()
    before = kit.weights(model)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    made = kit.trainer(model, kit.fixed(), kit.config(tmp_path, gradient_checkpointing=True), peft_config=lora)
    made.train()
    base = torch.cat([p.detach().reshape(-1) for n, p in made.model.named_parameters() if "lora" not in n])
    assert torch.equal(base, before)
    assert any(p.detach().abs().sum() > 0 for n, p in made.model.named_parameters() if "lora_B" in n)


# --- metrics on rollouts known by heart ------------------------------------------------
def test_metrics_by_hand(tmp_path: Path):
    end = kit.stop()
    table = {
        "a": [([20, end], 1.0), ([20, 21, 22, end], 0.0), ([30, 31, 32, 33], 0.0), ([20, 21, end], 1.0)],
        "bb": [([40, end], 0.5)] * 4,
    }
    made, _ = trained(kit.policy(), kit.Fixed(table), tmp_path)
    want = {
        "reward": (2 + 2) / 8, "rewards/score/mean": 0.5, "frac_reward_zero_std": 0.5,
        "reward_std": (4 * 0.25 / 7) ** 0.5,  # [1,0,0,1,.5,.5,.5,.5], over the whole batch
        "rewards/score/std": (4 * 0.25 / 7) ** 0.5, "rewards/unscored_frac": 0.0,
        "completions/mean_length": (2 + 4 + 4 + 3 + 2 * 4) / 8, "completions/min_length": 2,
        "completions/max_length": 4, "completions/clipped_ratio": 1 / 8,
        "completions/mean_terminated_length": (2 + 4 + 3 + 8) / 7, "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 4, "num_tokens": 21 + 4 * 1 + 4 * 2, "agentrl/no_signal_steps": 0.0,
        "rollout/turns_mean": 1.0, "rollout/samples_per_rollout": 1.0, "rollout/fork_frac": 0.0,
    }  # fmt: skip
    last = made.state.log_history[0]
    assert {name: last[name] for name in want} == pytest.approx(want)
    assert last["step_time"] > 0
    assert not [name for name in last if name.startswith(("tools/", "kl", "sampling/", "aux", "entropy_coef"))]


def test_entropy_covers_all_completions_also_those_without_signal(tmp_path: Path):
    samples = kit.fixed()
    quiet = "question 1: x"
    table = samples.table | {quiet: [(ids, 1.0) for ids, _ in samples.table[quiet]]}
    model = kit.policy()
    total, n = 0.0, 0
    for prompt, members in table.items():
        start = samples.prompt_ids(prompt)
        for ids, _ in members:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1]
            total += torch.distributions.Categorical(logits=logits).entropy().sum().item()
            n += len(ids)
    made, _ = trained(model, kit.Fixed(table), tmp_path)
    assert kit.logs_with(made, "entropy") == [pytest.approx(total / n, rel=1e-5)]


def test_metrics_are_means_over_the_window_not_of_the_last_step(tmp_path: Path):
    """Sums and counts over two generation phases of different sizes, divided once."""
    samples = kit.fixed(groups=4)
    made, _ = trained(kit.policy(), samples, tmp_path, max_steps=2, logging_steps=2)
    lengths = [len(ids) for members in samples.table.values() for ids, _ in members]
    assert kit.logs_with(made, "completions/mean_length") == [pytest.approx(sum(lengths) / 16)]
    assert kit.logs_with(made, "num_tokens")[0] == sum(lengths) + 4 * sum(
        map(len, map(samples.prompt_ids, samples.table))
    )
