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
from agentrl.sampler.masks import layer_types, longest_context, masks, windows
from agentrl.sampler.slots import Turn
from agentrl.sampler.vision import features, placeholder_ids, without
from agentrl.types import SamplingParams

Moves = tuple[list[int], list[int], int]  # source slots, target slots, tokens


class Drawn(NamedTuple):
    """What was drawn: for each turn one entry behind its last token and one behind each token of its guess."""

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
        self.layer_types = layer_types(self.config)
        self.windows = windows(self.config, self.layer_types)
        self._embeddings = base.get_input_embeddings()
        self.vocabulary = self._embeddings.weight.shape[0]
        self.context = longest_context(self.config, max_context)
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

    def decode(self, turns: Sequence[Turn], guesses: Sequence[list[int]], moves: Moves) -> Drawn:
        """The next tokens of each turn, as many as its guess has and one more; turn `i` lives in slot `i`."""
        with self._forwarding():
            if not self.cached:
                return self._draw(self._whole(turns), turns)
            self._move(moves)
            starts = [len(turn.held) - 1 for turn in turns]
            if any(guesses):
                news = [[turn.held[-1], *guess] for turn, guess in zip(turns, guesses, strict=True)]
                self._reserve(len(turns), max(map(len, news)) + max(starts))
                return self._draw(self._feed_window(0, news, starts, guesses), turns, guesses)
            visible = max(starts) + 1
            self._reserve(len(turns), visible)
            tokens = np.array([turn.held[-1] for turn in turns])[:, None]
            return self._draw(self._forward(0, tokens, np.array(starts)[:, None], None, visible, 1)[:, 0], turns)

    def feed(self, feeds: Sequence[Feed], moves: Moves) -> Drawn:
        """The first tokens of each turn. Rows lie in consecutive slots, leaders first, shortest first."""
        with self._forwarding():
            self._check()
            if self.cached and any(feed.turn.request.media for feed in feeds):
                self.cached = False  # from here on: keys of other images may lie under the same ids
                self.cache.free()
            turns = [feed.turn for feed in feeds]
            if not self.cached:
                for feed in feeds:
                    feed.guess = []
                self.prefilled_tokens += sum(len(turn.held) for turn in turns)
                return self._draw(self._whole(turns), turns)
            self._move(moves)
            self._reserve(feeds[0].row.slot + len(feeds), max(len(feed.turn.held) + len(feed.guess) for feed in feeds))
            for feed in feeds:
                if feed.donor is not None:
                    self.cache.copy([feed.donor.slot], [feed.row.slot], feed.start)
            fed = [feed for feed in feeds if feed.leader is None]
            logits = [self._feed_bucket(bucket) for bucket in _buckets(fed, self.max_forward_tokens)]
            logits_MV = torch.cat(logits) if len(logits) > 1 else logits[0]
            if len(fed) < len(feeds):
                logits_MV = logits_MV[self._follow(fed, [feed for feed in feeds if feed.leader is not None])]
            self.prefilled_tokens += sum(len(feed.new) for feed in fed)
            return self._draw(logits_MV, turns, [feed.guess for feed in feeds])

    def _follow(self, fed: Sequence[Feed], followers: Sequence[Feed]) -> list[int]:
        """The followers' rows hold what their leaders' do; answers which of the leaders' logits each turn reads."""
        leaders = [feed.leader for feed in followers if feed.leader is not None]
        sources = [leader.row.slot for leader in leaders]
        longest = max(feed.start + len(feed.guess) for feed in followers)
        self.cache.copy(sources, [feed.row.slot for feed in followers], longest, min(feed.held for feed in followers))
        begins = dict(zip(fed, itertools.accumulate((len(feed.guess) + 1 for feed in fed), initial=0), strict=False))
        index = list(range(sum(len(feed.guess) + 1 for feed in fed)))
        for leader, feed in zip(leaders, followers, strict=True):
            begin = begins[leader]
            index += range(begin, begin + len(feed.guess) + 1)
        return index

    def _feed_bucket(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The next-token logits [M, V] of rows in consecutive slots, fed in one forward or, when long, several."""
        first, guesses = feeds[0].row.slot, [feed.guess for feed in feeds]
        news, starts = [feed.new + feed.guess for feed in feeds], [feed.start for feed in feeds]
        if len(feeds) > 1 or len(news[0]) <= self.max_forward_tokens:
            return self._feed_window(first, news, starts, guesses)
        new, start, step = news[0], starts[0], self.max_forward_tokens
        last = (len(feeds[0].new) - 1) // step * step
        for begin in range(0, last, step):
            self._feed_window(first, [new[begin : begin + step]], [start + begin])
        return self._feed_window(first, [new[last:]], [start + last], guesses)

    def _feed_window(
        self, first: int, news: Sequence[list[int]], starts: Sequence[int], guesses: Sequence[list[int]] = ()
    ) -> torch.Tensor:
        """One forward of new tokens, left-padded so that every row's last token is the window's last.

        Returns:
            [M, V] the logits behind each row's last token that is no guess, and behind each guess.
        """
        lengths = np.fromiter(map(len, news), np.int64, len(news))
        width = int(lengths.max())
        positions = np.array(starts)[:, None] + np.arange(width)
        real = None
        if int(lengths.min()) == width:
            tokens = np.array(news)
        else:
            pads = (width - lengths)[:, None]
            real = np.arange(width) >= pads
            tokens = np.zeros((len(news), width), np.int64)
            tokens[real] = np.fromiter(itertools.chain.from_iterable(news), np.int64, int(lengths.sum()))
            positions = np.where(real, positions - pads, 0)
        counts = [len(guess) + 1 for guess in guesses] or [1] * len(news)
        most = max(counts)
        logits_NKV = self._forward(first, tokens, positions, real, int(positions.max()) + 1, most)
        if min(counts) == most:
            return logits_NKV.flatten(0, 1)
        wanted_NK = torch.arange(most) >= most - torch.tensor(counts)[:, None]
        return logits_NKV[wanted_NK.to(logits_NKV.device)]

    def _forward(
        self, first: int, tokens: np.ndarray, positions: np.ndarray, real: np.ndarray | None, visible: int, keep: int
    ) -> torch.Tensor:
        """The last `keep` columns' logits [N, keep, V] in float32; `real` is False where a token is padding."""
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
            **self._keep(keep),
        )
        return output.logits[:, -keep:].float()

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
            cached = self._feed_window(0, [row[-1:] for row in rows], [len(row) - 1 for row in rows]).log_softmax(-1)
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
        return self._embeddings.weight.device

    def _mask(self, positions_NW: torch.Tensor, visible: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """What each token sees, in the form that the attention in use reads."""
        made = masks(self.windows, positions_NW, visible, self._added_masks(positions_NW.device))
        return made if self.layer_types else made["full_attention"]

    def _added_masks(self, device: torch.device) -> torch.dtype | None:
        """The dtype of masks that are added to scores; None where the attention takes those of True and False."""
        if self.attention != "sdpa":
            return self.model.dtype
        # Our own attention has a quick way for added masks, in float32 on a CPU.
        exact = device.type == "cpu" and self.autocast_dtype is None and self.model.dtype == torch.float32
        return torch.float32 if exact and self._exchangeable else None

    def _draw(self, logits_BV: torch.Tensor, turns: Sequence[Turn], guesses: Sequence[list[int]] = ()) -> Drawn:
        """An id and its log-prob for each row of logits, the rows grouped by their parameters.

        Every turn has one row, and one more for each token of its guess.
        """
        logits_BV = without(logits_BV, self.placeholders)
        counts = [len(guess) + 1 for guess in guesses] or [1] * len(turns)
        numbers = [x for turn, count in zip(turns, counts, strict=True) for x in turn.numbers(count)]
        uniform_B = torch.tensor(numbers, dtype=torch.float64)
        params = turns[0].request.params
        same = all(turn.request.params is params or turn.request.params == params for turn in turns)
        if len(numbers) > len(turns):
            turns = [turn for turn, count in zip(turns, counts, strict=True) for _ in range(count)]
        if same:
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
