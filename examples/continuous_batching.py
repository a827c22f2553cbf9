"""Rollouts drawn by transformers' continuous batching: a tiny policy learns to write digits, in seconds on a CPU.

    python examples/continuous_batching.py

It is made for flash attention on a GPU (load the model with attn_implementation="flash_attention_2"). Elsewhere the
default sampler is quicker, and draws the same tokens.
"""

from __future__ import annotations

from transformers import PrinterCallback

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.train.tiny import make_model, make_tokenizer


def digits(completions: list[str], **columns: object) -> list[float]:
    """The share of digits in each completion."""
    return [sum(letter in "0123456789" for letter in text) / max(1, len(text)) for text in completions]


def main() -> list[float]:
    """The mean reward of each five optimizer steps."""
    tokenizer = make_tokenizer()
    args = GRPOConfig(
        output_dir="outputs/continuous_batching",
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={
            "max_memory_percent": 0.5,  # the default: the cache takes no more of the memory that is free
            "page_size": 32,  # tokens; beginnings that are the same are fed once, in whole pages
        },
        max_steps=30,
        logging_steps=5,
        num_generations=8,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        max_completion_length=16,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=make_model(tokenizer, seed=0),
        args=args,
        processing_class=tokenizer,
        reward_funcs=digits,
        train_dataset=[{"prompt": "Write a number with as many digits as you like, and nothing else."}],
    )
    trainer.remove_callback(PrinterCallback)  # prints every metric
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    trainer.close()
    print("mean reward:", " ".join(f"{reward:.2f}" for reward in rewards))
    return rewards


if __name__ == "__main__":
    main()
