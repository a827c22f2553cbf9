"""A row in which tokens stand for several sequences gives the numbers of one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import train_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_train_rope_rows import DYNAMIC, each, llama4
from test_train_rows import MUST_NOT, gradient, sequence, some_loss
from tree_kit import CPU, FAMILIES, alone, forks, off, probed, sequences, shared_row, through, truth

from agentrl.train import layout as layout_module
from agentrl.train.attention import MaskNeeded
from agentrl.train.log_probs import PolicyForward, Wanted
from agentrl.train.rows import TrainItem, make_row

BOUND = 1e-4  # of max |a|: log-probs and gradients of the tree row against one sample at a time


def assert_exact(policy: PolicyForward, items: list[TrainItem], least: int = 1, bound: float = BOUND) -> None:
    want, want_gradient = truth(policy.model, items)
    got, got_gradient = through(policy, make_row(items, CPU, least))
    assert off(got, want) <= bound
    assert off(got_gradient, want_gradient) <= bound


# --- architectures -------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_shares_exactly(monkeypatch: pytest.MonkeyPatch, kind: str):
    """Prompts of 24, so that a window of 8 lies within it; then with segments in pieces of 5 and a bucket for each."""
    policy = probed(kind)
    assert policy.packs and policy.splits_head and policy.least_shared
    items = forks()
    assert 1.5 * len(shared_row(items).input_ids_T) < sum(item.tokens for item in items)
    assert_exact(policy, items)
    monkeypatch.setattr(layout_module, "PIECE", 5)
    monkeypatch.setattr(layout_module, "SMALL", 0)
    assert_exact(policy, items)


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 9, 40]))
@settings(max_examples=25, deadline=None)
def test_random_trees(seed: int, prompt: int, groups: int, size: int, least: int):
    for kind in ("Qwen3", "Gemma3Text"):
        items = forks(seed, prompt, groups, size)
        items = [i for i in items if sequences([i])[0].input_ids and not sequences([i])[0].completion_mask[0]]
        if items:
            assert_exact(_cached(kind), items, least)


def _cached(kind: str, kept: dict[str, PolicyForward] = {}) -> PolicyForward:  # noqa: B006
    if kind not in kept:
        kept[kind] = probed(kind)
    return kept[kind]


@pytest.mark.parametrize("window", [2, 5, 23, 24, 25, 60])
def test_windows_around_the_prompts_length(window: int):
    assert_exact(probed("Mistral", sliding_window=window), forks(3))


def test_a_deep_chain_of_turns():
    """20 turns, each repeating the conversation: one token in 10 is new."""
    ids = [3 + (7 * t * t + t) % 280 for t in range(100)]
    turns = [sequence([*ids[: 5 * n], n, n + 1], [t >= 5 * n - 2 for t in range(5 * n + 2)]) for n in range(1, 21)]
    items = [TrainItem(0, tuple(turns), 1.0, True)]
    assert len(shared_row(items).input_ids_T) == 100 + 2 * 20
    assert_exact(probed("Llama"), items)


@pytest.mark.parametrize("kind", ["Qwen3", "GPT2"])
def test_trained_tokens_inside_the_shared_part(kind: str):
    """They are trained in one sequence, in both, or in none, each with its own place in the loss."""
    ids = list(range(40, 60))
    first = sequence([*ids, 7, 8], [t in (5, 9, 20, 21) for t in range(22)])
    second = sequence([*ids, 9], [t in (5, 12, 20) for t in range(21)])
    items = [TrainItem(0, (first,), 1.0, True), TrainItem(1, (second, second), 1.0, True)]
    row = shared_row(items)
    assert row.scored_by_N.tolist() == [4, 8, 19, 20, 4, 11, 19, 4, 11, 19]
    assert_exact(probed(kind), items)


# --- models that must not share ------------------------------------------------------------
@pytest.mark.parametrize(("kind", "changes"), [
    *MUST_NOT,
    ("GPT2", {"resid_pdrop": 0.1}), ("GPT2", {"attn_pdrop": 0.1}), ("GPT2", {"embd_pdrop": 0.1}),
    ("Llama", {"attention_dropout": 0.1}),
    ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.1}),
    ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.1}),  # a number, no module
])  # fmt: skip
def test_models_that_must_not_share_do_not(kind: str, changes: dict[str, Any]):
    policy = probed(kind, **changes)
    assert policy.least_shared is None and policy.least_for(forks()) is None
    if kind in ("Gemma2", "GptOss"):
        assert policy.packs is False
        assert_exact(policy, forks())  # a row that was built shared is padded, and right
    policy.model.train()
    row = make_row(forks(), CPU, policy.least_shared)
    with policy.context(row):
        assert policy.run(row).log_probs_N.isfinite().all()


def test_dropout_of_an_adapter_stops_sharing():
    for p in (0.1, 0.0):
        model = kit.build("Qwen3")
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=p))
        policy = PolicyForward(model, 1.0)
        policy.probe()
        assert policy.packs and (policy.least_shared is None) == (p > 0)


def test_chunked_attention_is_right_within_a_chunk_and_beyond():
    policy = PolicyForward(llama4(16), 1.0)
    policy.probe()
    short = forks(prompt=6, longest=3)
    assert max(len(s.input_ids) for s in sequences(short)) <= 16
    assert_exact(policy, short)
    assert_exact(policy, forks(prompt=20))


def test_what_does_not_run_packed_is_not_built_shared():
    """Else rows would be filled as if it were, and metrics would say so."""
    policy, items = probed("Qwen3"), forks()
    assert policy.least_for(items) == policy.least_shared
    assert policy.least_for([]) == policy.least_shared
    longest = max(len(s.input_ids) for s in sequences(items))
    for name in ("limit", "longest_packed"):
        setattr(policy, name, longest)
        assert policy.least_for(items)
        setattr(policy, name, longest - 1)
        assert policy.least_for(items) is None
        setattr(policy, name, None)
    picture = replace(items[0], sequences=(replace(items[0].sequences[0], media=("a picture",)),))  # type: ignore[arg-type]
    assert policy.least_for([picture, *items[1:]]) is None
    policy.packs = False
    assert policy.least_for(items) is None


# --- ways of running -----------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text", "Qwen3Next"])
def test_activation_checkpointing(kind: str):
    policy = probed(kind)
    row = shared_row(forks())
    policy.model.train()
    want, want_gradient = through(policy, row)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    got, got_gradient = through(policy, row)
    assert torch.equal(got, want) and off(got_gradient, want_gradient) <= 1e-6


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_bf16_is_as_near_to_fp32_as_unshared_rows_are(kind: str, autocast: bool):
    items = forks()
    exact = probed(kind)
    want, want_gradient = truth(exact.model, items)
    model = exact.model if autocast else kit.build(kind, **FAMILIES[kind]).bfloat16()
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert policy.least_shared
    errors = []
    for least in (None, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, got_gradient = through(policy, make_row(items, CPU, least))
        errors.append((off(got, want), off(got_gradient, want_gradient)))
    (plain, plain_gradient), (shared, shared_gradient) = errors
    assert plain > 1e-4  # it did run in bf16
    assert shared <= 2 * plain and shared_gradient <= 2 * plain_gradient


def test_an_adapters_gradients():
    items = forks()
    model = kit.build("Qwen3")
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert_exact(policy, items)
    row = shared_row(items)
    with policy.context(row):  # through the wrapper, as training calls it
        out = wrapped(agentrl_row=row)
    assert off(out["log_probs_N"].detach(), alone(model, sequences(items)).detach()) <= BOUND


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text", "Qwen3Next"])
@pytest.mark.parametrize("multiple", [8, 64])
def test_a_filled_row(kind: str, multiple: int):
    policy = probed(kind)
    policy.multiple = multiple
    row = shared_row(forks())
    assert policy.filler(row) == -len(row.input_ids_T) % multiple > 0
    assert_exact(policy, forks())


def test_the_whole_head_where_it_cannot_be_split_off():
    policy = probed("Qwen3")
    policy.splits_head = False
    assert_exact(policy, forks())


def test_entropies_and_candidates_of_a_tree_row():
    """Values and gradients against full logits of each sequence alone."""
    policy, items = probed("Qwen3"), forks()
    row = shared_row(items)
    ids = torch.arange(len(row.targets_N) * 3).view(-1, 3) % 290
    wanted = Wanted(entropy_gradient=True, candidates_NK=ids)
    with policy.context(row):
        out = policy.run(row, wanted)
        got = gradient(policy.model, out.entropy_N.sin().sum() + (out.candidates_NK * 0.1).sin().sum())
    logits = torch.cat([_logits(policy.model, s) for s in sequences(items)])
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    assert off(out.entropy_N.detach(), entropy.detach()) <= BOUND
    want = gradient(policy.model, entropy.sin().sum() + (every.gather(-1, ids) * 0.1).sin().sum())
    assert off(got, want) <= BOUND


def _logits(model: Any, one: Any) -> torch.Tensor:
    at = [t - 1 for t, trained in enumerate(one.completion_mask) if trained]
    return model(input_ids=torch.tensor([one.input_ids])).logits[0, at].float()


def test_sampling_sets_and_sampler_heads_belong_to_each_trained_token():
    """Both branches are drawn from sets of their own at the position that they share."""
    prompt = list(range(20, 40))
    sets = [[[5, 6, 7], [9, 8]], [[5, 11], []]]
    heads = [[{5: -0.1, 6: -2.0}, {8: -0.3}], [{11: -0.2}, {12: -0.4, 5: -1.0}]]
    parts = [replace(sequence([*prompt, 5, 8 + 4 * n], [t >= 20 for t in range(22)]),
                     sampling_mask=sets[n], sampler_logprobs=heads[n]) for n in range(2)]  # fmt: skip
    items = [TrainItem(n, (part,), 1.0, True) for n, part in enumerate(parts)]
    policy = probed("Qwen3")
    row = shared_row(items)
    assert row.scored_by_N.tolist() == [19, 20, 19, 20]  # both began with 5
    apart = make_row(items, CPU)
    for name in ("sets_NK", "heads_NH", "head_log_probs_NH", "targets_N", "rollout_N"):
        assert torch.equal(getattr(row, name), getattr(apart, name))
    logits = torch.cat([_logits(policy.model, s) for s in sequences(items)])
    inside = torch.full_like(logits, -torch.inf)
    for n, chosen in enumerate([*sets[0], *sets[1]]):
        inside[n, chosen or slice(None)] = 0.0
    every = (logits + inside).log_softmax(-1)
    want = every.gather(-1, row.targets_N[:, None])[:, 0]
    got, got_gradient = through(policy, row)
    assert off(got, want.detach()) <= BOUND
    assert off(got_gradient, gradient(policy.model, some_loss(want))) <= BOUND


# --- when a row cannot run as it was built ---------------------------------------------------
def test_a_mask_in_mid_run_makes_a_shared_row_a_padded_one(monkeypatch: pytest.MonkeyPatch):
    from agentrl.train import attention

    policy, items = probed("Qwen3"), forks()
    want, want_gradient = truth(policy.model, items)
    row = shared_row(items)

    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise MaskNeeded("for this length")

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, refuses)
    got, got_gradient = through(policy, row)
    assert off(got, want) <= BOUND and off(got_gradient, want_gradient) <= BOUND
    assert policy.packs is False and policy.least_shared is None and policy.least_for(items) is None
    again, _ = through(policy, make_row(items, CPU, policy.least_shared))
    assert off(again, want) <= BOUND


def test_beyond_the_rope_limit_a_shared_row_runs_one_sequence_at_a_time():
    policy = probed("Llama", **DYNAMIC)
    assert policy.limit == 32 and policy.packs and policy.least_shared
    short, long = forks(prompt=12, longest=5), forks(prompt=30)
    assert policy.least_for(short) and policy.least_for(long) is None
    for items in (short, long, short):  # the long ones are built shared all the same
        want, want_gradient = each(lambda: kit.build("Llama", **DYNAMIC), items)
        got, got_gradient = through(policy, shared_row(items))
        assert off(got, want) <= BOUND and off(got_gradient, want_gradient) <= BOUND
    assert policy.filler(shared_row(long)) == 0


# --- mixtures of experts ---------------------------------------------------------------------
@pytest.mark.parametrize("multiple", [1, 16])
def test_the_load_balancing_loss_counts_a_token_once_for_each_sequence(multiple: int):
    policy, items = probed("Qwen3Moe"), forks()
    policy.multiple = multiple
    results = []
    for least in (None, 1):
        row = make_row(items, CPU, least)
        with policy.context(row):
            out = policy.run(row, Wanted(router_loss=True))
            assert out.router_loss is not None
            results.append((out.router_loss.detach(), gradient(policy.model, out.router_loss * 3)))
    (want, want_gradient), (got, got_gradient) = results
    assert off(got, want) <= 1e-5 and off(got_gradient, want_gradient) <= BOUND


# --- faults ------------------------------------------------------------------------------------
def test_F147_the_last_shared_token_predicts_another_token_in_each_branch():
    items = [TrainItem(n, (sequence([1, 2, 3 + n], [False, False, True]),), 1.0, True) for n in range(2)]
    row = shared_row(items)
    assert row.input_ids_T.tolist() == [1, 2, 3, 4]
    assert row.scored_by_N.tolist() == [1, 1] and row.targets_N.tolist() == [3, 4]
    assert_exact(probed("Llama"), items)


def test_F149_identical_completions_of_opposite_advantage_cancel_and_both_count():
    one = sequence([*range(20, 40), 5, 6, 7], [t >= 20 for t in range(23)])
    items = [TrainItem(n, (one,), 1.0 - 2 * n, True) for n in range(2)]
    row = shared_row(items)
    assert len(row.input_ids_T) == 23 and len(row.targets_N) == 6
    policy = probed("Llama")
    with policy.context(row):
        out = policy.run(row)
        assert torch.equal(out.log_probs_N[:3], out.log_probs_N[3:])
        nothing = gradient(policy.model, (out.log_probs_N * row.per_token([1.0, -1.0])).sum())
        double = gradient(policy.model, policy.run(row).log_probs_N.sum())
    single = gradient(policy.model, alone(policy.model, [one]).sum())
    assert off(double, 2 * single) <= BOUND
    assert nothing.abs().max() <= 1e-7 * single.abs().max()


def test_F155_nothing_is_scored_across_a_segments_start():
    """Sequences without a prompt but one token: the first trained token follows its own, wherever that lies."""
    items = [TrainItem(n, (sequence([first, 5, 6]),), 1.0, True) for n, first in enumerate((7, 8, 7))]
    row = shared_row(items)
    assert row.input_ids_T.tolist() == [7, 5, 6, 8, 5, 6]
    assert row.scored_by_N.tolist() == [0, 1, 3, 4, 0, 1]
    assert_exact(probed("Qwen3"), items)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text", "Qwen3Next", "GPT2"])
def test_another_branch_changes_nothing_of_its_siblings(kind: str):
    policy = probed(kind)
    prompt = list(range(20, 40))
    kept = [TrainItem(n, (sequence([*prompt, 100 + n, *range(60, 70)]),), 1.0, True) for n in range(2)]
    out = []
    for other in (90, 150):
        branch = TrainItem(2, (sequence([*prompt, 200, *[other] * 10]),), 1.0, True)
        row = shared_row([*kept, branch])
        with policy.context(row), torch.no_grad():
            out.append(policy.run(row).log_probs_N[: 2 * 30])
    assert off(out[0], out[1]) <= 1e-6
