"""Logprobs of target tokens from hidden states, without the [tokens, vocabulary] matrix.

Suffixes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

CHUNK_TOKENS = 256
"""Tokens whose logits exist at the same time: 256 × 49,152 float32 is 48 MB."""


def target_logprobs(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, trained_T: torch.Tensor
) -> torch.Tensor:
    """log softmax(hidden @ weightᵀ)[target], float32, shape (T,).

    Differentiable in `hidden_TH`; `weight_VH` is frozen. `trained_T` (bool) names the tokens whose gradient is wanted:
    the others get a gradient of 0 at no cost. Logits and softmax are float32 whatever the model's dtype: logits rounded to
    bfloat16 are off by up to 0.1.
    """
    return _TargetLogprobs.apply(hidden_TH, weight_VH, targets_T, trained_T)


class _TargetLogprobs(torch.autograd.Function):
    """d lp / d hidden = weight[target] − softmax(logits) @ weight does not depend on the incoming gradient, so it is made
    while the logits are there: two matrix products in all, where keeping nothing would take a third in backward."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, targets_T, trained_T):
        wants_grad = ctx.needs_input_grad[0]
        logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=hidden_TH.device)
        slope_TH = torch.zeros_like(hidden_TH) if wants_grad else None
        # On CPU one float32 copy for the call; a GPU multiplies bfloat16 into float32 by itself.
        logits_weight_VH = weight_VH if weight_VH.is_cuda else weight_VH.float()
        for begin in range(0, len(targets_T), CHUNK_TOKENS):
            chunk = slice(begin, begin + CHUNK_TOKENS)
            target_C = targets_T[chunk, None]
            logits_CV = _logits(hidden_TH[chunk], logits_weight_VH)
            logsumexp_C = logits_CV.logsumexp(-1, keepdim=True)
            logprobs_T[chunk] = (logits_CV.gather(-1, target_C) - logsumexp_C).squeeze(-1)
            if slope_TH is None or not trained_T[chunk].any():
                continue
            rows = trained_T[chunk].nonzero().squeeze(-1)
            residual_RV = logits_CV[rows].sub_(logsumexp_C[rows]).exp_()
            residual_RV.scatter_add_(-1, target_C[rows], torch.full_like(logsumexp_C[rows], -1.0))
            slope_TH[begin + rows] = -(residual_RV.to(weight_VH.dtype) @ weight_VH).to(slope_TH.dtype)
        if slope_TH is not None:
            ctx.save_for_backward(slope_TH)
        return logprobs_T

    @staticmethod
    def backward(ctx, grad_T):
        (slope_TH,) = ctx.saved_tensors
        return (grad_T[:, None] * slope_TH).to(slope_TH.dtype), None, None, None


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    if weight_VH.dtype == torch.float32:
        return hidden_CH.float() @ weight_VH.T
    return torch.mm(hidden_CH.to(weight_VH.dtype), weight_VH.T, out_dtype=torch.float32)
