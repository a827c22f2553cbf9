"""From turns to what one forward pass sees."""

from __future__ import annotations

import math
from collections.abc import Iterable

from agentrl.types import TrainingSequence, TurnRecord


def to_sequences(turns: Iterable[TurnRecord]) -> list[TrainingSequence]:
    """Joins turns while each prompt continues the ids held so far, and begins a new sequence where one does not.

    Every sampled id is trained in exactly one sequence; nothing else is. No realignment is tried: one different token
    forks. Sequences in which nothing was sampled are left out.

    >>> one = TurnRecord([1, 2], [3], [-0.5], {}, "stop")
    >>> two = TurnRecord([1, 2, 3, 9], [4], [-0.1], {}, "stop")
    >>> [(s.input_ids, s.completion_mask) for s in to_sequences([one, two])]
    [([1, 2, 3, 9, 4], [False, False, True, False, True])]
    >>> drifted = TurnRecord([1, 2, 7, 9], [4], [-0.1], {}, "stop")
    >>> [s.input_ids for s in to_sequences([one, drifted])]
    [[1, 2, 3], [1, 2, 7, 9, 4]]
    """
    rows: list[tuple[list[int], list[bool], list[float], list[int]]] = []
    for turn in turns:
        prompt, output, log_probs = turn.prompt_ids, turn.output_ids, turn.output_log_probs
        if prompt is None or output is None or log_probs is None:
            return []  # a sampler without ids: can be evaluated, not trained
        if len(output) != len(log_probs):
            raise ValueError(f"a turn has {len(output)} sampled ids but {len(log_probs)} log-probs")
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], [], [], []))
        ids, mask, old, versions = rows[-1]
        context = prompt[len(ids) :]
        ids += [*context, *output]
        mask += [False] * len(context) + [True] * len(output)
        old += [math.nan] * len(context) + list(log_probs)
        versions.append(turn.version)
    return [TrainingSequence(ids, mask, old, min(versions)) for ids, mask, old, versions in rows if any(mask)]


def completion_ids(sequences: Iterable[TrainingSequence]) -> list[int]:
    """All ids after the first prompt, tool results included; a fork adds what its sequence has after its own prompt.

    >>> completion_ids([TrainingSequence([1, 2, 3, 9, 4], [False, False, True, False, True], [])])
    [3, 9, 4]
    """
    return [i for one in sequences for i in one.input_ids[one.completion_mask.index(True) :]]
