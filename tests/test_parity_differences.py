"""Where agentrl differs from the PyPI package `trl` on purpose: both beside a slow third implementation.

docs/training.md has the table of these; the numbers in it are those below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import train_kit as kit
from parity_kit import (
    Rollouts,
    Run,
    apart,
    frozen_heap,  # noqa: F401
    model_path,
    other,
    ours,
    prompt_ids,
    rollouts,
    score,
    start,
    theirs,
)
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CUT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


# --- the third implementation ----------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """A micro-batch: (prompt, completion, advantage) of its trained rollouts, and the generation batch it is of."""

    members: tuple[tuple[list[int], tuple[int, ...], float], ...]
    batch: int

    @property
    def tokens(self) -> int:
        return sum(len(ids) for _, ids, _ in self.members)


def part(samples: Rollouts, group: int, batch: int, rewards: dict[int, float | None] | None = None) -> Part:
    """One whole group; `rewards` replace those of some members, None leaves a member out of everything."""
    prompt = list(samples.table)[group]
    given = {m: (rewards or {}).get(m, one.score) for m, one in enumerate(samples.table[prompt])}
    members = [(one.ids, given[m]) for m, one in enumerate(samples.table[prompt]) if given[m] is not None]
    seen = torch.tensor([reward for _, reward in members], dtype=torch.float64)
    advantages = ((seen - seen.mean()) / (seen.std() + 1e-4)).tolist()
    made = [(prompt_ids(prompt), ids, a) for (ids, _), a in zip(members, advantages, strict=True)]
    return Part(tuple(made), batch)


Share = Callable[[Sequence[Part], Part], float]


def plain(steps: Sequence[Sequence[Part]], share: Share, bonus: float = 0.0, bonus_share: Share | None = None) -> Run:
    """Plain SGD on min(r A, clip(r) A), rollout by rollout; `share` is what one token of a micro-batch counts."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    old: dict[int, list[torch.Tensor]] = {}
    log = []
    for step in steps:
        for one in dict.fromkeys(p.batch for p in step):  # frozen when a step first needs the generation batch
            for every in [p for s in steps for p in s if p.batch == one]:
                if id(every) not in old:
                    with torch.no_grad():
                        old[id(every)] = [kit.log_probs(model, prompt, ids) for prompt, ids, _ in every.members]
        loss = torch.zeros(())
        for p in step:
            for (prompt, ids, advantage), before in zip(p.members, old[id(p)], strict=True):
                logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                known = torch.distributions.Categorical(logits=logits)
                ratio = (known.log_prob(torch.tensor(ids)) - before).exp()
                loss = loss - share(step, p) * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
                if bonus_share is not None:
                    loss = loss - bonus * bonus_share(step, p) * known.entropy().sum()
        model.zero_grad()
        loss.backward()
        log.append({"loss": loss.item()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    return Run(kit.weights(model) - start(), log)


def of_the_step(step: Sequence[Part], one: Part) -> float:
    return 1 / sum(p.tokens for p in step)


def assert_runs(got: Run, want: Run) -> None:
    assert apart(got, want) < 1e-4
    assert [entry["loss"] for entry in got.log] == pytest.approx([entry["loss"] for entry in want.log], abs=2e-5)


@pytest.fixture
def losses() -> Callable[[Run], list[float]]:
    return lambda run: [round(entry["loss"], 3) for entry in run.log]


# --- the normaliser of dapo, cispo and vespo --------------------------------------------
GENERATIONS: dict[str, tuple[dict[str, int], list[list[tuple[int, int]]], int]] = {
    # option, (group, generation batch) of each micro-batch of each step, micro-batches of a generation batch
    "one for two steps": ({"steps_per_generation": 2}, [[(0, 0)], [(1, 0)], [(2, 1)]], 2),
    "two for one step": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        [[(0, 0), (1, 1)], [(2, 2), (3, 3)], [(4, 4), (5, 5)]], 1,
    ),
    "three for two": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        [[(0, 0), (1, 0)], [(2, 0), (3, 1)], [(4, 1), (5, 1)]], 3,
    ),
}  # fmt: skip
FIRST_LOSS = {"one for two steps": (0.097, 0.113), "two for one step": (0.162, 0.175), "three for two": (0.162, 0.206)}


@pytest.mark.parametrize("name", GENERATIONS)
def test_dapo_counts_the_tokens_of_the_optimizer_step(name: str, losses: Callable[[Run], list[float]]):
    """trl: those of the generation batch, each micro-batch with an equal share. Equal where both are one."""
    options, table, slices = GENERATIONS[name]
    samples = rollouts(10)
    changes = {"loss_type": "dapo", "per_device_train_batch_size": 4, **options}
    steps = [[part(samples, group, batch) for group, batch in step] for step in table]
    # of whole generation batches, also those whose last micro-batches come after the third step
    tokens = [sum(part(samples, b * slices + i, b).tokens for i in range(slices)) for b in range(10 // slices)]

    def of_the_generation(step: Sequence[Part], one: Part) -> float:
        return slices / (tokens[one.batch] * len(step))

    got, want = ours(samples, changes), theirs(samples, changes)
    assert_runs(got, plain(steps, of_the_step))
    assert_runs(want, plain(steps, of_the_generation))
    assert apart(got, want) > 0.1
    assert (losses(got)[0], losses(want)[0]) == FIRST_LOSS[name]


@pytest.mark.parametrize(("loss_type", "more"), [("cispo", {"epsilon_high": 5.0}), ("vespo", {})])
def test_so_do_cispo_and_vespo(loss_type: str, more: dict[str, Any]):
    """At ratio 1 (two generation batches in a step) their gradient is dapo's: so is the difference."""
    cut = {**CUT, "steps_per_generation": 1, "max_steps": 1}
    changes = {"loss_type": loss_type, **cut, **more}
    dapo = {"loss_type": "dapo", **cut}
    assert apart(ours(rollouts(), changes), ours(rollouts(), dapo)) < 1e-4
    assert apart(theirs(rollouts(), changes), theirs(rollouts(), dapo)) < 1e-4
    assert apart(ours(rollouts(), changes), theirs(rollouts(), changes)) > 0.05


# --- options -----------------------------------------------------------------------------
def test_cispo_bounds_its_weight_at_5_by_default():
    """trl: at epsilon, 0.2, so that every weight is below 1. Set epsilon_high, and both are equal."""
    changes = {"loss_type": "cispo", "num_iterations": 3}
    got, want = ours(rollouts(), changes), theirs(rollouts(), changes)
    assert torch.equal(got.moved, ours(rollouts(), changes | {"epsilon_high": 5.0}).moved)
    assert apart(want, ours(rollouts(), changes | {"epsilon_high": 0.2})) < 1e-4
    assert [round(run.log[0]["loss"], 3) for run in (got, want)] == [-1.263, -0.253]  # 0.2 of it


def test_a_rollout_that_nobody_scored_is_out_of_everything(losses: Callable[[Run], list[float]]):
    """Out of the baseline in both. trl counts its 9 tokens in the normaliser of 55."""
    samples = rollouts(none=((1, "score"),))
    changes = {"loss_type": "dapo", "num_iterations": 3}
    scored = Part(part(samples, 0, 0, {1: None}).members + part(samples, 1, 0).members, 0)
    got, want = ours(samples, changes), theirs(samples, changes)
    assert_runs(got, plain([[scored]] * 3, of_the_step))
    assert_runs(want, plain([[scored]] * 3, lambda step, one: 1 / (one.tokens + 9)))
    assert scored.tokens == 46 and (losses(got)[0], losses(want)[0]) == (0.257, 0.215)
    assert got.log[0]["rewards/unscored_frac"] == 0.125


def test_the_entropy_bonus_is_a_mean_over_the_tokens_of_the_step(losses: Callable[[Run], list[float]]):
    """trl: the mean of the micro-batches' means. Equal where a step is one micro-batch."""
    changes = {"loss_type": "dapo", "num_iterations": 3, "entropy_coef": 0.3, **CUT}
    groups = [part(rollouts(), 0, 0), part(rollouts(), 1, 0)]
    steps = [groups] * 3

    def of_the_micro_batch(step: Sequence[Part], one: Part) -> float:
        return 1 / (one.tokens * len(step))

    got, want = ours(rollouts(), changes), theirs(rollouts(), changes)
    assert_runs(got, plain(steps, of_the_step, 0.3, of_the_step))
    assert_runs(want, plain(steps, of_the_step, 0.3, of_the_micro_batch))
    assert apart(got, want) > 0.01
    assert (losses(got)[0], losses(want)[0]) == (-1.302, -1.303)


def test_a_rollout_func_counts_as_another_engine():
    """trl corrects for vLLM alone; there the default correction is the same (test_train_parity.py)."""
    changes = {"loss_type": "dapo", "num_iterations": 3, "vllm_importance_sampling_correction": True}
    got = ours(rollouts(), changes)
    assert apart(got, theirs(rollouts(), changes)) < 1e-4
    assert apart(got, theirs(rollouts(), changes, vllm=False)) > 0.1
    off = changes | {"vllm_importance_sampling_correction": False}
    assert apart(ours(rollouts(), off), theirs(rollouts(), changes, vllm=False)) < 1e-4


REFUSED: dict[str, dict[str, Any]] = {
    "delta": {"loss_type": "sapo", "delta": 1.5},
    "epsilon_high": {"loss_type": "vespo", "epsilon_high": 0.3},
    "multi_objective_aggregation": {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
    "entropy_target": {"entropy_target": 0.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_do_nothing_is_refused(name: str):
    """trl takes it, and does the same without it."""
    changes = REFUSED[name]
    with pytest.raises(ConfigurationError, match=name):
        ours(rollouts(), changes, (score, other))
    idle = {k: v for k, v in changes.items() if k in ("loss_type", "multi_objective_aggregation")}
    assert apart(theirs(rollouts(), changes, (score, other)), theirs(rollouts(), idle, (score, other))) < 1e-6


def test_dr_grpo_without_a_length_is_refused_before_anything_is_played():
    changes = {"loss_type": "dr_grpo", "max_completion_length": None}
    with pytest.raises(ConfigurationError, match="max_completion_length"):
        ours(rollouts(), changes)
    with pytest.raises(TypeError):
        theirs(rollouts(), changes)


# --- epochs ------------------------------------------------------------------------------
def test_the_last_rows_of_an_epoch_are_played():
    """Three rows, two in a generation batch: trl never plays the third."""
    played: dict[str, list[str]] = {"ours": [], "theirs": []}
    samples, changes = rollouts(3), {"loss_type": "dapo", "max_steps": 2}
    for name, run in (("ours", ours), ("theirs", theirs)):

        def noted(prompts: list[str], trainer: Any, name: str = name) -> dict[str, list[Any]]:
            played[name] += [list(samples.table).index(p) for p in dict.fromkeys(prompts)]  # type: ignore[misc]
            return samples(prompts, trainer)

        noted.rows = samples.rows  # type: ignore[attr-defined]
        run(noted, changes)  # type: ignore[arg-type]
    assert played == {"ours": [0, 1, 2, 0], "theirs": [0, 1, 0, 1]}


# --- metrics -----------------------------------------------------------------------------
def test_metrics_do_not_depend_on_micro_batches():
    """trl: means of the micro-batches' means. Lengths 32 and 23 tokens."""
    changes = {"loss_type": "dapo", "num_iterations": 3, "beta": 0.2}
    names = ("entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_max")
    whole, cut, want = ours(rollouts(), changes), ours(rollouts(), changes | CUT), theirs(rollouts(), changes | CUT)
    for one, two in zip(whole.log, cut.log, strict=True):
        assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, abs=2e-5, rel=2e-4)
    assert all(abs(want.log[2][n] - cut.log[2][n]) > 1e-3 for n in names)


def test_vespos_mean_weight_is_over_trained_rollouts():
    """trl: a masked rollout counts with the weight 1 that it would have without tokens."""
    changes = {"loss_type": "vespo", "num_iterations": 2, "mask_truncated_completions": True}
    got, want = (run(rollouts(), changes).log[1]["vespo/phi_seq_mean"] for run in (ours, theirs))
    assert (got * 6 + 2) / 8 == pytest.approx(want, rel=1e-4)  # two of eight are masked


def test_zero_std_is_a_matter_of_groups():
    """With scale_rewards="batch", trl looks at the std of the batch, which is not 0."""
    changes = {"loss_type": "dapo", "scale_rewards": "batch", "max_steps": 1}
    got, want = (run(rollouts(equal=(1,)), changes).log[0]["frac_reward_zero_std"] for run in (ours, theirs))
    assert (got, want) == (0.5, 0.0)


def test_the_shortest_completion_is_the_shortest():
    """Two generation batches in a step: trl logs the mean of their shortest and of their longest."""
    changes = {"loss_type": "dapo", "max_steps": 1, "steps_per_generation": 1, **CUT}
    names = ("completions/min_length", "completions/max_length")
    got, want = (run(rollouts(10), changes | {"logging_steps": 1}).log[0] for run in (ours, theirs))
    lengths = [[len(m.ids) for m in members] for members in list(rollouts(10).table.values())[:2]]
    assert [got[n] for n in names] == [min(map(min, lengths)), max(map(max, lengths))]
    means = [sum(min(x) for x in lengths) / 2, sum(max(x) for x in lengths) / 2]
    assert [want[n] for n in names] == pytest.approx(means)
