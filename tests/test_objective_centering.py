"""The asynchronous loss: its exact expectation over small vocabularies is enumerated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigurationError
from agentrl.objective import AsyncLossConfig, async_policy_loss
from agentrl.objective.centering import head_coefficients

WIDE = AsyncLossConfig(clip_min=0.0, clip_max=None)


def expected_gradient(p, q, config, head, advantage=1.0):
    """Sum over sampled tokens y of q_y x gradient of L(y) on the policy's logits, with the sampler's top `head`."""
    logits_V = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    log_p_V = logits_V.log_softmax(-1)
    q_V = torch.tensor(q, dtype=torch.float64)
    top_H = q_V.argsort(descending=True, stable=True)[:head]
    V = len(p)
    terms = async_policy_loss(
        log_p_V, q_V.log(), torch.full((V,), advantage, dtype=torch.float64), torch.zeros(V, dtype=torch.long), config,
        head_log_probs_TH=log_p_V[top_H].expand(V, -1), head_sampler_log_probs_TH=q_V[top_H].log().expand(V, -1),
    )  # fmt: skip
    (q_V * terms.loss_T).sum().backward()
    return logits_V.grad.tolist(), terms


def test_two_tokens_by_hand_with_weight_one():
    """p = (0.6, 0.4), q = (0.5, 0.5): the mean score is (-0.1, 0.1) before and exactly 0 after."""
    p, q = torch.tensor([0.6, 0.4], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    jacobian = torch.eye(2, dtype=torch.float64) - p  # row y: gradient of log p_y on the logits
    assert (q @ jacobian).tolist() == pytest.approx([-0.1, 0.1])
    coefficients = head_coefficients(p.log()[None], q.log()[None], torch.ones_like)[0]
    assert ((q - coefficients) @ jacobian).tolist() == pytest.approx([0.0, 0.0], abs=1e-15)


def test_identity_over_the_whole_vocabulary_needs_no_correction():
    """With g(w) = w the weighted score already averages to zero: sum of c_v grad log p_v is the gradient of 1."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.2, 0.6]]).double()
    assert head_coefficients(p.log(), q.log(), lambda w: w)[0].tolist() == pytest.approx(p[0].tolist())
    half = head_coefficients(p[:, :2].log(), q[:, :2].log(), lambda w: w)
    assert half[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-15)  # and with a tail it is 0 term by term


def test_a_head_with_a_tail_by_hand():
    """Head of one: p 0.6, q 0.5. Tail 0.4 under p and 0.5 under q: alpha = 1.25."""
    p, q = torch.tensor([[0.6]]).double().log(), torch.tensor([[0.5]]).double().log()
    one = head_coefficients(p, q, torch.ones_like)
    assert one.item() == pytest.approx(0.5 - 1.25 * 0.6)

    def low_only(ratio):  # 0.8 of the tail is inside, 1.2 of the head is not
        return torch.where(ratio <= 1.0, ratio, torch.zeros_like(ratio))

    assert head_coefficients(p, q, low_only).item() == pytest.approx(0 - 1.25 * 0.8 * 0.6)


def test_masked_tokens_bias_the_plain_weights_and_not_the_centred_loss():
    p, q = [0.1, 0.6, 0.3], [0.6, 0.2, 0.2]  # ratios 1/6 (dropped), 3, 1.5
    gradient, terms = expected_gradient(p, q, AsyncLossConfig(), head=3)
    assert terms.extras["dropped_T"].tolist() == [True, False, False]
    assert gradient == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    logits = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    kept = torch.tensor([0.0, 3.0, 1.5], dtype=torch.float64)
    (-(torch.tensor(q, dtype=torch.float64) * kept * logits.log_softmax(-1))).sum().backward()
    assert max(abs(x) for x in logits.grad.tolist()) > 0.05  # what centering takes away


def distribution(size):
    return st.lists(st.floats(0.05, 1.0), min_size=size, max_size=size).map(lambda xs: [x / sum(xs) for x in xs])


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 6).flatmap(lambda n: st.tuples(distribution(n), distribution(n))), st.sampled_from([1.0, -2.5]))
def test_the_mean_over_the_samplers_draws_is_zero_with_the_whole_vocabulary(pair, advantage):
    p, q = pair
    gradient, _ = expected_gradient(p, q, AsyncLossConfig(clip_min=0.7, clip_max=1.6), head=len(p), advantage=advantage)
    assert gradient == pytest.approx([0.0] * len(p), abs=1e-10)


@settings(max_examples=80, deadline=None)
@given(distribution(6), distribution(3), st.floats(0.2, 0.8))
def test_a_short_head_is_exact_where_the_tail_is_proportional_to_the_policy(p, head_q, mass):
    """q's tail is alpha p, which is what the formula assumes, for any alpha."""
    q = [x * mass for x in head_q] + [x * (1 - mass) / sum(p[3:]) for x in p[3:]]
    if min(q[:3]) <= max(q[3:]):  # the head must be the sampler's most likely tokens
        return
    gradient, terms = expected_gradient(p, q, AsyncLossConfig(clip_min=0.6, clip_max=1.7), head=3)
    assert gradient == pytest.approx([0.0] * 6, abs=1e-10)
    assert terms.extras["sampler_mass_T"].tolist() == pytest.approx([mass] * 6)


def test_the_gradient_of_one_token_by_hand():
    """sg(w) l - sum sg(c) log p with w = 1.2: c = (0.6, 0.4), both inside, so the head's part has no net score."""
    log_p = torch.tensor([0.6, 0.4], dtype=torch.float64).log()
    log_q = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    logits = log_p.clone().requires_grad_()
    live = logits.log_softmax(-1)
    terms = async_policy_loss(
        live[:1], log_q[:1], torch.tensor([2.0]).double(), torch.tensor([0]), WIDE, head_log_probs_TH=live[None],
        head_sampler_log_probs_TH=log_q[None],
    )  # fmt: skip
    expected = -2 * (1.2 * math.log(0.6) - 0.6 * math.log(0.6) - 0.4 * math.log(0.4))
    assert terms.loss_T.item() == pytest.approx(expected)
    terms.loss_T.sum().backward()
    assert logits.grad.tolist() == pytest.approx([-2 * 1.2 * 0.4, 2 * 1.2 * 0.4])


def test_tiny_tails_and_padding_stay_finite():
    """Full heads in fp32 whose mass is 1 but for rounding, a policy without tail, NaN and -inf padding."""
    generator = torch.Generator().manual_seed(0)
    log_q = (torch.randn(50, 8, generator=generator) * 3).log_softmax(-1)
    log_p = (torch.randn(50, 8, generator=generator) * 3).log_softmax(-1)
    same = head_coefficients(log_p, log_q, torch.ones_like)
    assert torch.allclose(same, log_q.exp(), atol=1e-6)
    peaked = torch.tensor([[0.0, -50.0]])
    spread = torch.tensor([[0.6, 0.2]]).log()
    for p, q in [(peaked, spread), (spread, peaked), (peaked, peaked)]:
        assert torch.isfinite(head_coefficients(p, q, torch.ones_like)).all()
    pad = torch.tensor([[math.log(0.6), math.nan, -math.inf]])
    live = torch.tensor([[0.7, 0.2, 0.1]]).log()
    padded = head_coefficients(live, pad, lambda w: w)
    assert padded[0, 1:].tolist() == [0.0, 0.0]
    short = head_coefficients(live[:, :1], pad[:, :1], lambda w: w)
    assert padded[0, 0].item() == short.item()


def brute_force(logits_TV, log_q_TV, targets, advantages, head, clip_min, clip_max):
    """The loss of each token from the whole distributions, with loops, the sampler's tail proportional to p."""
    total = logits_TV.new_zeros(())
    for logits_V, log_q_V, y, advantage in zip(logits_TV, log_q_TV, targets, advantages, strict=True):
        log_p_V = logits_V - logits_V.exp().sum().log()
        p, q = log_p_V.exp().tolist(), log_q_V.exp().tolist()
        top = sorted(range(len(q)), key=lambda v: -q[v])[:head]
        tail_p, tail_q = 1 - sum(p[v] for v in top), 1 - sum(q[v] for v in top)
        inside = [v in top for v in range(len(q))]
        assumed = [q[v] if inside[v] else p[v] * tail_q / tail_p for v in range(len(q))]  # proportional tail

        def weight(ratio):
            return ratio if clip_min <= ratio <= clip_max else 0.0

        total = total - advantage * weight(p[y] / q[y]) * log_p_V[y]
        for v in range(len(q)):
            total = total + advantage * assumed[v] * weight(p[v] / assumed[v]) * log_p_V[v]
    return total


@pytest.mark.parametrize("head", [1, 3, 6, 7])
@pytest.mark.parametrize("bounds", [(0.5, 5.0), (0.9, 1.2), (0.0, math.inf)])
def test_gradients_are_those_of_the_whole_vocabulary_by_brute_force(head, bounds):
    """Five tokens over seven ids in float64; a head of seven is the exact correction."""
    draw = torch.Generator().manual_seed(head)
    logits = torch.randn(5, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    log_q = (logits.detach() + 0.4 * torch.randn(5, 7, generator=draw, dtype=torch.float64)).log_softmax(-1)
    targets, advantages = torch.tensor([0, 3, 6, 2, 2]), torch.tensor([1.0, -2.0, 0.5, 0.7, -0.1], dtype=torch.float64)
    want = torch.autograd.grad(brute_force(logits, log_q, targets, advantages, head, *bounds), logits)[0]
    log_p, top = logits.log_softmax(-1), log_q.topk(head, -1)
    config = AsyncLossConfig(clip_min=bounds[0], clip_max=bounds[1])
    terms = async_policy_loss(
        log_p.gather(-1, targets[:, None])[:, 0], log_q.gather(-1, targets[:, None])[:, 0], advantages,
        torch.zeros(5, dtype=torch.long), config,
        head_log_probs_TH=log_p.gather(-1, top.indices), head_sampler_log_probs_TH=top.values,
    )  # fmt: skip
    got = torch.autograd.grad(terms.loss_T.sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    assert terms.extras["sampler_mass_T"].tolist() == pytest.approx(top.values.exp().sum(-1).tolist())
    if bounds == (0.9, 1.2):
        uncentred = torch.autograd.grad(
            -(advantages * terms.ratio_T * ~terms.extras["dropped_T"] * log_p.gather(-1, targets[:, None])[:, 0]).sum(),
            logits,
        )[0]
        assert (uncentred - got).abs().max() > 0.01  # the correction bites


@pytest.mark.parametrize("tail", [0.0, 1e-9, 1e-7, 2e-6, 1e-5])
def test_a_tiny_tail_mass_gives_no_wild_gradient_in_float32(tail):
    """1 - sum is rounding there: whatever the ratio of two tails reads, the logits' gradient is the exact one's."""
    log_q = torch.tensor([[0.7, 0.3 - tail, tail]]).log()
    start = torch.tensor([[0.6, 0.4, 3e-8]]).log()

    def gradient(head: int) -> torch.Tensor:
        logits = start.clone().requires_grad_()
        log_p = logits.log_softmax(-1)
        terms = async_policy_loss(
            log_p[:, 0], log_q[:, 0], torch.ones(1), torch.tensor([0]), AsyncLossConfig(),
            head_log_probs_TH=log_p[:, :head], head_sampler_log_probs_TH=log_q[:, :head],
        )  # fmt: skip
        return torch.autograd.grad(terms.loss_T.sum(), logits)[0]

    torch.testing.assert_close(gradient(2), gradient(3), atol=2e-5, rtol=0)


@pytest.mark.parametrize("clip_min", [0.5, 0.0, None])
def test_a_head_token_that_the_policy_cannot_draw_does_not_poison_the_loss(clip_min):
    """Candidate sets (top-k) give log p = -inf to the rest; 0 x -inf would be NaN."""
    live = torch.tensor([[-0.1, -math.inf]], requires_grad=True)
    terms = async_policy_loss(
        live[0, :1], torch.tensor([-0.2]), torch.ones(1), torch.tensor([0]), AsyncLossConfig(clip_min=clip_min),
        head_log_probs_TH=live, head_sampler_log_probs_TH=torch.tensor([[-0.2, -2.0]]),
    )  # fmt: skip
    terms.loss_T.sum().backward()
    assert torch.isfinite(terms.loss_T).all() and torch.isfinite(live.grad).all()


def test_f031_stale_tokens_are_dropped_from_the_numerator_only():
    """F031: ratio e^4 with A < 0 gives nothing; e^0.1 is untouched; both stay in the list of tokens."""
    config = AsyncLossConfig(score_centering=False)
    live = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    terms = async_policy_loss(
        live,
        torch.tensor([-5.0, -1.1, -0.2]),
        torch.tensor([-1.0, -1.0, 1.0]),
        torch.zeros(3, dtype=torch.long),
        config,
    )
    assert terms.loss_T.tolist() == pytest.approx([0.0, math.exp(0.1), 0.0])
    assert terms.ratio_T.tolist() == pytest.approx([math.exp(4), math.exp(0.1), math.exp(-0.8)])
    assert terms.extras["dropped_T"].tolist() == [True, False, True]
    terms.loss_T.sum().backward()
    assert live.grad.tolist() == pytest.approx([0.0, math.exp(0.1), 0.0])


def test_without_centering_clipping_is_the_synchronous_one():
    config = AsyncLossConfig(score_centering=False, epsilon_high=0.28)
    ratios = torch.tensor([1.5, 0.6, 1.5, 0.6])
    terms = async_policy_loss(
        ratios.log(), torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.zeros(4, dtype=torch.long), config
    )
    assert terms.loss_T.tolist() == pytest.approx([-1.28, 0.8, 1.5, -0.6])
    assert terms.low_T.tolist() == [False, True, False, False]
    assert terms.high_T.tolist() == [True, False, False, False]


def test_with_centering_every_token_outside_the_region_counts():
    ratios = torch.tensor([1.5, 0.6, 1.5, 0.6, 1.0])
    head = torch.zeros(5, 1)
    terms = async_policy_loss(
        ratios.log(), torch.zeros(5), torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]), torch.zeros(5, dtype=torch.long),
        AsyncLossConfig(), head_log_probs_TH=head, head_sampler_log_probs_TH=head,
    )  # fmt: skip
    assert terms.low_T.tolist() == [False, True, False, True, False]
    assert terms.high_T.tolist() == [True, False, True, False, False]


def test_no_tokens_and_bad_input():
    empty, index = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    head = torch.zeros(0, 8)
    terms = async_policy_loss(
        empty, empty, empty, index, AsyncLossConfig(), head_log_probs_TH=head, head_sampler_log_probs_TH=head
    )
    assert terms.loss_T.sum().item() == 0.0
    with pytest.raises(ConfigurationError, match="most likely tokens"):
        async_policy_loss(empty, empty, empty, index, AsyncLossConfig())
    with pytest.raises(ConfigurationError, match=r"clip_min 6\.0 is above clip_max 5\.0"):
        AsyncLossConfig(clip_min=6.0)
    with pytest.raises(ConfigurationError, match="epsilon_high"):
        AsyncLossConfig(epsilon_high=-1.0)
    with pytest.raises(ValueError, match="sampler_log_probs_T is missing"):
        one = torch.zeros(1)
        async_policy_loss(one, one * math.nan, one, torch.tensor([0]), AsyncLossConfig(score_centering=False))
