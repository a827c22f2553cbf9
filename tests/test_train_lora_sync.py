"""Adapters go to a server alone where it can serve them, and merged where it cannot."""

# ruff: noqa: F811  (fixtures that are imported)
from __future__ import annotations

import logging
from pathlib import Path

import peft
import pytest
import torch
from fake_vllm import VOCABULARY, refusal
from sync_kit import FakeServer, Trainer, change, fake, lora, memory, trainer, weights  # noqa: F401  (fixtures)
from weights_kit import adapted, qwen3, same

from agentrl.errors import ConfigurationError, RunStopped, SamplerError
from agentrl.train.lora_sync import LoraSync, why_not_alone


def test_an_adapter_goes_alone_and_versions_are_kept_for_turns_that_began_under_them(
    lora: FakeServer, tmp_path: Path
) -> None:
    lora.info["vllm_config"]["lora_config"]["max_loras"] = 4  # pyright: ignore[reportOptionalSubscript]
    trainer = Trainer(lora, tmp_path)
    model = adapted("lora")
    sync = trainer.sync(model, max_staleness=2)
    assert isinstance(sync, LoraSync)
    orders: list[str] = []
    lora.trouble["/v1/load_lora_adapter"] = lambda: orders.append(f"load beside {len(lora.adapters)}")
    lora.trouble["/v1/unload_lora_adapter"] = lambda: orders.append(f"unload from {len(lora.adapters)}")
    for version in range(5):
        times = sync.publish(version)
        assert times.pause_s == 0 and times.way == "lora" and 0 < times.transfer_s < times.total_s
        output = trainer.sample()
        assert output.version == version
        assert lora.bodies[-1]["model"] in lora.adapters and f"-{version}-" in lora.bodies[-1]["model"]
        assert len(lora.adapters) == min(version + 1, 3) == len(list((tmp_path / ".vllm_lora").glob("*/agentrl-*")))
        read = peft.PeftModel.from_pretrained(qwen3(), lora.adapters[lora.bodies[-1]["model"]])
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(read(ids).logits, model(ids).logits)
        change(model, version)
    assert orders[-2:] == ["load beside 3", "unload from 4"]
    sync.close()
    assert not (tmp_path / ".vllm_lora").exists()
    trainer.run(trainer.sampler.close)
    trainer.loop.close()


def test_an_old_adapter_that_stays_stops_nothing(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    sync = trainer.sync(adapted("lora"))
    sync.publish(0)
    lora.trouble["/v1/unload_lora_adapter"] = lambda: refusal(500, "busy")
    sync.publish(1)
    assert trainer.sample().version == 1 and "keeps the adapter" in caplog.text


def test_an_adapter_that_fails_leaves_a_broken_sampler_and_a_later_one_heals(
    lora: FakeServer, trainer: Trainer
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    sync = trainer.sync(adapted("lora"))
    sync.publish(0)
    lora.trouble["/v1/load_lora_adapter"] = lambda: refusal(500, "no room")
    with pytest.raises(RunStopped, match=r"load.*failed .*no room"):
        sync.publish(1)
    with pytest.raises(SamplerError, match="Weights 1"):
        trainer.sample()
    assert not lora.paused
    lora.trouble.clear()
    sync.publish(1)
    assert trainer.sample().version == 1


def test_a_restarted_server_gets_its_adapters_back(lora: FakeServer, trainer: Trainer) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    sync = trainer.sync(adapted("lora"))
    sync.publish(0)
    sync.publish(1)
    lora.restarted()
    assert trainer.sample().version == 1 and len(lora.adapters) == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("dora", "DoRA"), ("modules_to_save", "modules_to_save"), ("embeddings", "embedding or the output layer"),
        ("bias", "bias='all'"), ("tokens", "trainable_token_indices"), ("experts", "target_parameters"),
        ("ia3", "no LoRA"), ("lora", None), ("rslora", None), ("patterns", None),
    ],
)  # fmt: skip
def test_what_vllm_cannot_serve_as_an_adapter_is_merged_and_the_reason_is_logged(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture, kind: str, why: str | None
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    model = adapted(kind)
    with caplog.at_level(logging.WARNING, logger="agentrl"):
        sync = trainer.sync(model)
    if why is None:
        assert sync.way == "lora" and caplog.records == []
        return
    assert sync.way == "file" and why in str(why_not_alone(model))
    sync.publish(0)
    sync.publish(1)
    assert len(caplog.records) == 1 and why in caplog.text
    same(lora.weights, weights(model))


def test_an_adapter_that_changed_the_base_model_is_merged() -> None:
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora"))
    assert why_not_alone(model) == "init_lora_weights='olora' changed the base model"
    plain = adapted("lora")
    plain.get_base_model().model.norm.weight.requires_grad_(True)
    assert "'base_model.model.model.norm.weight' is trained beside it" in str(why_not_alone(plain))


def test_a_server_without_enough_room_says_with_what_to_restart_it(lora: FakeServer, trainer: Trainer) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=12, target_modules=["q_proj"], rank_pattern={"x": 20}))
    with pytest.raises(ConfigurationError, match=r"rank 20 .*--max-lora-rank 32 --max-loras 2\."):
        trainer.sync(model)
    with pytest.raises(ConfigurationError, match=r"max_staleness=4 .*--max-lora-rank 8 --max-loras 6\."):
        trainer.sync(adapted("lora"), max_staleness=4)
    with pytest.raises(ConfigurationError, match=r"--max-loras 3\."):  # the next is loaded before the oldest goes
        trainer.sync(adapted("lora"), max_staleness=1)
    big = peft.get_peft_model(qwen3(), peft.LoraConfig(r=600, target_modules=["q_proj"]))
    with pytest.raises(ConfigurationError, match=r"up to rank 512"):
        trainer.sync(big)


def test_a_server_that_does_not_let_adapters_change_gets_merged_weights(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    lora.info["vllm_env"] = {}  # pyright: ignore[reportOptionalSubscript]
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    assert trainer.sync(adapted("lora")).way == "file"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in caplog.text


def test_a_server_whose_base_model_an_earlier_run_changed_gets_merged_weights(
    lora: FakeServer, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    lora.version = "17"
    assert trainer.sync(adapted("lora")).way == "file"
    assert "an earlier run changed its base model (to weights '17')" in caplog.text


def test_a_server_that_an_earlier_run_left_paused_goes_on(lora: FakeServer, trainer: Trainer) -> None:
    trainer.run(lambda: trainer.sampler.start(VOCABULARY))
    lora.paused = True
    trainer.sync(adapted("lora")).publish(0)
    assert trainer.sample().version == 0
