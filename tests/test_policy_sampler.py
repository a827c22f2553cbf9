"""The sampler of a run: what the trainer's weights reach, and a folder that another engine can load them from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import RunStopped
from agentrl.sampler import ScriptedSampler
from agentrl.train.checkpoint_folder import checkpoint_folder
from agentrl.train.policy_sampler import PolicySampler
from agentrl.train.trainer import GRPOTrainer


class Silent(ScriptedSampler):
    """A sampler that knows nothing of weights."""

    publish = None  # type: ignore[assignment]


def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completion_ids))]


@pytest.mark.parametrize("takes_weights", [True, False])
def test_F121_a_sampler_that_weights_do_not_reach_is_warned_about_once(tmp_path: Path, takes_weights: bool):
    trainer = GRPOTrainer(
        model=kit.policy(), processing_class=kit.fresh_tokenizer(), args=kit.config(tmp_path, max_steps=2),
        reward_funcs=constant, train_dataset=[{"prompt": "a"}, {"prompt": "b"}],
    )  # fmt: skip
    sampler = (ScriptedSampler if takes_weights else Silent)([[65, kit.stop()]])
    trainer.player.engine.sampler = sampler
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    trainer.close()
    texts = [str(one.message) for one in caught if "has no publish(version)" in str(one.message)]
    assert len(texts) == (0 if takes_weights else 1)
    assert sampler.version == (1 if takes_weights else 0)  # of the second step's weights


# --- the first syncs -------------------------------------------------------------------
class Sync:
    way = "double"

    def __init__(self) -> None:
        self.versions: list[int] = []

    def publish(self, version: int) -> Any:
        self.versions.append(version)

    def close(self) -> None: ...


@pytest.mark.parametrize("elsewhere", [False, True])
def test_two_syncs_are_checked_and_an_error_of_any_rank_stops_all(elsewhere: bool):
    said = [None, None if elsewhere else ValueError("other weights")]
    asked: list[str | None] = []

    def first_error(error: str | None) -> str | None:
        asked.append(error)
        return "other weights on rank 1" if elsewhere and len(asked) == 2 else error

    sync = Sync()
    policy = PolicySampler(
        None, None, False, torch.nn.Linear(1, 1), sync, check=lambda: said.pop(0), first_error=first_error,  # type: ignore[arg-type]
    )  # fmt: skip
    policy.publish(0)
    with pytest.raises(RunStopped, match=r"^other weights"):
        policy.publish(1)
    policy.publish(2)  # no third one
    assert sync.versions == [0, 1, 2] and len(asked) == 2 and said == []


# --- a folder for another engine -------------------------------------------------------
def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[5, 6, 7, 8]])).logits


def test_a_model_of_a_folder_is_loaded_from_there_and_no_copy_is_made(tmp_path: Path):
    kit.policy().save_pretrained(tmp_path)
    closers: list[Any] = []
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checkpoint_folder(model, kit.fresh_tokenizer(), closers, False) == str(tmp_path)
    assert not closers


@pytest.mark.parametrize("kind", ["in memory", "resized", "adapter"])
def test_another_model_is_written_as_it_is_and_its_folder_goes_with_the_run(tmp_path: Path, kind: str):
    kit.policy().save_pretrained(tmp_path)
    model: Any = kit.policy(3) if kind == "in memory" else AutoModelForCausalLM.from_pretrained(tmp_path)
    if kind == "resized":
        model.resize_token_embeddings(model.config.vocab_size + 16, mean_resizing=False)
    if kind == "adapter":
        from peft import LoraConfig, get_peft_model

        model.config._name_or_path = ""  # as of a model that was made here
        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear"))
    closers: list[Any] = []
    folder = Path(checkpoint_folder(model, kit.fresh_tokenizer(), closers, False))
    assert folder != tmp_path
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model), rtol=0, atol=2e-5)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(kit.tokenizer())
    for close in closers:
        close()
    assert not folder.exists()
