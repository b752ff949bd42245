"""AdamW over one flat buffer, its state and its work split over the ranks from ZeRO stage 1 on.

AdamW updates each number by itself, so one flat parameter, or a slice of it, steps as its many views would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from raysessions.actors.engines.process_group import ProcessGroup
from raysessions.errors import SessionError
from raysessions.training_state import MOMENTS
from raysessions.types import AdamParams


class ShardedAdamW:
    """Steps `weights`, whole on every rank, from the ranks' gradients. `is_sharded`: each rank steps its own slice."""

    def __init__(self, weights: torch.Tensor, group: ProcessGroup, *, is_sharded: bool) -> None:
        self._weights = weights
        self._group = group
        self._is_sharded = is_sharded
        self._own = torch.nn.Parameter(group.own_slice(weights) if is_sharded else weights, requires_grad=False)
        self._adamw = torch.optim.AdamW([self._own], fused=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """`exp_avg` and `exp_avg_sq` of what this rank steps: not copies. Empty before the first step."""
        state = self._adamw.state.get(self._own, {})
        return {name: state[name] for name in MOMENTS} if state else {}

    def load(self, moments: Mapping[str, torch.Tensor], step: int) -> None:
        """Goes on from `step` steps with the moments of the whole buffer; without moments, as before the first step."""
        self._adamw.state.clear()
        if not moments:
            return
        own = {name: self._group.own_slice(whole) if self._is_sharded else whole for name, whole in moments.items()}
        self._adamw.state[self._own] = {
            # Where torch itself keeps the count of a fused optimizer.
            "step": torch.tensor(float(step), device=self._own.device),
            **{name: part.to(self._own.device, copy=True) for name, part in own.items()},
        }

    def step(self, gradient: torch.Tensor, adam: AdamParams) -> float:
        """Clips and steps with `gradient`, the sum over the ranks (the own slice of it if sharded). Returns its L2 norm
        before clipping. Raises `SessionError` on every rank, with nothing applied, if that is not finite."""
        square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        norm = (self._group.sum(square) if self._is_sharded else square).sqrt().item()
        if not math.isfinite(norm):
            raise SessionError(
                f"The gradient's norm is {norm}: nothing was applied and the gradient was dropped. "
                "Look for extreme advantages or logprobs in the last batches."
            )
        if adam.grad_clip_norm and norm > adam.grad_clip_norm:
            gradient.mul_(adam.grad_clip_norm / norm)
        self._adamw.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._own.grad = gradient
        self._adamw.step()
        self._own.grad = None
        if self._is_sharded:
            self._group.gather_slices(self._weights)
        return norm
