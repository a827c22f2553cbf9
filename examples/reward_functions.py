"""Training without an environment: a dataset of prompts and reward functions.

    python examples/reward_functions.py

The model is made here and starts from nothing, so the task is small: begin with a certain letter, and be brief.
"""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.train.tiny import make_model, make_tokenizer

ROWS = [{"prompt": f"Say {word}: ", "wanted": word[0]} for word in ("ant", "ape", "ash", "axe")]


def first_letter(completions: list[str], wanted: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    """1.0 where the completion begins with the letter in the row's column `wanted`, half where it comes later."""
    log_extra("wanted", wanted)  # a column in the printed completions and in the record
    return [1.0 if text[:1] == want else 0.5 * (want in text) for text, want in zip(completions, wanted, strict=True)]


async def shorter(completion_ids: list[list[int]], log_metric: Any) -> list[float | None]:
    """Functions may be async. None means: not scored by this function."""
    log_metric("tokens/longest", max(len(ids) for ids in completion_ids))
    return [None if not ids else -len(ids) / 8 for ids in completion_ids]


def main() -> list[float]:
    """The mean of `first_letter` over each five optimizer steps."""
    tokenizer = make_tokenizer()  # one token per byte
    model = make_model(tokenizer, seed=0)
    args = GRPOConfig(
        output_dir="outputs/reward_functions",
        max_steps=40,
        per_device_train_batch_size=32,
        reward_weights=[1.0, 0.1],  # in the order of reward_funcs
        learning_rate=3e-3,
        max_completion_length=8,
        logging_steps=5,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=[first_letter, shorter], args=args, train_dataset=ROWS, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    means = [entry["rewards/first_letter/mean"] for entry in trainer.state.log_history if "reward" in entry]
    trainer.close()
    print("first_letter:", " ".join(f"{mean:.2f}" for mean in means))
    return means


if __name__ == "__main__":
    main()
