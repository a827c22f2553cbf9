"""Tiny models and fixed rollouts that the tests of the train room share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from agentrl.sampler import ScriptedSampler
from agentrl.train.config import GRPOConfig
from agentrl.train.tiny import make_tokenizer
from agentrl.train.trainer import GRPOTrainer

torch.set_num_threads(1)


@functools.lru_cache
def tokenizer() -> Any:
    """Bytes and Qwen3's control tokens. Shared: tests must not change it."""
    return make_tokenizer()


def fresh_tokenizer() -> Any:
    return make_tokenizer()


COMMON: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny model of a transformers family, with weights large enough for its predictions to differ."""
    config_class = getattr(transformers, f"{kind}Config")
    name = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    settings = dict(COMMON)
    if kind == "GPT2":
        settings = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128,
                    "initializer_range": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    config = config_class(**(settings | changes))
    config._attn_implementation = changes.get("attn_implementation", "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, name)(config).eval()


def policy(seed: int = 0, **changes: Any) -> Any:
    """A tiny Qwen3 for `tokenizer()`."""
    tok = tokenizer()
    ends = {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id}
    return build("Qwen3", seed, **({"vocab_size": len(tok), "max_position_embeddings": 2048, **ends} | changes))


def judge(seed: int = 0, folder: Path | None = None, labels: int = 1, **changes: Any) -> Any:
    """A tiny reward model for `tokenizer()`, saved with one where a folder is given."""
    size = {"vocab_size": len(tokenizer()), "max_position_embeddings": 2048, "num_labels": labels}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**(COMMON | size | changes)))
    if folder is not None:
        model.save_pretrained(folder)
        fresh_tokenizer().save_pretrained(folder)
    return model


def config(folder: Path | str, **changes: Any) -> GRPOConfig:
    """A quiet config: SGD-sized batches of 8 rollouts in groups of 4, no checkpoints."""
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1,
        "max_completion_length": 16, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "log_level": "error", "logging_steps": 1, "gradient_checkpointing": False, "learning_rate": 0.1,
        "lr_scheduler_type": "constant", "shuffle_dataset": False, "max_grad_norm": 0.0, "optim": "sgd",
        "record_episodes": False, "vllm_importance_sampling_correction": False,  # the log-probs of `Fixed` are a filler
    }  # fmt: skip
    return GRPOConfig(**(settings | changes))


@dataclass(frozen=True)
class Fixed:
    """Completions that do not depend on the model: `table[prompt]` is a list of (ids, reward)."""

    table: dict[str, Sequence[tuple[list[int], float | None]]]
    log_prob: float = -1.0
    calls: list[list[str]] | None = None

    @property
    def rows(self) -> list[dict[str, str]]:
        return [{"prompt": prompt} for prompt in self.table]

    def prompt_ids(self, prompt: str) -> list[int]:
        return tokenizer().encode(prompt, add_special_tokens=False)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        if self.calls is not None:
            self.calls.append(list(prompts))
        members = [(p, ids, reward) for p in prompts for ids, reward in self.table[p]]
        return {
            "prompt_ids": [self.prompt_ids(p) for p, _, _ in members],
            "completion_ids": [list(ids) for _, ids, _ in members],
            "logprobs": [[self.log_prob] * len(ids) for _, ids, _ in members],
            "score": [reward for _, _, reward in members],
        }


def score(score: list[float | None], **kwargs: Any) -> list[float | None]:
    """The rewards of `Fixed`."""
    return score


def stop() -> int:
    return tokenizer().eos_token_id


def fixed(groups: int = 2, size: int = 4, *, truncated: Sequence[int] = (), seed: int = 0) -> Fixed:
    """`groups` prompts x `size` completions of 1 to 11 tokens with rewards that differ within each group.

    `truncated`: places (counted over all) of completions that do not end with the stop token.
    """
    draw = torch.Generator().manual_seed(seed)
    table: dict[str, list[tuple[list[int], float | None]]] = {}
    for g in range(groups):
        members: list[tuple[list[int], float | None]] = []
        for m in range(size):
            length = int(torch.randint(0, 11, (1,), generator=draw))
            ids = torch.randint(10, 250, (length,), generator=draw).tolist()
            last = 11 if g * size + m in truncated else stop()
            members.append(([*ids, last], float((3 * m + g) % 4)))
        table[f"question {g}: " + "x" * g] = members
    return Fixed(table)


def trainer(model: Any, samples: Fixed, args: GRPOConfig, **changes: Any) -> GRPOTrainer:
    """A trainer that plays `samples`."""
    settings: dict[str, Any] = {
        "reward_funcs": score, "train_dataset": samples.rows, "rollout_func": samples, "processing_class": tokenizer(),
    }  # fmt: skip
    return GRPOTrainer(model, args=args, **(settings | changes))


def weights(model: Any) -> torch.Tensor:
    """All parameters end to end, a copy."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def logs_with(trainer: Any, name: str) -> list[float]:
    """The logged values of a metric, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def lasting(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock says, and without how rollouts lie in a process's rows: two runs agree on these."""
    clock = ("_s", "step_time", "runtime", "per_second", "rollout/concurrency")
    cut = ("train_", "total_flos", "batch/row_", "batch/samples_per_row", "batch/packing_ratio", "batch/pad_frac",
           "batch/forwarded_tokens_per_step")  # fmt: skip
    return {k: v for k, v in metrics.items() if not k.endswith(clock) and not k.startswith(cut)}


def log_probs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """[N] by the plain forward of one sequence alone."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def step_loss(
    model: Any, samples: Fixed, loss_type: str, *, max_length: int = 16, old: Callable[..., torch.Tensor] | None = None,
    masked: Sequence[int] = (),
) -> torch.Tensor:  # fmt: skip
    """The loss of one step over all of `samples` in one micro-batch, token by token, without any of agentrl's code."""
    terms, n = [], 0
    for prompt, members in samples.table.items():
        rewards = torch.tensor([r for _, r in members], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for (ids, _), advantage in zip(members, advantages.tolist(), strict=True):
            if n not in masked:
                now = log_probs(model, samples.prompt_ids(prompt), ids)
                before = now.detach() if old is None else old(samples.prompt_ids(prompt), ids)
                ratio = (now - before).exp()
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            n += 1
    total = sum(len(t) for t in terms)
    if loss_type == "grpo":
        return torch.stack([t.mean() for t in terms]).sum() / n
    if loss_type in ("bnpo", "dapo"):
        return torch.cat(terms).sum() / total
    assert loss_type == "dr_grpo"
    return torch.cat(terms).sum() / (n * max_length)


# --- environments, and trainers that play them with the engine ---
def length(completions: list[Any], **kwargs: Any) -> list[float]:
    """Rewards that differ for different texts."""
    return [float(len(str(completion)) % 5) for completion in completions]


def make(folder: Path, script: Any = None, *, args: dict[str, Any] | None = None, **settings: Any) -> GRPOTrainer:
    """A trainer on a tiny random model; with `script`, that is what the policy says."""
    given = {"model": policy(), "args": config(folder, **(args or {})), "processing_class": tokenizer()}
    made = GRPOTrainer(**(given | settings))
    if script is not None:
        made.player.engine.sampler = ScriptedSampler(script, tokenizer=tokenizer())
    return made


class Door:
    """Opens after enough pushes. Counts what happened over all instances."""

    log: ClassVar[list[dict[str, Any]]] = []

    def reset(self, seed: int = -1, **row: Any) -> str:
        self.pushes, self.done = 0, False
        type(self).log.append({"seed": seed, **row})
        return f"The door is closed, {seed}."

    def get_reward(self) -> float:
        return float(self.pushes)

    def push(self, times: int) -> str:
        """Push the door.

        Args:
            times: How often.
        """
        self.pushes += times
        self.done = self.pushes >= 3
        return f"pushed {self.pushes}"


class Lamp:
    """Another environment with a tool of its own."""

    def reset(self) -> None:
        self.on = False

    def get_reward(self) -> float:
        return float(self.on)

    async def switch(self) -> str:
        """Switch the lamp."""
        self.on = not self.on
        return "on" if self.on else "off"
