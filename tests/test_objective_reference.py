"""The whole way from log-probs to the loss of a step, against a slow second implementation in plain Python.

The reference keeps nested lists (rollouts of tokens) and spells every formula out per token; it takes the log-probs
twice, live and frozen, so that a finite difference over the live ones is the gradient that stop-gradients leave.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.objective import LossConfig, policy_loss, sampler_correction, token_weights

ALL = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
LONGEST = 16


@dataclass
class Played:
    """One rollout: lists per token, one advantage, its micro-batch."""

    live: list[float]
    old: list[float]
    sampler: list[float]
    ref: list[float]
    keep: list[bool]
    advantage: float
    cut: int


@dataclass
class Options:
    config: LossConfig
    correction: str | None = None
    clip_min: float | None = None
    clip_max: float | None = None
    use_keep: bool = False


# --- the second implementation ---------------------------------------------------------
def rho(rollout, t, options):
    """The sampler correction of one token."""
    gaps = [o - q for o, q in zip(rollout.old, rollout.sampler, strict=True)]
    value = math.exp(sum(gaps) if options.correction.startswith("sequence") else gaps[t])
    low = 0 if options.clip_min is None else options.clip_min
    high = math.inf if options.clip_max is None else options.clip_max
    if options.correction.endswith("truncate"):
        return min(max(value, low), high)
    return value if low <= value <= high else 0.0


def phi(rollout, frozen, options):
    c = options.config
    log_w = sum(max(-20, min(20, f - o)) for f, o in zip(frozen, rollout.old, strict=True))
    if options.correction is not None:
        terms = [rho(rollout, t, options) for t in range(len(frozen))]
        if options.correction.startswith("sequence"):
            terms = terms[:1]
        log_w += sum(math.log(x) if x > 0 else -math.inf for x in terms)
    log_w = max(math.log(1e-8), min(20, log_w))
    positive = rollout.advantage >= 0
    k, lam = (c.vespo_k_pos, c.vespo_lambda_pos) if positive else (c.vespo_k_neg, c.vespo_lambda_neg)
    return math.exp(lam + k * log_w - lam * math.exp(log_w))


def token_loss(rollout, live, frozen, t, options):
    """L_t of one token, with the live log-probs where gradient flows and the frozen ones elsewhere."""
    c, a = options.config, rollout.advantage
    gaps = [x - o for x, o in zip(live, rollout.old, strict=True)]
    r = math.exp(sum(gaps) / len(gaps) if c.importance_sampling_level == "sequence" else gaps[t])
    eps_high = c.epsilon_high if c.epsilon_high is not None else (5.0 if c.loss_type == "cispo" else c.epsilon)
    if c.loss_type == "vespo":
        loss = -phi(rollout, frozen, options) * a * live[t]
    elif c.loss_type == "cispo":
        still = [x - o for x, o in zip(frozen, rollout.old, strict=True)]
        weight = math.exp(sum(still) / len(still) if c.importance_sampling_level == "sequence" else still[t])
        loss = -min(weight, eps_high) * a * live[t]
    elif c.loss_type == "sapo":
        tau = c.sapo_temperature_pos if a > 0 else c.sapo_temperature_neg
        loss = -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
    else:
        bounded = r if c.delta is None else min(r, c.delta)
        loss = -min(bounded * a, min(max(r, 1 - c.epsilon), 1 + eps_high) * a)
    if options.correction is not None and c.loss_type != "vespo":
        loss *= rho(rollout, t, options)
    if c.off_policy_mask_threshold is not None and a < 0:
        drift = sum(q - f for q, f in zip(rollout.sampler, frozen, strict=True)) / len(frozen)
        loss = 0.0 if drift > c.off_policy_mask_threshold else loss
    if options.use_keep and not rollout.keep[t]:
        loss = 0.0
    if c.beta:
        gap = rollout.ref[t] - live[t]
        kl = math.exp(gap) - gap - 1
        loss += c.beta * kl * (r if c.use_bias_correction_kl else 1)
    return loss


def reference_loss(rollouts, live, frozen, options):
    kind = options.config.loss_type
    losses = [
        [token_loss(p, xs, fs, t, options) for t in range(len(xs))]
        for p, xs, fs in zip(rollouts, live, frozen, strict=True)
    ]
    cuts = sorted({p.cut for p in rollouts})
    if kind in ("dapo", "cispo", "vespo"):
        tokens = sum(map(len, losses))
        return sum(map(sum, losses)) / tokens if tokens else 0.0
    if kind == "dr_grpo":
        return sum(map(sum, losses)) / (len(losses) * LONGEST)
    if kind == "luspo":
        return sum(map(sum, losses)) / len(losses)
    total = 0.0
    for cut in cuts:
        own = [ls for p, ls in zip(rollouts, losses, strict=True) if p.cut == cut]
        if kind == "bnpo":
            tokens = sum(map(len, own))
            total += sum(map(sum, own)) / tokens if tokens else 0.0
        else:
            total += sum(sum(ls) / len(ls) if ls else 0.0 for ls in own) / len(own)
    return total / len(cuts)


# --- the code under test, over flat tokens in any order ----------------------------------
def flat_loss(rollouts, options, order_seed=0):
    """(loss, gradient as nested lists): tokens of all rollouts are shuffled, as packing might."""
    places = [(i, t) for i, p in enumerate(rollouts) for t in range(len(p.live))]
    random.Random(order_seed).shuffle(places)

    def gather(name):
        return torch.tensor([getattr(rollouts[i], name)[t] for i, t in places], dtype=torch.float64)

    rollout_T = torch.tensor([i for i, _ in places], dtype=torch.long)
    advantages_T = torch.tensor([rollouts[i].advantage for i, _ in places], dtype=torch.float64)
    live_T = gather("live").requires_grad_()
    correction_T, level = None, "token"
    if options.correction is not None:
        level = "sequence" if options.correction.startswith("sequence") else "token"
        correction_T = sampler_correction(
            gather("old"), gather("sampler"), rollout_T, options.correction, options.clip_min, options.clip_max
        )
    keep_T = torch.tensor([rollouts[i].keep[t] for i, t in places], dtype=torch.bool) if options.use_keep else None
    terms = policy_loss(
        live_T, gather("old"), advantages_T, rollout_T, options.config, ref_log_probs_T=gather("ref"),
        sampler_log_probs_T=gather("sampler"), correction_T=correction_T, correction_level=level, keep_T=keep_T,
        num_rollouts=len(rollouts),
    )  # fmt: skip
    lengths_R = torch.tensor([len(p.live) for p in rollouts])
    weights_R = token_weights(
        lengths_R,
        torch.tensor([p.cut for p in rollouts]),
        loss_type=options.config.loss_type,
        num_rollouts_total=len(rollouts),
        trained_tokens_total=int(lengths_R.sum()),
        num_microbatches_total=len({p.cut for p in rollouts}),
        max_completion_length=LONGEST,
    )
    loss = (weights_R[rollout_T] * terms.loss_T).sum()
    loss.backward()
    gradient = [[0.0] * len(p.live) for p in rollouts]
    for (i, t), value in zip(places, live_T.grad.tolist(), strict=True):
        gradient[i][t] = value
    return loss.item(), gradient


# --- random batches --------------------------------------------------------------------
log_probs = st.floats(-4, -0.01)


@st.composite
def batches(draw):
    rollouts = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 4))
        columns = {
            name: draw(st.lists(log_probs, min_size=count, max_size=count))
            for name in ("live", "old", "sampler", "ref")
        }
        keep = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        advantage = draw(st.sampled_from([-1.5, -0.3, 0.0, 0.7, 2.0]))
        rollouts.append(Played(**columns, keep=keep, advantage=advantage, cut=draw(st.integers(0, 1))))
    return rollouts


@st.composite
def option_sets(draw):
    loss_type = draw(st.sampled_from(ALL))
    clipped = loss_type not in ("cispo", "sapo", "vespo")
    fields = {
        "loss_type": loss_type,
        "epsilon": draw(st.sampled_from([0.1, 0.2])),
        "epsilon_high": None if loss_type in ("sapo", "vespo") else draw(st.sampled_from([None, 0.28, 1.5])),
        "delta": draw(st.sampled_from([None, 1.5, 4.0])) if clipped else None,
        "importance_sampling_level": draw(st.sampled_from(["token", "sequence"])),
        "beta": draw(st.sampled_from([0.0, 0.4])),
        "use_bias_correction_kl": draw(st.booleans()),
        "off_policy_mask_threshold": draw(st.sampled_from([None, 0.3])),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LossConfig(**fields)
    modes = [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    return Options(
        config,
        correction=draw(st.sampled_from(modes)),
        clip_min=draw(st.sampled_from([None, 0.5])),
        clip_max=draw(st.sampled_from([None, 3.0])),
        use_keep=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(batches(), option_sets(), st.integers(0, 99))
def test_value_equals_the_second_implementation_in_any_token_order(rollouts, options, order_seed):
    live = [p.live for p in rollouts]
    expected = reference_loss(rollouts, live, live, options)
    value, gradient = flat_loss(rollouts, options, order_seed)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    again, other = flat_loss(rollouts, options, order_seed + 1)
    assert again == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert [x for row in other for x in row] == pytest.approx([x for row in gradient for x in row], rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(batches(), option_sets(), st.randoms())
def test_order_of_rollouts_does_not_matter(rollouts, options, rng):
    value, gradient = flat_loss(rollouts, options)
    order = list(range(len(rollouts)))
    rng.shuffle(order)
    moved, moved_gradient = flat_loss([rollouts[i] for i in order], options)
    assert moved == pytest.approx(value, rel=1e-9, abs=1e-12)
    for place, i in enumerate(order):
        assert moved_gradient[place] == pytest.approx(gradient[i], rel=1e-9, abs=1e-12)


def drawn(seed):
    """Rollouts whose ratios lie in, below and above every region used here, but never on an edge."""
    rng = random.Random(seed)
    rollouts = []
    for count, advantage, cut in [(3, 1.2, 0), (2, -0.8, 0), (4, -1.1, 1), (0, 1.0, 1), (1, 0.6, 1)]:
        old = [rng.uniform(-3, -0.5) for _ in range(count)]
        rollouts.append(
            Played(
                live=[o + rng.choice([-0.9, -0.5, -0.05, 0.04, 0.1, 0.6, 1.9]) for o in old],
                old=old,
                sampler=[o + rng.uniform(-0.3, 0.3) for o in old],
                ref=[o + rng.uniform(-1, 1) for o in old],
                keep=[rng.random() < 0.7 for _ in old],
                advantage=advantage,
                cut=cut,
            )
        )
    return rollouts


VARIANTS = [
    {},
    {"importance_sampling_level": "sequence"},
    {"beta": 0.3},
    {"beta": 0.3, "use_bias_correction_kl": False, "off_policy_mask_threshold": 0.1},
    {"beta": 0.3, "importance_sampling_level": "sequence"},
]


@pytest.mark.parametrize("loss_type", ALL)
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("correction", [None, "token_truncate", "sequence_mask"])
@pytest.mark.filterwarnings("ignore:loss_type='luspo'")
def test_gradient_equals_finite_differences_of_the_second_implementation(loss_type, fields, correction):
    more = {"delta": 3.0} if loss_type in ("grpo", "dapo") else {}
    for seed in range(3):
        rollouts = drawn(seed)
        options = Options(
            LossConfig(loss_type=loss_type, **fields, **more), correction=correction, clip_max=1.2, use_keep=seed == 2
        )
        _, gradient = flat_loss(rollouts, options, seed)
        frozen = [p.live for p in rollouts]
        step = 1e-6
        for i, p in enumerate(rollouts):
            for t in range(len(p.live)):
                sides = []
                for sign in (1, -1):
                    live = [list(x) for x in frozen]
                    live[i][t] += sign * step
                    sides.append(reference_loss(rollouts, live, frozen, options))
                slope = (sides[0] - sides[1]) / (2 * step)
                assert gradient[i][t] == pytest.approx(slope, rel=1e-5, abs=1e-8), (seed, i, t)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "luspo", "cispo", "vespo"])
@pytest.mark.filterwarnings("ignore:loss_type='luspo'")
def test_f003_f021_gradients_are_equal_however_a_step_is_cut(loss_type):
    """F003, F021: every micro-batch in its own backward call, totals of the whole step: the gradients add up."""
    options = Options(LossConfig(loss_type=loss_type))
    for cuts in ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [1, 0, 1, 0, 1]):
        rollouts = drawn(1)
        for p, cut in zip(rollouts, cuts, strict=True):
            p.cut = cut
        gradient = flat_loss(rollouts, options)[1]
        if cuts == [0] * 5:
            whole = gradient
        for own, expected in zip(gradient, whole, strict=True):
            assert own == pytest.approx(expected, rel=1e-9)


def test_f019_values_outside_the_trained_tokens_cannot_reach_the_loss():
    """F019, F033, F035: there is no padding here; a rollout's values do not change with its neighbours' tokens."""
    for loss_type in ALL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = Options(LossConfig(loss_type=loss_type, beta=0.2), correction="sequence_truncate", clip_max=2.0)
        rollouts = drawn(0)
        before = flat_loss(rollouts, options)[1]
        rollouts[2].live = [x - 1 for x in rollouts[2].live]
        after = flat_loss(rollouts, options)[1]
        assert after[0] == before[0] and after[1] == before[1] and after[2] != before[2]
