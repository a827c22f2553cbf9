"""What cannot change a step: padding, order, rows, micro-batches, forks, and whatever stands where nothing is trained.

Whole steps of `StepRunner` on a tiny model in float64: the gradient of every parameter, the loss and the metrics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import train_kit as kit
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.objective import LossConfig, clip_summary, policy_loss, sampler_correction
from agentrl.rollout.sequences import to_sequences
from agentrl.train.correction import SamplerCorrection
from agentrl.train.entropy import EntropyControl, EntropySettings
from agentrl.train.generation import recorded_log_probs
from agentrl.train.log_probs import PolicyForward
from agentrl.train.metrics import MetricWindow
from agentrl.train.rows import TrainItem, make_row
from agentrl.train.step import StepBatch, StepRunner
from agentrl.types import TrainingSequence, TurnRecord

OVER_THE_STEP = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LOSSES = ("bnpo", *OVER_THE_STEP)
LONGEST = 16


@functools.cache
def parts() -> tuple[Any, PolicyForward, Accelerator]:
    model = kit.policy(num_hidden_layers=1).double()
    policy = PolicyForward(model, 1.0)
    policy.splits_head = True
    return model, policy, Accelerator(cpu=True)


def config(loss_type: str, **fields: Any) -> LossConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # luspo at token level
        return LossConfig(loss_type=loss_type, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Settings:
    config: LossConfig
    quantile: float = 1.0
    bonus: float = 0.0
    correction: str | None = None


@dataclass(frozen=True)
class Outcome:
    gradient: torch.Tensor
    loss: float
    metrics: dict[str, float]


def step(
    items: Sequence[TrainItem], chosen: Settings, *, cut: Sequence[int] | None = None, batch_size: int = 8,
    packs: bool = True, multiple: int = 1,
) -> Outcome:  # fmt: skip
    """One step; `cut` names the micro-batch of each rollout, `batch_size` only decides how long a row may be."""
    model, policy, accelerator = parts()
    policy.packs, policy.multiple = packs, multiple
    cut = [0] * len(items) if cut is None else cut
    correction = None if chosen.correction is None else SamplerCorrection(chosen.correction, 0.7, 1.3)  # type: ignore[arg-type]
    entropy = EntropyControl(EntropySettings(chosen.quantile, chosen.bonus))
    runner = StepRunner(policy, accelerator, chosen.config, LONGEST, entropy, 0.0, correction)
    batch = StepBatch(tuple(items), tuple(cut), max(cut) + 1, batch_size)
    window = MetricWindow()
    model.zero_grad()
    loss = runner.run(model, batch, window)
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    metrics = MetricWindow.values([window.state()]) | clip_summary(window.parts, clip_metric="clip_ratio")
    metrics = {k: v for k, v in metrics.items() if k.startswith(("entropy", "kl", "clip", "vespo", "sampling"))}
    return Outcome(torch.cat([g.reshape(-1).clone() for g in gradient]), float(loss), metrics)


def assert_same(one: Outcome, two: Outcome) -> None:
    size = max(float(two.gradient.norm()), 1e-3)
    assert float((one.gradient - two.gradient).norm()) < 3e-6 * size  # weights and advantages are float32
    assert one.loss == pytest.approx(two.loss, abs=2e-6, rel=1e-5)
    assert one.metrics == pytest.approx(two.metrics, abs=1e-6, rel=1e-5)


# --- random rollouts ---------------------------------------------------------------------
def sequence(ids: Sequence[int], mask: Sequence[bool], filler: float = math.nan) -> TrainingSequence:
    return TrainingSequence(list(ids), list(mask), [-1.0 - i % 5 / 4 if m else filler for i, m in enumerate(mask)])


def item(index: int, sequences: Sequence[TrainingSequence], advantage: float, draw: random.Random) -> TrainItem:
    """With log-probs of the others near the policy's own: ratios in, below and above the usual bounds, on no edge."""
    now = own_log_probs(sequences)

    def near(gaps: Sequence[float]) -> torch.Tensor:
        return torch.tensor([x - draw.choice(gaps) + draw.uniform(-0.01, 0.01) for x in now], dtype=torch.float64)

    old, ref = near([-0.6, -0.1, 0.0, 0.1, 0.5]), near([-0.5, 0.3])
    sampler = old + torch.tensor([draw.uniform(-0.5, 0.5) for _ in now], dtype=torch.float64)
    return TrainItem(index, tuple(sequences), advantage, True, old, sampler, ref, corrected=True)


def own_log_probs(sequences: Sequence[TrainingSequence]) -> list[float]:
    model, _, _ = parts()
    out: list[float] = []
    for s in sequences:
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=torch.tensor([s.input_ids])).logits[0], -1)
        out += [float(log_probs[t - 1, i]) for t, i in enumerate(s.input_ids) if s.completion_mask[t]]
    return out


@st.composite
def rollouts(draw: st.DrawFn, least: int = 1, most: int = 4) -> list[TrainItem]:
    """Some have no trained token, tool results between them, a masked rollout, or an advantage of 0."""
    values = random.Random(draw(st.integers(0, 10_000)))
    made = []
    for index in range(draw(st.integers(least, most))):
        masks = draw(st.lists(st.lists(st.booleans(), min_size=0, max_size=5), min_size=1, max_size=2))
        sequences = []
        for mask in masks:
            mask = [False] * values.randint(1, 3) + mask
            sequences.append(sequence([values.randrange(10, 250) for _ in mask], mask))
        one = item(index, sequences, draw(st.sampled_from([-1.3, -0.4, 0.0, 0.8, 1.7])), values)
        made.append(dataclasses.replace(one, active=draw(st.sampled_from([True, True, True, False]))))
    return made


@st.composite
def chosen(draw: st.DrawFn, losses: Sequence[str] = LOSSES, quantile: bool = True) -> Settings:
    loss_type = draw(st.sampled_from(losses))
    clipped = loss_type not in ("cispo", "sapo", "vespo")
    fields: dict[str, Any] = {
        "importance_sampling_level": draw(st.sampled_from(["token", "sequence"])),
        "beta": draw(st.sampled_from([0.0, 0.3])),
        "use_bias_correction_kl": draw(st.booleans()),
        "off_policy_mask_threshold": draw(st.sampled_from([None, 0.1])),
        "delta": draw(st.sampled_from([None, 1.25])) if clipped else None,
    }
    return Settings(
        config(loss_type, **fields),
        draw(st.sampled_from([1.0, 0.4])) if quantile else 1.0,
        draw(st.sampled_from([0.0, 0.2])),
        draw(st.sampled_from([None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])),
    )


few = settings(max_examples=50, deadline=None)


@few
@given(rollouts(), chosen(), st.integers(1, 4), st.booleans(), st.sampled_from([1, 8]))
def test_rows_and_padding_change_nothing(
    items: list[TrainItem], s: Settings, batch_size: int, packs: bool, multiple: int
):
    """F025, F155: one row for all, one for each, padded or packed; no term crosses a border."""
    assert_same(step(items, s, batch_size=batch_size, packs=packs, multiple=multiple), step(items, s, batch_size=99))


@few
@given(rollouts(2), chosen(), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_changes_nothing(items: list[TrainItem], s: Settings, rng: random.Random):
    cut = [n % 2 for n in range(len(items))]
    order = list(range(len(items)))
    rng.shuffle(order)
    assert_same(step([items[i] for i in order], s, cut=[cut[i] for i in order]), step(items, s, cut=cut))


@few
@given(rollouts(4, 4), chosen(OVER_THE_STEP, quantile=False))
def test_F003_F021_micro_batches_of_equal_size_change_nothing(items: list[TrainItem], s: Settings):
    whole = step(items, s)
    for cut in ([0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 2, 3]):
        assert_same(step(items, s, cut=cut), whole)


@few
@given(rollouts(2, 4), st.sampled_from(["bnpo", "grpo", "sapo"]), st.sampled_from([1.0, 0.4]))
def test_F021_what_depends_on_the_cut_is_the_mean_of_its_micro_batches(
    items: list[TrainItem], loss_type: str, quantile: float
):
    """bnpo, uneven grpo and sapo, and the entropy quantile: each micro-batch is what it would be as a step."""
    s = Settings(config(loss_type, beta=0.3), quantile)
    first, second = step(items[:1], s), step(items[1:], s)
    both = step(items, s, cut=[0] + [1] * (len(items) - 1))
    want = (first.gradient + second.gradient) / 2
    assert float((both.gradient - want).norm()) < 3e-6 * max(float(want.norm()), 1e-3)
    assert both.loss == pytest.approx((first.loss + second.loss) / 2, abs=2e-6, rel=1e-5)


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), chosen(), st.integers(0, 999))
def test_a_fork_changes_nothing(first: int, tool: int, second: int, s: Settings, seed: int):
    """A rollout of two turns as one sequence, and as two of which the second repeats the first untrained."""
    draw = random.Random(seed)
    ids = [draw.randrange(10, 250) for _ in range(2 + first + tool + second)]
    turn_1, turn_2 = range(2, 2 + first), range(2 + first + tool, len(ids))
    joined = [sequence(ids, [t in turn_1 or t in turn_2 for t in range(len(ids))])]
    forked = [
        sequence(ids[: 2 + first], [t in turn_1 for t in range(2 + first)]),
        sequence(ids, [t in turn_2 for t in range(len(ids))]),
    ]
    one = item(0, joined, -0.7, draw)
    neighbour = item(1, [sequence([12, 13, 14, 15], [False, True, True, True])], 0.9, draw)
    two = dataclasses.replace(one, sequences=tuple(forked))
    assert_same(step([two, neighbour], s), step([one, neighbour], s))


@few
@given(rollouts(), chosen(), st.lists(st.integers(10, 250), min_size=1, max_size=4), st.booleans())
def test_F019_what_stands_behind_the_last_trained_token_changes_nothing(
    items: list[TrainItem], s: Settings, tail: list[int], packs: bool
):
    """Ids of padding, noise, or a tool result that nothing answers."""
    longer = [
        dataclasses.replace(
            one,
            sequences=tuple(
                TrainingSequence(
                    q.input_ids + tail, q.completion_mask + [False] * len(tail), q.old_log_probs + [0.0] * len(tail)
                )
                for q in one.sequences
            ),
        )
        for one in items
    ]
    assert_same(step(longer, s, packs=packs), step(items, s))


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_F027_only_the_first_end_token_is_trained(loss_type: str, beta: float):
    """pad is the end token: [a, end, end, end] and [a, b, c, end] have 2 and 4 trained tokens."""
    draw, end = random.Random(3), kit.stop()
    short = item(0, [sequence([7, 8, 40, end], [False, False, True, True])], 1.1, draw)
    other = item(1, [sequence([7, 8, 40, 41, 42, end], [False, False, True, True, True, True])], -0.9, draw)
    filled = dataclasses.replace(
        short, sequences=(sequence([7, 8, 40, end, end, end], [False] * 2 + [True] * 2 + [False] * 2),)
    )
    assert (filled.trained_tokens, other.trained_tokens) == (2, 4)
    s = Settings(config(loss_type, beta=beta))
    assert_same(step([filled, other], s, packs=False), step([short, other], s))


@pytest.mark.parametrize("filler", [0.0, 1.0, -40.0, math.nan])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_F035_F033_recorded_log_probs_of_untrained_tokens_are_never_read(filler: float, mode: str):
    """Five tool tokens with any filler; equal log-probs give the ratio 1, whatever is masked between them."""
    mask = [False, True, True, *[False] * 5, True]
    given_ids = [9, 30, 31, 90, 91, 92, 93, 94, 32]
    one = TrainItem(0, (sequence(given_ids, mask, filler),), 1.0, True)
    recorded = recorded_log_probs(one)
    assert recorded.tolist() == recorded_log_probs(TrainItem(0, (sequence(given_ids, mask),), 1.0, True)).tolist()
    rollout_T = torch.zeros(3, dtype=torch.long)
    assert sampler_correction(recorded, recorded, rollout_T, mode, None, 3.0).tolist() == [1.0] * 3  # type: ignore[arg-type]
    full = dataclasses.replace(one, old_N=recorded, sampler_N=recorded, corrected=True)
    out = step([full], Settings(config("dapo"), correction=mode))
    assert out.metrics["sampling/importance_sampling_ratio/mean"] == 1.0
    assert out.metrics["sampling/sampling_logp_difference/max"] == 0.0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_F005_F001_masked_rollouts_alone_are_nothing_and_beside_others_no_denominator(loss_type: str):
    """Lengths 4 and a masked 12: the sum of dapo's weights is that of the 4."""
    draw = random.Random(1)
    kept = item(0, [sequence([5, 20, 21, 22, 23], [False, True, True, True, True])], 1.0, draw)
    masked = item(1, [sequence(range(30, 43), [False] + [True] * 12)], -1.0, draw)
    masked = dataclasses.replace(masked, active=False)
    s = Settings(config(loss_type, beta=0.2))
    nothing = step([masked, masked], s)
    assert nothing.loss == 0.0 and not nothing.gradient.any()
    alone, both = step([kept], s), step([kept, masked], s)
    share = 0.5 if loss_type in ("grpo", "sapo", "dr_grpo", "luspo") else 1.0  # a mean over rollouts counts it as 0
    assert float((both.gradient - alone.gradient * share).norm()) < 1e-6 * float(alone.gradient.norm())
    assert both.loss == pytest.approx(alone.loss * share, rel=1e-6)


def test_F009_F007_the_ratio_is_to_the_frozen_log_probs_rollout_by_rollout():
    """Of one row, one rollout has frozen log-probs (-2 against -1: the ratio e) and one is new: its ratio is 1."""
    draw = random.Random(0)
    ids, mask = [5, 20, 21], [False, True, True]
    new = dataclasses.replace(item(0, [sequence(ids, mask)], 1.0, draw), old_N=None)
    now = torch.tensor(own_log_probs(new.sequences), dtype=torch.float64)
    stale = dataclasses.replace(new, index=1, advantage=-1.0, old_N=now - 1)
    loose = Settings(config("dapo", epsilon=0.2))
    assert step([stale], loose).loss == pytest.approx(math.e, rel=1e-6)
    both = step([new, stale], loose)
    assert both.loss == pytest.approx((-1 + math.e) / 2, rel=1e-6)
    assert both.metrics["clip_ratio/region_mean"] == 0.0  # A < 0 and r > 1 + eps: the pessimistic side is not clipped


def test_F043_F045_F175_turns_become_sequences_with_their_end_tokens_trained_and_nothing_else():
    """Prompt 3, a turn of 2, a tool result of 2, a turn of 1: both end tokens are targets, no given token is."""
    end = kit.stop()
    first = TurnRecord([5, 6, 7], [20, end], [-1.0, -0.5], {"role": "assistant", "content": ""}, "stop")
    then = TurnRecord([5, 6, 7, 20, end, 80, 81], [end], [-0.25], {"role": "assistant", "content": ""}, "stop")
    (one,) = to_sequences([first, then])
    assert one.completion_mask == [False, False, False, True, True, False, False, True]
    whole = TrainItem(0, (one,), 1.0, True)
    assert make_row([whole], torch.device("cpu")).targets_N.tolist() == [20, end, end]
    model, _, _ = parts()
    logits = model(input_ids=torch.tensor([one.input_ids])).logits[0]
    wanted = torch.log_softmax(logits, -1)[[2, 3, 6], [20, end, end]].sum() / -3
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(wanted, list(model.parameters()))])
    got = step([whole], Settings(config("dapo"))).gradient
    assert float((got - gradient).norm()) < 1e-6 * float(gradient.norm())  # at ratio 1, of these three targets alone
    assert recorded_log_probs(whole).tolist() == [-1.0, -0.5, -0.25]


# --- float64 gradients of the pure functions -----------------------------------------------
VARIANTS: list[dict[str, Any]] = [
    {},
    {"importance_sampling_level": "sequence"},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"off_policy_mask_threshold": 0.05},
]


def gradient_is_right(loss: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> bool:
    return torch.autograd.gradcheck(loss, (at.clone().requires_grad_(),), eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("fields", [*VARIANTS, {"beta": 0.3}, {"beta": 0.3, "importance_sampling_level": "sequence"}])
@pytest.mark.parametrize("corrected", [False, True])
def test_gradients_in_float64(loss_type: str, fields: dict[str, Any], corrected: bool):
    """Weights without gradient (cispo, vespo) are held still: the old log-probs move along."""
    still = loss_type in ("cispo", "vespo")
    if still and fields.get("beta") and fields.get("use_bias_correction_kl", True):
        fields = fields | {"use_bias_correction_kl": False}  # times the ratio, which must move
    old = torch.tensor([-1.0, -2.0, -0.7, -1.5, -2.2, -0.4], dtype=torch.float64)
    now = old + torch.tensor([0.1, -0.5, 0.6, 0.02, 0.4, -0.31], dtype=torch.float64)
    ref, sampler = old - 0.3, old + torch.tensor([0.2, -0.1, 0.3, 0.0, -0.4, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.2, 1.2, -0.8, -0.8, -0.8, 0.5], dtype=torch.float64)
    rollout_T = torch.tensor([0, 0, 1, 1, 1, 2])
    factor = sampler_correction(old, sampler, rollout_T, "token_truncate", None, 1.2) if corrected else None
    chosen = config(loss_type, **fields)

    def loss(log_probs_T: torch.Tensor) -> torch.Tensor:
        before = old + (log_probs_T - now).detach() if still else old
        return policy_loss(
            log_probs_T, before, advantages, rollout_T, chosen, ref_log_probs_T=ref, sampler_log_probs_T=sampler,
            correction_T=factor,
        ).loss_T  # fmt: skip

    assert gradient_is_right(loss, now)
    moved = now.clone().requires_grad_()
    loss(moved).sum().backward()
    assert moved.grad is not None and moved.grad.abs().sum() > 0.1
