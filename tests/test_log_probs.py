"""What comes out of the head in one pass: log-probs, entropies, candidate sets, router losses, and in fp32."""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import train_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from agentrl.errors import ConfigurationError
from agentrl.train.head import cast_head_to_fp32, renormalised, scores
from agentrl.train.log_probs import PolicyForward, RowLogProbs, Wanted, router_loss_of, score_tokens
from agentrl.train.rows import Row, TrainItem, make_row
from agentrl.types import TrainingSequence

CPU = torch.device("cpu")
DOUBLE = torch.float64


# --- one row of logits -----------------------------------------------------------------
def test_scores_by_hand():
    """Two tokens over three ids: p = (1/2, 1/4, 1/4) and (1, 0, 0)."""
    logits = torch.tensor([[math.log(2), 0.0, 0.0], [5.0, -math.inf, -math.inf]], dtype=DOUBLE, requires_grad=True)
    ids = torch.tensor([[2, 0, -1], [0, 1, -1]])
    log_probs, entropy, candidates = scores(logits, torch.tensor([1, 0]), ids, entropy_gradient=True)
    assert log_probs.exp().tolist() == pytest.approx([0.25, 1.0])
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    assert candidates is not None and candidates.exp().tolist() == [pytest.approx([0.25, 0.5, 0.0]), [1.0, 0.0, 0.0]]
    (first,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)  # onehot - p
    assert first.tolist() == [pytest.approx([-0.5, 0.75, -0.25]), pytest.approx([0.0, 0.0, 0.0])]
    (second,) = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)  # -p (log p + H)
    half = 0.5 * math.log(2)  # H = 1.5 log 2; log p = -1, -2, -2 times log 2
    assert second.tolist() == [pytest.approx([-0.5 * half, 0.25 * half, 0.25 * half]), pytest.approx([0.0, 0.0, 0.0])]
    (third,) = torch.autograd.grad(candidates[:, 0].sum() + candidates[0, 2], logits)  # padding has no gradient
    assert third.tolist() == [pytest.approx([-0.5, -0.25, 0.75]), pytest.approx([0.0, 0.0, 0.0])]


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradients_in_float64(entropy_gradient: bool):
    draw = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(4, 7, generator=draw, dtype=DOUBLE)).requires_grad_()
    targets, ids = torch.tensor([0, 6, 3, 3]), torch.tensor([[0, 1], [6, 2], [4, 5], [3, 0]])

    def some(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = scores(x, targets, ids, entropy_gradient=entropy_gradient)
        assert out[1].requires_grad is entropy_gradient and out[2] is not None
        return (out[0] * out[0], out[2].exp(), *((out[1].square(),) if entropy_gradient else ()))

    assert torch.autograd.gradcheck(some, (logits,))


# --- in chunks -------------------------------------------------------------------------
def plain(hidden: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, head: Any, temperature: float):
    """The same from full logits, by torch's own operations."""
    every = torch.log_softmax(head(hidden) / temperature, -1)
    picked = every.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -math.inf)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1), picked


def some_loss(log_probs: torch.Tensor, entropy: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Weighs every number differently."""
    steps = torch.linspace(-1, 2, len(log_probs), dtype=log_probs.dtype)
    inside = renormalised(log_probs, picked)
    return (steps * inside.exp()).sum() + (log_probs * steps.flip(0)).sum() + (entropy * steps).sum() * 0.3


@given(st.integers(1, 70), st.sampled_from([1.0, 0.6]), st.integers(1, 4), st.booleans())
@settings(max_examples=25, deadline=None)
def test_chunks_equal_full_logits_in_float64(tokens: int, temperature: float, candidates: int, chunked: bool):
    draw = torch.Generator().manual_seed(tokens)
    head = torch.nn.Linear(6, 23, dtype=DOUBLE)
    hidden = torch.randn(tokens, 6, generator=draw, dtype=DOUBLE, requires_grad=True)
    targets = torch.randint(0, 23, (tokens,), generator=draw)
    ids = torch.stack([torch.randperm(23, generator=draw)[:candidates] for _ in range(tokens)])
    ids[:, 1:][torch.rand(tokens, candidates - 1, generator=draw) < 0.4] = -1
    leaves = [hidden, *head.parameters()]
    want = plain(hidden, targets, ids, head, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.train.log_probs.MAX_LOGITS", 16 * 23 if chunked else 1 << 24)
        out = score_tokens(hidden, targets, head, temperature, Wanted(entropy_gradient=True, candidates_NK=ids))
        assert out.candidates_NK is not None
        got = out.log_probs_N, out.entropy_N, out.candidates_NK
        got_gradient = torch.autograd.grad(some_loss(*got), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    for a, b in zip(got_gradient, torch.autograd.grad(some_loss(*want), leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-10)


def test_the_head_sees_the_row_in_pieces_and_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    """No call of the head is larger than a chunk, and no [chunk, vocabulary] tensor waits for the backward pass."""
    monkeypatch.setattr("agentrl.train.log_probs.MAX_LOGITS", 16 * 50)
    sizes: list[int] = []
    head = torch.nn.Linear(8, 50)
    head.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    kept: list[int] = []
    hidden, targets = torch.randn(40, 8, requires_grad=True), torch.zeros(40, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = score_tokens(hidden, targets, head, 1.0)
    assert sizes == [1, 16, 16, 8] and max(kept, default=0) < 16 * 50
    out.log_probs_N.sum().backward()
    assert sorted(sizes[4:]) == [8, 16, 16]


def test_no_trained_token_gives_empty_tensors_with_a_graph():
    head, hidden = torch.nn.Linear(4, 9), torch.zeros(0, 4, requires_grad=True)
    wanted = Wanted(entropy_gradient=True, candidates_NK=torch.zeros(0, 3, dtype=torch.long))
    out = score_tokens(hidden, torch.zeros(0, dtype=torch.long), head, 1.0, wanted)
    assert out.candidates_NK is not None and out.candidates_NK.shape == (0, 3)
    (out.log_probs_N.sum() + out.entropy_N.sum() + out.candidates_NK.sum()).backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


def bench_head() -> Any:
    path = Path(__file__).parent / "benchmarks" / "bench_head.py"
    spec = importlib.util.spec_from_file_location("bench_head", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_vocabulary_of_150k_takes_less_than_a_fifth_of_the_memory_of_full_logits():
    """1k tokens here; the benchmark itself has 4k. Process peaks, Python and torch themselves not counted."""
    bench = bench_head()
    out = bench.in_one_process("chunked,full", 150_000, 1024, 8, 0.0)
    full, chunked = out["full"]["peak"] - out["chunked"]["rest"], out["chunked"]["more"]
    assert full > 3 * 1024 * 150_000 * 4 * 0.9  # logits, log-probs, gradient: the plain way is no straw man
    assert chunked < full / 5
    assert bench.difference(out["full"], out["chunked"]) < 1e-5


# --- candidate sets --------------------------------------------------------------------
def test_renormalised_by_hand():
    """p = (1/2, 1/4, 1/4); the token was drawn from {0, 2}, from {1} alone, and from everything."""
    logits = torch.tensor([[math.log(2), 0.0, 0.0]] * 3, dtype=DOUBLE, requires_grad=True)
    ids = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    log_probs, _, picked = scores(logits, torch.tensor([0, 1, 2]), ids)
    assert picked is not None
    inside = renormalised(log_probs, picked)
    assert inside.exp().tolist() == pytest.approx([2 / 3, 1.0, 0.25])
    (gradient,) = torch.autograd.grad(inside.sum(), logits)  # onehot - p inside the set
    want = [[1 / 3, 0.0, -1 / 3], [0.0, 0.0, 0.0], [-0.5, -0.25, 0.75]]
    assert gradient.tolist() == [pytest.approx(row, abs=1e-12) for row in want]


def test_renormalised_has_finite_gradients_without_any_candidate():
    picked = torch.tensor([[-1.0, -math.inf], [-math.inf, -math.inf]], dtype=DOUBLE, requires_grad=True)
    log_probs = torch.tensor([-1.0, -2.0], dtype=DOUBLE, requires_grad=True)
    renormalised(log_probs, picked).sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [1.0, 1.0]
    assert picked.grad is not None and picked.grad.tolist() == [[-1.0, 0.0], [0.0, 0.0]]


# --- through a model -------------------------------------------------------------------
def items(lengths: tuple[int, ...] = (9, 30, 4, 17), seed: int = 0) -> list[TrainItem]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i, n in enumerate(lengths):
        ids = torch.randint(3, 260, (n,), generator=draw).tolist()
        made.append(TrainItem(i, (TrainingSequence(ids, [t > 1 for t in range(n)], [0.0] * n),), 1.0, True))
    return made


def alone(model: Any, item: TrainItem) -> torch.Tensor:
    """[L - 2, V] log-probs of one sequence by the plain model."""
    ids = torch.tensor([item.sequences[0].input_ids])
    return torch.log_softmax(model(input_ids=ids).logits[0, 1:-1].float(), -1)


def forward(policy: PolicyForward, row: Row, wanted: Wanted) -> RowLogProbs:
    with policy.context(row):
        return policy.run(row, wanted)


WAYS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("packs", "splits"), WAYS)
def test_entropies_and_candidates_of_a_row(packs: bool, splits: bool):
    model, parts = kit.build("Qwen3"), items()
    every = torch.cat([alone(model, item) for item in parts])
    row = make_row(parts, CPU)
    ids = torch.stack([row.targets_N, (row.targets_N * 7 + 1) % 300, torch.full_like(row.targets_N, -1)], 1)
    policy = PolicyForward(model, 1.0)
    policy.packs, policy.splits_head = packs, splits
    out = forward(policy, row, Wanted(entropy_gradient=True, candidates_NK=ids))
    want = every.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -math.inf)
    torch.testing.assert_close(out.candidates_NK, want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.log_probs_N, want[:, 0], atol=2e-5, rtol=1e-5)
    want_entropy = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(out.entropy_N, want_entropy, atol=2e-5, rtol=1e-5)
    got = torch.autograd.grad(out.entropy_N.sum(), list(model.parameters()))
    for a, b in zip(got, torch.autograd.grad(want_entropy.sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    policy.restore()


MOE = {
    "Qwen3Moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, modeling_qwen3_moe),
    "Mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, modeling_mixtral),
}


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize(("packs", "splits"), WAYS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_the_load_balancing_loss_is_transformers_own_of_sequences_run_alone(
    kind: str, packs: bool, splits: bool, multiple: int
):
    """Router logits of one sequence at a time, without padding, and their gradient."""
    changes, module = MOE[kind]
    model, parts = kit.build(kind, **changes), items()
    each = [model(input_ids=torch.tensor([i.sequences[0].input_ids]), output_router_logits=True) for i in parts]
    layers = tuple(torch.cat(one) for one in zip(*(out.router_logits for out in each), strict=True))
    assert [len(layer) for layer in layers] == [9 + 30 + 4 + 17] * 2
    want = module.load_balancing_loss_func(layers, 4, 2)
    assert isinstance(want, torch.Tensor) and want.item() > 2.0  # 2 of 4 experts each: 2.0 is perfect balance
    policy = PolicyForward(model, 1.0, multiple=multiple)
    policy.packs, policy.splits_head = packs, splits
    out = forward(policy, make_row(parts, CPU), Wanted(router_loss=True))
    assert out.router_loss is not None
    torch.testing.assert_close(out.router_loss, want, atol=1e-5, rtol=1e-5)
    mine, theirs = (
        torch.autograd.grad(x, list(model.parameters()), allow_unused=True) for x in (out.router_loss, want)
    )
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    assert forward(policy, make_row(parts, CPU), Wanted()).router_loss is None
    policy.restore()


def test_the_load_balancing_loss_survives_activation_checkpointing():
    model = kit.build("Qwen3Moe", **MOE["Qwen3Moe"][0]).train()
    policy = PolicyForward(model, 1.0)
    policy.packs = policy.splits_head = True
    row, found = make_row(items(), CPU), []
    for _ in range(2):
        with policy.context(row):
            out = policy.run(row, Wanted(router_loss=True))
            assert out.router_loss is not None
            loss = out.log_probs_N.mean() + out.router_loss
            found.append(torch.autograd.grad(loss, list(model.parameters())))
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    policy.restore()


def test_a_dense_model_has_no_load_balancing_loss():
    assert router_loss_of(kit.build("Qwen3")) is None


# --- the output layer in fp32 ----------------------------------------------------------
def half_model(**changes: Any) -> Any:
    return kit.policy(tie_word_embeddings=False, **changes).to(torch.bfloat16)


def test_tied_embeddings_are_refused():
    model = kit.policy(tie_word_embeddings=True).to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"cast_lm_head_to_fp32.*tie_word_embeddings"):
        cast_head_to_fp32(model)
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("packs", "splits"), WAYS)
@pytest.mark.parametrize("autocast", [True, False])
def test_the_fp32_head_computes_in_fp32_on_every_path(packs: bool, splits: bool, autocast: bool):
    """The exact product of the hidden states and the weights, both in fp32; also where autocast would round it."""
    model = half_model() if not autocast else half_model().float()
    cast_head_to_fp32(cast_twice := model)
    cast_head_to_fp32(cast_twice)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == (torch.float32 if autocast else torch.bfloat16)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    policy = PolicyForward(model, 1.0)
    policy.packs, policy.splits_head = packs, splits
    row = make_row(items(), CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = forward(policy, row, Wanted())
        assert out.log_probs_N.dtype == torch.float32
        out.log_probs_N.sum().backward()
    assert seen
    for hidden, logits in seen:
        assert logits.dtype == torch.float32
        assert torch.equal(logits, F.linear(hidden.detach().float(), model.lm_head.weight))
    assert model.lm_head.weight.grad.dtype == torch.float32 and model.lm_head.weight.grad.any()
    policy.restore()


def test_sampler_and_trainer_use_the_fp32_head_and_checkpoints_are_as_before(tmp_path: Path):
    model = half_model()
    names = set(model.state_dict())
    args = {"cast_lm_head_to_fp32": True, "max_completion_length": 6, "beta": 0.1, "num_iterations": 2, "max_steps": 2,
            "learning_rate": 1e-2}  # fmt: skip
    rows = [{"prompt": "once"}, {"prompt": "twice"}]
    made = kit.make(tmp_path, args=args, model=model, train_dataset=rows, reward_funcs=kit.length)
    head, before = model.lm_head, model.lm_head.weight.detach().clone()
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    head.register_forward_hook(lambda module, args, out: dtypes[torch.is_grad_enabled()].add(out.dtype))
    made.train()
    assert dtypes == {True: {torch.float32}, False: {torch.float32}}  # training; playing, old and reference log-probs
    assert (head.weight - before).abs().max() > 0 and head.weight.dtype == torch.float32
    made.save_model(str(tmp_path / "saved"))
    made.close()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert set(read.state_dict()) == names and read.config.dtype == torch.bfloat16
    assert torch.equal(read.lm_head.weight, head.weight.to(read.dtype))
    other = copy.deepcopy(model)
    other.lm_head.weight.data.zero_()
    assert not other(input_ids=torch.tensor([[3, 4]])).logits.any()  # a copy computes with its own weights
    assert model(input_ids=torch.tensor([[3, 4]])).logits.any()
