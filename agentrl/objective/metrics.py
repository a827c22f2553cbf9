"""Ratio metrics as sums and counts: added over micro-batches and ranks first, divided once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl.objective._shapes import check_flat, count_rollouts, rollout_sum
from agentrl.objective.importance import CorrectionMode
from agentrl.objective.losses import LossTerms

Sums = dict[str, Tensor]
"""Named sums ``x_sum`` and counts ``x_count`` (scalars, to be added), extremes ``x_min``/``x_max``, and tensors per
rollout ``x_R`` (to be concatenated)."""


def clip_metrics(terms: LossTerms, rollout_T: Tensor, *, num_rollouts: int | None = None) -> Sums:
    """What clip_ratio/* needs of one call of a loss: clipped tokens per rollout, and their number of tokens.

    ``low_R``, ``high_R``, ``region_R`` and ``tokens_R`` count tokens of each rollout; where one rollout's tokens are
    spread over several calls, add these first. `clip_summary` makes the metrics.

    >>> rollout = torch.tensor([0, 0, 1])
    >>> no = torch.tensor([False, False, False])
    >>> terms = LossTerms(torch.zeros(3), None, torch.ones(3), no, torch.tensor([True, False, True]))
    >>> clip_metrics(terms, rollout)["high_R"], clip_metrics(terms, rollout)["tokens_R"]
    (tensor([1., 1.], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
    """
    check_flat(rollout_T, low_T=terms.low_T, high_T=terms.high_T)
    rollouts = count_rollouts(rollout_T, num_rollouts)

    def count(flag_T: Tensor) -> Tensor:
        return rollout_sum(flag_T.double(), rollout_T, rollouts)

    sums = {
        "low_R": count(terms.low_T),
        "high_R": count(terms.high_T),
        "region_R": count(terms.low_T | terms.high_T),
        "tokens_R": count(torch.ones_like(terms.low_T)),
    }
    if "phi_R" in terms.extras:
        sums["phi_R"] = terms.extras["phi_R"]
    return sums


def clip_summary(
    parts: Iterable[Sums], *, clip_metric: str | None = "clip_ratio", level: str = "token"
) -> dict[str, float]:
    """The logged clip metrics of all parts together; no name for what was not measured.

    `clip_metric` and `level` are those of the `LossTerms`. Means are over tokens, at level "sequence" over rollouts;
    low_min and high_max are extremes over rollouts of the share of their own tokens. Rollouts without tokens count
    nowhere.

    >>> part = {"low_R": torch.tensor([0.0, 4.0]), "high_R": torch.zeros(2), "region_R": torch.tensor([0.0, 4.0]),
    ...         "tokens_R": torch.tensor([12.0, 4.0])}
    >>> clip_summary([part])["clip_ratio/low_mean"]  # 4 of 16 tokens, not the mean of 0 and 1
    0.25
    """
    joined = _concatenated(parts)
    summary: dict[str, float] = {}
    if "phi_R" in joined:
        phi_R = joined["phi_R"][~torch.isnan(joined["phi_R"])]
        if phi_R.numel():
            summary["vespo/phi_seq_mean"] = float(phi_R.double().mean())
    trained_R = joined["tokens_R"] > 0 if "tokens_R" in joined else torch.zeros(0, dtype=torch.bool)
    if clip_metric is None or not bool(trained_R.any()):
        return summary
    tokens_R = joined["tokens_R"][trained_R]
    shares = {name: joined[f"{name}_R"][trained_R] / tokens_R for name in ("low", "high", "region")}
    unit_R = torch.ones_like(tokens_R) if level == "sequence" else tokens_R
    means = {name: float((share_R * unit_R).sum() / unit_R.sum()) for name, share_R in shares.items()}
    if clip_metric != "clip_ratio":
        return summary | {clip_metric: means["high"]}
    return summary | {
        "clip_ratio/region_mean": means["region"],
        "clip_ratio/low_mean": means["low"],
        "clip_ratio/low_min": float(shares["low"].min()),
        "clip_ratio/high_mean": means["high"],
        "clip_ratio/high_max": float(shares["high"].max()),
    }


def sampling_metrics(
    log_probs_T: Tensor,
    sampler_log_probs_T: Tensor,
    ratio_T: Tensor,
    rollout_T: Tensor,
    mode: CorrectionMode,
    *,
    num_rollouts: int | None = None,
) -> Sums:
    """What sampling/* needs of one call: differences over tokens, ratios over tokens or (sequence modes) rollouts.

    `ratio_T` is the restricted correction for the synchronous trainer and the raw ratio for the asynchronous one.
    """
    check_flat(rollout_T, log_probs_T=log_probs_T, sampler_log_probs_T=sampler_log_probs_T, ratio_T=ratio_T)
    difference_T = (log_probs_T.detach().double() - sampler_log_probs_T.double()).abs()
    ratio = ratio_T.detach().double()
    if mode.startswith("sequence"):  # one number per rollout, the same at all its tokens
        rollouts = count_rollouts(rollout_T, num_rollouts)
        tokens_R = rollout_sum(torch.ones_like(ratio), rollout_T, rollouts)
        per_R = ratio.new_zeros(rollouts).scatter(0, rollout_T, ratio)
        ratio = per_R[tokens_R > 0]
    inf = torch.tensor(torch.inf, dtype=torch.float64, device=ratio.device)
    return {
        "difference_sum": difference_T.sum(),
        "difference_count": inf.new_tensor(difference_T.numel()),
        "difference_max": difference_T.max() if difference_T.numel() else -inf,
        "ratio_sum": ratio.sum(),
        "ratio_count": inf.new_tensor(ratio.numel()),
        "ratio_min": ratio.min() if ratio.numel() else inf,
        "ratio_max": ratio.max() if ratio.numel() else -inf,
    }


def sampling_summary(parts: Iterable[Sums]) -> dict[str, float]:
    """The logged sampling/* metrics of all parts together; empty where nothing was measured."""
    joined = list(parts)
    if not joined or not sum(float(part["difference_count"]) for part in joined):
        return {}

    def mean(name: str) -> float:
        return sum(float(p[f"{name}_sum"]) for p in joined) / sum(float(p[f"{name}_count"]) for p in joined)

    return {
        "sampling/sampling_logp_difference/mean": mean("difference"),
        "sampling/sampling_logp_difference/max": max(float(p["difference_max"]) for p in joined),
        "sampling/importance_sampling_ratio/min": min(float(p["ratio_min"]) for p in joined),
        "sampling/importance_sampling_ratio/mean": mean("ratio"),
        "sampling/importance_sampling_ratio/max": max(float(p["ratio_max"]) for p in joined),
    }


def _concatenated(parts: Iterable[Sums]) -> Sums:
    collected: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            collected.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in collected.items()}
