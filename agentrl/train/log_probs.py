"""Log-probabilities of trained tokens: the only forward pass of training, with logits only where needed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.train.attention import Layout, running
from agentrl.train.rows import Row, TrainItem, make_row
from agentrl.types import TrainingSequence

log = logging.getLogger(__name__)
MAX_LOGITS = 1 << 24  # fp32 logits alive at once: 64 MiB


@dataclass(frozen=True, slots=True)
class RowLogProbs:
    """What the policy says about a row's N trained tokens."""

    log_probs_N: Tensor  # of softmax(logits / temperature), with gradient where enabled
    entropy_N: Tensor  # nats, of the same distribution, without gradient


def token_log_probs(hidden_N: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor], temperature: float):
    """Log-prob of each target and entropy of its distribution, in chunks of at most `MAX_LOGITS` logits.

    Args:
        hidden_N: [N, hidden] states that predict the targets.
        targets_N: [N] token ids.
        head: [n, hidden] to [n, vocabulary] logits, as the model makes them.
        temperature: Logits are divided by it.

    Returns:
        ([N] log-probs, [N] entropies without gradient), fp32.
    """

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        log_probs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            known = log_probs.detach()
            # a log-prob of -inf has probability 0 and adds nothing
            entropy = -torch.linalg.vecdot(known.exp(), known.clamp_min(torch.finfo(known.dtype).min))
        return log_probs.gather(-1, targets[:, None])[:, 0], entropy

    if not len(targets_N):
        # Keeps the graph, output layer included: DDP waits for a gradient of every parameter, a zero will do.
        empty = head(hidden_N).sum(-1).float()
        return empty, empty.detach()
    with torch.no_grad():
        vocabulary = head(hidden_N[:1]).shape[-1]
    size = max(16, MAX_LOGITS // vocabulary)
    if len(targets_N) <= size:
        return chunk(hidden_N, targets_N)
    parts = []
    for at in range(0, len(targets_N), size):
        piece = hidden_N[at : at + size], targets_N[at : at + size]
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, *piece, use_reentrant=False))
        else:
            parts.append(chunk(*piece))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class PolicyForward:
    """Runs rows through a causal language model, packed where that is right for it, else padded.

    Which way is right is found by behaviour: on first use a small row is run packed and one sequence at a time, and
    packing is used only if they agree. The same holds for computing the output layer apart from the model.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        self.model, self.temperature = model, temperature  # the bare causal model, no wrapper
        self.packs: bool | None = None
        self.splits_head: bool | None = None
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._before: PolicyForward | None = model.__dict__.get("_agentrl_policy_forward")  # another trainer's, say
        self._original = self._before._original if self._before is not None else model.forward
        model.forward = types.MethodType(_forward, model)  # so that DDP and PEFT wrappers stay in the path
        model._agentrl_policy_forward = self  # type: ignore[attr-defined]

    def restore(self) -> None:
        """The model's own `forward` is back, or that of the `PolicyForward` that was there before."""
        if self.model.__dict__.get("_agentrl_policy_forward") is not self:
            return
        if self._before is not None:
            self.model._agentrl_policy_forward = self._before  # type: ignore[attr-defined]
        else:
            self.model.forward = self._original
            del self.model._agentrl_policy_forward  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def context(self, row: Row):
        """Forward and backward of `row` must both run inside: activation checkpointing recomputes in the backward."""
        if not self.packs:
            yield
            return
        with running(self.model, Layout.of(row.lengths, row.input_ids_T.device)):
            yield

    def run(self, row: Row) -> RowLogProbs:
        """Called through the wrapped model's forward."""
        hidden_or_logits = self._hidden(row)
        if self.splits_head:
            return RowLogProbs(*token_log_probs(hidden_or_logits, row.targets_N, self._head, self.temperature))
        return RowLogProbs(*token_log_probs(hidden_or_logits, row.targets_N, lambda x: x, self.temperature))

    # --- two ways through the decoder ---
    def _hidden(self, row: Row) -> Tensor:
        """[N, hidden] (or [N, vocabulary] where the head cannot be split off) at the positions that predict."""
        call = self._decoder if self.splits_head else self._logits
        if self.packs:
            inputs = {"input_ids": row.input_ids_T[None], "position_ids": row.position_ids_T[None]}
            if not self.splits_head and "logits_to_keep" in inspect.signature(self._original).parameters:
                return call(**inputs, logits_to_keep=row.scored_by_N)[0]
            return call(**inputs)[0].index_select(0, row.scored_by_N)
        inputs, where = padded(row, self._takes_positions)
        out = call(**inputs)
        return out.reshape(-1, out.shape[-1]).index_select(0, where[row.scored_by_N])

    def _decoder(self, **inputs: Any) -> Tensor:
        base = getattr(self.model, self.model.base_model_prefix)
        return base(**inputs, use_cache=False).last_hidden_state

    def _logits(self, **inputs: Any) -> Tensor:
        return self._original(**inputs, use_cache=False).logits

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden)  # type: ignore[misc]
        config = self.model.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (scaling := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scaling
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    # --- finding out ---
    @torch.no_grad()
    def probe(self) -> None:
        """`packs` and `splits_head` are known; both are used only where they give what the plain model gives."""
        if self.packs is not None:
            return
        was_training = self.model.training
        self.model.eval()
        try:
            row = self._probe_row()
            self.packs = self.splits_head = False
            plain = self.run(row).log_probs_N
            self.splits_head = self._agrees(row, plain, "splitting off the output layer")
            config = self.model.config.get_text_config()
            if self._takes_positions and config._attn_implementation == "sdpa":
                self.packs = True
                self.packs = self._agrees(row, plain, "packing")
        finally:
            self.model.train(was_training)

    def _probe_row(self) -> Row:
        vocabulary = self.model.config.get_text_config().vocab_size
        low, device = min(3, vocabulary - 1), next(self.model.parameters()).device
        window = getattr(self.model.config.get_text_config(), "sliding_window", None) or 0
        long = min(window + 9, 600) if window else 24
        sequences = []
        for n, length in enumerate((7, long, 12)):
            ids = [low + (n * 31 + 7 * t * t + t) % max(1, vocabulary - low) for t in range(length)]
            sequences.append(TrainingSequence(ids, [t > 1 for t in range(length)], [0.0] * length))
        return make_row([TrainItem(0, tuple(sequences), 1.0, True)], device)

    def _agrees(self, row: Row, plain: Tensor, what: str) -> bool:
        """Whether the way that is switched on gives the plain model's numbers, and no segment sees another."""
        if what.startswith("splitting"):
            self.splits_head = True
        fp32 = next(self.model.parameters()).dtype == torch.float32
        try:
            with self.context(row):
                other = self.run(row).log_probs_N
                changed = self.run(_other_first_segment(row)).log_probs_N
        except Exception as error:  # whatever a foreign architecture raises means the same: not this way
            log.info("%s is not used for %s: %s", what, type(self.model).__name__, error)
            return False
        after = row.scored_by_N >= row.lengths[0]
        leak = (changed - other)[after].abs().max().item()
        worst = (other - plain).abs().max().item()
        if not (worst <= (1e-4 if fp32 else 0.15) and leak <= (1e-5 if fp32 else 1e-3)):
            log.info("%s is not used for %s: off by %.3g, leak %.3g", what, type(self.model).__name__, worst, leak)
            return False
        return True


def _other_first_segment(row: Row) -> Row:
    """The row with other tokens in its first segment: nothing after it may change."""
    ids = row.input_ids_T.clone()
    ids[: row.lengths[0]] = ids[: row.lengths[0]].flip(0)
    return replace(row, input_ids_T=ids)


def _forward(self: PreTrainedModel, *args: Any, agentrl_row: Row | None = None, **kwargs: Any) -> Any:
    policy: PolicyForward = self._agentrl_policy_forward  # type: ignore[attr-defined]
    if agentrl_row is None:
        return policy._original(*args, **kwargs)
    out = policy.run(agentrl_row)
    return {"log_probs_N": out.log_probs_N, "entropy_N": out.entropy_N}


def padded(row: Row, positions: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The row as [S, L] right-padded inputs, and [T] where each token of the row lies in them.

    Position ids are given wherever the model takes them, so padding cannot shift a position.
    """
    device, longest = row.input_ids_T.device, max(row.lengths)
    size = torch.tensor(row.lengths, device=device)
    mask = torch.arange(longest, device=device)[None, :] < size[:, None]
    where = mask.reshape(-1).nonzero()[:, 0]
    ids = torch.zeros(mask.numel(), dtype=torch.long, device=device)
    ids[where] = row.input_ids_T
    inputs = {"input_ids": ids.view_as(mask), "attention_mask": mask.long()}
    if positions:
        inputs["position_ids"] = torch.arange(longest, device=device).expand(len(row.lengths), -1)
    return inputs, where
