"""Rewards, gradients and weights that are not usable numbers: said in a sentence, before the weights are touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import train_kit as kit
from transformers import TrainerCallback

from agentrl.errors import AgentRLError, ConfigurationError, RunStopped, SamplerError
from agentrl.objective import group_advantages
from agentrl.rollout.metric_names import TAKEN, TAKEN_PREFIXES, check_metric
from agentrl.rollout.scoring import name_sources
from agentrl.sampler import draw
from agentrl.types import SamplingParams

ROWS = [{"prompt": "Once"}, {"prompt": "Twice"}]


def rewarding(*values: float) -> kit.Fixed:
    """Two groups of four, both with these rewards."""
    samples = kit.fixed(groups=2)
    return kit.Fixed({
        prompt: [(ids, value) for (ids, _), value in zip(members, values, strict=True)]
        for prompt, members in samples.table.items()
    })  # fmt: skip


def outcome(samples: kit.Fixed, folder: Path, **args: Any) -> tuple[AgentRLError, bool]:
    """What a run ended with, and whether its weights are what they were."""
    model = kit.policy()
    before = kit.weights(model)
    made = kit.trainer(model, samples, kit.config(folder, **args))
    with pytest.raises(AgentRLError) as error:
        made.train()
    made.close()
    return error.value, bool(torch.equal(kit.weights(model), before))


# --- rewards ---------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1e30, 1e39, 1e7])
def test_an_advantage_that_float32_cannot_train_on_is_refused(tmp_path: Path, size: float):
    error, untouched = outcome(rewarding(*(size * i for i in range(4))), tmp_path, scale_rewards="none")
    assert isinstance(error, ConfigurationError) and untouched
    largest, top = f"{1.5 * size:.3g}", f"{3 * size:.3g}"
    text = str(error)
    assert f"advantage of {largest}" in text and f"from 0 to {top} with scale_rewards='none'" in text


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_large_rewards_whose_advantages_are_small_train(tmp_path: Path, scale: str):
    small = kit.trainer(kit.policy(), rewarding(0, 1, 2, 3), kit.config(tmp_path, scale_rewards=scale))
    large = kit.trainer(kit.policy(), rewarding(0, 1e90, 2e90, 3e90), kit.config(tmp_path, scale_rewards=scale))
    for made in (small, large):
        made.train()
        made.close()
    want, got = (kit.logs_with(made, "loss")[0] for made in (small, large))
    assert want != 0 and got == pytest.approx(want, rel=2e-3)  # 1e-4 in the divisor
    assert torch.allclose(kit.weights(small.model), kit.weights(large.model), atol=1e-4)


def test_advantages_of_the_largest_rewards_are_exact():
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    group = torch.zeros(4, dtype=torch.long)
    got = group_advantages(rewards * 3e99, group).advantages_N
    assert torch.allclose(got, torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64) / (5 / 3) ** 0.5, rtol=1e-12)
    assert not group_advantages(rewards * 3e99, group).zero_std_N.any()


@pytest.mark.parametrize("values", [(0, 1e300, 2e300, 3e300), (1.7e308, -1.7e308, 0, 0)])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_rewards_that_float64_cannot_compare_are_refused(tmp_path: Path, values: tuple[float, ...], scale: str):
    error, untouched = outcome(rewarding(*values), tmp_path, scale_rewards=scale)
    assert isinstance(error, ConfigurationError) and untouched
    assert f"reach from {min(values):.3g} to {max(values):.3g}" in str(error) and "scale_rewards" in str(error)


def test_a_weight_that_makes_rewards_too_large_is_refused():
    rewards, weights = torch.tensor([[0.0], [1e60]], dtype=torch.float64), torch.tensor([1e60], dtype=torch.float64)
    with pytest.raises(ConfigurationError, match=r"times reward_weights .* reach from 0 to 1e\+120"):
        group_advantages(rewards, torch.zeros(2, dtype=torch.long), weights_K=weights)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([float("nan")], r"reward_weights\[0\] is nan"), ([float("inf")], r"reward_weights\[0\] is inf"),
        (["a"], r"reward_weights\[0\] is 'a'"), ([None], r"reward_weights\[0\] is None"),
        ("1.0", "reward_weights is '1.0'"), (2.0, r"reward_weights is 2\.0"),
    ],
)  # fmt: skip
def test_reward_weights_are_finite_numbers(tmp_path: Path, weights: Any, text: str):
    with pytest.raises(ConfigurationError, match=text):
        name_sources([kit.length], weights)
    with pytest.raises(ConfigurationError, match=text):
        kit.config(tmp_path, reward_weights=weights)


# --- steps -----------------------------------------------------------------------------
class Poison(TrainerCallback):
    """From step `at` on, the gradients are multiplied."""

    def __init__(self, model: Any, at: int, factor: float) -> None:
        self.at, self.factor, self.step = at, factor, 0
        for parameter in model.parameters():
            parameter.register_hook(self._spoil)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step + 1

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor if self.step >= self.at else gradient


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("factor", "word"), [(float("nan"), "nan"), (1e30, "inf")])
def test_a_step_without_a_finite_gradient_is_not_taken(tmp_path: Path, clip: float, factor: float, word: str):
    """1e30: every gradient is finite and their norm is not; clipping would make a silent step of zeros of it."""
    model = kit.policy()
    seen: list[torch.Tensor] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kit.weights(model))

    args = kit.config(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, max_grad_norm=clip)
    made = kit.trainer(model, kit.fixed(), args, callbacks=[Poison(model, 3, factor), Watch()])
    with pytest.raises(RunStopped) as error:
        made.train()
    made.close()
    text = str(error.value)
    assert text.startswith(f"Optimizer step 3 was not taken, because its gradient norm is {word}: ")
    assert text.endswith(f"the last checkpoint is {tmp_path / 'checkpoint-2'}.")
    assert len(seen) == 2 and torch.equal(kit.weights(model), seen[-1])


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where_no_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = kit.trainer(kit.policy(), kit.fixed(), kit.config(tmp_path))
    run = made.step_runner.run
    monkeypatch.setattr(made.step_runner, "run", lambda *args: run(*args) * float("inf"))
    with pytest.raises(
        RunStopped, match=rf"step 1 .* its loss is .*inf: .* no checkpoint in {re.escape(str(tmp_path))}"
    ):
        made.train()
    made.close()
    assert torch.equal(kit.weights(made.model), kit.weights(kit.policy()))


def test_a_gradient_scaler_may_skip_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = kit.policy()
    poison = Poison(model, 2, float("nan"))
    made = kit.trainer(model, kit.fixed(), kit.config(tmp_path, max_steps=3), callbacks=[poison])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(made.accelerator, "scaler", scaler)  # as accelerate makes one for fp16 on an accelerator
    made.train()
    made.close()
    once = kit.trainer(kit.policy(), kit.fixed(), kit.config(tmp_path, max_steps=1))
    once.train()
    once.close()
    assert made.state.global_step == 3 and scaler.get_scale() == 1.0  # halved by each of two skipped steps
    assert torch.allclose(kit.weights(model), kit.weights(once.model), atol=1e-6)


def test_the_sampler_says_that_the_weights_are_not_finite(tmp_path: Path):
    model = kit.policy()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    made = kit.make(tmp_path, model=model, train_dataset=ROWS, reward_funcs=kit.length)
    with pytest.raises(RunStopped, match="The policy's weights are not finite"):
        made.train()
    made.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_drawing_from_logits_that_are_no_numbers_is_a_sampler_error(temperature: float, bad: float):
    logits = torch.zeros(2, 5)
    params = SamplingParams(temperature=temperature)
    uniform = torch.tensor([0.5, 0.999], dtype=torch.float64)
    draw.pick(draw.log_probs(logits, params), params, uniform)
    logits[1, 3] = bad
    with pytest.raises(SamplerError, match="weights are not finite"):
        draw.pick(draw.log_probs(logits, params), params, uniform)


# --- metrics of reward functions -------------------------------------------------------
DOCUMENTED = json.loads((Path(__file__).parent / "data" / "metrics.json").read_text())


@pytest.mark.parametrize("name", sorted({*TAKEN, *(f"{prefix}x" for prefix in TAKEN_PREFIXES)}))
def test_names_of_the_trainer_are_refused(name: str):
    with pytest.raises(ConfigurationError, match=re.escape(f"log_metric('{name}', ...)")):
        check_metric(name, 1.0)


def test_every_name_that_a_run_logs_is_taken(tmp_path: Path):
    made = kit.make(tmp_path, train_dataset=ROWS, eval_dataset=ROWS, reward_funcs=kit.length,
                    args={"beta": 0.1, "entropy_coef": 0.1, "vllm_importance_sampling_correction": True})  # fmt: skip
    made.train()
    made.evaluate()
    made.close()
    logged = {name for entry in made.state.log_history for name in entry}
    documented = {re.sub(r"\{[^}]*\}", "x", name) for names in DOCUMENTED.values() for name in names}
    assert "loss" in logged and len(documented) > 40
    free = []
    for name in sorted(logged | documented):
        try:
            check_metric(name, 1.0)
            free.append(name)
        except ConfigurationError:
            pass
    assert free == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "5", None, [1, 2], torch.zeros(2)])
def test_a_metric_is_a_finite_number(value: Any):
    assert check_metric("judged", torch.tensor(2.0)) == 2.0
    with pytest.raises(ConfigurationError, match=r"log_metric\('judged', .*must be a finite number"):
        check_metric("judged", value)


def test_a_refused_metric_names_the_reward_function(tmp_path: Path):
    def sly(completions: list[Any], log_metric: Any) -> list[float]:
        log_metric("loss", 5.0)
        return [0.0, 1.0, 2.0, 3.0]

    made = kit.make(tmp_path, train_dataset=ROWS, reward_funcs=sly)
    with pytest.raises(ConfigurationError, match=r"log_metric\('loss'") as error:
        made.train()
    made.close()
    assert error.value.__notes__ == ["Raised by the reward function 'sly'."]


# --- data ------------------------------------------------------------------------------
def test_a_DataFrame_is_a_dataset(tmp_path: Path):
    frame = pandas.DataFrame({"prompt": ["Once", "Twice"], "answer": [3, 4]}, index=[7, 9])
    seen: list[int] = []

    def judged(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
        seen.extend(answer)
        assert "__index_level_0__" not in columns
        return [0.0, 1.0, 2.0, 3.0]

    made = kit.make(tmp_path, train_dataset=frame, eval_dataset={"all": frame}, reward_funcs=judged)
    made.train()
    assert sorted(seen) == [3] * 4 + [4] * 4
    assert "eval_all_reward" in made.evaluate()
    assert "eval_reward" in made.evaluate(frame)
    made.close()


def test_a_DataFrame_that_Arrow_cannot_hold_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"DataFrame cannot be made a dataset.*to_dict\('records'\)"):
        kit.make(tmp_path, train_dataset=pandas.DataFrame({"prompt": ["a", 3]}), reward_funcs=kit.length)


# --- the best model --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("metric", "fine"),
    [(None, False), ("reward", False), ("eval_reward", False), ("eval_easy_reward", True), ("hard_kl", True)],
)
def test_the_best_model_of_several_sets_is_by_a_metric_of_one_of_them(tmp_path: Path, metric: str | None, fine: bool):
    args = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1,
            "save_steps": 1, "metric_for_best_model": metric}  # fmt: skip
    sets = {"easy": ROWS, "hard": ROWS}

    def build() -> Any:
        return kit.make(tmp_path, train_dataset=ROWS, eval_dataset=sets, reward_funcs=kit.length, args=args)

    if fine:
        build().close()
        return
    with pytest.raises(ConfigurationError, match=r"'eval_easy_reward', 'eval_hard_reward'"):
        build()
