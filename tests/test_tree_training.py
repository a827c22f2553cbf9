"""Sharing changes no step: loss, weights and metrics of whole runs with it and without, and what they log of it."""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objective_invariances import LOSSES, Outcome, Settings, assert_same, chosen, item, parts, sequence, step

from agentrl.errors import ConfigurationError, RunStopped
from agentrl.train.rows import TrainItem
from agentrl.train.step import frozen_log_probs, row_budget
from agentrl.train.trainer import GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:loss_type='luspo'")
END = kit.stop()
# prompts of 8 and 3 tokens; the completions of one share beginnings, two of them are equal
TABLE: dict[str, list[tuple[list[int], float | None]]] = {
    "abcdefgh": [([50, END], 0.0), ([51, END], 1.0), ([52, 53, END], 2.0), ([50, 54, END], 7.0)],
    "xyz": [([60, 61, END], 0.0), ([60, 61, END], 3.0), ([60, 62, 63, END], 1.0), ([64, 65, 66, 67, END], 7.0)],
}
DISTINCT = (8 + 2 + 2 + 3 + 2, 3 + 3 + 3 + 5)  # 17 and 14 tokens
WHOLE = (10 + 10 + 11 + 11, 6 + 6 + 7 + 8)


def run(folder: Path, least: int | None, samples: kit.Fixed | None = None, **args: Any) -> tuple[GRPOTrainer, Any]:
    """A trainer that has trained, with beginnings shared where that saves `least` tokens; and its weights."""
    model = kit.policy()
    made = kit.trainer(model, kit.Fixed(TABLE) if samples is None else samples, kit.config(folder, **args))
    made.policy_forward.probe()
    assert made.policy_forward.packs and made.policy_forward.least_shared  # it was found to be right
    made.policy_forward.least_shared = least
    made.train()
    made.close()
    return made, kit.weights(model)


# --- with sharing and without ----------------------------------------------------------------
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
TWICE = {"num_iterations": 2, "max_steps": 2}
RUNS: dict[str, dict[str, Any]] = {
    **{f"{loss}, twice, KL": {"loss_type": loss, "beta": 0.2, **TWICE} for loss in LOSSES},
    "accumulated": {**ACCUMULATED, **TWICE},
    "bnpo, accumulated": {"loss_type": "bnpo", **ACCUMULATED, **TWICE},
    "budget of 20": {"token_budget": 20, "beta": 0.1, **TWICE},
    "quantile and bonus": {"top_entropy_quantile": 0.4, "entropy_coef": 0.2, **TWICE},
    "sequence level": {"importance_sampling_level": "sequence", **TWICE},
    "correction": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        **TWICE,
    },
    "checkpointing": {"gradient_checkpointing": True, "max_steps": 2},
    "masked": {"mask_truncated_completions": True, "beta": 0.1},
    "moving reference": {"beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_run(tmp_path: Path, name: str):
    samples = kit.Fixed(TABLE)
    if name == "masked":
        cut = {prompt: [([*ids[:-1], 11] if i == 1 else ids, r) for i, (ids, r) in enumerate(members)]
               for prompt, members in TABLE.items()}  # fmt: skip
        samples = kit.Fixed(cut)
    start = kit.weights(kit.policy())
    (apart, want), (shared, got) = (run(tmp_path, least, samples, **RUNS[name]) for least in (None, 1))
    assert (want - start).norm() > 1e-2
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    of_rows = ("batch/", "sample/")
    for one, two in zip(apart.state.log_history, shared.state.log_history, strict=True):
        assert set(one) == set(two)
        keep = {k: v for k, v in kit.lasting(one).items() if not k.startswith(of_rows)}
        assert {k: two[k] for k in keep} == pytest.approx(keep, abs=5e-6, rel=5e-5)
    assert kit.logs_with(apart, "batch/packing_ratio") == [1.0] * len(kit.logs_with(apart, "batch/packing_ratio"))
    assert all(ratio > 1.2 for ratio in kit.logs_with(shared, "batch/packing_ratio"))


def forked(seed: int, size: int) -> list[TrainItem]:
    """Rollouts of one prompt and two turns, some forked: the second turn's sequence repeats the first."""
    draw = random.Random(seed)
    prompt = [draw.randrange(10, 250) for _ in range(6)]
    made = []
    for index in range(size):
        ids = [*prompt, *(draw.choice([11, 12]) for _ in range(draw.randint(2, 7)))]
        middle = draw.randint(7, len(ids) - 1)
        whole = [sequence(ids, [t >= 6 for t in range(len(ids))])]
        fork = [sequence(ids[:middle], [t >= 6 for t in range(middle)]),
                sequence(ids, [t >= middle for t in range(len(ids))])]  # fmt: skip
        one = item(index, draw.choice([whole, fork]), draw.choice([-1.3, 0.0, 0.8, 1.7]), draw)
        made.append(dataclasses.replace(one, active=draw.random() < 0.85))
    return made


@given(st.integers(0, 10**6), st.integers(1, 5), chosen(), st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_F149_forked_rollouts_in_float64(seed: int, size: int, s: Settings, batch_size: int, cut: bool):
    """Gradients, loss and metrics of a step with any loss, correction, quantile and bonus, in rows of any size."""
    items = forked(seed, size)
    places = [i % 2 for i in range(size)] if cut and size > 1 else [0] * size
    assert_same(with_sharing(items, s, places, batch_size), step(items, s, cut=places))


def with_sharing(items: list[TrainItem], s: Settings, cut: list[int], batch_size: int) -> Outcome:
    policy = parts()[1]
    policy.least_shared = 1
    try:
        return step(items, s, cut=cut, batch_size=batch_size)
    finally:
        policy.least_shared = None


def test_frozen_log_probs_come_back_in_the_order_of_the_rollouts():
    model, policy, _ = parts()
    items = [i for i in forked(1, 6) if i.trained_tokens]
    policy.packs, policy.least_shared = True, 1
    try:
        for budget in (10, 25, 1000):
            got = frozen_log_probs(policy, items, budget, torch.device("cpu"),
                                   lambda row: policy.run(row))  # fmt: skip
            for one, item_ in zip(got, items, strict=True):
                ids = [torch.tensor([s.input_ids]) for s in item_.sequences]
                every = [torch.log_softmax(model(input_ids=x).logits[0], -1) for x in ids]
                want = [e[t - 1, s.input_ids[t]] for e, s in zip(every, item_.sequences, strict=True)
                        for t in range(len(s.input_ids)) if s.completion_mask[t]]  # fmt: skip
                torch.testing.assert_close(one, torch.stack(want).detach(), atol=1e-6, rtol=0)
    finally:
        policy.least_shared = None


# --- metrics by hand -------------------------------------------------------------------------
def test_batch_metrics_of_one_shared_row(tmp_path: Path):
    last = run(tmp_path, 1)[0].state.log_history[0]
    distinct, whole, trained = sum(DISTINCT), sum(WHOLE), 10 + 15
    want = {
        "batch/packing_ratio": whole / distinct, "batch/row_tokens_mean": distinct, "batch/row_tokens_max": distinct,
        "batch/row_fill_frac": distinct / (11 * 8), "batch/samples_per_row": 8, "batch/pad_frac": 0.0,
        "batch/row_imbalance": 1.0, "batch/forwarded_tokens_per_step": distinct,
        "batch/trained_tokens_per_step": trained, "batch/samples_per_step": 8,
        "batch/masked_token_frac": 1 - trained / whole,
        "sample/forwarded_tokens_mean": whole / 8, "sample/forwarded_tokens_max": 11,
        "sample/trained_tokens_mean": trained / 8,
    }  # fmt: skip
    assert {name: last[name] for name in want} == pytest.approx(want)
    assert "batch/dropped_oversize_count" not in last


def test_batch_metrics_of_a_row_for_each_group(tmp_path: Path):
    """A budget of 17 tokens: 8 x 9 / 2 + 9 x 8 + 2 x 3 / 2 + ... pairs of the first group, and of the second."""
    last = run(tmp_path, 1, token_budget=17)[0].state.log_history[0]
    one = 36 + 2 * 8 + 3 + 2 * 8 + 3 + 3 * 8 + 6 + (2 * 9 + 3)  # [50, END] and [54, END] behind 50
    two = 6 + (3 * 3 + 6) + (3 * 4 + 6) + (5 * 3 + 15)  # [62, 63, END] behind 60
    want = {
        "batch/samples_per_row": 4, "batch/row_tokens_mean": sum(DISTINCT) / 2, "batch/row_tokens_max": 17,
        "batch/row_fill_frac": sum(DISTINCT) / 34, "batch/packing_ratio": sum(WHOLE) / sum(DISTINCT),
        "batch/row_imbalance": max(one, two) / ((one + two) / 2), "batch/dropped_oversize_count": 0,
        "batch/microbatches_per_step": 1,
    }  # fmt: skip
    assert {name: last[name] for name in want} == pytest.approx(want)


def test_padded_rows_say_how_much_of_them_is_padding(tmp_path: Path):
    model = kit.policy()
    made = kit.trainer(model, kit.Fixed(TABLE), kit.config(tmp_path))
    made.policy_forward.probe()
    made.policy_forward.packs = False  # a model that makes masks of its own
    made.train()
    last = made.state.log_history[0]
    assert last["batch/pad_frac"] == pytest.approx(1 - sum(WHOLE) / (8 * 11))
    assert last["batch/packing_ratio"] == 1.0
    assert last["batch/forwarded_tokens_per_step"] == sum(WHOLE)
    made.close()


def test_filler_of_a_multiple_is_padding(tmp_path: Path):
    last = run(tmp_path, 1, pad_to_multiple_of=32)[0].state.log_history[0]
    assert last["batch/pad_frac"] == pytest.approx(1 / 32)  # 31 tokens


# --- a budget of tokens ----------------------------------------------------------------------
def test_samples_beyond_the_budget_are_named_counted_and_not_trained(tmp_path: Path):
    with pytest.warns(UserWarning, match=r"2 of 8 samples .* token_budget=10 .* rollout 3, has 11 tokens"):
        made, got = run(tmp_path, 1, token_budget=10, loss_type="dr_grpo")
    last = made.state.log_history[0]
    assert last["batch/dropped_oversize_count"] == 2 and last["batch/samples_per_step"] == 6
    assert last["batch/trained_tokens_per_step"] == 25 - 6
    assert last["reward"] == pytest.approx(21 / 8)  # its reward is in the baseline and in the metrics
    model = kit.policy()
    loss = kit.step_loss(model, kit.Fixed(TABLE), "dr_grpo", masked=(2, 3))
    want = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close((kit.weights(kit.policy()) - got) / 0.1, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("budget", [2, 5])
def test_F105_a_run_whose_samples_are_all_beyond_the_budget_stops(tmp_path: Path, beta: float, budget: int):
    with pytest.raises(RunStopped, match=r"All 8 samples are longer .* Raise token_budget"):
        run(tmp_path, 1, token_budget=budget, beta=beta)


def test_a_budget_that_holds_everything_warns_of_nothing(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*token_budget.*")
        made, _ = run(tmp_path, 1, token_budget=11)
    assert made.state.log_history[0]["batch/dropped_oversize_count"] == 0
    assert made.state.log_history[0]["batch/row_tokens_max"] <= 11


@pytest.mark.parametrize("budget", [1, 0, -5])
def test_a_budget_that_can_hold_nothing_is_refused(tmp_path: Path, budget: int):
    with pytest.raises(ConfigurationError, match="token_budget must be at least 2"):
        kit.trainer(kit.policy(), kit.Fixed(TABLE), kit.config(tmp_path, token_budget=budget))


def test_the_default_budget_is_a_padded_micro_batch():
    items = forked(0, 3)
    longest = max(len(s.input_ids) for i in items for s in i.sequences)
    assert row_budget(items, 4, None) == 4 * longest and row_budget(items, 4, 9) == 9 and row_budget([], 4, None) == 4


def test_a_budget_is_refused_where_micro_batches_must_stay_whole(tmp_path: Path):
    """A load-balancing loss is one of a micro-batch; a row of it may be longer than any budget."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    sizes = {"vocab_size": len(kit.tokenizer()), "eos_token_id": END, "max_position_embeddings": 2048}
    model = kit.build("Qwen3Moe", **experts, **sizes)
    with pytest.raises(ConfigurationError, match="token_budget cannot be kept with a load-balancing loss"):
        kit.trainer(model, kit.Fixed(TABLE), kit.config(tmp_path, token_budget=20, router_aux_loss_coef=0.1))
    kit.trainer(model, kit.Fixed(TABLE), kit.config(tmp_path, token_budget=20, router_aux_loss_coef=0.0)).close()
