"""`generation_kwargs` for models of transformers: what each of them does to a turn, or why it cannot."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from agentrl.sampler.slots import Turn

_PROCESSORS = (  # in the order in which transformers applies them
    "sequence_bias", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
_CACHE = (
    "cache_implementation", "cache_config", "use_cache", "max_cache_len", "prefill_chunk_size", "disable_compile",
    "compile_config",
)  # fmt: skip
_IDLE = {"do_sample": True, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
_ONE = "a rollout is one sequence that is drawn token by token"
_CUT = "the candidates of a token are those of top_k, top_p and min_p, which training knows"
_STOPS = "a turn ends where the chat template says, or at its token limit"
_REFUSED = {
    "do_sample": "tokens are drawn; for nearly greedy ones set temperature=0.01",
    "num_beams": _ONE,
    "num_return_sequences": "num_generations says how many rollouts a group has",
    "return_dict_in_generate": "the sampler reads the tokens by itself",
    "streamer": "tokens are handed out when their turn is over",
    "assistant_model": _ONE,
    "prompt_lookup_num_tokens": _ONE,
    "penalty_alpha": _ONE,
    "typical_p": _CUT,
    "epsilon_cutoff": _CUT,
    "eta_cutoff": _CUT,
    "top_h": _CUT,
    "max_length": "max_completion_length and max_new_tokens limit a turn",
    "min_length": "min_new_tokens does the same, and does not count the prompt",
    "eos_token_id": _STOPS,
    "stop_strings": _STOPS,
    "max_time": _STOPS,
    "stopping_criteria": _STOPS,
    "pad_token_id": "padding is never seen",
    "seed": "every turn is drawn from the run's seed",
    "logits_processor": f"name what it should do: {', '.join(_PROCESSORS)}",
}


@dataclass(frozen=True, slots=True)
class GenerationKwargs:
    """What `generation_kwargs` ask for."""

    processors: Mapping[str, Any]  # what changes logits, in order
    cache: Mapping[str, Any]  # what is for `generate` itself
    max_new_tokens: int | None = None  # most tokens in one turn


def read_kwargs(kwargs: Mapping[str, Any], *, generate: bool = True) -> GenerationKwargs:
    """The kwargs by what they are for; temperature and its like are not among them, but in `SamplingParams`.

    >>> read_kwargs({"suppress_tokens": [7], "max_new_tokens": 8, "use_cache": None})
    GenerationKwargs(processors={'suppress_tokens': [7]}, cache={}, max_new_tokens=8)

    Args:
        kwargs: None is the same as unset.
        generate: The turns are drawn by `generate`, which has options for its cache.

    Raises:
        ConfigurationError: Names one that does nothing here, and why.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    given = {name: value for name, value in given.items() if name not in _IDLE or value != _IDLE[name]}
    most = given.pop("max_new_tokens", None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigurationError(f"generation_kwargs: max_new_tokens must be a whole number, at least 1; got {most!r}.")
    cache = {name: given.pop(name) for name in _CACHE if name in given} if generate else {}
    processors = {name: given.pop(name) for name in _PROCESSORS if name in given}
    for name in given:
        raise ConfigurationError(_refusal(name))
    return GenerationKwargs(processors, cache, most)


def _refusal(name: str) -> str:
    known = (*_PROCESSORS, "max_new_tokens", *_CACHE)
    if name in _CACHE:
        return f"generation_kwargs: '{name}' is an option of generate's cache; continuous batching has its own cache."
    if name in _REFUSED:
        return f"generation_kwargs: '{name}' cannot be used here: {_REFUSED[name]}."
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"these can: {', '.join(known)}."
    return f"generation_kwargs: '{name}' cannot be used here; {hint}"


class Processors:
    """The logits processors of `generation_kwargs`, for each turn on its own ids.

    `generate` applies its own to a whole padded batch: padding counts as text there, and all rows end at one id.

    Raises:
        ConfigurationError: A value that its processor does not take.
    """

    def __init__(self, values: Mapping[str, Any], device: Any) -> None:
        self._values = values
        self._device = device
        self._made: dict[Turn, list[Any]] = {}
        for name, value in values.items():
            try:
                self._make(name, value, 1, [0])
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                raise ConfigurationError(f"generation_kwargs: {name}={value!r} does not work: {error}") from error

    def __bool__(self) -> bool:
        return bool(self._values)

    def __call__(self, logits_BV: torch.Tensor, turns: list[Turn]) -> torch.Tensor:
        """The logits [B, V] as the processors leave them; row `b` is the next token of `turns[b]`."""
        import torch

        if not self._values:
            return logits_BV
        self._made = {turn: self._made.get(turn) or self._of(turn) for turn in turns}
        rows = []
        for logits_V, turn in zip(logits_BV, turns, strict=True):
            ids_1T, row_1V = torch.tensor([turn.held], device=logits_BV.device), logits_V[None]
            for processor in self._made[turn]:
                row_1V = processor(ids_1T, row_1V)
            rows.append(row_1V)
        return torch.cat(rows)

    def _of(self, turn: Turn) -> list[Any]:
        stops = list(turn.request.stop_ids)
        return [
            self._make(name, value, turn.prompt_length, stops)
            for name, value in self._values.items()
            if stops or name not in ("min_new_tokens", "exponential_decay_length_penalty")  # those move the stop ids
        ]

    def _make(self, name: str, value: Any, prompt: int, stops: list[int]) -> Any:
        import transformers as hf

        device: Any = self._device
        match name:
            case "sequence_bias":
                return hf.SequenceBiasLogitsProcessor(value)
            case "no_repeat_ngram_size":
                return hf.NoRepeatNGramLogitsProcessor(value)
            case "bad_words_ids":
                return hf.NoBadWordsLogitsProcessor(value, eos_token_id=None)
            case "min_new_tokens":
                return hf.MinNewTokensLengthLogitsProcessor(prompt, value, stops, device=device)
            case "exponential_decay_length_penalty":
                return hf.ExponentialDecayLengthPenalty(tuple(value), stops, prompt)
            case "suppress_tokens":
                return hf.SuppressTokensLogitsProcessor(value, device=device)
            case _:
                return hf.SuppressTokensAtBeginLogitsProcessor(value, prompt, device=device)


def batching_config(config: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """The keys of `transformers_continuous_batching_config` as transformers' class takes them, with our defaults.

    Raises:
        ConfigurationError: An unknown key, or one that the sampler decides by itself.
    """
    from transformers import ContinuousBatchingConfig

    names = [field.name for field in dataclasses.fields(ContinuousBatchingConfig)]
    where = "transformers_continuous_batching_config"
    for name, value in config.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(names)}."
            raise ConfigurationError(f"{where} has no key '{name}'; {hint}")
        if name in _DECIDED and value not in (None, _DECIDED[name]):
            raise ConfigurationError(
                f"{where}: {name}={value!r} cannot be used here, because ids are drawn outside of the model from the "
                "run's seed, step by step; leave it out."
            )
    given = {name: value for name, value in config.items() if value is not None and name not in _DECIDED}
    percent = given.setdefault("max_memory_percent", 0.5)
    if not isinstance(percent, (int, float)) or not 0 < percent <= 1:
        raise ConfigurationError(f"{where}: max_memory_percent is a share of the memory, in (0, 1]; got {percent!r}.")
    kinds = ("fifo", "prefill_first")
    if given.get("scheduler_type", "fifo") not in kinds:
        raise ConfigurationError(f"{where}: scheduler_type must be one of {kinds}; got {given['scheduler_type']!r}.")
    return {"max_requests_per_batch": slots, "auto_switch_to_flash": False} | given | _DECIDED


_DECIDED: dict[str, Any] = {
    "return_logprobs": False,  # the sampler's own are those of what was drawn, after every filter
    "seed": None,
    "per_request_processors": False,
    "drop_unsupported_processors": True,
    "use_async_batching": False,
    "use_cuda_graph": False,
    "q_padding_interval_size": 0,
    "kv_padding_interval_size": 0,
    "varlen_compile_config": None,
    "decode_compile_config": None,
    "default_compile_level": 0,
    "max_queue_size": 0,
}
