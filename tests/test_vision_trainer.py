"""GRPOTrainer with pictures: from `reset`, from tools and from the rows of a dataset, with weights saved and read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.errors import ConfigurationError
from agentrl.train import setup
from agentrl.train.warm_up import warm_up
from tests import train_kit as kit
from tests import vision_worker
from tests.test_vision import Cave, looking
from tests.tiny_processors import gemma3, qwen3_vl
from tests.tiny_vision import gemma3_model, qwen3_vl_model


class Gallery(Cave):
    """Pays for how many pictures were seen in time, and for the number drawn."""

    seen: list[int]

    def reset(self, seed: int = 0) -> list[dict[str, Any]]:
        self.seen = []
        return super().reset(seed % 5)

    def look(self, at: int) -> list[dict[str, Any]]:
        """Looks somewhere.

        Args:
            at: Where.
        """
        self.seen.append(at)
        return super().look(at)

    def get_reward(self) -> float:
        return float(len(self.seen))


def lengths(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Rewards that differ within groups."""
    return [float(len(ids) % 7) for ids in completion_ids]


# The double has no video processor, so it saves none; the class is looked up by its name when it is read again.
Saved: Any = type(
    "Qwen3VLProcessor", (type(qwen3_vl()),),
    {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])},
)  # fmt: skip


def qwen() -> tuple[Any, Any]:
    processor = qwen3_vl()
    processor.__class__ = Saved
    return processor, qwen3_vl_model(processor)


def gemma() -> tuple[Any, Any]:
    processor = gemma3()
    return processor, gemma3_model(processor)


def make(folder: Path, processor: Any, model: Any, *, environment: Any = Gallery, **args: Any) -> GRPOTrainer:
    settings = {"max_steps": 2, "learning_rate": 1e-2, "max_completion_length": 300}
    given = {"environment_factory": environment} if environment is not None else {}
    more = {key: args.pop(key) for key in ("train_dataset", "peft_config") if key in args}
    made = GRPOTrainer(model, lengths, kit.config(folder, **(settings | args)), processing_class=processor,
                       **given, **more)  # fmt: skip
    made.player.engine.renderer = looking(made.renderer, 1)
    return made


@pytest.mark.parametrize("family", [qwen, gemma])
@pytest.mark.parametrize(
    "args",
    [
        {"save_strategy": "steps", "save_steps": 1, "record_episodes": True, "log_completions": True},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.1,
         "gradient_checkpointing": True, "entropy_coef": 0.01, "max_steps": 4},
    ],
)  # fmt: skip
def test_a_run_with_pictures_changes_the_eyes_and_is_saved(tmp_path, family, args):
    processor, model = family()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make(tmp_path / "run", processor, model, **args)
    trainer.train()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert any("visual" in name or "vision_tower" in name for name in moved) and len(moved) > 0.7 * len(before)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    (group, *_) = trainer._last_groups
    assert [len(turn.media) for turn in group.rollouts[0].turns][:2] == [1, 2]
    trainer.save_model(str(tmp_path / "saved"))
    trainer.close()

    read = setup.load_model(str(tmp_path / "saved"), GRPOConfig(str(tmp_path)))
    assert type(read) is type(model) and torch.equal(kit.weights(read), kit.weights(model))
    if family is gemma:
        again = setup.load_tokenizer(None, read, GRPOConfig(str(tmp_path)))
        assert type(again) is type(processor)
    else:  # the class itself needs torchvision
        assert (tmp_path / "saved" / "processor_config.json").is_file()


def test_rows_with_and_without_pictures_are_trained_and_evaluated(tmp_path):
    """Pictures in a column: the first pass over what was sampled is on the policy, to rounding."""
    processor, model = qwen()
    settings = {"learning_rate": 1e-6, "num_iterations": 2, "max_steps": 2, "max_completion_length": 8}
    corrected = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0}
    trainer = GRPOTrainer(model, vision_worker.judge, kit.config(tmp_path, **settings, **corrected),
                          vision_worker.ROWS, vision_worker.ROWS, processing_class=processor)  # fmt: skip
    trainer.train()
    shown = [[len(s.media) for r in group.rollouts for s in r.sequences] for group in trainer._last_groups]
    assert shown == [[2] * 4, [0] * 4]
    assert all(abs(loss) < 1e-3 for loss in kit.logs_with(trainer, "loss"))
    assert trainer.evaluate()["eval_reward"] >= 0
    trainer.close()


def test_an_adapter_on_the_language_model_leaves_the_eyes_alone(tmp_path):
    processor, model = qwen()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lora = LoraConfig(r=4, target_modules=r".*language_model.*q_proj")
    trainer = make(tmp_path, processor, model, peft_config=lora, beta=0.1)
    start = kit.weights(trainer.model)
    trainer.train()
    trainer.close()
    assert not torch.equal(kit.weights(trainer.model), start)
    same = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(p, before[name]) for name, p in same.items()) and len(same) == len(before)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    def run(folder: str, **args: Any) -> GRPOTrainer:
        return make(tmp_path / folder, *qwen(), save_strategy="steps", save_steps=1, max_steps=2, **args)

    whole, resumed = run("whole"), run("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    torch.testing.assert_close(kit.weights(resumed.model), kit.weights(whole.model), atol=1e-6, rtol=0)
    for trainer in (whole, resumed):
        trainer.close()


def test_a_warm_up_shows_the_pictures_of_random_episodes():
    processor, model = gemma()
    eyes = {name: p.detach().clone() for name, p in model.named_parameters() if "vision_tower.encoder" in name}
    done = warm_up(model, processor, Gallery, steps=2, episodes=4, batch_size=2, max_calls=2)
    assert done.episodes == 4 and 0 < done.last_loss < 20
    moved = [name for name, p in model.named_parameters() if name in eyes and not torch.equal(p, eyes[name])]
    assert len(moved) > 0.8 * len(eyes) > 8


@pytest.mark.slow
def test_two_processes_train_like_one_though_one_sees_no_picture(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    everywhere = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                  "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}  # fmt: skip
    command = [sys.executable, str(here / "vision_worker.py"), str(tmp_path)]
    started = [
        subprocess.Popen(command, env=os.environ | everywhere | {"RANK": rank, "LOCAL_RANK": rank},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in "01"
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(texts)
    one = vision_worker.train(tmp_path / "one", world=1)
    assert one["moved"] > 1e-3
    for rank in "01":
        two = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        torch.testing.assert_close(two["weights"], one["weights"], atol=1e-6, rtol=0)


def test_a_processor_beside_a_model_of_text_is_refused():
    processor = qwen3_vl()
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(processor.tokenizer), num_key_value_heads=1, **shape))
    with pytest.raises(ConfigurationError, match=r"LlamaForCausalLM reads text only.*Qwen3VLProcessor.*Pass the model"):
        setup.load_tokenizer(processor, model, GRPOConfig())


def test_a_processor_that_cannot_be_loaded_leaves_the_tokenizer(tmp_path):
    """Qwen-VL's needs torchvision here: text can be trained, and the warning says what cannot."""
    processor, model = qwen()
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    read = setup.load_model(str(tmp_path), GRPOConfig())
    with pytest.warns(UserWarning, match="Images cannot be read, because the processor of"):
        tokenizer = setup.load_tokenizer(None, read, GRPOConfig())
    assert not hasattr(tokenizer, "image_processor") and len(tokenizer) == len(processor.tokenizer)
