"""What a sample of episodes says about a policy: mean, confidence interval, pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist


def mean_interval(by_task: Sequence[Sequence[float]]) -> tuple[float | None, tuple[float, float] | None]:
    """The mean over all samples, and its 95% interval: Student's t over tasks, whose samples count as one cluster.

    With one sample per task this is the usual t interval of a mean. None where there is nothing to say: no sample, a
    single task, or tasks without any spread.

    >>> mean, (low, high) = mean_interval([[1.0], [2.0], [3.0], [4.0]])  # t with 3 degrees of freedom: 3.182
    >>> round(mean, 3), round(high - mean, 3) == round(3.182446 * math.sqrt(5 / 3) / 2, 3)
    (2.5, True)
    >>> mean_interval([[1.0], [1.0]])
    (1.0, None)
    """
    tasks = [list(samples) for samples in by_task if samples]
    total = sum(map(len, tasks))
    if not total:
        return None, None
    mean = math.fsum(math.fsum(samples) for samples in tasks) / total
    count = len(tasks)
    if count < 2:
        return mean, None
    squares = math.fsum(math.fsum(value - mean for value in samples) ** 2 for samples in tasks)
    error = math.sqrt(count / (count - 1) * squares) / total
    if error < 1e-12:
        return mean, None
    half = t_quantile(0.975, count - 1) * error
    return mean, (mean - half, mean + half)


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution with `freedom` degrees of freedom, to about 1e-4.

    >>> [round(t_quantile(0.975, n), 3) for n in (1, 2, 3, 4, 10, 30, 100)]
    [12.706, 4.303, 3.182, 2.776, 2.228, 2.042, 1.984]
    """
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        if _t_distribution(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_distribution(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0: the finite trigonometric sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if freedom > 1000:
        return NormalDist().cdf(t)
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inside / 2


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is correct, estimated without bias from more (arXiv 2107.03374, equation 1).

    1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples of which {correct} are correct")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def counted(values: Sequence[str]) -> Mapping[str, int]:
    """How often each value is there, most often first.

    >>> counted(["finished", "env_done", "finished"])
    {'finished': 2, 'env_done': 1}
    """
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
