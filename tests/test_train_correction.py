"""The sampler correction in the trainer: rollouts whose log-probs come from another engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit

from agentrl.errors import ConfigurationError
from agentrl.objective import AsyncLossConfig, async_policy_loss
from agentrl.train.correction import SamplerCorrection, add_async_sampling, applies
from agentrl.train.generation import recorded_log_probs
from agentrl.train.metrics import MetricWindow
from agentrl.train.rows import TrainItem, make_row
from agentrl.types import TrainingSequence

RATIO = "sampling/importance_sampling_ratio/"
ON = {"vllm_importance_sampling_correction": True}
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class Engine(kit.Fixed):
    """Fixed rollouts whose log-probs are the model's at `temperature`, minus what `gap` gives for each completion."""

    gap: Callable[[int, int], list[float | None]] | None = None  # (place, tokens) -> gaps, None: no log-prob
    model: Any = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: Any, gap: Callable[[int, int], list[float | None]], **changes: Any) -> Engine:
        return cls(kit.fixed(truncated=(1, 6)).table, gap=gap, model=model, **changes)

    @torch.no_grad()
    def own(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, *ids]])
        logits = self.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1] / self.temperature
        return logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]

    def gaps(self, at: int, count: int) -> list[float | None]:
        assert self.gap is not None
        return self.gap(at, count)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        out = super().__call__(prompts, trainer)
        pairs = zip(out["prompt_ids"], out["completion_ids"], strict=True)
        rows = [(self.own(p, ids).tolist(), self.gaps(n, len(ids))) for n, (p, ids) in enumerate(pairs)]
        out["logprobs"] = [[None if g is None else lp - g for lp, g in zip(*row, strict=True)] for row in rows]
        return out


def spread(at: int, count: int) -> list[float | None]:
    """Gaps o - q between -0.9 and 0.9, so that each bound below cuts some tokens and some rollouts."""
    return [0.9 * math.sin(1.7 * at + 2.3 * t + 0.4) for t in range(count)]


def by_hand(gaps: list[float], mode: str, low: float | None, high: float | None) -> list[float]:
    """The weights of one rollout's tokens, written out."""
    logs = [sum(gaps)] * len(gaps) if mode.startswith("sequence") else gaps
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    ratios = [math.exp(x) for x in logs]
    if mode.endswith("truncate"):
        return [min(max(r, low), high) for r in ratios]
    return [r if low <= r <= high else 0.0 for r in ratios]


def expected(model: Any, engine: Engine, mode: str, low: float | None, high: float | None) -> tuple[torch.Tensor, dict]:
    """Weights of the model after one SGD step of dapo at rate 0.1, and the sampling/* metrics, without agentrl."""
    losses, ratios, differences, n, tokens = [], [], [], 0, 0
    for prompt, members in engine.table.items():
        rewards = torch.tensor([r for _, r in members], dtype=torch.float64)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        for (ids, _), advantage in zip(members, advantages, strict=True):
            gaps = [float(g) for g in engine.gaps(n, len(ids)) if g is not None]
            weights = by_hand(gaps, mode, low, high)
            now = kit.log_probs(model, engine.prompt_ids(prompt), ids)
            losses.append((-advantage * torch.tensor(weights) * (now - now.detach()).exp()).sum())
            differences += [abs(g) for g in gaps]
            ratios += weights[:1] if mode.startswith("sequence") else weights
            n, tokens = n + 1, tokens + len(ids)
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    moved = torch.cat([(p - 0.1 * p.grad).detach().reshape(-1) for p in model.parameters()])
    return moved, {
        "loss": float(loss.detach()), RATIO + "min": min(ratios), RATIO + "max": max(ratios),
        RATIO + "mean": sum(ratios) / len(ratios), "sampling/sampling_logp_difference/max": max(differences),
        "sampling/sampling_logp_difference/mean": sum(differences) / len(differences),
    }  # fmt: skip


def options(mode: str, low: float | None, high: float | None) -> dict[str, Any]:
    names = ("mode", "clip_min", "clip_max")
    return ON | {f"vllm_importance_sampling_{n}": v for n, v in zip(names, (mode, low, high), strict=True)}


def run(folder: Path, gap: Any = spread, engine: Engine | None = None, **args: Any) -> Any:
    engine = Engine.of(kit.policy(), gap) if engine is None else engine
    trainer = kit.trainer(kit.policy(), engine, kit.config(folder, **args))
    trainer.train()
    trainer.close()
    return trainer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.7, None), (0.7, 1.5)])
def test_the_step_and_the_metrics_by_hand(tmp_path: Path, mode: str, low: float | None, high: float | None):
    """Every mode with each bound: the weights after a step, the loss, and sampling/* after restriction."""
    model = kit.policy()
    want, logs = expected(model, Engine.of(kit.policy(), spread), mode, low, high)
    trainer = run(tmp_path, **options(mode, low, high))
    torch.testing.assert_close(kit.weights(trainer.model), want, atol=2e-6, rtol=0)
    got = trainer.state.log_history[0]
    assert {name: got[name] for name in logs} == pytest.approx(logs, abs=2e-5)
    off = run(tmp_path / "off")
    assert (kit.weights(off.model) - want).abs().max() > 1e-3 and RATIO + "mean" not in off.state.log_history[0]


def test_cutting_the_step_changes_nothing(tmp_path: Path):
    """Micro-batches, a second pass over frozen log-probs, and rows with advantage 0 (metrics cover them)."""
    whole = run(tmp_path / "a", **options("sequence_truncate", 0.5, 2.0), num_iterations=2, max_steps=2)
    cut = run(tmp_path / "b", **options("sequence_truncate", 0.5, 2.0), num_iterations=2, max_steps=2,
              per_device_train_batch_size=2, gradient_accumulation_steps=4)  # fmt: skip
    torch.testing.assert_close(kit.weights(cut.model), kit.weights(whole.model), atol=2e-6, rtol=0)
    for one, two in zip(whole.state.log_history[:2], cut.state.log_history[:2], strict=True):
        names = [name for name in one if name.startswith("sampling/")]
        assert len(names) == 5
        assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, abs=1e-5)
    first, second = (entry[RATIO + "mean"] for entry in whole.state.log_history[:2])
    assert first == pytest.approx(second, abs=1e-6)  # against the policy that played, not the one being trained
    still = Engine({p: [(ids, 1.0) for ids, _ in members] for p, members in kit.fixed().table.items()}, gap=spread,
                   model=kit.policy())  # fmt: skip
    logs = run(tmp_path / "c", engine=still, **options("token_truncate", None, 3.0)).state.log_history[0]
    assert logs["agentrl/no_signal_steps"] == 1.0 and logs["sampling/sampling_logp_difference/max"] > 0.5


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_vespo_has_the_correction_inside_its_weight(tmp_path: Path, mode: str):
    """log w = sum of log(correction), once per rollout in the sequence modes; phi replaces the factor."""
    model, engine = kit.policy(), Engine.of(kit.policy(), spread)
    losses, n, tokens = [], 0, 0
    for prompt, members in engine.table.items():
        rewards = torch.tensor([r for _, r in members], dtype=torch.float64)
        for (ids, _), a in zip(members, ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(), strict=True):
            weights = by_hand([float(g or 0) for g in spread(n, len(ids))], mode, 0.5, 2.0)
            log_w = math.log(weights[0]) if mode.startswith("sequence") else sum(math.log(w) for w in weights)
            k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            phi = math.exp(lam + k * log_w - lam * math.exp(log_w))
            losses.append(-phi * a * kit.log_probs(model, engine.prompt_ids(prompt), ids).sum())
            n, tokens = n + 1, tokens + len(ids)
    (torch.stack(losses).sum() / tokens).backward()
    want = torch.cat([(p - 0.1 * p.grad).detach().reshape(-1) for p in model.parameters()])
    trainer = run(tmp_path, loss_type="vespo", **options(mode, 0.5, 2.0))
    torch.testing.assert_close(kit.weights(trainer.model), want, atol=5e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_F029_processed_log_probs_give_ratio_1_at_any_temperature(tmp_path: Path, temperature: float):
    engine = Engine.of(kit.policy(), lambda at, count: [0.0] * count, temperature=temperature)
    logs = run(tmp_path, engine=engine, temperature=temperature, **options("token_mask", 0.99, 1.01)).state.log_history
    assert [logs[0][RATIO + name] for name in ("min", "mean", "max")] == pytest.approx([1.0] * 3, abs=1e-5)
    raw = Engine.of(kit.policy(), lambda at, count: [0.0] * count, temperature=1.0)
    if temperature != 1.0:  # the fault: log-probs at temperature 1 beside those at T
        logs = run(tmp_path / "raw", engine=raw, temperature=temperature, **options("token_mask", 0.9, 1.1)).state
        assert logs.log_history[0][RATIO + "min"] == 0.0


# --- when it is active -----------------------------------------------------------------
def engine_run(folder: Path, **args: Any) -> Any:
    trainer = kit.make(folder, reward_funcs=kit.length, train_dataset=[{"prompt": "Once"}, {"prompt": "Twice"}],
                       args=args)  # fmt: skip
    trainer.train()
    trainer.close()
    return trainer


def test_the_trainers_own_sampler_in_fp32_needs_no_correction(tmp_path: Path):
    """Its recorded log-probs are the old ones: nothing is measured and the step is the same, also with top-k."""
    for sampling in ({}, {"top_k": 5}):
        on, off = (engine_run(tmp_path, **flag, **sampling) for flag in (ON, {}))
        assert torch.equal(kit.weights(on.model), kit.weights(off.model))
        assert RATIO + "mean" not in on.state.log_history[0]


def test_in_bf16_the_trainers_own_sampler_is_another_engine(tmp_path: Path):
    """Packed and cached forwards round differently: small differences, and the step is weighted."""
    on, off = (engine_run(tmp_path, bf16=True, **flag) for flag in (options("token_truncate", None, 3.0), {}))
    logs = on.state.log_history[0]
    assert 0 < logs["sampling/sampling_logp_difference/mean"] < 0.05
    assert logs[RATIO + "min"] < 1 < logs[RATIO + "max"]
    assert not torch.equal(kit.weights(on.model), kit.weights(off.model))


def test_by_default_it_is_on_and_drops_rollouts_above_3(tmp_path: Path):
    config = kit.GRPOConfig(output_dir=str(tmp_path), report_to="none")
    assert config.sampler_correction() == SamplerCorrection("sequence_mask", None, 3.0)
    far = run(tmp_path, lambda at, count: [math.log(4.0) / count] * count, **ON)
    assert far.state.log_history[0][RATIO + "max"] == 0.0
    assert torch.equal(kit.weights(far.model), kit.weights(kit.policy()))
    off = kit.config(tmp_path, vllm_importance_sampling_mode="token_mask")  # a mode without the correction: none
    assert off.sampler_correction() is None


def test_a_rollout_function_may_have_no_log_probs_at_all(tmp_path: Path):
    samples = kit.fixed()

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return samples(prompts, trainer) | {"logprobs": None}

    def moved(**args: Any) -> torch.Tensor:
        given = {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "max_steps": 2}
        trainer = kit.trainer(kit.policy(), samples, kit.config(tmp_path, **given, **args), rollout_func=generate)
        trainer.train()
        trainer.close()
        assert RATIO + "mean" not in trainer.state.log_history[0]
        return kit.weights(trainer.model)

    assert torch.equal(moved(**ON), moved())  # nothing to correct with; the mask reads the old log-probs instead
    assert (moved() - kit.weights(kit.policy())).abs().max() > 1e-3


@pytest.mark.parametrize("missing", [None, math.nan])
def test_F037_a_missing_log_prob_is_an_error_and_never_probability_1(tmp_path: Path, missing: Any):
    """One token of one rollout; without the correction it is not needed, and 0.0 stays a real log-prob."""

    def one_missing(at: int, count: int) -> list[float | None]:
        return [missing if (at, t) == (2, count - 1) else 0.0 for t in range(count)]

    with pytest.raises(ConfigurationError, match=r"Rollout 2 .* has no log-prob for its \d+th sampled token"):
        run(tmp_path, one_missing, **ON)
    assert run(tmp_path, one_missing).state.log_history[0]["loss"] != 0.0
    assert run(tmp_path, one_missing, off_policy_mask_threshold=0.5).state.log_history[0]["loss"] != 0.0
    certain = item([0.0, -1.0], filler=0.0)
    assert applies([certain], truncated=False)


def test_a_missing_log_prob_of_a_rollout_that_is_not_trained_is_no_error():
    gone = replace(item([math.nan, -1.0]), active=False)
    assert applies([item([-1.0]), gone], truncated=False)
    with pytest.raises(ConfigurationError, match="its 0th"):
        applies([item([-1.0]), replace(gone, active=True)], truncated=False)


# --- rollouts of several turns ---------------------------------------------------------
def item(sampler: list[float], filler: float = math.nan, corrected: bool = True, context: int = 2) -> TrainItem:
    """One sequence: a prompt, sampled tokens, `context` tool tokens with a filler, and a last sampled token."""
    first, last = sampler[:-1], sampler[-1:]
    ids = list(range(10, 10 + 2 + len(sampler) + context))
    mask = [False, False, *(True for _ in first), *([False] * context), True]
    old = [filler, filler, *first, *([filler] * context), *last]
    made = TrainItem(0, (TrainingSequence(ids, mask, old),), 1.0, True, corrected=corrected)
    return replace(made, sampler_N=recorded_log_probs(made))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filler", [0.0, 1.0, math.nan])
def test_F033_F035_tool_tokens_are_in_no_ratio_whatever_their_filler(mode: str, filler: float):
    """3 sampled and 5 tool tokens, all differences 0: exactly 1, not 3 and not e^-5."""
    row = make_row([item([-1.0, -2.0, -0.5], filler, context=5)], torch.device("cpu"))
    weights = SamplerCorrection(mode, 0.5, 3.0).weights(row, torch.tensor([-1.0, -2.0, -0.5]))
    assert weights.tolist() == [1.0, 1.0, 1.0]


def test_a_rollout_in_several_sequences_has_one_ratio_and_uncorrected_ones_weigh_1():
    """exp of the sum over both sequences; a rollout beside it in the row that is not corrected is left alone."""
    forked = item([-1.0, -1.0])
    forked = replace(forked, sequences=forked.sequences * 2, sampler_N=torch.full((4,), -1.0))
    row = make_row([item([-9.0], corrected=False), forked], torch.device("cpu"))
    old = torch.tensor([-1.0, -0.9, -0.8, -0.7, -0.6])
    correction = SamplerCorrection("sequence_truncate", None, 3.0)
    assert correction.weights(row, old).tolist() == pytest.approx([1.0, *[math.exp(1.0)] * 4])
    none = make_row([item([-9.0], corrected=False)], torch.device("cpu"))
    assert correction.weights(none, torch.tensor([-1.0])) is None


# --- the asynchronous loss ---------------------------------------------------------------
def test_the_asynchronous_metrics_by_hand():
    """Raw ratios, the share of tokens that are dropped, the mass of the sampler's most likely ids."""
    window, row = MetricWindow(), make_row([item([-1.0, -2.0, -3.0])], torch.device("cpu"))
    now = torch.tensor([-1.0, -2.0 + math.log(8.0), -3.0 + math.log(0.25)])
    head = torch.tensor([[0.5, 0.25], [0.5, 0.0], [0.9, 0.1]]).log()
    terms = async_policy_loss(
        now, row.gathered("sampler_N"), torch.ones(3), row.rollout_N, AsyncLossConfig(),
        head_log_probs_TH=torch.full((3, 2), -1.0), head_sampler_log_probs_TH=head,
    )  # fmt: skip
    add_async_sampling(window, terms, now, row)
    assert MetricWindow.values([window.state()]) == pytest.approx({
        RATIO + "min": 0.25, RATIO + "max": 8.0, RATIO + "mean": (1 + 8 + 0.25) / 3, "sampling/masked_mean": 2 / 3,
        "sampling/sampler_mass": (0.75 + 0.5 + 1.0) / 3, "sampling/sampling_logp_difference/max": math.log(8.0),
        "sampling/sampling_logp_difference/mean": (math.log(8.0) + math.log(4.0)) / 3,
    })  # fmt: skip


# --- refusals --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"vllm_importance_sampling_mode": "token"}, "Unknown importance sampling mode 'token'"),
        ({"vllm_importance_sampling_clip_min": 4.0}, "clip_min 4.0 is above clip_max 3.0"),
        ({"vllm_importance_sampling_clip_max": -1.0}, "clip_max must be at least 0"),
        ({"repetition_penalty": 1.1}, "vllm_importance_sampling_correction=False"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, args: dict[str, Any], text: str):
    with pytest.raises(ConfigurationError, match=text):
        kit.config(tmp_path, **(ON | args))
    if "repetition_penalty" in args:
        assert kit.config(tmp_path, **args).sampler_correction() is None


def test_sets_of_a_rollout_function_are_checked(tmp_path: Path):
    samples = kit.fixed()

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        out = samples(prompts, trainer)
        return out | {"sampling_mask": [[[1]] * len(ids) for ids in out["completion_ids"]]}

    trainer = kit.trainer(kit.policy(), samples, kit.config(tmp_path), rollout_func=generate)
    with pytest.raises(Exception, match="not in its candidate set"):
        trainer.train()
    trainer.close()
