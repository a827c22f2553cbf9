"""A packed row gives the loss, the gradient and the log-probs of its sequences run one at a time."""

from __future__ import annotations

import math

import pytest
import torch
import train_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train.layout import Layout
from agentrl.train.log_probs import PolicyForward, padded, score_tokens
from agentrl.train.pack import plan_rows
from agentrl.train.rows import TrainItem, make_row
from agentrl.types import TrainingSequence

CPU = torch.device("cpu")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, **MOE,
}  # fmt: skip
PACKS = {
    "Qwen3": {},
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {**WINDOW, "query_pre_attn_scalar": 8},
    "Qwen3Moe": MOE,
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.35},
    "GPT2": {},
    "Qwen3Next": LINEAR,  # half of its layers carry a state along the row
}
MUST_NOT = [
    ("Gemma2", {**WINDOW, "query_pre_attn_scalar": 8}),  # soft-capped attention
    ("Gemma2", {**WINDOW, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}),
    ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"}),  # sinks
]


def sequence(ids: list[int], mask: list[bool] | None = None) -> TrainingSequence:
    mask = [t > 0 for t in range(len(ids))] if mask is None else mask
    return TrainingSequence(ids, mask, [math.nan if not m else -1.0 for m in mask])


def items(lengths: tuple[tuple[int, ...], ...] = ((5, 19), (11,), (3,), (40, 7)), seed: int = 0) -> list[TrainItem]:
    """One rollout per entry, with one sequence per number; about two thirds of the tokens are trained."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i, parts in enumerate(lengths):
        sequences = []
        for n in parts:
            ids = torch.randint(3, 290, (n,), generator=draw).tolist()
            mask = (torch.rand(n, generator=draw) < 0.66).tolist()
            sequences.append(sequence(ids, [False, *mask[1:-1], True]))
        made.append(TrainItem(i, tuple(sequences), advantage=1.0 - i, active=True))
    return made


def alone(model, sequences) -> torch.Tensor:
    """Log-probs of the trained tokens, each sequence through the plain model by itself."""
    parts = []
    for s in sequences:
        logits = model(input_ids=torch.tensor([s.input_ids])).logits[0].float()
        every = torch.log_softmax(logits, -1)
        parts += [every[t - 1, s.input_ids[t]][None] for t in range(1, len(s.input_ids)) if s.completion_mask[t]]
    return torch.cat(parts)


def gradient(model, scalar: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(scalar, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.reshape(-1) for g in grads if g is not None])


def some_loss(log_probs_N: torch.Tensor) -> torch.Tensor:
    """A loss that weighs every token differently."""
    return (log_probs_N * torch.linspace(-1, 2, len(log_probs_N))).sum() + log_probs_N.square().sum() / 50


def through(policy: PolicyForward, row):
    with policy.context(row):
        out = policy.run(row)
        return out, gradient(policy.model, some_loss(out.log_probs_N)) if out.log_probs_N.requires_grad else None


@pytest.mark.parametrize("kind", PACKS)
def test_packed_equals_one_sequence_at_a_time(kind: str):
    model = kit.build(kind, **PACKS[kind])
    parts = items()
    want = alone(model, [s for item in parts for s in item.sequences])
    want_gradient = gradient(model, some_loss(want))
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert policy.packs, f"{kind} could be packed"
    assert policy.splits_head
    out, got_gradient = through(policy, make_row(parts, CPU))
    torch.testing.assert_close(out.log_probs_N, want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got_gradient, want_gradient, atol=2e-4, rtol=1e-3)
    policy.restore()


@pytest.mark.parametrize(("kind", "changes"), MUST_NOT)
def test_models_that_packing_would_change_take_the_padded_path(kind: str, changes: dict):
    model = kit.build(kind, **changes)
    parts = items()
    want = alone(model, [s for item in parts for s in item.sequences])
    want_gradient = gradient(model, some_loss(want))
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert policy.packs is False
    out, got_gradient = through(policy, make_row(parts, CPU))
    torch.testing.assert_close(out.log_probs_N, want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got_gradient, want_gradient, atol=5e-4, rtol=1e-3)


def test_activation_checkpointing_recomputes_the_same_packed_row():
    """The backward pass runs the attention again, and must find the row's borders."""
    model = kit.build("Qwen3")
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert policy.packs
    row = make_row(items(), CPU)
    model.train()
    _, want = through(policy, row)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, got = through(policy, row)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    policy.restore()


def test_F025_padded_rows_do_not_shift_positions():
    """Absolute (GPT-2) and rotary positions; short sequences beside a long one."""
    for kind in ("GPT2", "Llama"):
        model = kit.build(kind)
        parts = items(((4,), (71,), (6,)))
        policy = PolicyForward(model, 1.0)
        policy.packs = policy.splits_head = False
        out, _ = through(policy, make_row(parts, CPU))
        torch.testing.assert_close(
            out.log_probs_N, alone(model, [s for item in parts for s in item.sequences]), atol=2e-5, rtol=1e-5
        )
        policy.restore()


def test_F025_padding_gives_positions_and_a_mask_from_the_lengths():
    inputs, where = padded(make_row([TrainItem(0, (sequence([5, 6]), sequence([7, 8, 9])), 0.0, True)], CPU), True)
    assert inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert inputs["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert where.tolist() == [0, 1, 3, 4, 5]


def test_F155_no_token_is_scored_across_a_border():
    """Each sequence's first trained token is predicted by its own predecessor, never by the neighbour's last token."""
    row = make_row([TrainItem(0, (sequence([5, 6, 7]),), 0.0, True), TrainItem(1, (sequence([8, 9]),), 0.0, True)], CPU)
    assert row.scored_by_N.tolist() == [0, 1, 3]
    assert row.targets_N.tolist() == [6, 7, 9]
    assert row.rollout_N.tolist() == [0, 0, 1]
    assert row.position_ids_T.tolist() == [0, 1, 2, 0, 1]


def test_F155_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="first token"):
        make_row([TrainItem(0, (sequence([5, 6], [True, True]),), 0.0, True)], CPU)


@pytest.mark.parametrize("packs", [True, False])
def test_F155_other_rollouts_in_the_row_change_nothing(packs: bool):
    model = kit.build("Qwen3")
    policy = PolicyForward(model, 1.0)
    policy.packs, policy.splits_head = packs, True
    one, other, third = items(((9,), (14,), (6,)))
    first, _ = through(policy, make_row([other, one], CPU))
    second, _ = through(policy, make_row([third, one], CPU))
    n = one.trained_tokens
    torch.testing.assert_close(first.log_probs_N[-n:], second.log_probs_N[-n:], atol=1e-6, rtol=0)
    policy.restore()


def test_F175_F043_only_masked_in_tokens_are_targets():
    """Prompt and tool-result targets have no gradient: other ids there change inputs, but are never scored."""
    row = make_row([TrainItem(0, (sequence([1, 2, 3, 4, 5], [False, False, True, False, True]),), 0.0, True)], CPU)
    assert row.targets_N.tolist() == [3, 5]
    logits = torch.randn(5, 12, requires_grad=True)
    log_probs_N = score_tokens(logits[row.scored_by_N], row.targets_N, lambda x: x, 1.0).log_probs_N
    log_probs_N.sum().backward()
    assert logits.grad is not None
    moved = (logits.grad.abs().sum(-1) > 0).tolist()
    assert moved == [False, True, False, True, False]  # the predecessors of the two trained tokens
    # replacing the last tool token's id where it is only a target (not an input to a trained one) changes nothing
    model = kit.build("Qwen3")
    policy = PolicyForward(model, 1.0)
    policy.packs, policy.splits_head = True, True
    tail = [[1, 2, 3, 4, 5, other] for other in (6, 200)]
    mask = [False, False, True, False, True, False]
    a, b = (through(policy, make_row([TrainItem(0, (sequence(ids, mask),), 0.0, True)], CPU)) for ids in tail)
    assert torch.equal(a[0].log_probs_N, b[0].log_probs_N)
    policy.restore()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_change_neither_values_nor_gradient(monkeypatch: pytest.MonkeyPatch, temperature: float):
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(12, 50)
    hidden = torch.randn(97, 12, generator=draw, requires_grad=True)
    targets = torch.randint(0, 50, (97,), generator=draw)
    logits = head(hidden) / temperature
    want = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    probabilities = logits.softmax(-1)
    want_entropy = -(probabilities * probabilities.log()).sum(-1)
    leaves = [hidden, *head.parameters()]
    want_gradient = torch.autograd.grad(some_loss(want), leaves)
    for limit in (1 << 24, 16 * 50):  # in one piece, and in pieces of 16 tokens
        monkeypatch.setattr("agentrl.train.log_probs.MAX_LOGITS", limit)
        out = score_tokens(hidden, targets, head, temperature)
        got, entropy = out.log_probs_N, out.entropy_N
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)
        assert not entropy.requires_grad
        for g, w in zip(torch.autograd.grad(some_loss(got), leaves), want_gradient, strict=True):
            torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-5)


def test_entropy_by_hand():
    logits = torch.tensor([[0.0, 0.0, -math.inf], [math.log(3.0), 0.0, -math.inf]])
    out = score_tokens(logits, torch.tensor([1, 0]), lambda x: x, 1.0)
    log_probs_N, entropy_N = out.log_probs_N, out.entropy_N
    assert log_probs_N.tolist() == pytest.approx([-math.log(2), math.log(0.75)])
    assert entropy_N.tolist() == pytest.approx([math.log(2), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)])


def test_F029_temperature_divides_the_logits():
    model = kit.build("Qwen3")
    (item,) = items(((12,),))
    logits = model(input_ids=torch.tensor([item.sequences[0].input_ids])).logits[0] / 0.6
    row = make_row([item], CPU)
    want = torch.log_softmax(logits, -1)[row.scored_by_N, row.targets_N]
    policy = PolicyForward(model, 0.6)
    policy.probe()
    torch.testing.assert_close(through(policy, row)[0].log_probs_N, want, atol=1e-5, rtol=1e-5)
    policy.restore()


@given(st.lists(st.integers(1, 70), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_layout_is_a_permutation_into_buckets(lengths: list[int]):
    """Every token of the row lies in exactly one place of the buckets, in its segment's order."""
    layout = Layout.of(tuple(lengths), (-1,) * len(lengths), CPU)
    assert not layout.shared and layout.above(None) == ()
    real = [torch.arange(b.queries_SQ.numel()) if b.real_R is None else b.real_R for b in layout.own]
    assert all(torch.equal(b.queries_SQ.reshape(-1)[r], b.rows_R) for b, r in zip(layout.own, real, strict=True))
    assert sorted(torch.cat([b.rows_R for b in layout.own]).tolist()) == list(range(sum(lengths)))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for bucket in layout.own:
        assert (segment[bucket.queries_SQ] == segment[bucket.queries_SQ[:, :1]]).all()


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 60))
def test_plan_rows_places_each_rollout_once_within_the_budget(sizes: list[int], budget: int):
    plan = plan_rows([TrainItem(i, (sequence([5] * n),), 1.0, True) for i, n in enumerate(sizes)], budget)
    assert sorted(i for row in plan for i in row) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in row) <= budget or len(row) == 1 for row in plan)


def test_F157_an_empty_row_gives_every_parameter_a_zero_gradient():
    """Untied output layer: DDP would wait for its gradient for ever."""
    from agentrl.train.step import _empty_row

    model = kit.build("Qwen3", tie_word_embeddings=False)
    policy = PolicyForward(model, 1.0)
    policy.probe()
    row = _empty_row(CPU)
    with policy.context(row):
        (policy.run(row).log_probs_N.sum() * 0.0).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(not p.grad.any() for p in model.parameters())
    policy.restore()


def test_forward_is_the_models_own_again_in_any_order():
    """Two trainers on one model, or a warm-up while a trainer lives: the plain call works, and neither breaks."""
    model = kit.build("Qwen3")
    ids = torch.tensor([[3, 4, 5]])
    plain = model(input_ids=ids).logits
    outer = PolicyForward(model, 1.0)
    outer.probe()
    row = make_row(items(((5,),)), CPU)
    want = through(outer, row)[0].log_probs_N
    inner = PolicyForward(model, 2.0)
    inner.probe()
    assert torch.equal(model(input_ids=ids).logits, plain)
    inner.restore()
    with outer.context(row):
        torch.testing.assert_close(model(agentrl_row=row)["log_probs_N"], want)
    outer.restore()
    assert torch.equal(model(input_ids=ids).logits, plain)
    assert "_agentrl_policy_forward" not in model.__dict__
