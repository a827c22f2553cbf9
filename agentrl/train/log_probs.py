"""Log-probabilities of trained tokens: the only forward pass of training, with logits only where needed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.sampler.rope import forget_lengths, rope_limit
from agentrl.sampler.vision import check_drawn, features, placeholder_ids, vision_parameters, without
from agentrl.train.attention import MaskNeeded, running, stand_down
from agentrl.train.candidates import joined
from agentrl.train.delta_net import DeltaLayout, delta_running, has_delta_layers
from agentrl.train.head import renormalised, scores
from agentrl.train.layout import Layout
from agentrl.train.probe import find_ways
from agentrl.train.rows import Row, TrainItem, each_sequence, filled

log = logging.getLogger(__name__)
MAX_LOGITS = 1 << 24  # fp32 logits alive at once: 64 MiB


@dataclass(frozen=True, slots=True)
class RowLogProbs:
    """What the policy says about a row's N trained tokens."""

    log_probs_N: Tensor  # of softmax(logits / temperature), within the row's `sets_NK`; with gradient where enabled
    entropy_N: Tensor  # nats, of the whole vocabulary's distribution; gradient only where `Wanted` asks for it
    candidates_NK: Tensor | None = None  # log-probs of the ids in `Wanted.candidates_NK`, -inf where the id is -1
    router_loss: Tensor | None = None  # the model's load-balancing loss over the row's tokens, where asked for


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a forward pass gives besides log-probs and entropies."""

    entropy_gradient: bool = False
    router_loss: bool = False
    candidates_NK: Tensor | None = None  # ids, padded with -1


PLAIN = Wanted()


def score_tokens(
    hidden_N: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor], temperature: float,
    wanted: Wanted = PLAIN,
) -> RowLogProbs:  # fmt: skip
    """Everything that comes out of the head, in chunks of at most `MAX_LOGITS` logits, made again in the backward pass.

    Args:
        hidden_N: [N, hidden] states that predict the targets.
        targets_N: [N] token ids.
        head: [n, hidden] to [n, vocabulary] logits, as the model makes them.
        temperature: Logits are divided by it.
        wanted: Gradient of the entropies; log-probs of more ids per token.

    Returns:
        fp32, or float64 where the logits are.
    """

    def chunk(hidden: Tensor, targets: Tensor, candidates: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        return scores(logits, targets, candidates, entropy_gradient=wanted.entropy_gradient)

    ids = wanted.candidates_NK
    if not len(targets_N):
        # Keeps the graph, output layer included: DDP waits for a gradient of every parameter, a zero will do.
        empty = head(hidden_N).sum(-1).float()
        none = None if ids is None else empty[:, None].expand(0, ids.shape[1])
        return RowLogProbs(empty, empty if wanted.entropy_gradient else empty.detach(), none)
    with torch.no_grad():
        vocabulary = head(hidden_N[:1]).shape[-1]
    size = max(16, MAX_LOGITS // vocabulary)
    parts = []
    for at in range(0, len(targets_N), size):
        piece = hidden_N[at : at + size], targets_N[at : at + size], None if ids is None else ids[at : at + size]
        if torch.is_grad_enabled() and len(targets_N) > size:
            parts.append(checkpoint(chunk, *piece, use_reentrant=False))
        else:
            parts.append(chunk(*piece))
    if len(parts) == 1:
        return RowLogProbs(*parts[0])
    candidates = None if ids is None else torch.cat([part[2] for part in parts])
    return RowLogProbs(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), candidates)


class PolicyForward:
    """Runs rows through a causal language model, packed where that is right for it, else padded.

    Which way is right is found by behaviour (probe.py). Where rotary positions depend on the longest sequence, rows
    with one beyond the limit run one sequence at a time. Rows with images are always padded, and ids that stand for
    images have probability 0, as they have where turns are sampled.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, *, multiple: int = 1) -> None:
        self.model, self.temperature = model, temperature  # the bare causal model, no wrapper
        self.multiple = multiple  # of the tokens in a row, or in each padded sequence
        self.packs: bool | None = None  # None: not known yet
        self.splits_head: bool | None = None
        self.least_shared: int | None = None  # tokens that a common beginning must save to stand once; None: none does
        self.why_not_shared = "that is not known yet"
        self.longest_packed: int | None = None  # beyond it the model may attend to less than packed attention does
        self.limit = rope_limit(model.config.get_text_config())
        self.placeholders = placeholder_ids(model)
        self._runs_states = has_delta_layers(model)
        self._eyes = vision_parameters(model) if self.placeholders else []
        self._before: PolicyForward | None = model.__dict__.get("_agentrl_policy_forward")  # another trainer's, say
        self._original = self._before._original if self._before is not None else model.forward
        self.takes_positions = "position_ids" in inspect.signature(self._original).parameters
        model.forward = types.MethodType(_forward, model)  # so that DDP and PEFT wrappers stay in the path
        model._agentrl_policy_forward = self  # type: ignore[attr-defined]

    def probe(self) -> None:
        """`packs`, `splits_head` and `least_shared` are known."""
        if self.packs is None:
            find_ways(self)

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
        if not self._packed(row):
            yield
            return
        full, device = filled(row, self.multiple), row.input_ids_T.device
        along = contextlib.nullcontext()
        if self._runs_states:
            along = delta_running(self.model, DeltaLayout.of(full.lengths, full.parents, device))
        with running(self.model, Layout.of(full.lengths, full.parents, device)), along:
            yield

    def run(self, row: Row, wanted: Wanted = PLAIN) -> RowLogProbs:
        """Called through the wrapped model's forward."""
        check_drawn(row.targets_N, self.placeholders)  # else its log-prob is -inf, and the loss is NaN
        hidden_or_logits, router_loss = self._hidden(row, wanted.router_loss)
        ids = joined(row.sets_NK, wanted.candidates_NK)
        out = score_tokens(
            hidden_or_logits, row.targets_N, self._logits, self.temperature, replace(wanted, candidates_NK=ids)
        )  # fmt: skip
        out = replace(_within_sets(out, row.sets_NK), router_loss=router_loss)
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._eyes and torch.is_grad_enabled() and together:
            # Not every row shows images, and DDP waits for a gradient of every parameter: a zero will do.
            zero = torch.stack([p.reshape(-1)[0].float() for p in self._eyes]).sum() * 0.0
            out = replace(out, log_probs_N=out.log_probs_N + zero.to(out.log_probs_N))
        return out

    def filler(self, row: Row) -> int:
        """Positions that a forward pass of `row` computes besides the row's tokens (each of which may be repeated)."""
        if self._by_itself(row):
            return sum(-length % self.multiple for length in row.sequence_lengths)
        if self._packed(row):
            return -len(row.input_ids_T) % self.multiple
        longest = row.longest + -row.longest % self.multiple
        return longest * len(row.sequence_lengths) - len(row.input_ids_T)

    def least_for(self, items: Sequence[TrainItem]) -> int | None:
        """`least_shared` for rows of these rollouts; None where they would not run packed, which undoes sharing."""
        sequences = [sequence for item in items for sequence in item.sequences]
        longest = max((len(sequence.input_ids) for sequence in sequences), default=0)
        return self.least_shared if self._packs(longest, any(sequence.media for sequence in sequences)) else None

    # --- two ways through the decoder ---
    def _packed(self, row: Row) -> bool:
        return self._packs(row.longest, row.has_media)

    def _packs(self, longest: int, media: bool) -> bool:
        bounds = [bound for bound in (self.limit, self.longest_packed) if bound is not None]
        return bool(self.packs) and not media and all(longest <= bound for bound in bounds)

    def _by_itself(self, row: Row) -> bool:
        """Whether a sequence of the row would change the positions of others."""
        return self.limit is not None and row.longest > self.limit

    def _hidden(self, row: Row, router: bool) -> tuple[Tensor, Tensor | None]:
        """[N, hidden] (or [N, vocabulary] where the head cannot be split off) at the positions that predict.

        With `router`, also the load-balancing loss of the row's tokens, padding left out.
        """
        rows = each_sequence(row) if self._by_itself(row) else [row]
        try:
            parts = [self._states(part, router) for part in rows]
        except MaskNeeded as error:  # only now: some models make a mask of their own for long sequences alone
            if not self._packed(row):
                raise
            log.warning("packing is not used any more for %s: %s", type(self.model).__name__, error)
            self.packs, self.least_shared = False, None
            self.why_not_shared = "the model makes a mask of its own"
            stand_down(self.model)
            parts = [self._states(row, router)]
        hidden = torch.cat([states for states, _ in parts]) if len(parts) > 1 else parts[0][0]
        if not router:
            return hidden, None
        balance = router_loss_of(self.model)
        assert balance is not None  # setup.check_router
        return hidden, balance(tuple(torch.cat(layer) for layer in zip(*(layers for _, layers in parts), strict=True)))

    def _states(self, row: Row, router: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`_hidden` of one forward of the decoder, with the router logits of each layer, [T, experts]."""
        if self.limit is not None:
            forget_lengths(self.model)
        asked: dict[str, Any] = {"output_router_logits": True} if router else {}
        if self._packed(row):
            full = filled(row, self.multiple)
            asked |= {"input_ids": full.input_ids_T[None], "position_ids": full.position_ids_T[None]}
            where = row.places_M if full is not row or row.shared else None
            if not self.splits_head and "logits_to_keep" in inspect.signature(self._original).parameters:
                out = self._original(**asked, logits_to_keep=row.scored_by_N, use_cache=False)
                return out.logits[0], _router_layers(out, where) if router else ()
        else:
            inputs, where = padded(row, self.takes_positions, self.multiple)
            asked |= inputs
        if self.splits_head:
            out = getattr(self.model, self.model.base_model_prefix)(**asked, use_cache=False)
            states = out.last_hidden_state
        else:
            out = self._original(**asked, use_cache=False)
            states = out.logits
        at = row.scored_by_N if where is None else where[row.scored_at_N]
        picked = states.reshape(-1, states.shape[-1]).index_select(0, at)
        return picked, _router_layers(out, where) if router else ()

    def _logits(self, hidden_or_logits: Tensor) -> Tensor:
        logits = self._head(hidden_or_logits) if self.splits_head else hidden_or_logits
        return without(logits, self.placeholders)

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


def _router_layers(out: Any, where: Tensor | None) -> tuple[Tensor, ...]:
    """The router logits of each layer, of the tokens at `where` (None: all), each as often as it stands there."""
    layers = tuple(layer.reshape(-1, layer.shape[-1]) for layer in out.router_logits if layer is not None)
    return layers if where is None else tuple(layer.index_select(0, where) for layer in layers)


def _within_sets(out: RowLogProbs, sets_NK: Tensor | None) -> RowLogProbs:
    """Log-probs of the distribution that each token was drawn from; `out` has those of its set before the others."""
    if sets_NK is None or out.candidates_NK is None:
        return out
    inside_NK, others_NH = out.candidates_NK.split([sets_NK.shape[1], out.candidates_NK.shape[1] - sets_NK.shape[1]], 1)
    others = renormalised(others_NH, inside_NK) if others_NH.shape[1] else None
    return replace(out, log_probs_N=renormalised(out.log_probs_N, inside_NK), candidates_NK=others)


def _forward(
    self: PreTrainedModel, *args: Any, agentrl_row: Row | None = None, agentrl_wanted: Wanted = PLAIN, **kwargs: Any
) -> Any:
    policy: PolicyForward = self._agentrl_policy_forward  # type: ignore[attr-defined]
    if agentrl_row is None:
        return policy._original(*args, **kwargs)
    out = policy.run(agentrl_row, agentrl_wanted)
    made = {name: getattr(out, name) for name in RowLogProbs.__slots__}
    return {name: value for name, value in made.items() if value is not None}  # wrappers look for tensors only


def router_loss_of(model: Any) -> Callable[[tuple[Tensor, ...]], Tensor] | None:
    """The load-balancing loss that transformers has for this architecture, of [T, experts] logits per layer."""
    balance = getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)
    experts, chosen = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    if balance is None or not experts or not chosen:
        return None
    if list(inspect.signature(balance).parameters)[:3] != ["gate_logits", "num_experts", "top_k"]:
        return None  # Doge's takes something else
    return lambda layers: balance(layers, experts, chosen)


@torch.no_grad()
def routes(model: Any) -> bool:
    """Whether a forward of the model gives router logits when it is asked for them."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        logits = model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    except (TypeError, AttributeError, ValueError):  # an architecture that does not know the question
        return False
    return any(layer is not None for layer in logits or ())


def padded(row: Row, positions: bool, multiple: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """The row as [S, L] right-padded inputs, and [M] where its sequences' tokens lie in them; `multiple` divides L.

    Position ids are given wherever the model takes them, so padding cannot shift a position. Not beside images: some
    models (Qwen-VL) count positions by images, and do so themselves.
    """
    device, longest = row.input_ids_T.device, -(-row.longest // multiple) * multiple
    size = torch.tensor(row.sequence_lengths, device=device)
    steps = torch.arange(longest, device=device)
    mask = steps[None, :] < size[:, None]
    where = mask.reshape(-1).nonzero()[:, 0]
    ids = torch.zeros(mask.numel(), dtype=torch.long, device=device)
    ids[where] = row.input_ids_T[row.places_M]
    inputs = {"input_ids": ids.view_as(mask), "attention_mask": mask.long()}
    if row.has_media:
        media = [sequence.media for item in row.items for sequence in item.sequences]
        return inputs | features(media, inputs["input_ids"]), where
    if positions:  # behind the longest sequence 0: a learnt position may not exist there
        inputs["position_ids"] = torch.where(steps < row.longest, steps, 0).expand(len(size), -1)
    return inputs, where
