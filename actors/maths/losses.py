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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a micro-batch's datums bring: `inputs["advantages"]` and so on, float32, shape (T,)."""

    columns: Mapping[str, torch.Tensor]
    sequence_T: torch.Tensor
    """Which datum of the micro-batch a token belongs to, int64, from 0, ascending."""
    num_sequences: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss gives for one micro-batch."""

    per_token_T: torch.Tensor
    """Each token's share; their sum is what is differentiated."""
    metrics: dict[str, Part]


Config = Mapping[str, float]
LossFn = Callable[[torch.Tensor, LossInputs, Config], LossOutput]


def cross_entropy(lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """−w·lp. Weights may be fractional or negative."""
    return sum_up(-inputs["weights"] * lp_T, inputs["weights"], {})


def importance_sampling(lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """−w·r·A: the policy gradient, corrected for the sampler being another distribution than the learner."""
    ratio_T = _diff(lp_T, inputs).exp()
    per_token_T = -inputs["weights"] * inputs["advantages"] * ratio_T
    return sum_up(per_token_T, inputs["weights"], _divergence(lp_T, inputs, clipped_T=None))


def ppo(lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """−w·min(r·A, clip(r)·A), bounds on the ratio itself (Schulman et al. 2017, "Proximal Policy Optimization")."""
    return _clipped(_diff(lp_T, inputs).exp(), lp_T, inputs, config)


def cispo(lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """−w·stopgrad(clip(r))·lp·A: clips the weight of a token's gradient, never the gradient itself (MiniMax 2025,
    "MiniMax-M1")."""
    ratio_T = _diff(lp_T, inputs).exp().detach()
    bounded_T = ratio_T.clamp(*_bounds(config))
    per_token_T = -inputs["weights"] * bounded_T * inputs["advantages"] * lp_T
    return sum_up(per_token_T, inputs["weights"], _divergence(lp_T, inputs, clipped_T=bounded_T != ratio_T))


def dro(lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """−w·(lp·A − ½·beta·(lp − q)²) (Richemond et al. 2024, "Offline Regularised Reinforcement Learning").

    The square pulls lp to q also where A is 0: a position that was not sampled must have weight 0."""
    diff_T = torch.where(inputs["weights"] != 0, lp_T - inputs["logprobs"], 0.0)
    per_token_T = -inputs["weights"] * (lp_T * inputs["advantages"] - 0.5 * config["beta"] * diff_T**2)
    return sum_up(per_token_T, inputs["weights"], _divergence(lp_T, inputs, clipped_T=None))


def gspo(lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """PPO's min with one ratio per sequence, s = exp(mean of lp − q over its tokens of weight ≠ 0), as a token ratio
    stopgrad(s)·exp(lp − stopgrad(lp)) (Zheng et al. 2025, "Group Sequence Policy Optimization", GSPO-token)."""
    counted_T = (inputs["weights"] != 0).float()
    diff_T = torch.where(counted_T != 0, lp_T.detach() - inputs["logprobs"], 0.0)
    sums_S = torch.zeros(2, inputs.num_sequences, device=lp_T.device)
    sums_S.index_add_(1, inputs.sequence_T, torch.stack([diff_T, counted_T]))
    sequence_ratio_S = (sums_S[0] / sums_S[1].clamp(min=1)).exp()
    ratio_T = sequence_ratio_S[inputs.sequence_T] * (lp_T - lp_T.detach()).exp()
    return _clipped(ratio_T, lp_T, inputs, config)


LOSS_FNS: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def _clipped(ratio_T: torch.Tensor, lp_T: torch.Tensor, inputs: LossInputs, config: Config) -> LossOutput:
    """−w·min(ratio·A, clip(ratio)·A)."""
    advantages_T = inputs["advantages"]
    free_T, bounded_T = ratio_T * advantages_T, ratio_T.clamp(*_bounds(config)) * advantages_T
    per_token_T = -inputs["weights"] * torch.minimum(free_T, bounded_T)
    clipped_T = (bounded_T < free_T).detach()
    return sum_up(per_token_T, inputs["weights"], _divergence(lp_T, inputs, clipped_T=clipped_T))


def _bounds(config: Config) -> tuple[float, float]:
    return config["clip_low_threshold"], config["clip_high_threshold"]


def _diff(lp_T: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """lp − q, and 0 where the coefficient is 0: there q is often a placeholder that would overflow exp."""
    counts_T = inputs["weights"] * inputs["advantages"] != 0
    return torch.where(counts_T, lp_T - inputs["logprobs"], 0.0)


def sum_up(per_token_T: torch.Tensor, weights_T: torch.Tensor, metrics: dict[str, Part]) -> LossOutput:
    """The output with the sums that every loss reports."""
    # Sums in float64: the same to 1e-12 however the datums are split.
    total = per_token_T.detach().double().sum().item()
    metrics = {"loss:sum": Part(total), "weight:sum": Part(weights_T.double().sum().item()), **metrics}
    return LossOutput(per_token_T, metrics)


def _divergence(lp_T: torch.Tensor, inputs: LossInputs, *, clipped_T: torch.Tensor | None) -> dict[str, Part]:
    """How far the learner is from the sampler, over the sampled tokens.

    v1 is the plain estimate of KL(sampler ‖ learner), v2 half the mean square, never negative (Schulman 2020,
    "Approximating KL Divergence"). `metrics.merge` makes the effective share of samples, ess, of the ratio's mean squares.
    """
    q_T, weights_T = inputs["logprobs"], inputs["weights"]
    # A prompt token given without weights has q = 0 and A = 0.
    sampled_T = (weights_T != 0) & ((q_T != 0) | (inputs["advantages"] != 0))
    diff_T = (lp_T.detach() - q_T)[sampled_T].double()
    count = len(diff_T)
    if count == 0:
        return {}
    ratio_T = diff_T.exp()
    num_clipped = 0 if clipped_T is None else int((clipped_T & sampled_T).sum().item())
    return {
        "kl_sample_train_v1:mean": Part(-diff_T.mean().item(), count),
        "kl_sample_train_v2:mean": Part(0.5 * (diff_T**2).mean().item(), count),
        "ratio:mean": Part(ratio_T.mean().item(), count),
        "clip_fraction:mean": Part(num_clipped / count, count),
        "ratio_square:mean": Part((ratio_T**2).mean().item(), count),
    }
