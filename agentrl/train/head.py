"""What a row of logits says about a token, and the output layer in fp32."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.errors import ConfigurationError

LEAST = -1e3  # log-probs below it are probability 0 in every dtype; 0 x LEAST is 0, where 0 x -inf is not


class _Scores(torch.autograd.Function):
    """Keeps one [n, vocabulary] tensor for the backward pass, two where the entropy has one, and makes one more."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits_nV: Tensor, targets_n: Tensor, candidates_nK: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        log_probs_nV = torch.log_softmax(logits_nV, -1)
        target_n = log_probs_nV.gather(-1, targets_n[:, None])[:, 0]
        picked_nK = None
        if candidates_nK is not None:
            picked_nK = log_probs_nV.gather(-1, candidates_nK.clamp_min(0)).masked_fill_(candidates_nK < 0, -torch.inf)
        probs_nV = log_probs_nV.exp()
        entropy_n = torch.linalg.vecdot(probs_nV, log_probs_nV.clamp_min_(LEAST)).neg_()
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_n)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            probs_nV, log_probs_nV if entropy_gradient else None, targets_n, candidates_nK, entropy_n
        )  # fmt: skip
        return target_n, entropy_n, picked_nK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_target_n: Tensor | None, to_entropy_n: Tensor | None, to_picked_nK: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        probs_nV, log_probs_nV, targets_n, candidates_nK, entropy_n = ctx.saved_tensors
        # d log p_y = onehot_y - p;  d H = -p (log p + H)
        score_n = torch.zeros_like(entropy_n) if to_target_n is None else to_target_n
        if to_picked_nK is not None:
            to_picked_nK = to_picked_nK.masked_fill(candidates_nK < 0, 0.0)
            score_n = score_n + to_picked_nK.sum(-1)
        if to_entropy_n is None:
            grad_nV = probs_nV * -score_n[:, None]
        else:
            factor_nV = (log_probs_nV + entropy_n[:, None]).mul_(-to_entropy_n[:, None])
            grad_nV = factor_nV.sub_(score_n[:, None]).mul_(probs_nV)
        if to_target_n is not None:
            grad_nV.scatter_add_(-1, targets_n[:, None], to_target_n[:, None])
        if to_picked_nK is not None:
            grad_nV.scatter_add_(-1, candidates_nK.clamp_min(0), to_picked_nK)
        return grad_nV, None, None, None


def scores(
    logits_nV: Tensor, targets_n: Tensor, candidates_nK: Tensor | None = None, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of each target, entropy in nats, and log-probs of candidate ids (-inf where the id is -1).

    >>> scores(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]), torch.tensor([[1, 2, -1]]))
    (tensor([-0.6931]), tensor([0.6931]), tensor([[-0.6931,    -inf,    -inf]]))
    """
    return _Scores.apply(logits_nV, targets_n, candidates_nK, entropy_gradient)  # type: ignore[return-value]


def renormalised(log_probs_N: Tensor, candidate_log_probs_NK: Tensor) -> Tensor:
    """[N] log-probs within the set that each token was drawn from (top-k, top-p, min-p), with gradient to both.

    Or [N, H], of several ids for each token.

    `candidate_log_probs_NK` are those of the set's distinct ids, the token's own among them, and -inf elsewhere. A
    token without any candidate was drawn from the whole vocabulary and stays as it is.

    >>> inside = torch.tensor([[0.5, 0.25, 0.0]]).log()
    >>> renormalised(torch.tensor([0.5]).log(), inside).exp()
    tensor([0.6667])
    """
    whole_N = torch.isneginf(candidate_log_probs_NK).all(-1)
    # the gradient of logsumexp of nothing but -inf is NaN, also where its value is not used
    mass_N = torch.logsumexp(candidate_log_probs_NK.masked_fill(whole_N[:, None], 0.0), -1)
    mass_N = torch.where(whole_N, 0.0, mass_N)
    return log_probs_N - (mass_N if log_probs_N.dim() == 1 else mass_N[:, None])


def cast_head_to_fp32(model: Any) -> None:
    """The model's output layer has fp32 weights and computes in fp32, whoever calls it: training, sampling, evaluation.

    Hidden states are cast on their way in, and autocast is off inside. The rest of the model, and the names of its
    weights, are as before. Doing it twice changes nothing.

    Raises:
        ConfigurationError: The output layer shares its weights with the input embedding, which would be cast with it.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        raise ConfigurationError(f"cast_lm_head_to_fp32: {type(model).__name__} has no output layer to cast.")
    shared = {id(p) for p in head.parameters()} & {id(p) for p in embedding.parameters()}
    if shared or getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        raise ConfigurationError(
            "cast_lm_head_to_fp32 needs an output layer of its own, but this model's is tied to its input embedding "
            "(tie_word_embeddings). Leave the option at False, or load the model in float32."
        )
    head.to(torch.float32)
    if "_agentrl_forward" not in head.__dict__:
        head._agentrl_forward = head.forward
        head.forward = types.MethodType(_fp32_forward, head)


def _fp32_forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return self._agentrl_forward(hidden.float(), *args, **kwargs)
