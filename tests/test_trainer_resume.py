"""`rollout_func`, a second `train()`, checkpoints and resuming."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from transformers import TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.train.trainer import GRPOTrainer


def trained(model: Any, samples: kit.Fixed, folder: Path, trainer_changes: dict[str, Any] | None = None, **args: Any):
    """The trainer after `train()`, and all parameters of its model."""
    made = kit.trainer(model, samples, kit.config(folder, **args), **(trainer_changes or {}))
    made.train()
    made.close()
    return made, kit.weights(model)


# --- rollout_func ----------------------------------------------------------------------
def test_F139_the_function_gets_each_prompt_once(tmp_path: Path):
    calls = kit.Fixed(kit.fixed().table, calls=[])
    trained(kit.policy(), calls, tmp_path)
    assert calls.calls == [list(calls.table)]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda a: a | {"completion_ids": a["completion_ids"] * 4},
            r"32 entries in 'completion_ids' for 2 prompts.*: 8",
        ),
        (lambda a: a | {"score": [1.0]}, r"1 entries in 'score'"),
        (lambda a: {k: v for k, v in a.items() if k != "logprobs"}, r"missing: \['logprobs'\]"),
        (lambda a: a | {"logprobs": [lp[:-1] for lp in a["logprobs"]]}, "completion_ids and .* logprobs"),
        (lambda a: [a], "must return a dict"),
    ],
)
def test_F139_any_other_shape_is_one_clear_message(tmp_path: Path, spoil: Any, says: str):
    samples = kit.fixed()
    made = kit.trainer(
        kit.policy(),
        samples,
        kit.config(tmp_path),
        rollout_func=lambda prompts, trainer: spoil(samples(prompts, trainer)),
    )
    with pytest.raises(ConfigurationError, match=says):
        made.train()


def test_rollout_func_works_in_evaluation(tmp_path: Path):
    samples = kit.fixed(size=2)
    made = kit.trainer(
        kit.policy(),
        samples,
        kit.config(tmp_path, num_generations=2, num_generations_eval=2),
        eval_dataset=samples.rows,
    )
    metrics = made.evaluate()
    assert metrics["eval_reward"] == pytest.approx(sum(r for m in samples.table.values() for _, r in m) / 4)


def test_rollout_func_log_probs_of_several_candidates_take_the_sampled_one(tmp_path: Path):
    """`logprob_token_ids` may come along, with the sampled token's log-prob first."""
    samples = kit.fixed()

    def several(prompts: list[str], trainer: Any) -> dict[str, Any]:
        answer = samples(prompts, trainer)
        answer["logprobs"] = [[[lp, -9.0] for lp in one] for one in answer["logprobs"]]
        answer["logprob_token_ids"] = [[[i, 5] for i in ids] for ids in answer["completion_ids"]]
        return answer

    _, plain = trained(kit.policy(), samples, tmp_path / "a")
    _, got = trained(kit.policy(), samples, tmp_path / "b", {"rollout_func": several})
    assert torch.equal(plain, got)


# --- save and resume -------------------------------------------------------------------
def test_F117_a_second_train_call_starts_at_the_beginning(tmp_path: Path):
    calls = kit.Fixed(kit.fixed(groups=6).table, calls=[])
    made = kit.trainer(kit.policy(), calls, kit.config(tmp_path, max_steps=2))
    made.train()
    made.train()
    assert calls.calls is not None
    assert calls.calls[:2] == calls.calls[2:]
    assert kit.logs_with(made, "num_tokens")[0] < kit.logs_with(made, "num_tokens")[1]


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("iterations", [1, 2])
def test_F159_F161_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, iterations: int):
    """Real sampling at temperature 1. Saved at the end of a generation phase, every later number is the same."""
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": iterations}
    args |= {"optim": "adamw_torch", "learning_rate": 1e-3, "max_completion_length": 6, "shuffle_dataset": True}
    rows = [{"prompt": f"question {i}"} for i in range(5)]

    def longer(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    def make(folder: str) -> GRPOTrainer:
        settings: dict[str, Any] = {"train_dataset": rows, "processing_class": kit.tokenizer()}
        return GRPOTrainer(kit.policy(), longer, kit.config(tmp_path / folder, **args), **settings)

    whole = make("whole")
    whole.train()
    resumed = make("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    torch.testing.assert_close(kit.weights(resumed.model), kit.weights(whole.model), atol=1e-7, rtol=0)
    entries = [[kit.lasting(e) for e in t.state.log_history if e["step"] > 2 and "loss" in e] for t in (whole, resumed)]
    assert entries[1] == [pytest.approx(e, abs=1e-6) for e in entries[0]] and len(entries[0]) == 2
    rewards = kit.logs_with(whole, "reward")
    assert all(a != b for a, b in pairwise(rewards))  # F161: step 2's draws are not step 0's again


def test_F159_resuming_in_the_middle_of_a_generation_phase_plays_it_again(tmp_path: Path):
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "learning_rate": 1e-3}
    calls = kit.Fixed(kit.fixed(groups=4).table, calls=[])
    whole, _ = trained(kit.policy(), calls, tmp_path, **args)
    assert whole.state.global_step == 4 and calls.calls is not None
    played = list(calls.calls)
    calls.calls.clear()
    again = kit.trainer(kit.policy(), calls, kit.config(tmp_path, **args))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert calls.calls == played  # phase 0 again for step 1, then phase 1
    assert again.state.global_step == 4


def test_the_original_template_is_saved_byte_for_byte(tmp_path: Path):
    """The tokenizer's own template rewrites history, so training uses another one; the checkpoint keeps the user's."""
    tok = kit.fresh_tokenizer()
    own = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{%- else %}{{ m.content }}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}  \n"
    )
    tok.chat_template = own
    samples = kit.fixed()
    made = kit.trainer(
        kit.policy(), samples, kit.config(tmp_path, save_strategy="steps", save_steps=1), processing_class=tok
    )
    made.train()
    made.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-1", "final"):
        assert (tmp_path / folder / "chat_template.jinja").read_bytes() == own.encode()
    assert tok.chat_template == own
