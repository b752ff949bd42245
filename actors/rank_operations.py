"""Operations that are the ranks' alone."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from raysessions.actors.hosted_session import HostedSession
from raysessions.actors.training_group import TrainingGroup
from raysessions.errors import SessionError
from raysessions.operations import AbandonedOp, CustomLossOp, LoadStateOp, LossOp, Operation, OptimStepOp
from raysessions.responses import LoadStateResponse
from raysessions.types import ForwardBackwardOutput


def send(group: TrainingGroup, session: HostedSession, op: Operation) -> Awaitable[Any]:
    """Sends the operation at once and returns its response to be awaited. Loading a state sends when it is awaited: others must
    wait for it."""
    session_id = session.session_id
    match op:
        case LossOp():
            return group.run_loss(session_id, op)
        case CustomLossOp(op, loss, metrics):
            return _with_metrics(group.run_loss(session_id, op), loss, metrics)
        case OptimStepOp(adam):
            return group.optim_step(session_id, adam)
        case LoadStateOp():
            return _load(group, session, op)
        case AbandonedOp(error):
            raise error
        case unknown:
            raise SessionError(f"Unknown operation {type(unknown).__name__}: client and cluster differ in version.")


async def _load(group: TrainingGroup, session: HostedSession, op: LoadStateOp) -> LoadStateResponse:
    state = await session.checkpoints.read_state(op.uri, with_optimizer=op.with_optimizer)
    await group.load_state(session.session_id, state)
    session.checkpoints.parent = str(op.uri)
    return LoadStateResponse(path=str(op.uri), step=state.step)


async def _with_metrics(
    response: Awaitable[ForwardBackwardOutput], loss: float, metrics: dict[str, float]
) -> ForwardBackwardOutput:
    """What the caller's own loss function said, in place of what its stand-in did."""
    output = await response
    outputs = [{"logprobs": of_datum["logprobs"]} for of_datum in output.loss_fn_outputs]
    engine = {name: value for name, value in output.metrics.items() if name.startswith("engine_")}
    return ForwardBackwardOutput(outputs, {"loss:sum": loss, **engine, **metrics})
