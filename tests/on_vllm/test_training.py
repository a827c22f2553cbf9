"""Training runs whose rollouts vLLM draws: in the process, from a server, from a server of the run's own."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_kit
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.errors import ConfigurationError, RunStopped
from agentrl.sampler.vllm import launch_ports
from agentrl.train.tiny import make_model, make_tokenizer

EXACT = 3e-5  # of log-probs in fp32


def sum_of_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between rollouts, whatever the model says."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 3,
        "max_completion_length": 24, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "gradient_checkpointing": False, "learning_rate": 1e-3, "use_vllm": True,
        "lr_scheduler_type": "constant", "temperature": 0.8,
    }  # fmt: skip
    return GRPOConfig(**(settings | changes))


def run(model: Any, args: GRPOConfig, **changes: Any) -> list[dict[str, Any]]:
    """The log of each step of a run on three prompts, or in an environment."""
    parts: dict[str, Any] = {"reward_funcs": sum_of_ids}
    if "environment_factory" not in changes:
        parts["train_dataset"] = [{"prompt": text} for text in ("Once", "There was a king", "1 2 3 4")]
    trainer = GRPOTrainer(model=model, args=args, **(parts | changes))
    try:
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]
    finally:
        trainer.close()


def episodes(folder: Path) -> list[list[int]]:
    """The ids that were sampled in each recorded episode."""
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    return [[token for turn in json.loads(line)["turns"] for token in turn["output_ids"]] for line in lines]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_exact(logs: list[dict[str, Any]], bound: float = EXACT) -> None:
    """In every step the engine drew with the weights that the trainer had: they moved, and the log-probs followed."""
    assert len(logs) == 3
    for entry in logs:
        assert entry["sampling/sampling_logp_difference/max"] < bound, entry
        assert abs(entry["sampling/importance_sampling_ratio/mean"] - 1) < 24 * bound
        assert entry["grad_norm"] > 0


# --- in the process --------------------------------------------------------------------
def test_colocate_draws_from_the_weights_of_each_step(folder: Path, tmp_path: Path):
    logs = run(str(folder), config(tmp_path))
    check_exact(logs)
    assert all(entry["perf/weight_sync_s"] > 0 for entry in logs)
    assert all(entry["perf/weight_sync_transfer_s"] <= entry["perf/weight_sync_s"] for entry in logs)


def test_colocate_plays_tools_in_an_environment(folder: Path, tmp_path: Path):
    logs = run(
        str(folder), config(tmp_path, max_completion_length=96), environment_factory="agentrl/Hunt-v0",
        reward_funcs=sum_of_ids,
    )  # fmt: skip
    check_exact(logs, 1e-4)


def test_candidates_make_the_ratio_one(folder: Path, tmp_path: Path):
    check_exact(run(str(folder), config(tmp_path, top_k=20, top_p=0.9, min_p=0.01)))


def test_F125_a_seed_draws_the_same_rollouts_and_another_one_others(folder: Path, tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(str(folder), config(tmp_path / name, seed=seed, data_seed=0, max_steps=1))
    first, again, other = (episodes(tmp_path / name) for name in "abc")
    assert first == again != other
    assert len({tuple(ids) for ids in first}) > 4  # members of a group are no copies of each other


def test_a_model_of_no_folder_is_drawn_from(folder: Path, tmp_path: Path):
    from transformers import Qwen3ForCausalLM

    known = load(folder)
    torch.manual_seed(3)
    known.config.num_hidden_layers = 1
    known.config.layer_types = known.config.layer_types[:1]
    model = Qwen3ForCausalLM(known.config)  # its config still names the folder, which holds another model
    check_exact(run(model, config(tmp_path), processing_class=AutoTokenizer.from_pretrained(folder)))


def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_before_it_is_built(tmp_path: Path):
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigurationError, match=r"heads have 16 numbers, and vLLM on a CPU needs 32"):
        run(make_model(tokenizer, 0), config(tmp_path), processing_class=tokenizer)


def test_adapters_are_merged_for_an_engine_in_the_process(folder: Path, tmp_path: Path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", lora_alpha=16)
    check_exact(run(str(folder), config(tmp_path, learning_rate=1e-2), peft_config=lora))


def test_bf16_differs_and_is_corrected(folder: Path, tmp_path: Path):
    args = config(tmp_path, model_init_kwargs={"dtype": "bfloat16"}, vllm_importance_sampling_mode="token_truncate")
    logs = run(str(folder), args)
    for entry in logs:
        assert 1e-4 < entry["sampling/sampling_logp_difference/mean"] < 0.2
        assert 0 < entry["sampling/importance_sampling_ratio/min"] < 1
        assert entry["sampling/importance_sampling_ratio/max"] <= 3.0


def test_a_regular_expression_bounds_what_is_drawn(folder: Path, tmp_path: Path):
    args = config(tmp_path, vllm_structured_outputs_regex="[ab]{4}", vllm_importance_sampling_correction=False)
    run(str(folder), args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in episodes(tmp_path)]
    assert texts and all(set(text) <= {"a", "b"} and len(text) <= 4 for text in texts), texts


def test_evaluation_between_steps_and_resuming(folder: Path, tmp_path: Path):
    rows = [{"prompt": "Once"}]
    args = config(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2, max_steps=3,
        per_device_eval_batch_size=4, num_generations_eval=2,
    )  # fmt: skip
    run(str(folder), args, eval_dataset=rows)
    trainer = GRPOTrainer(model=str(folder), args=args, reward_funcs=sum_of_ids, train_dataset=rows, eval_dataset=rows)
    try:
        trainer.train(resume_from_checkpoint=True)
        (last,) = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] == 3][-1:]
    finally:
        trainer.close()
    assert last["sampling/sampling_logp_difference/max"] < EXACT  # weights of the checkpoint, not of the folder


def test_the_first_sync_is_checked_and_fails_loudly(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine that keeps other weights than it was sent is found out before anything is trained."""
    from agentrl.sampler.vllm import VLLMSampler

    real = VLLMSampler.load

    def spoiled(self: Any, weights: Any, version: int) -> Any:
        return real(self, ((name, tensor * 1.5 if "mlp" in name else tensor) for name, tensor in weights), version)

    monkeypatch.setattr(VLLMSampler, "load", spoiled)
    with pytest.raises(RunStopped, match=r"log-probs"):
        run(str(folder), config(tmp_path))
    assert not (tmp_path / "episodes.jsonl").exists()

    calls = []

    def stale(self: Any, weights: Any, version: int) -> Any:
        """Weights that change nothing: the engine was built with the first ones."""
        calls.append(version)
        return real(self, list(weights) if len(calls) == 1 else first(), version)

    def first() -> list[Any]:
        return list(load(folder).named_parameters())

    monkeypatch.setattr(VLLMSampler, "load", stale)
    with pytest.raises(RunStopped, match=r"log-probs"):  # after one step: the second sync is checked too
        run(str(folder), config(tmp_path, learning_rate=1e-2))
    assert calls == [0, 1]


# --- a server --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def own(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_kit.Server]:
    """A server whose weights these tests change."""
    running = vllm_kit.start(folder, tmp_path_factory.mktemp("vllm") / "server.log")
    yield running
    running.stop()


def at(server: vllm_kit.Server, folder: Path, **changes: Any) -> GRPOConfig:
    return config(folder, vllm_mode="server", vllm_server_base_url=server.base_url, **changes)


def test_a_server_draws_from_the_weights_of_each_step(own: vllm_kit.Server, folder: Path, tmp_path: Path):
    logs = run(str(folder), at(own, tmp_path, vllm_server_timeout=120.0))
    check_exact(logs)
    for entry in logs:
        assert entry["rollout/vllm_retry_count"] == entry["rollout/vllm_preemption_count"] == 0
        assert 0 <= entry["rollout/vllm_kv_cache_usage_frac"] < 1
        assert entry["rollout/vllm_running_requests"] >= 0 and entry["rollout/vllm_queued_requests"] >= 0
        parts = [entry[f"perf/weight_sync_{part}_s"] for part in ("pause", "transfer", "barrier")]
        assert all(0 <= part <= entry["perf/weight_sync_s"] for part in parts) and parts[1] > 0
    assert not list(tmp_path.glob("*.safetensors*")) and not list(Path("/dev/shm").glob(f"agentrl*{os.getpid()}*"))


def test_a_server_plays_tools_in_an_environment(own: vllm_kit.Server, folder: Path, tmp_path: Path):
    logs = run(
        str(folder), at(own, tmp_path, max_completion_length=96), environment_factory="agentrl/Hunt-v0",
        reward_funcs=sum_of_ids,
    )  # fmt: skip
    check_exact(logs, 1e-4)


def test_the_same_server_serves_the_next_run(own: vllm_kit.Server, folder: Path, tmp_path: Path):
    for name in ("first", "second"):
        check_exact(run(str(folder), at(own, tmp_path / name)))
    assert episodes(tmp_path / "first") == episodes(tmp_path / "second")


def test_F127_a_prompt_beyond_the_servers_limit_ends_as_truncated_or_is_refused(
    folder: Path, tmp_path: Path, own: vllm_kit.Server
):
    long = [{"prompt": "x" * (vllm_kit.CONTEXT - 10)}, {"prompt": "Once"}]
    logs = run(str(folder), at(own, tmp_path / "a", max_completion_length=64, max_steps=1), train_dataset=long)
    assert logs[0]["completions/clipped_ratio"] > 0
    with pytest.raises(ConfigurationError, match=r"prompt of row .* tokens, but the model sees"):
        run(str(folder), at(own, tmp_path / "b"), train_dataset=[{"prompt": "x" * (vllm_kit.CONTEXT + 10)}])


def test_a_server_of_another_vocabulary_is_refused(own: vllm_kit.Server, folder: Path, tmp_path: Path):
    model = load(folder)
    model.resize_token_embeddings(model.config.vocab_size + 64)
    with pytest.raises(ConfigurationError, match=r"with 265 ids, and the model that is trained has 329"):
        run(model, at(own, tmp_path), processing_class=AutoTokenizer.from_pretrained(folder))


def test_a_dtype_that_differs_is_warned_about(own: vllm_kit.Server, folder: Path, tmp_path: Path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(str(folder), at(own, tmp_path, model_init_kwargs={"dtype": "bfloat16"}, max_steps=1))
    (text,) = {str(one.message) for one in caught if "computes in" in str(one.message)}
    assert "float32 and the trainer in bfloat16" in text and "--dtype bfloat16" in text


def test_no_server_is_a_connection_error(folder: Path, tmp_path: Path):
    port = vllm_kit.free_port()
    args = config(tmp_path, vllm_mode="server", vllm_server_port=port, vllm_server_timeout=2.0)
    with pytest.raises(ConnectionError, match=str(port)):
        run(str(folder), args)


@pytest.mark.slow
def test_a_run_owns_its_server(folder: Path, tmp_path: Path):
    args = config(tmp_path, vllm_mode="server", vllm_server_base_url="auto", vllm_server_timeout=300.0)
    trainer = GRPOTrainer(
        model=str(folder), args=args, reward_funcs=sum_of_ids, train_dataset=[{"prompt": "Once"}, {"prompt": "Twice"}]
    )
    sampler = trainer.player.sampler
    url = sampler.options.base_url
    try:
        trainer.train()
        check_exact([entry for entry in trainer.state.log_history if "loss" in entry])
        found = launch_ports.holder(int(url.rsplit(":", 1)[1]))
        assert found is not None
        os.kill(found[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RunStopped, match=r"ended by signal 9 .*vllm_server\.log"):
            trainer.player.run(lambda: sampler.sample(vllm_kit.request([1, 2, 3])))
        assert time.monotonic() - began < 60  # not the 300 s that somebody else's server is waited for
    finally:
        trainer.close()
    assert (tmp_path / "vllm_server.log").stat().st_size > 0
    import urllib.request

    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/health", timeout=2)
