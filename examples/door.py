"""A first environment: written, checked, played by hand, and learnt by a small policy in a few seconds.

    python examples/door.py

The policy is made here: a freshly initialised model of 0.14 million parameters that has only seen random calls. With a
model that already calls tools, leave `small_policy` out and give `GRPOTrainer` the model's name.
"""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from transformers import PrinterCallback

from agentrl import Environment, GRPOConfig, GRPOTrainer, check_environment, play_episode, warm_up
from agentrl.train.tiny import make_model, make_tokenizer
from agentrl.train.warm_up import random_episodes

Color = Literal["black", "blue", "green", "red"]


class Door(Environment):
    """Four doors, and a sign that says which one is not locked."""

    run_inline = True  # these methods are cheap: they need no thread

    def reset(self, seed: int) -> str:
        """The first message. Everything random follows from `seed`, so a group of rollouts plays the same task."""
        self._right = random.Random(seed).choice(get_args(Color))
        self._opened, self._tries, self.done = False, 0, False
        return f"The sign says {self._right}. Open a door."

    def open(self, color: Color) -> str:
        """Open a door.

        Args:
            color: Which door.
        """
        self._tries += 1
        self._opened = color == self._right
        self.done = self._opened or self._tries == 2  # the episode ends after this call
        return f"The {color} door opens." if self._opened else f"The {color} door is locked."

    def get_reward(self) -> float:
        """Called once, after the episode."""
        return float(self._opened)


def small_policy() -> tuple[Any, Any]:
    """A model and its tokenizer that know how a call is written, and nothing about signs and doors."""
    letters = make_tokenizer()
    played = random_episodes(Door, letters, 100)
    texts = [letters.decode(sequence.input_ids) for episode in played for sequence in episode.sequences]
    tokenizer = make_tokenizer(texts, words=get_args(Color))
    model = make_model(tokenizer, seed=0)
    warm_up(model, tokenizer, Door, episodes=400, steps=200, batch_size=16)
    return model, tokenizer


def main() -> float:
    """The mean reward of the last ten optimizer steps."""
    for finding in check_environment(Door):
        print(finding)

    script = [{"tool_calls": [{"name": "open", "arguments": {"color": "pink"}}]}, "I give up."]
    for message in play_episode(Door, script).messages:
        print(f"{message['role']:>9}: {message['content'] or message['tool_calls'][0]['function']}")

    model, tokenizer = small_policy()
    args = GRPOConfig(
        output_dir="outputs/door",
        max_steps=60,
        per_device_train_batch_size=32,  # rollouts in a micro-batch: 4 groups of num_generations = 8
        steps_per_generation=2,  # two micro-batches are played at once ...
        num_iterations=2,  # ... and each is trained on twice
        learning_rate=1.5e-3,  # the default, 1e-6, is for real models
        warmup_steps=10,
        max_completion_length=64,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(model=model, args=args, processing_class=tokenizer, environment_factory=Door)
    trainer.remove_callback(PrinterCallback)  # prints every metric
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    trainer.close()
    print("mean reward:", " ".join(f"{reward:.2f}" for reward in rewards))
    print("read the episodes: agentrl show outputs/door")
    return rewards[-1]


if __name__ == "__main__":
    main()
