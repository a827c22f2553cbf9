"""Ready-made reward functions.

Each works on plain-string completions and on conversational ones (a list of messages), takes whatever other keyword
arguments the trainer passes, and returns one number per completion (None: not scored).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.errors import ConfigurationError, MissingDependency

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "think_format_reward",
]

Completion = str | list[dict[str, Any]]
RewardFunction = Callable[..., Sequence[float | None]]


def think_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """1.0 where the answer opens with exactly one reasoning block, else 0.0.

    The format reward of DeepSeek-R1 (arXiv 2501.12948). Text passes if it starts (after whitespace) with ``<think>``
    and holds one ``<think>`` and one ``</think>``, in this order. A conversational completion is judged by its last
    assistant message; reasoning that was already split off into ``reasoning_content`` counts as the block, and the
    content must then hold no further tag.

    >>> think_format_reward(["<think>6 x 7</think>42", "42", "<think>6 x 7"])
    [1.0, 0.0, 0.0]
    >>> think_format_reward([[{"role": "assistant", "reasoning_content": "6 x 7", "content": "42"}]])
    [1.0]
    """
    return [float(_opens_with_one_block(completion)) for completion in completions]


def _opens_with_one_block(completion: Completion) -> bool:
    text = _answer_text(completion)
    if isinstance(completion, list) and _answer(completion).get("reasoning_content"):
        return "<think>" not in text and "</think>" not in text
    starts = text.lstrip().startswith("<think>")
    return starts and text.count("<think>") == 1 and text.count("</think>") == 1


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str | None], **kwargs: Any
) -> list[float | None]:
    """1.0 where the answer is mathematically equal to the row's `solution` column, 0.0 where not, None where the
    solution itself cannot be read (the rollout is then not scored by this function).

    Judged by the package math-verify (extra ``math``): LaTeX and plain expressions, ``\\boxed{}`` first. A
    conversational completion is judged by the content of its last assistant message. Raises MissingDependency.
    """
    parse, verify = _math_verify()
    if len(solution) != len(completions):
        raise ConfigurationError(
            f"accuracy_reward got {len(solution)} solutions for {len(completions)} completions; it needs one each."
        )
    # The package's own timeouts use signals, which only work in the main thread; rewards may run in others.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    rewards: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        gold = [] if expected is None else parse(str(expected), parsing_timeout=seconds)
        if not gold:
            rewards.append(None)
            continue
        answer = parse(_answer_text(completion), parsing_timeout=seconds)
        rewards.append(float(bool(verify(gold, answer, timeout_seconds=seconds))))
    return rewards


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependency("math-verify", "math", "accuracy_reward") from error
    return parse, verify


def get_repetition_penalty_reward(ngram_size: int, max_penalty: float) -> RewardFunction:
    """A reward function that goes from 0 (no n-gram repeated) down to `max_penalty` (nothing else).

    max_penalty x (1 - distinct n-grams / n-grams), over lower-case words split at whitespace, as in "Demystifying Long
    Chain-of-Thought Reasoning" (arXiv 2502.03373). Fewer words than `ngram_size`: 0.0. In a conversational completion
    the text of all assistant messages counts, each by itself, so that no n-gram spans two turns. Raises
    ConfigurationError for `ngram_size` < 1 or a positive `max_penalty`.

    >>> penalty = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    >>> penalty(["the cat the cat the cat", "the cat sat", "cat"])  # 2 distinct of 5; 2 of 2; none
    [-0.6, 0.0, 0.0]
    """
    if ngram_size < 1:
        raise ConfigurationError(f"ngram_size must be at least 1; it is {ngram_size}.")
    if max_penalty > 0:
        raise ConfigurationError(f"max_penalty must not be positive, it is added to the reward; it is {max_penalty}.")

    def repetition_penalty_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        rewards = []
        for completion in completions:
            ngrams = [ngram for text in _assistant_texts(completion) for ngram in _ngrams(text, ngram_size)]
            repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
            rewards.append(max_penalty * repeated if repeated else 0.0)
        return rewards

    return repetition_penalty_reward


def get_cosine_scaled_reward(
    max_len: int, min_value_wrong: float = -1.0, max_value_wrong: float = -0.5, min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> RewardFunction:  # fmt: skip
    """A reward function that prefers short right answers, and long wrong ones to short wrong ones.

    The cosine reward of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373). With L tokens in the
    completion and c = (1 + cos(pi x min(L / max_len, 1))) / 2, which falls from 1 to 0: a right answer gets
    min_value_correct + c x (max_value_correct - min_value_correct), a wrong one max_value_wrong + c x (min_value_wrong
    - max_value_wrong). Right and wrong, or None, is what `accuracy_reward` says. L is the length of the completion's
    ids, tool results included. Raises ConfigurationError for a max_len below 1 and a minimum above its maximum.
    """
    if max_len < 1:
        raise ConfigurationError(f"max_len must be at least 1; it is {max_len}.")
    bounds = {"wrong": (min_value_wrong, max_value_wrong), "correct": (min_value_correct, max_value_correct)}
    for kind, (low, high) in bounds.items():
        if low > high:
            raise ConfigurationError(f"min_value_{kind} ({low}) must not be above max_value_{kind} ({high}).")

    def cosine_scaled_reward(
        completions: Sequence[Completion], solution: Sequence[str | None], completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:  # fmt: skip
        rewards: list[float | None] = []
        for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            c = (1 + math.cos(math.pi * min(len(ids) / max_len, 1.0))) / 2
            short, long = (max_value_correct, min_value_correct) if right else (min_value_wrong, max_value_wrong)
            rewards.append(None if right is None else long + c * (short - long))
        return rewards

    return cosine_scaled_reward


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardFunction:
    """A reward function of the number of tokens: 0, falling to -1 over the last `soft_punish_cache` tokens, then -1.

    DAPO's equation 13 (arXiv 2503.14476) with L tokens, M = max_completion_len, C = soft_punish_cache: 0 for
    L <= M - C; (M - C - L) / C up to M; -1 above. L is the length of the completion's ids as trained, tool results
    between the turns included. Raises ConfigurationError unless 0 <= C <= M and M > 0.

    >>> punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    >>> punish(completion_ids=[[0] * 80, [0] * 90, [0] * 100, [0] * 101])
    [0.0, -0.5, -1.0, -1.0]
    """
    if not (max_completion_len > 0 and 0 <= soft_punish_cache <= max_completion_len):
        raise ConfigurationError(
            f"soft_punish_cache ({soft_punish_cache}) must be between 0 and max_completion_len ({max_completion_len})."
        )
    free = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        rewards = []
        for ids in completion_ids:
            length = len(ids)
            if length <= free:
                rewards.append(0.0)
            elif length <= max_completion_len:
                rewards.append((free - length) / soft_punish_cache)
            else:
                rewards.append(-1.0)
        return rewards

    return soft_overlong_punishment_reward


def _ngrams(text: str, size: int) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def _answer(completion: list[dict[str, Any]]) -> dict[str, Any]:
    """The last assistant message, {} without one."""
    return next((message for message in reversed(completion) if message.get("role") == "assistant"), {})


def _answer_text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else _text(_answer(completion))


def _assistant_texts(completion: Completion) -> list[str]:
    """What the model wrote, one string per assistant message, reasoning included."""
    if isinstance(completion, str):
        return [completion]
    own = [message for message in completion if message.get("role") == "assistant"]
    return [f"{message.get('reasoning_content') or ''}\n{_text(message)}" for message in own]


def _text(message: dict[str, Any]) -> str:
    """The text of a message's content: a string, content blocks, or nothing (a turn of tool calls only)."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content if block.get("type") == "text")
