"""Forwards of the model over the cached rows, and the drawing of tokens from their logits.

Nothing here knows of event loops: it is called on the loop's thread or on the sampler's, never on both at once.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from agentrl.errors import ConfigurationError
from agentrl.sampler import draw
from agentrl.sampler.admission import Feed
from agentrl.sampler.kv_cache import SLOT_ATTENTION, SlotCache
from agentrl.sampler.rope import rope_limit
from agentrl.sampler.slots import Turn
from agentrl.sampler.vision import features, placeholder_ids, without
from agentrl.types import SamplingParams

Moves = tuple[list[int], list[int], int]  # source slots, target slots, tokens


class Drawn(NamedTuple):
    """What was drawn, one entry per row."""

    ids: list[int]
    log_probs: list[float]
    sets: list[Sequence[int]] | None = None  # where a row's parameters truncate
    tops: list[Mapping[int, float]] | None = None  # where a row's request asks for them


class ModelRunner:
    """The model, its cache and its masks."""

    def __init__(
        self,
        model: Any,
        max_slots: int,
        max_forward_tokens: int,
        max_context: int | None,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if getattr(base.config, "is_encoder_decoder", False):
            raise ConfigurationError(
                f"{type(base).__name__} is an encoder-decoder; TransformersSampler needs a decoder-only language model."
            )
        self.model = model
        self.config = base.config.get_text_config()
        self.layer_types = _layer_types(self.config)
        self.windows = _windows(self.config, self.layer_types)
        self.vocabulary = base.get_input_embeddings().weight.shape[0]
        self.context = _context(self.config, max_context)
        self.max_slots = max_slots
        self.max_forward_tokens = max_forward_tokens
        self.autocast_dtype = autocast_dtype
        self.attention = "sdpa"  # while forwarding: the implementation in use
        self.placeholders = placeholder_ids(base)  # ids that stand for images and are never drawn
        self.cache = SlotCache()
        self.prefilled_tokens = 0
        self.forwards = 0
        arguments = set(inspect.signature(base.forward).parameters)
        prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
        stateful = self.layer_types is None or getattr(base, "_is_stateful", False)
        self.cached = {"past_key_values", "position_ids"} <= arguments and not stateful and not prompt_learning
        self._checked = False
        self._keeps_logits = "logits_to_keep" in arguments
        self._supports_sdpa = bool(getattr(base, "_supports_sdpa", False))
        self._exchangeable = bool(getattr(base, "_supports_attention_backend", False))

    def free(self) -> None:
        """The cache's memory is given back."""
        self.cache.free()

    def decode(self, turns: Sequence[Turn], moves: Moves) -> Drawn:
        """One more token for each turn; turn `i` lives in slot `i`."""
        with self._forwarding():
            if not self.cached:
                return self._draw(self._whole(turns), turns)
            self._move(moves)
            tokens = np.fromiter((turn.held[-1] for turn in turns), np.int64, len(turns))
            lengths = np.fromiter((len(turn.held) - 1 for turn in turns), np.int64, len(turns))
            visible = int(lengths.max()) + 1
            self._reserve(len(turns), visible)
            logits_BV = self._forward(0, tokens[:, None], lengths[:, None], None, visible)
            return self._draw(logits_BV, turns)

    def feed(self, feeds: Sequence[Feed], moves: Moves) -> Drawn:
        """The first token of each turn. Rows lie in consecutive slots, leaders first, shortest first."""
        with self._forwarding():
            self._check()
            if self.cached and any(feed.turn.request.media for feed in feeds):
                self.cached = False  # from here on: keys of other images may lie under the same ids
                self.cache.free()
            if not self.cached:
                turns = [feed.turn for feed in feeds]
                self.prefilled_tokens += sum(len(turn.held) for turn in turns)
                return self._draw(self._whole(turns), turns)
            self._move(moves)
            first = feeds[0].row.slot
            self._reserve(first + len(feeds), max(len(feed.turn.held) for feed in feeds))
            for feed in feeds:
                if feed.donor is not None:
                    self.cache.copy([feed.donor.slot], [feed.row.slot], feed.start)
            fed = [feed for feed in feeds if feed.leader is None]
            logits = [self._feed_bucket(bucket) for bucket in _buckets(fed, self.max_forward_tokens)]
            logits_BV = torch.cat(logits) if len(logits) > 1 else logits[0]
            followers = [(feed.leader.row.slot, feed) for feed in feeds if feed.leader is not None]
            if followers:
                sources = [slot for slot, _ in followers]
                longest = max(feed.start for _, feed in followers)
                self.cache.copy(sources, [feed.row.slot for _, feed in followers], longest)
                index = list(range(len(fed))) + [slot - first for slot in sources]
                logits_BV = logits_BV[index]
            self.prefilled_tokens += sum(len(feed.new) for feed in fed)
            return self._draw(logits_BV, [feed.turn for feed in feeds])

    def _feed_bucket(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The next-token logits [N, V] of rows in consecutive slots, fed in one forward or, when long, several."""
        if len(feeds) == 1 and len(feeds[0].new) > self.max_forward_tokens:
            feed = feeds[0]
            step = self.max_forward_tokens
            last = (len(feed.new) - 1) // step * step
            for begin in range(0, last, step):
                self._feed_window(feed.row.slot, [feed.new[begin : begin + step]], [feed.start + begin])
            return self._feed_window(feed.row.slot, [feed.new[last:]], [feed.start + last])
        return self._feed_window(feeds[0].row.slot, [feed.new for feed in feeds], [feed.start for feed in feeds])

    def _feed_window(self, first: int, news: list[list[int]], starts: list[int]) -> torch.Tensor:
        """One forward of new tokens, left-padded so that every row's last token is the window's last."""
        width = max(map(len, news))
        tokens = np.zeros((len(news), width), np.int64)
        positions = np.zeros((len(news), width), np.int64)
        real = np.zeros((len(news), width), bool)
        for i, (new, start) in enumerate(zip(news, starts, strict=True)):
            pad = width - len(new)
            tokens[i, pad:] = new
            positions[i, pad:] = np.arange(start, start + len(new))
            real[i, pad:] = True
        padded = None if real.all() else real
        return self._forward(first, tokens, positions, padded, int(positions.max()) + 1)

    def _forward(
        self, first: int, tokens: np.ndarray, positions: np.ndarray, real: np.ndarray | None, visible: int
    ) -> torch.Tensor:
        """The last column's logits [N, V] in float32; `real` is False where a token is padding."""
        device = self.device
        tokens_NW = torch.from_numpy(tokens).to(device, non_blocking=True)
        positions_NW = torch.from_numpy(positions).to(device, non_blocking=True)
        columns_NW = positions_NW
        if real is not None:
            columns_NW = torch.where(torch.from_numpy(real).to(device), positions_NW, self.cache.trash)
        self.cache.begin(first, columns_NW, visible)
        self.forwards += 1
        output = self.model(
            input_ids=tokens_NW,
            attention_mask=self._mask(positions_NW, visible),
            position_ids=positions_NW,
            past_key_values=self.cache,
            use_cache=True,
            **self._keep(1),
        )
        return output.logits[:, -1].float()

    def _whole(self, turns: Sequence[Turn]) -> torch.Tensor:
        return self._recompute([turn.held for turn in turns], [turn.request.media for turn in turns])

    def _recompute(self, rows: Sequence[list[int]], media: Sequence[tuple[Any, ...]] = ()) -> torch.Tensor:
        """The next-token logits [B, V] of whole sequences with the images in them, without any cache.

        Padding is on the right, where no causal model can see it, whatever its layers are.
        """
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        parts: list[torch.Tensor] = []
        begin = 0
        while begin < len(order):
            end = begin + 1
            while end < len(order) and len(rows[order[end]]) * (end + 1 - begin) <= self.max_forward_tokens:
                end += 1
            some = [rows[i] for i in order[begin:end]]
            shortest, longest = len(some[0]), len(some[-1])
            # A row is padded with its own last token: models warn when they meet their padding id.
            ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in some], device=self.device)
            self.forwards += 1
            images = features([media[i] for i in order[begin:end]], ids) if media else {}
            keep = longest - shortest + 1
            logits = self.model(input_ids=ids, use_cache=False, **images, **self._keep(keep)).logits[:, -keep:]
            last = torch.tensor([len(row) - shortest for row in some], device=logits.device)
            parts.append(logits[torch.arange(len(some), device=logits.device), last].float())
            begin = end
        return torch.cat(parts)[torch.tensor(order).argsort().to(parts[0].device)]

    def _check(self) -> None:
        """Whether the model's cached forwards equal its plain ones is known; if not, nothing is cached.

        Three sequences of unlike lengths go both ways once. Names of architectures say too little: ALiBi, hidden
        local windows and remote code all differ here.
        """
        if self._checked or not self.cached:
            return
        self._checked = True
        forwards = self.forwards
        rows = [[(7 * i + 3 * k) % self.vocabulary for i in range(length)] for k, length in enumerate((9, 4, 6))]
        try:
            self._reserve(len(rows), 16)
            self._feed_window(0, [row[:-1] for row in rows], [0] * len(rows))
            ends = np.array([[row[-1]] for row in rows])
            places = np.array([[len(row) - 1] for row in rows])
            cached = self._forward(0, ends, places, None, int(places.max()) + 1).log_softmax(-1)
            gap = (cached - self._recompute(rows).log_softmax(-1)).abs().mean().item()
            exact = self.model.dtype == torch.float32 and self.autocast_dtype is None
            # NaN is the weights' fault, and said where a token is drawn.
            fine = math.isnan(gap) or gap < (1e-3 if exact else 0.2)
            problem = "" if fine else f"log-probs differ by {gap:.2g} with a cache"
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        self.cache.free()
        self.forwards = forwards
        if problem:
            self.cached = False
            warnings.warn(
                f"Model type '{self.config.model_type}' cannot use the sampler's cache ({problem}); every token "
                "will be a forward of whole sequences. A vLLM server is faster.",
                stacklevel=2,
            )

    def _keep(self, count: int) -> dict[str, Any]:
        """Arguments that ask for the last `count` positions' logits only, where the model can."""
        return {"logits_to_keep": count} if self._keeps_logits else {}

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _mask(self, positions_NW: torch.Tensor, visible: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """What each token sees: columns up to its own position. Padding, at position 0, sees column 0."""
        columns = torch.arange(visible, device=positions_NW.device)
        query = positions_NW[:, None, :, None]
        causal = columns <= query
        masks = {}
        for kind, window in self.windows.items():
            seen = causal
            if window is not None and kind == "chunked_attention":
                seen = causal & (columns // window == query // window)
            elif window is not None and visible > window:
                seen = causal & (columns > query - window)
            masks[kind] = seen if self.attention == "sdpa" else self._additive(seen)
        return masks if self.layer_types else masks["full_attention"]

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def _draw(self, logits_BV: torch.Tensor, turns: Sequence[Turn]) -> Drawn:
        """An id and its log-prob for each turn, the rows grouped by their parameters."""
        logits_BV = without(logits_BV, self.placeholders)
        uniform_B = torch.tensor([next(turn.stream) for turn in turns], dtype=torch.float64)
        params = turns[0].request.params
        if all(turn.request.params is params or turn.request.params == params for turn in turns):
            return self._draw_group(logits_BV, turns, params, uniform_B)
        groups: dict[SamplingParams, list[int]] = {}
        for i, turn in enumerate(turns):
            groups.setdefault(turn.request.params, []).append(i)
        ids, log_probs = [0] * len(turns), [0.0] * len(turns)
        sets: list[Sequence[int]] = [()] * len(turns)
        tops: list[Mapping[int, float]] = [{}] * len(turns)
        for params, index in groups.items():
            drawn = self._draw_group(logits_BV[index], [turns[i] for i in index], params, uniform_B[index])
            for n, i in enumerate(index):
                ids[i], log_probs[i] = drawn.ids[n], drawn.log_probs[n]
                sets[i] = drawn.sets[n] if drawn.sets is not None else ()
                tops[i] = drawn.tops[n] if drawn.tops is not None else {}
        return Drawn(ids, log_probs, sets, tops)

    def _draw_group(
        self, logits_BV: torch.Tensor, turns: Sequence[Turn], params: SamplingParams, uniform_B: torch.Tensor
    ) -> Drawn:
        seen_BV = None
        if params.repetition_penalty != 1.0:
            seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
            for i, turn in enumerate(turns):
                seen_BV[i, torch.tensor(turn.held, device=logits_BV.device)] = True
        # Apple's GPUs have no float64; float32 is accurate enough, at a vocabulary's width, to draw fairly.
        dtype = torch.float32 if logits_BV.device.type == "mps" else torch.float64
        log_probs_BV = draw.log_probs(logits_BV, params, seen_BV)
        ids_B, log_probs_B = draw.pick(log_probs_BV, params, uniform_B.to(dtype).to(logits_BV.device))
        sets = draw.candidates(log_probs_BV) if params.truncates else None
        return Drawn(ids_B.tolist(), log_probs_B.tolist(), sets, _most_likely(log_probs_BV, turns))

    def _move(self, moves: Moves) -> None:
        sources, targets, length = moves
        if sources:
            self._reserve(max(targets) + 1, length)
            self.cache.copy(sources, targets, length)

    def _reserve(self, slots: int, columns: int) -> None:
        if slots > self.cache.slots:
            slots = max(slots, min(2 * self.cache.slots, self.max_slots))
        self.cache.reserve(slots, columns, self.context)

    def _attention(self, training: str | None) -> str:
        """The attention that reads our masks and is the nearest to what training uses.

        SDPA has no soft-capping of attention logits, so models with it keep to eager unless training uses SDPA too.
        """
        if training in ("sdpa", "eager"):
            return training
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        return "sdpa" if self._supports_sdpa and not capped else "eager"

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """No gradients; an attention that reads our masks, whatever training uses.

        Not `inference_mode`: buffers that some rotary embeddings make on the way would later break training.
        """
        before = self.config._attn_implementation
        self.attention = self._attention(before)
        name = SLOT_ATTENTION if self.attention == "sdpa" and self._exchangeable else self.attention
        if self.autocast_dtype is None:
            autocast = nullcontext()
        else:
            autocast = torch.autocast(self.device.type, self.autocast_dtype)
        if before != name:
            self.config._attn_implementation = name
        try:
            with torch.no_grad(), autocast:
                yield
        finally:
            if before != name:
                self.config._attn_implementation = before


def _most_likely(log_probs_BV: torch.Tensor, turns: Sequence[Turn]) -> list[Mapping[int, float]] | None:
    """For each turn as many of its row's most likely ids as it asked for; None where no turn asked for any."""
    wanted = [turn.request.num_sampler_logprobs for turn in turns]
    if not any(wanted):
        return None
    rows = draw.most_likely(log_probs_BV, max(wanted))
    return [dict(itertools.islice(row.items(), count)) for row, count in zip(rows, wanted, strict=True)]


def _buckets(feeds: Sequence[Feed], most: int) -> list[list[Feed]]:
    """Runs of feeds, sorted by length, that waste little padding and hold at most `most` tokens each."""
    buckets: list[list[Feed]] = []
    for feed in feeds:
        if buckets:
            bucket, width = buckets[-1], len(feed.new)
            if width <= 2 * len(bucket[0].new) + 16 and width * (len(bucket) + 1) <= most:
                bucket.append(feed)
                continue
        buckets.append([feed])
    return buckets


_PLAIN = {"full_attention", "sliding_attention", "chunked_attention"}


def _layer_types(config: Any) -> tuple[str, ...] | None:
    """The kinds of attention among the layers; empty where one mask serves all, None where some are not attention."""
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if set(kinds) - _PLAIN:
        return None
    return () if kinds in ((), ("full_attention",)) else kinds


def _windows(config: Any, layer_types: tuple[str, ...] | None) -> dict[str, int | None]:
    """How far back each kind of layer sees, in tokens; None is everything."""
    sliding = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if layer_types:
        sizes = {"full_attention": None, "sliding_attention": sliding, "chunked_attention": chunk}
        return {kind: sizes[kind] for kind in layer_types}
    if getattr(config, "layer_types", None):
        return {"full_attention": None}
    return {"full_attention": sliding}


def _context(config: Any, max_context: int | None) -> int | None:
    """The longest sequence, in tokens; None where nothing limits it."""
    context = getattr(config, "max_position_embeddings", None)
    if (limit := rope_limit(config)) is not None:
        # A longer sequence rotates all keys anew, those of others in the batch too; cached keys would no longer fit.
        context = limit
    if max_context is not None:
        context = max_context if context is None else min(context, max_context)
    return context
