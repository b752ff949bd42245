"""The caller's half of `forward_backward_custom`. torch is imported here only, when it is used."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raysessions.batch import Batch
from raysessions.errors import LossError
from raysessions.future import APIFuture
from raysessions.loss_op import loss_op
from raysessions.operations import AbandonedOp, CustomLossOp, Loss, Operation
from raysessions.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    import torch

CustomLossFn = Callable[[Sequence[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, float]]"]


def targets_only(data: Sequence[Datum]) -> Sequence[Datum]:
    """The datums as the model needs them. What is no list of datums is left for validation to refuse."""
    if isinstance(data, str | bytes) or not isinstance(data, Sequence):
        return data
    return [_targets_only(datum) for datum in data]


def _targets_only(datum: Any) -> Any:
    given = getattr(datum, "loss_fn_inputs", None)
    if not isinstance(given, Mapping) or "target_tokens" not in given or not hasattr(datum, "model_input"):
        return datum
    targets = given["target_tokens"]
    shape = targets.shape if hasattr(targets, "shape") else np.shape(targets)
    return Datum(datum.model_input, {"target_tokens": targets, "weights": np.ones(tuple(shape), dtype=np.float32)})


def run_second_pass(
    data: Sequence[Datum],
    batch: Batch,
    loss_fn: CustomLossFn,
    forward: APIFuture[ForwardBackwardOutput],
    submit: Callable[[Operation], object],
) -> None:
    """Waits for `forward` in a thread, runs the caller's loss, and submits the pass that has its gradient."""

    def run() -> None:
        try:
            op: Operation = _second_pass(data, batch, loss_fn, forward.result())
        except BaseException as error:  # whatever it is, the host waits for an operation, and the caller for this error
            op = AbandonedOp(_sendable(error))
        submit(op)

    threading.Thread(target=run, name="forward_backward_custom", daemon=True).start()


def _second_pass(data: Sequence[Datum], batch: Batch, loss_fn: CustomLossFn, output: ForwardBackwardOutput) -> CustomLossOp:
    import torch

    logprobs = [of_datum["logprobs"].to_torch().requires_grad_() for of_datum in output.loss_fn_outputs]
    returned = loss_fn(data, logprobs)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise LossError(f"The custom loss must return (loss, metrics), not {type(returned).__name__}.")
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LossError("The custom loss must be a scalar tensor made from the logprobs that it was given.")
    gradients = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)
    weights = [torch.zeros_like(lp) if grad is None else -grad for lp, grad in zip(logprobs, gradients, strict=True)]
    flat = torch.cat(weights).numpy()
    if not np.isfinite(flat).all():
        raise LossError("The custom loss has a gradient that is not finite: look for log(0), 0/0 or overflow in it.")
    weighted = dataclasses.replace(batch, inputs={"weights": flat})
    op = loss_op(weighted, Loss("cross_entropy", gates=("weights",)), backward=True)
    return CustomLossOp(op, float(loss.detach()), {name: float(value) for name, value in (metrics or {}).items()})


def _sendable(error: BaseException) -> Exception:
    """The error itself if it can travel, else what it says."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LossError(f"The custom loss failed: {error!r}")
    return error if isinstance(error, Exception) else LossError(f"The custom loss was interrupted: {error!r}")
