"""From turns to what one forward pass sees."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

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
    rows: list[tuple[list[int], list[bool], list[float], list[TurnRecord]]] = []
    media: list[tuple[Any, ...]] = []  # per row; equal ids may stand for other images, and that forks too
    for turn in turns:
        prompt, output, log_probs = turn.prompt_ids, turn.output_ids, turn.output_log_probs
        if prompt is None or output is None or log_probs is None:
            return []  # a sampler without ids: can be evaluated, not trained
        if len(output) != len(log_probs):
            raise ValueError(f"a turn has {len(output)} sampled ids but {len(log_probs)} log-probs")
        for what in (turn.output_sampling_mask, turn.output_sampler_logprobs):
            if what is not None and len(what) != len(output):
                raise ValueError(
                    f"a turn has {len(output)} sampled ids but {len(what)} candidate sets or top log-probs"
                )
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0] or turn.media[: len(media[-1])] != media[-1]:
            rows.append(([], [], [], []))
            media.append(())
        media[-1] = turn.media
        ids, mask, old, joined = rows[-1]
        context = prompt[len(ids) :]
        ids += [*context, *output]
        mask += [False] * len(context) + [True] * len(output)
        old += [math.nan] * len(context) + list(log_probs)
        joined.append(turn)
    made = [
        TrainingSequence(
            ids, mask, old, min(turn.version for turn in joined), shown,
            _per_token(joined, "output_sampling_mask", ()), _per_token(joined, "output_sampler_logprobs", {}),
        )
        for (ids, mask, old, joined), shown in zip(rows, media, strict=True)
        if any(mask)
    ]  # fmt: skip
    for sequence in made:
        _check_media(sequence)
    return made


def _per_token(turns: Sequence[TurnRecord], name: str, nothing: Any) -> list[Any] | None:
    """The turns' entries end to end, `nothing` for a turn without any; None where no turn has any."""
    parts = [getattr(turn, name) for turn in turns]
    if all(part is None for part in parts):
        return None
    sizes = [len(turn.output_ids or ()) for turn in turns]
    filled = [[nothing] * size if part is None else part for part, size in zip(parts, sizes, strict=True)]
    return [entry for part in filled for entry in part]


def _check_media(sequence: TrainingSequence) -> None:
    """Every image has its placeholder ids among the context: a forward would mix up features otherwise.

    Sampled ids do not count, because a policy may draw a placeholder by itself.
    """
    if not sequence.media:
        return
    wanted: Counter[frozenset[int]] = Counter()
    for image in sequence.media:
        wanted[image.token_ids] += image.tokens
    context = Counter(i for i, sampled in zip(sequence.input_ids, sequence.completion_mask, strict=True) if not sampled)
    for ids, count in wanted.items():
        found = sum(context[i] for i in ids)
        if found != count:
            raise ValueError(f"a sequence has {found} placeholder ids for {count} image features")


def rendered_again(turns: Iterable[TurnRecord]) -> list[int]:
    """For each turn after the first, how many of the held tokens its prompt did not continue; 0 where it continued all.

    >>> one = TurnRecord([1, 2], [3], [-0.5], {}, "stop")
    >>> two = TurnRecord([1, 2, 3, 9], [4], [-0.1], {}, "stop")
    >>> drifted = TurnRecord([1, 7], [4], [-0.1], {}, "stop")
    >>> rendered_again([one, two, drifted])
    [0, 4]
    """
    counts: list[int] = []
    held: list[int] | None = None
    media: tuple[Any, ...] = ()
    for turn in turns:
        prompt, output = turn.prompt_ids, turn.output_ids
        if prompt is None or output is None:
            return []  # a sampler without ids
        if held is not None:
            other = turn.media[: len(media)] != media  # equal ids that stand for other images: nothing can be shared
            same = 0 if other else len(held)
            if not other and prompt[: len(held)] != held:
                pairs = enumerate(zip(held, prompt, strict=False))
                same = next((i for i, (a, b) in pairs if a != b), min(len(held), len(prompt)))
            counts.append(len(held) - same)
        held, media = [*prompt, *output], turn.media
    return counts


def completion_ids(sequences: Iterable[TrainingSequence]) -> list[int]:
    """All ids after the first prompt, tool results included; a fork adds what its sequence has after its own prompt.

    >>> completion_ids([TrainingSequence([1, 2, 3, 9, 4], [False, False, True, False, True], [])])
    [3, 9, 4]
    """
    return [i for one in sequences for i in one.input_ids[one.completion_mask.index(True) :]]
