"""The training ranks of one base model, as one thing. Lives inside the ModelHost, their only caller.

Every method sends its call at once and returns something to await: calls reach the ranks in the order of the methods,
and the next one is on its way before the last has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import numpy as np
import ray

from raysessions.actors.answer import answer
from raysessions.actors.maths.metrics import merge
from raysessions.actors.placement import place_engine_actor
from raysessions.actors.protocol import AdapterFacts, LossResult, ModelFacts
from raysessions.actors.training_actor import TrainingActor
from raysessions.config import LoraConfig, TrainingConfig
from raysessions.errors import TrainingGroupError
from raysessions.operations import LossOp
from raysessions.types import AdamParams, ForwardBackwardOutput, OptimStepResponse, TensorData

RANK_DIED = TrainingGroupError("A training rank died, and the session's weights with it. Create a new session.")


class TrainingGroup:
    """One rank for now: the whole base model in one process."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    @classmethod
    async def place(cls, base_model: str, config: TrainingConfig) -> TrainingGroup:
        return cls(await place_engine_actor(TrainingActor, base_model, config, config=config))

    def load(self) -> Awaitable[ModelFacts]:
        return _answered(self._rank.load.remote())

    def add_session(self, session_id: str, lora: LoraConfig) -> Awaitable[AdapterFacts]:
        return _answered(self._rank.add_session.remote(session_id, lora))

    def remove_session(self, session_id: str) -> Awaitable[None]:
        return _answered(self._rank.remove_session.remote(session_id))

    def run_loss(self, session_id: str, op: LossOp) -> Awaitable[ForwardBackwardOutput]:
        return _collect(self._rank.run_loss.remote(session_id, op), op.lengths)

    def optim_step(self, session_id: str, adam: AdamParams) -> Awaitable[OptimStepResponse]:
        return _respond(self._rank.optim_step.remote(session_id, adam))

    def export_adapter(self, session_id: str) -> ray.ObjectRef:
        """The adapter as an object in the store, by reference: the host never holds the weights."""
        return self._rank.export_adapter.remote(session_id)

    def stop(self) -> None:
        ray.kill(self._rank)


async def _answered(ref: ray.ObjectRef) -> Any:
    return await answer(ref, if_dead=RANK_DIED)


async def _collect(ref: ray.ObjectRef, lengths: tuple[int, ...]) -> ForwardBackwardOutput:
    result: LossResult = await _answered(ref)
    bounds = np.cumsum(lengths)[:-1]
    columns = zip(np.split(result.logprobs, bounds), np.split(result.elementwise_loss, bounds), strict=True)
    outputs = [{"logprobs": TensorData(logprobs), "elementwise_loss": TensorData(loss)} for logprobs, loss in columns]
    return ForwardBackwardOutput(outputs, merge(result.metrics))


async def _respond(ref: ray.ObjectRef) -> OptimStepResponse:
    return OptimStepResponse(await _answered(ref))
