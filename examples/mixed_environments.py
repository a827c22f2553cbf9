"""Several environments in one run: the dataset's column `environment` says which one plays a row.

    python examples/mixed_environments.py

A row's prompt shows the tools of its own environment and no others. Two optimizer steps of an untrained model show
that the path works; what a policy needs in order to learn is in door.py.
"""

from __future__ import annotations

from collections import Counter

from transformers import PrinterCallback

from agentrl import Environment, GRPOConfig, GRPOTrainer, RandomPolicy, play_episode, read_episodes
from agentrl.train.tiny import make_model, make_tokenizer


class Adder(Environment):
    """Add numbers up to a target."""

    run_inline = True

    def reset(self, target: int) -> str:
        """`target` is a column of the dataset."""
        self._target, self._total, self.done = target, 0, False
        return f"Reach {target}."

    def add(self, number: int) -> str:
        """Add a number to the total.

        Args:
            number: What to add.
        """
        self._total += number
        self.done = self._total >= self._target
        return f"The total is {self._total}."

    def get_reward(self) -> float:
        """1.0 at the target, less away from it."""
        return 1.0 / (1 + abs(self._target - self._total))


class Switch(Environment):
    """Turn a switch on."""

    run_inline = True

    def reset(self, seed: int, **row: object) -> str:
        """`**row` takes the other environment's columns, which are None in this one's rows."""
        self._on = bool(seed % 2)
        return f"The switch is {'on' if self._on else 'off'}. Leave it on."

    def flip(self) -> str:
        """Flip the switch."""
        self._on = not self._on
        return f"The switch is {'on' if self._on else 'off'}."

    def get_reward(self) -> float:
        """1.0 where the switch was left on."""
        return float(self._on)


ENVIRONMENTS = {"adder": Adder, "switch": Switch}
ROWS = [
    {"environment": "adder", "target": 7},
    {"environment": "adder", "target": 12},
    {"environment": "switch"},
    {"environment": "switch", "prompt": "You work in a power station. "},  # reset()'s text comes after the prompt
]


def main() -> dict[str, int]:
    """How many episodes each environment played."""
    for seed, row in enumerate(ROWS):
        episode = play_episode(ENVIRONMENTS[row["environment"]], RandomPolicy(stop_p=0.2), task=row, seed=seed)
        print(f"{row['environment']:>8}: {episode.reward:.2f} after {len(episode.tool_calls)} random calls")

    tokenizer = make_tokenizer()
    args = GRPOConfig(
        output_dir="outputs/mixed",
        max_steps=2,
        per_device_train_batch_size=8,
        steps_per_generation=1,
        num_generations=4,
        max_completion_length=32,
        max_tool_calling_iterations=4,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=make_model(tokenizer, seed=0),
        args=args,
        train_dataset=ROWS,
        processing_class=tokenizer,
        environment_factory=ENVIRONMENTS,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.close()
    played = Counter(str(record["environment"]) for record in read_episodes("outputs/mixed/episodes.jsonl"))
    print(dict(played))
    return dict(played)


if __name__ == "__main__":
    main()
