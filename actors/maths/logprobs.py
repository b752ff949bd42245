"""Logprobs of target tokens from hidden states, without the [positions, vocabulary] matrix.

Suffixes: T positions, P pairs of a position and a target, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch

CHUNK_TOKENS = 256
"""Positions whose logits exist at the same time: 256 × 49,152 float32 is 48 MB."""


def target_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    position_P: torch.Tensor,
    target_P: torch.Tensor,
    trained_P: torch.Tensor,
) -> torch.Tensor:
    """log softmax(hidden[position] @ weightᵀ)[target], float32, shape (P,).

    `position_P` must ascend; a position may have any number of targets, and its logits are made once. Differentiable in
    `hidden_TH`; `weight_VH` is frozen and not needed in backward. `trained_P` (bool) names the pairs whose gradient is
    wanted: the others get a gradient of 0 at no cost. Logits and softmax are float32 whatever the model's dtype: logits
    rounded to bfloat16 are off by up to 0.1.
    """
    return _TargetLogprobs.apply(hidden_TH, weight_VH, position_P, target_P, trained_P)


class _TargetLogprobs(torch.autograd.Function):
    """d lp / d hidden = weight[target] − softmax(logits) @ weight does not depend on the incoming gradient, so it is made
    while the logits are there: two matrix products in all, where keeping nothing would take a third in backward."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, position_P, target_P, trained_P):
        wants_grad = ctx.needs_input_grad[0]
        logprobs_P = torch.empty(len(target_P), dtype=torch.float32, device=hidden_TH.device)
        slopes, rows = [hidden_TH.new_empty(0, hidden_TH.shape[1])], [position_P.new_empty(0)]
        logits = _Logits(hidden_TH, weight_VH)
        begins = torch.arange(0, len(hidden_TH) + CHUNK_TOKENS, CHUNK_TOKENS, device=position_P.device)
        bounds = torch.searchsorted(position_P, begins).tolist()
        for chunk, (first, last) in enumerate(itertools.pairwise(bounds)):
            begin = chunk * CHUNK_TOKENS
            at_C, target_C = position_P[first:last] - begin, target_P[first:last]
            logits_TV = logits.of(begin, begin + CHUNK_TOKENS)
            logsumexp_T = logits_TV.logsumexp(-1)
            logprobs_P[first:last] = logits_TV[at_C, target_C] - logsumexp_T[at_C]
            if not wants_grad:
                continue
            pairs = trained_P[first:last].nonzero().squeeze(-1)
            if not len(pairs):
                continue
            # Positions with a trained target, and for each trained pair which of them is its own.
            used_T, own_P = at_C[pairs].unique_consecutive(return_inverse=True)
            logits_TV, logsumexp_T = (x if len(used_T) == len(x) else x[used_T] for x in (logits_TV, logsumexp_T))
            probabilities_TV = logits_TV.sub_(logsumexp_T[:, None]).exp_()
            expected_TH = probabilities_TV.to(weight_VH.dtype) @ weight_VH
            slopes.append((weight_VH[target_C[pairs]] - expected_TH[own_P]).to(hidden_TH.dtype))
            rows.append(first + pairs)
        if wants_grad:
            pairs_P = torch.cat(rows)
            ctx.save_for_backward(torch.cat(slopes), pairs_P, position_P[pairs_P])
            ctx.num_positions = len(hidden_TH)
        return logprobs_P

    @staticmethod
    def backward(ctx, grad_P):
        slope_PH, pairs_P, position_P = ctx.saved_tensors
        # Summed in float32: a position may have many targets.
        grad_TH = torch.zeros(ctx.num_positions, slope_PH.shape[1], dtype=torch.float32, device=slope_PH.device)
        grad_TH.index_add_(0, position_P, grad_P[pairs_P, None] * slope_PH)
        return grad_TH.to(slope_PH.dtype), None, None, None, None


class _Logits:
    """float32 logits of a few positions at a time."""

    def __init__(self, hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> None:
        self._hidden_TH = hidden_TH.to(weight_VH.dtype)
        self._weight_HV = weight_VH.T
        self._buffer_TV = None
        if not weight_VH.is_cuda:
            # A GPU multiplies bfloat16 into float32 by itself; here both are copied first, without loss. And one buffer for
            # all chunks: fresh memory costs as much again as the product.
            self._hidden_TH, self._weight_HV = self._hidden_TH.float(), weight_VH.float().T
            self._buffer_TV = torch.empty(min(CHUNK_TOKENS, len(hidden_TH)), len(weight_VH))

    def of(self, begin: int, end: int) -> torch.Tensor:
        """Valid until the next call, and may be written to."""
        hidden_TH = self._hidden_TH[begin:end]
        if self._buffer_TV is not None:
            return torch.mm(hidden_TH, self._weight_HV, out=self._buffer_TV[: len(hidden_TH)])
        if hidden_TH.dtype == torch.float32:
            return torch.mm(hidden_TH, self._weight_HV)
        return torch.mm(hidden_TH, self._weight_HV, out_dtype=torch.float32)
