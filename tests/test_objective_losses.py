"""The policy losses: numbers by hand, one or three tokens at a time."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from agentrl.errors import ConfigurationError
from agentrl.objective import LossConfig, k3, policy_loss

ALL = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def config(loss_type="dapo", **fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # luspo at token level warns, tested below
        return LossConfig(loss_type=loss_type, **fields)


def flat(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_rollout(count):
    return torch.zeros(count, dtype=torch.long)


def loss_and_gradient(log_probs, old, advantages, config, rollout=None, **options):
    log_probs_T = log_probs.clone().requires_grad_()
    rollout_T = one_rollout(len(log_probs)) if rollout is None else rollout
    terms = policy_loss(log_probs_T, old, advantages, rollout_T, config, **options)
    terms.loss_T.sum().backward()
    return terms, log_probs_T.grad


def test_f023_clipping_is_per_token_or_per_sequence_as_asked():
    ratios = flat(1.10, 0.90, 1.50)
    token, gradient = loss_and_gradient(ratios.log(), flat(0, 0, 0), flat(1, 1, 1), config())
    assert token.loss_T.tolist() == pytest.approx([-1.10, -0.90, -1.20])
    assert gradient.tolist() == pytest.approx([-1.10, -0.90, 0.0])  # d r / d l = r; the clipped token has none
    mean = 1.485 ** (1 / 3)
    sequence, gradient = loss_and_gradient(
        ratios.log(), flat(0, 0, 0), flat(1, 1, 1), config(importance_sampling_level="sequence")
    )
    assert sequence.loss_T.tolist() == pytest.approx([-mean] * 3)
    assert sequence.ratio_T.tolist() == pytest.approx([mean] * 3)
    assert gradient.tolist() == pytest.approx([-mean] * 3)  # three tokens, each with a third of each


def test_sequence_level_is_one_ratio_for_each_rollout():
    rollout = torch.tensor([0, 1, 0])
    terms, gradient = loss_and_gradient(
        flat(2.0, 8.0, 0.5).log(), flat(0, 0, 0), flat(1, -1, 1), config(importance_sampling_level="sequence"), rollout
    )
    assert terms.ratio_T.tolist() == pytest.approx([1.0, 8.0, 1.0])
    assert terms.loss_T.tolist() == pytest.approx([-1.0, 8.0, -1.0])
    assert gradient.tolist() == pytest.approx([-1.0, 8.0, -1.0])


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_the_pessimistic_side_is_not_clipped_but_delta_bounds_it(loss_type):
    """F031: with A < 0 the surrogate grows with the ratio; delta ends that."""
    old, log_probs, advantage = flat(-5.0), flat(-1.0), flat(-1.0)
    free, gradient = loss_and_gradient(log_probs, old, advantage, config(loss_type))
    assert free.loss_T.item() == pytest.approx(math.e**4) == gradient.item()
    bounded, gradient = loss_and_gradient(log_probs, old, advantage, config(loss_type, delta=3.0))
    assert bounded.loss_T.item() == pytest.approx(3.0)
    assert gradient.item() == 0.0


def test_f009_the_ratio_is_against_the_log_probs_given_as_old():
    """F009: sampler -2.0 and policy -1.0 is the ratio e, not 1 against its own detached value."""
    terms, _ = loss_and_gradient(flat(-1.0), flat(-2.0), flat(1.0), config())
    assert terms.ratio_T.item() == pytest.approx(math.e)
    assert terms.high_T.item() is True


def test_f007_a_second_pass_reads_the_frozen_old_log_probs():
    logits = torch.tensor([0.0, 0.5], dtype=torch.float64, requires_grad=True)
    old = logits.log_softmax(-1)[0:1].detach()
    ratios = []
    for _ in range(2):
        log_probs_T = logits.log_softmax(-1)[0:1]
        terms = policy_loss(log_probs_T, old, flat(1.0), one_rollout(1), config())
        ratios.append(terms.ratio_T.item())
        (gradient,) = torch.autograd.grad(terms.loss_T.sum(), logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
        after = logits.log_softmax(-1)[0].item()
        if len(ratios) == 1:
            expected = math.exp(after - old.item())
    assert ratios[0] == 1.0
    assert ratios[1] == pytest.approx(expected) and ratios[1] > 1.05


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    terms, gradient = loss_and_gradient(
        flat(-1.0, -1.0, -1.0), flat(-1.5, -4.0, -4.0), flat(1.0, 2.0, -2.0), config("cispo")
    )
    weights = [math.exp(0.5), 5.0, 5.0]  # e^3 is above 5, the default bound
    assert terms.loss_T.tolist() == pytest.approx([weights[0], 10.0, -10.0])
    assert gradient.tolist() == pytest.approx([-weights[0], -10.0, 10.0])
    assert terms.clip_metric == "cispo_clip_ratio"
    assert terms.high_T.tolist() == [False, True, False]
    assert not terms.low_T.any()


def test_sapo_has_its_own_temperature_for_each_sign():
    terms, gradient = loss_and_gradient(flat(math.log(1.5), math.log(1.5)), flat(0, 0), flat(1, -1), config("sapo"))
    up = 1 / (1 + math.exp(-0.5))
    down = 1 / (1 + math.exp(-1.05 * 0.5))
    assert terms.loss_T.tolist() == pytest.approx([-4 * up, 4 / 1.05 * down])
    # d/dl of sigmoid(tau (r - 1)) is s (1 - s) tau r
    assert gradient.tolist() == pytest.approx([-4 * up * (1 - up) * 1.5, 4 * down * (1 - down) * 1.5])
    assert terms.clip_metric is None


def test_sapo_at_ratio_one_is_the_policy_gradient():
    _, gradient = loss_and_gradient(flat(-1.0, -1.0), flat(-1.0, -1.0), flat(2.0, -3.0), config("sapo"))
    assert gradient.tolist() == pytest.approx([-2.0, 3.0])


def test_vespo_by_hand():
    rollout = torch.tensor([0, 0, 1])
    log_probs, old = flat(-1.0, -2.0, -1.0), flat(-1.2, -1.9, -1.5)
    terms, gradient = loss_and_gradient(log_probs, old, flat(1, 1, -1), config("vespo"), rollout)
    up = math.exp(3 + 2 * 0.1 - 3 * math.exp(0.1))
    down = math.exp(2 + 3 * 0.5 - 2 * math.exp(0.5))
    assert terms.loss_T.tolist() == pytest.approx([up, 2 * up, -down])
    assert gradient.tolist() == pytest.approx([-up, -up, down])
    assert terms.extras["phi_R"].tolist() == pytest.approx([up, down])
    same, _ = loss_and_gradient(log_probs, log_probs, flat(1, 1, -1), config("vespo"), rollout)
    assert same.extras["phi_R"].tolist() == pytest.approx([1.0, 1.0])


def test_vespo_has_the_correction_inside_its_weight_once():
    rollout, correction = torch.tensor([0, 0]), flat(2.0, 0.9)
    terms, _ = loss_and_gradient(
        flat(-1, -1), flat(-1, -1), flat(1, 1), config("vespo"), rollout, correction_T=correction
    )
    phi = math.exp(3 + 2 * math.log(1.8) - 3 * 1.8)
    assert terms.loss_T.tolist() == pytest.approx([phi, phi])
    whole, _ = loss_and_gradient(
        flat(-1, -1), flat(-1, -1), flat(1, 1), config("vespo"), rollout, correction_T=flat(1.8, 1.8),
        correction_level="sequence",
    )  # fmt: skip
    assert whole.loss_T.tolist() == pytest.approx([phi, phi])


def test_vespo_clamps_and_never_overflows():
    far = policy_loss(flat(-1.0), flat(-500.0), flat(1.0), one_rollout(1), config("vespo"))
    assert far.loss_T.item() == 0.0  # log w = 20: exp(-3 e^20)
    masked = policy_loss(flat(-1.0), flat(-1.0), flat(1.0), one_rollout(1), config("vespo"), correction_T=flat(0.0))
    assert masked.loss_T.item() == pytest.approx(math.exp(3 + 2 * math.log(1e-8) - 3e-8), rel=1e-6, abs=0)
    # Each token's gap counts at most 20 either way: 30 and -25 cancel.
    both = policy_loss(flat(-1.0, -26.0), flat(-31.0, -1.0), flat(1.0, 1.0), one_rollout(2), config("vespo"))
    assert both.loss_T.tolist() == pytest.approx([1.0, 26.0])
    flipped = config("vespo", vespo_lambda_pos=0.0)  # lambda is at least 1e-4
    terms = policy_loss(flat(-1.0), flat(-1.5), flat(1.0), one_rollout(1), flipped)
    assert terms.loss_T.item() == pytest.approx(math.exp(1e-4 + 2 * 0.5 - 1e-4 * math.exp(0.5)))
    wild = config("vespo", vespo_k_neg=1e6)
    assert policy_loss(flat(-1.0), flat(-2.0), flat(-1.0), one_rollout(1), wild).loss_T.item() == 0.0


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_the_correction_multiplies_the_policy_term_and_not_the_kl(loss_type):
    log_probs, old, ref, advantage = flat(-1.0, -1.0), flat(-1.1, -1.1), flat(-1.5, -1.5), flat(1.0, 1.0)
    plain = policy_loss(log_probs, old, advantage, one_rollout(2), config(loss_type))
    both = policy_loss(
        log_probs, old, advantage, one_rollout(2), config(loss_type, beta=0.5), ref_log_probs_T=ref,
        correction_T=flat(3.0, 0.0),
    )  # fmt: skip
    policy = both.loss_T - 0.5 * both.kl_T
    assert policy.tolist() == pytest.approx([3 * plain.loss_T[0].item(), 0.0])


def test_k3_by_hand_and_its_two_gradients():
    gap = 0.5  # f - l
    value = math.exp(gap) - gap - 1
    assert k3(flat(-1.5), flat(-1.0)).item() == pytest.approx(value)
    for bias_correction, slope in [(False, -(math.exp(gap) - 1)), (True, value - (math.exp(gap) - 1))]:
        cfg = config(beta=2.0, use_bias_correction_kl=bias_correction)
        terms, gradient = loss_and_gradient(flat(-1.5), flat(-1.5), flat(0.0), cfg, ref_log_probs_T=flat(-1.0))
        assert terms.loss_T.item() == pytest.approx(2 * value)  # on policy the ratio is 1 and only the gradient differs
        assert gradient.item() == pytest.approx(2 * slope)
    off = policy_loss(flat(-1.5), flat(-2.0), flat(0.0), one_rollout(1), config(beta=1.0), ref_log_probs_T=flat(-1.0))
    assert off.kl_T.item() == pytest.approx(value * math.exp(0.5))


def test_k3_is_accurate_for_a_reference_that_is_almost_the_policy():
    assert k3(torch.tensor([-1.0]), torch.tensor([-1.0])).item() == 0.0
    assert (k3(torch.randn(1000), torch.randn(1000)) >= 0).all()


def test_without_beta_a_reference_gives_the_metric_and_no_loss():
    terms, gradient = loss_and_gradient(flat(-1.0), flat(-1.0), flat(0.0), config(), ref_log_probs_T=flat(-2.0))
    assert terms.kl_T.item() == pytest.approx(math.exp(-1)) and gradient.item() == 0.0
    with pytest.raises(ConfigurationError, match="ref_log_probs_T"):
        policy_loss(flat(-1.0), flat(-1.0), flat(0.0), one_rollout(1), config(beta=0.1))


def test_off_policy_mask_takes_bad_and_distant_rollouts_out_of_the_policy_term():
    """Rollout 0 drifted with A < 0; 1 drifted with A > 0; 2 did not drift: means 0.75, 0.75 and 0.25."""
    rollout = torch.tensor([0, 0, 1, 2])
    sampler, log_probs = flat(-1.0, -1.0, -1.0, -1.0), flat(-2.5, -1.0, -1.75, -1.25)
    cfg = config(off_policy_mask_threshold=0.5)
    terms = policy_loss(log_probs, log_probs, flat(-1, -1, 1, -1), rollout, cfg, sampler_log_probs_T=sampler)
    assert terms.loss_T.tolist() == pytest.approx([0, 0, -1, 1])
    assert terms.extras["kept_by_threshold_T"].tolist() == [False, False, True, True]
    without = policy_loss(log_probs, sampler, flat(-1, -1, 1, -1), rollout, cfg)  # the old ones stand in
    assert without.loss_T.tolist()[:2] == [0, 0]
    with_kl = policy_loss(
        log_probs, log_probs, flat(-1, -1, 1, -1), rollout, config(off_policy_mask_threshold=0.5, beta=1.0),
        sampler_log_probs_T=sampler, ref_log_probs_T=log_probs - 1,
    )  # fmt: skip
    assert with_kl.loss_T.tolist()[:2] == pytest.approx([math.exp(-1)] * 2)


def test_the_entropy_mask_takes_tokens_out_of_the_policy_term_only():
    keep = torch.tensor([True, False])
    terms, gradient = loss_and_gradient(
        flat(-1, -1), flat(-1, -1), flat(1, 1), config(beta=1.0), keep_T=keep, ref_log_probs_T=flat(-2, -2)
    )
    kl = math.exp(-1)
    assert terms.loss_T.tolist() == pytest.approx([-1 + kl, kl])
    assert gradient[1].item() != 0.0  # the KL still acts


def test_clip_flags_need_both_the_ratio_and_the_sign():
    ratios, signs = flat(0.5, 0.5, 2.0, 2.0, 1.0, 0.5), flat(-1, 1, 1, -1, 1, 0)
    terms = policy_loss(ratios.log(), torch.zeros(6).double(), signs, one_rollout(6), config())
    assert terms.low_T.tolist() == [True, False, False, False, False, False]
    assert terms.high_T.tolist() == [False, False, True, False, False, False]
    higher = policy_loss(ratios.log(), torch.zeros(6).double(), signs, one_rollout(6), config(epsilon_high=1.5))
    assert not higher.high_T.any()


# --- edges -----------------------------------------------------------------------------
@pytest.mark.parametrize("loss_type", ALL)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_f005_no_trained_token_is_loss_zero_with_finite_gradients(loss_type, level):
    parameter = torch.ones(3, requires_grad=True)
    log_probs_T = parameter[torch.zeros(0, dtype=torch.long)]
    none = torch.zeros(0)
    terms = policy_loss(
        log_probs_T, none, none, one_rollout(0), config(loss_type, beta=0.1, importance_sampling_level=level,
        off_policy_mask_threshold=0.5), ref_log_probs_T=none, correction_T=none, sampler_log_probs_T=none,
    )  # fmt: skip
    loss = terms.loss_T.sum()
    loss.backward()
    assert loss.item() == 0.0
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("loss_type", ALL)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows_leaves_finite_losses_and_gradients(loss_type, advantage):
    for log_prob, old in [(-1.0, -500.0), (-500.0, -1.0)]:
        for level in ("token", "sequence"):
            log_probs_T = torch.tensor([log_prob], requires_grad=True)
            terms = policy_loss(
                log_probs_T, torch.tensor([old]), torch.tensor([advantage]), one_rollout(1),
                config(loss_type, importance_sampling_level=level),
            )  # fmt: skip
            terms.loss_T.sum().backward()
            assert torch.isfinite(terms.loss_T).all() and torch.isfinite(log_probs_T.grad).all()


@pytest.mark.parametrize("name", ["old_log_probs_T", "sampler_log_probs_T", "ref_log_probs_T"])
def test_f037_a_missing_log_prob_is_an_error_that_names_the_token(name):
    given = {n: flat(-1.0, -1.0) for n in ("old_log_probs_T", "sampler_log_probs_T", "ref_log_probs_T")}
    given[name] = flat(-1.0, math.nan)
    with pytest.raises(ValueError, match=f"{name} is missing .* at trained token 1"):
        policy_loss(
            log_probs_T=flat(-1.0, -1.0),
            advantages_T=flat(1.0, 1.0),
            rollout_T=one_rollout(2),
            config=config(),
            **given,
        )


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="advantages_T has shape"):
        policy_loss(flat(-1.0, -1.0), flat(-1.0, -1.0), flat(1.0), one_rollout(2), config())
    with pytest.raises(ValueError, match="int64"):
        policy_loss(flat(-1.0), flat(-1.0), flat(1.0), torch.zeros(1), config())


def test_half_precision_is_widened():
    half = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    terms = policy_loss(half, half, torch.ones(2), one_rollout(2), config())
    assert terms.loss_T.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "ppo"}, "grpo, bnpo"),
        ({"importance_sampling_level": "turn"}, "'token' or 'sequence'"),
        ({"epsilon": -0.1}, "epsilon must be at least 0"),
        ({"delta": 0.0}, "delta must be greater than 0"),
        ({"delta": 4.0, "loss_type": "cispo"}, "delta has no meaning"),
        ({"epsilon_high": 0.3, "loss_type": "sapo"}, "epsilon_high has no meaning"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be greater"),
        ({"beta": -1.0}, "beta must be at least 0"),
        ({"beta": math.nan}, "beta must be"),
        ({"off_policy_mask_threshold": -0.5}, "off_policy_mask_threshold must be greater"),
    ],
)
def test_contradictory_or_impossible_numbers_are_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        LossConfig(**fields)


def test_luspo_at_token_level_warns():
    with pytest.warns(UserWarning, match="importance_sampling_level='sequence'"):
        LossConfig(loss_type="luspo")
