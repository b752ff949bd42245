"""The losses. Pure: logprobs and inputs in, per-token loss and metrics out. `raysessions/losses.py` has their names.

Suffix _T: one entry per target token, all datums of a micro-batch end to end, float32.

    lp   logprob of the target under the learner, nats; the only tensor with a gradient
    q    logprob given with the datum: under the sampler that drew the token
    A    advantage
    w    weight
    r    exp(lp − q), the importance ratio
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raysessions.actors.maths.metrics import Part

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss gives for one micro-batch."""

    per_token_T: torch.Tensor
    """Each token's share; their sum is what is differentiated."""
    metrics: dict[str, Part]


LossFn = Callable[[torch.Tensor, Tensors, Mapping[str, float]], LossOutput]


def cross_entropy(lp_T: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> LossOutput:
    """−w·lp. Weights may be fractional or negative."""
    return _output(-inputs["weights"] * lp_T, inputs["weights"], {})


def importance_sampling(lp_T: torch.Tensor, inputs: Tensors, config: Mapping[str, float]) -> LossOutput:
    """−w·r·A: the policy gradient, corrected for the sampler being another distribution than the learner."""
    coefficient_T = inputs["weights"] * inputs["advantages"]
    # Where the coefficient is 0 the ratio is not needed, and q is often a placeholder that would overflow exp.
    ratio_T = torch.where(coefficient_T != 0, lp_T - inputs["logprobs"], 0.0).exp()
    return _output(-coefficient_T * ratio_T, inputs["weights"], _divergence(lp_T, inputs))


LOSS_FNS: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
}


def _output(per_token_T: torch.Tensor, weights_T: torch.Tensor, metrics: dict[str, Part]) -> LossOutput:
    # Sums in float64: the same to 1e-12 however the datums are split.
    total = per_token_T.detach().double().sum().item()
    metrics = {"loss:sum": Part(total), "weight:sum": Part(weights_T.double().sum().item()), **metrics}
    return LossOutput(per_token_T, metrics)


def _divergence(lp_T: torch.Tensor, inputs: Tensors) -> dict[str, Part]:
    """How far the learner is from the sampler, over the sampled tokens.

    v1 is the plain estimate of KL(sampler ‖ learner), v2 half the mean square, never negative (Schulman 2020,
    "Approximating KL Divergence"). ess is the effective share of samples, (Σr)² / (n·Σr²).
    """
    q_T, weights_T = inputs["logprobs"], inputs["weights"]
    # A prompt token given without weights has q = 0 and A = 0.
    sampled_T = (weights_T != 0) & ((q_T != 0) | (inputs["advantages"] != 0))
    diff_T = (lp_T.detach() - q_T)[sampled_T].double()
    count = len(diff_T)
    if count == 0:
        return {}
    ratio_T = diff_T.exp()
    ess = (ratio_T.sum() ** 2 / (ratio_T**2).sum() / count).item()
    return {
        "kl_sample_train_v1:mean": Part(-diff_T.mean().item(), count),
        "kl_sample_train_v2:mean": Part(0.5 * (diff_T**2).mean().item(), count),
        "ratio:mean": Part(ratio_T.mean().item(), count),
        "ess:mean": Part(ess, count),
    }
