"""Between this project's requests and vLLM's: what is asked of an engine, and what its answer means.

The same for a server and for an engine in this process; needs neither vLLM nor torch. T is the tokens of one turn.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.types import SampleOutput, SampleRequest, SamplingParams, VersionSpan

FLOOR = -9999.0
"""What vLLM's JSON says for a log-prob of minus infinity, and for NaN."""
TIES = 8
"""More log-probs than top-k that are asked for: ids that tie with the last of the top-k are candidates too."""
_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_EXTRA = frozenset({
    *_PARAMS, "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
    "repetition_detection", "thinking_token_budget", "skip_reading_prefix_cache", "watermarking", "extra_args",
})  # fmt: skip
_FINISHED: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length", "repetition": "length"}


class BadAnswer(Exception):
    """An answer of the engine that cannot be read: garbage, or cut off. Asking again may help."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How turns are drawn and what is recorded of it, besides what each request says.

    Raises:
        ConfigurationError: `extra` holds a key that vLLM does not know, or one that is not the user's to set.
    """

    candidates: bool = True  # record the ids that each token was drawn from, where drawing is truncated
    sampling_mask: bool = False  # the engine returns those ids by itself (--return-sampling-mask)
    extra: Mapping[str, Any] = field(default_factory=dict)  # generation_kwargs: they win over the request's params
    regex: str | None = None  # every turn matches it (structured outputs)
    vocabulary: int | None = None  # ids of the model, where known
    max_logprobs: int | None = None  # per token that the engine gives, where known; -1: as many as there are ids

    def __post_init__(self) -> None:
        for key in self.extra:
            if key not in _EXTRA:
                raise ConfigurationError(
                    f"generation_kwargs: '{key}' cannot be set for vLLM here. What can: {', '.join(sorted(_EXTRA))}."
                )


@dataclass(frozen=True, slots=True)
class RawTurn:
    """One turn as an engine gave it, in plain lists."""

    ids: list[int]  # [T]
    log_probs: Sequence[float | None] | None  # [T] of the ids
    finish_reason: str | None
    top_ids: Sequence[Sequence[int]] = ()  # [T] the most likely ids and the drawn one; empty where not asked for
    top_log_probs: Sequence[Sequence[float]] = ()  # [T] likewise; FLOOR or less: cannot be drawn
    sets: Sequence[Sequence[int]] | None = None  # [T] candidate ids, where the engine gives them by itself
    spans: tuple[VersionSpan, ...] = ()


def engine_seed(seed: tuple[int, ...]) -> int:
    """A number of 63 bits that is this seed's alone: no two turns of a run get the same one.

    >>> engine_seed((1, 2, 3)) == engine_seed((1, 2, 3)), engine_seed((1, 2, 3)) == engine_seed((1, 23))
    (True, False)
    """
    digest = hashlib.blake2b(",".join(map(str, seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def effective(params: SamplingParams, drawing: Drawing) -> SamplingParams:
    """The parameters that ids are really drawn with: `generation_kwargs` win.

    >>> effective(SamplingParams(top_k=5), Drawing(extra={"top_k": 3, "min_tokens": 2})).top_k
    3
    """
    if not drawing.extra:
        return params
    return replace(params, **{name: drawing.extra[name] for name in _PARAMS if name in drawing.extra})


def sampling_params(request: SampleRequest, drawing: Drawing) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams for this request; `structured_outputs` is a dict, for JSON.

    The engine's own end tokens are ignored: a turn ends at `request.stop_ids` and, with a regex, where it is matched.

    Raises:
        ConfigurationError: vLLM would draw from another distribution than the one asked for, or cannot say what it
            drew from.

    >>> request = SampleRequest([], [], [1], 8, SamplingParams(top_k=3), (0, 0, 0), "c", stop_ids=(2,))
    >>> fields = sampling_params(request, Drawing())
    >>> fields["logprobs"], fields["stop_token_ids"], fields["ignore_eos"]
    (11, [2], True)
    """
    params = effective(request.params, drawing)
    _check(params, drawing)
    fields: dict[str, Any] = dict(drawing.extra)
    if isinstance(bias := fields.get("logit_bias"), Mapping):  # JSON has names only
        fields["logit_bias"] = {int(token): value for token, value in bias.items()}
    fields.update(
        max_tokens=request.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p or 0.0,
        repetition_penalty=params.repetition_penalty,
        seed=engine_seed(request.seed),
        logprobs=_log_probs_wanted(request.num_sampler_logprobs, params, drawing),
        stop_token_ids=list(request.stop_ids),
        ignore_eos=drawing.regex is None,  # a regex that is matched leaves the end token alone to be drawn
        detokenize=False,
    )
    if drawing.regex is not None:
        fields["structured_outputs"] = {"regex": drawing.regex}
    return fields


def read_json(answer: Any, *, spans: tuple[VersionSpan, ...] = (), tops: bool = True) -> RawTurn:
    """The one choice of an answer of `/inference/v1/generate`; `spans` are read by the caller.

    Raises:
        BadAnswer: It has another form.
    """
    try:
        choice = answer["choices"][0]
        ids, content = choice["token_ids"] or [], (choice.get("logprobs") or {}).get("content")
        if not all(type(i) is int for i in ids):
            raise TypeError("token_ids holds something that is no id")
        log_probs = top_ids = top_log_probs = None
        if content is not None:
            log_probs = [entry["logprob"] for entry in content]
            if [entry["token_id"] for entry in content] != ids:
                raise ValueError("log-probs of other ids than those drawn")
        if content is not None and tops:
            top_ids = [[top["token_id"] for top in entry["top_logprobs"]] for entry in content]
            top_log_probs = [[top["logprob"] for top in entry["top_logprobs"]] for entry in content]
        return RawTurn(
            ids, log_probs, choice["finish_reason"], top_ids or (), top_log_probs or (), choice.get("sampling_mask"),
            spans,
        )  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error}") from error


def read_output(raw: RawTurn, request: SampleRequest, drawing: Drawing, version: int) -> SampleOutput:
    """The turn, checked: as many finite log-probs as ids, ids of the vocabulary, candidates where they are wanted.

    Args:
        raw: What the engine gave.
        version: Of the weights, where `raw.spans` is empty.

    Raises:
        SamplerError: It cannot be trained on; the message says why.
    """
    reason = _FINISHED.get(raw.finish_reason or "")
    if reason is None:
        raise SamplerError(f"vLLM gave up this turn (finish_reason '{raw.finish_reason}'), and it is played again.")
    if not raw.ids:
        raise SamplerError("vLLM ended a turn without a single token.")
    if drawing.vocabulary is not None and not 0 <= min(raw.ids) <= max(raw.ids) < drawing.vocabulary:
        raise SamplerError(
            f"vLLM drew an id outside the {drawing.vocabulary} of the model that is trained: it serves another model."
        )
    log_probs = _checked(raw)
    params = effective(request.params, drawing)
    if not _spans_fit(raw):
        raise SamplerError(f"vLLM's weight versions {raw.spans} do not cover the {len(raw.ids)} tokens that it drew.")
    oldest = min((span.version for span in raw.spans), default=version)
    return SampleOutput(
        raw.ids,
        log_probs,
        reason,
        oldest,
        sampling_mask=_sets(raw, drawing) if drawing.candidates and params.truncates else None,
        sampler_logprobs=_most_likely(raw, request.num_sampler_logprobs) if request.num_sampler_logprobs else None,
        versions=raw.spans if len(raw.spans) > 1 else (),
    )


def _check(params: SamplingParams, drawing: Drawing) -> None:
    if not (params.temperature == 0 or 0.01 <= params.temperature <= 2.0):
        raise ConfigurationError(
            f"vLLM draws at temperature 0 or between 0.01 and 2; got {params.temperature}. Set temperature accordingly."
        )
    if drawing.candidates and params.truncates and params.top_k <= 0:
        raise ConfigurationError(
            "top_p below 1 or min_p above 0 needs top_k > 0 with vLLM: it names the candidates that a token was drawn "
            "from only among its top_k. Set top_k, or switch vllm_importance_sampling_correction off."
        )
    if drawing.sampling_mask and not (params.temperature > 0 and params.top_k > 0):
        raise ConfigurationError(
            "A vLLM with --return-sampling-mask draws only with temperature > 0 and top_k > 0: set both, or start it "
            "without that flag."
        )


def _log_probs_wanted(most_likely: int, params: SamplingParams, drawing: Drawing) -> int:
    """How many log-probs per token to ask for."""
    least = most_likely + 1 if most_likely else 0  # + 1: the drawn id takes a place in the answer
    wanted = least
    if drawing.candidates and params.truncates and not drawing.sampling_mask:
        least, wanted = max(least, params.top_k), max(least, params.top_k + TIES)
    if drawing.vocabulary is not None:
        least, wanted = min(least, drawing.vocabulary), min(wanted, drawing.vocabulary)
    limit = drawing.max_logprobs
    if limit is None or limit < 0:
        return wanted
    if least > limit:
        raise ConfigurationError(
            f"{least} log-probs per token are needed (for top_k or score centering), and this vLLM gives {limit}: "
            "start it with --max-logprobs -1."
        )
    return min(wanted, limit)


def _checked(raw: RawTurn) -> list[float]:
    """The log-probs, each a finite number that a probability can have."""
    if raw.log_probs is None:
        raise SamplerError("vLLM returned no log-probs; without them a turn cannot be trained on.")
    if len(raw.log_probs) != len(raw.ids):
        raise SamplerError(f"vLLM returned {len(raw.log_probs)} log-probs for {len(raw.ids)} tokens.")
    try:
        log_probs: list[float] = [float(x) for x in raw.log_probs]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        log_probs = [math.nan]
    if not math.isfinite(sum(log_probs)) or min(log_probs) <= FLOOR:
        raise SamplerError(
            "vLLM returned a log-prob that is no finite number: the weights that it holds are not finite, or too "
            "large for its precision."
        )
    if max(log_probs) > 1e-3:
        raise SamplerError("vLLM returned a log-prob above 0: start it with --logprobs-mode processed_logprobs.")
    return log_probs


def _spans_fit(raw: RawTurn) -> bool:
    at = 0
    for span in raw.spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return not raw.spans or at == len(raw.ids)


def _sets(raw: RawTurn, drawing: Drawing) -> list[Sequence[int]]:
    """The candidates of each token, ascending."""
    found: Iterable[Iterable[int]]
    if drawing.sampling_mask:
        found = raw.sets if raw.sets is not None else ()
    else:
        rows = zip(raw.top_ids, raw.top_log_probs, strict=True)
        found = ({i for i, lp in zip(*row, strict=True) if lp > FLOOR} for row in rows)  # the drawn id may stand twice
    sets: list[Sequence[int]] = [array("i", sorted(row)) for row in found]
    if len(sets) != len(raw.ids):
        raise SamplerError("vLLM did not say which candidates each token was drawn from.")
    return sets


def _most_likely(raw: RawTurn, count: int) -> list[dict[int, float]]:
    """Log-probs by id of the `count` most likely ids of each token, best first."""
    if len(raw.top_ids) != len(raw.ids):
        raise SamplerError("vLLM did not return the log-probs of the most likely tokens that were asked for.")
    rows = []
    for ids, log_probs in zip(raw.top_ids, raw.top_log_probs, strict=True):
        best = sorted(dict(zip(ids, log_probs, strict=True)).items(), key=itemgetter(1), reverse=True)[:count]
        rows.append({i: log_prob for i, log_prob in best if log_prob > FLOOR})
    return rows
