"""The function behind a loss's name: a built-in one, or what `register_loss` sent along."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch

from raysessions.actors.maths.losses import LOSS_FNS, LossInputs, LossOutput, sum_up
from raysessions.actors.maths.metrics import MERGES, Part
from raysessions.errors import LossError
from raysessions.operations import Loss


def compute_loss(loss: Loss, logprobs_T: torch.Tensor, inputs: LossInputs) -> LossOutput:
    """The loss of a micro-batch. Raises `LossError` if a registered function returns something else than it should."""
    if loss.function is None:
        return LOSS_FNS[loss.name](logprobs_T, inputs, loss.config)
    returned = _unpickle(loss.name, loss.function)(logprobs_T, inputs, loss.config)
    per_token_T, metrics = returned if isinstance(returned, tuple) else (returned, {})
    _check(loss.name, per_token_T, metrics, logprobs_T)
    parts = {name: Part(float(value), len(logprobs_T)) for name, value in metrics.items()}
    weights_T = inputs.columns.get("weights", torch.ones_like(logprobs_T))
    return sum_up(per_token_T, weights_T, parts)


def _check(name: str, per_token_T: Any, metrics: Any, logprobs_T: torch.Tensor) -> None:
    if not isinstance(per_token_T, torch.Tensor) or per_token_T.shape != logprobs_T.shape:
        got = tuple(per_token_T.shape) if isinstance(per_token_T, torch.Tensor) else type(per_token_T).__name__
        raise LossError(f"Loss {name!r} must return one number per token, shape {tuple(logprobs_T.shape)}; it gave {got}.")
    if torch.is_grad_enabled() and not per_token_T.requires_grad:
        raise LossError(f"Loss {name!r} returned numbers that do not depend on logprobs_T: there is nothing to train on.")
    if not isinstance(metrics, Mapping):
        raise LossError(f"Loss {name!r} must return its metrics as a dict, not {type(metrics).__name__}.")
    for metric in metrics:
        if ":" not in metric or metric.rpartition(":")[2] not in MERGES:
            raise LossError(f"Loss {name!r}: metric {metric!r} must end in {', '.join(':' + kind for kind in MERGES)}.")


@functools.lru_cache(maxsize=64)
def _unpickle(name: str, function: bytes) -> Any:
    try:
        return cloudpickle.loads(function)
    except Exception as error:
        raise LossError(
            f"The function of loss {name!r} cannot be loaded on the training rank: {error!r}. Its module must be installed "
            "on the cluster's nodes, or be sent with runtime_env."
        ) from error
