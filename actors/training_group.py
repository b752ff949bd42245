"""The training ranks of one base model, as one thing. Lives inside the ModelHost, their only caller.

Every method sends its calls at once and returns something to await: calls reach the ranks in the order of the methods,
and the next one is on its way before the last has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import ray

from raysessions.actors.answer import answer
from raysessions.actors.maths.metrics import Part, merge
from raysessions.actors.placement import Placed, place_engine_actors
from raysessions.actors.protocol import (
    AdapterFacts,
    Address,
    LossResult,
    ModelFacts,
    PeerFailedError,
    RankDiedError,
    RankState,
    Seat,
)
from raysessions.actors.training_actor import TrainingActor
from raysessions.config import LoraConfig, TrainingConfig
from raysessions.operations import LossOp
from raysessions.responses import OptimStepResponse
from raysessions.training_state import TrainingState
from raysessions.types import AdamParams, ForwardBackwardOutput, TensorData

RANK_DIED = RankDiedError("A training rank died.")

STRAGGLER_S = 60.0
"""How long the other ranks may take to answer once one has failed: at ZeRO stage 3 they may wait for it for ever."""


class TrainingGroup:
    """N ranks that get the same calls in the same order."""

    def __init__(self, placed: Placed, operation_timeout_s: float) -> None:
        self._placed = placed
        self._ranks = placed.actors
        self._operation_timeout_s = operation_timeout_s

    @classmethod
    async def place(cls, base_model: str, config: TrainingConfig) -> TrainingGroup:
        placed = await place_engine_actors(TrainingActor, base_model, config, config=config, count=config.num_workers)
        return cls(placed, config.operation_timeout_s)

    async def load(self) -> ModelFacts:
        addresses = await self._together([rank.address.remote() for rank in self._ranks])
        loading = [rank.load.remote(seat) for rank, seat in zip(self._ranks, _seats(addresses), strict=True)]
        return (await self._together(loading))[0]

    def add_session(self, session_id: str, lora: LoraConfig) -> Awaitable[AdapterFacts]:
        return _first(self._together([rank.add_session.remote(session_id, lora) for rank in self._ranks]))

    def remove_session(self, session_id: str) -> Awaitable[None]:
        return _first(self._together([rank.remove_session.remote(session_id) for rank in self._ranks]))

    def run_loss(self, session_id: str, op: LossOp) -> Awaitable[ForwardBackwardOutput]:
        return _collect(self._together([rank.run_loss.remote(session_id, op) for rank in self._ranks]), op.lengths)

    def optim_step(self, session_id: str, adam: AdamParams) -> Awaitable[OptimStepResponse]:
        return _respond(self._together([rank.optim_step.remote(session_id, adam) for rank in self._ranks]))

    def export_adapter(self, session_id: str) -> tuple[ray.ObjectRef, Awaitable[int]]:
        """The adapter as an object in the store, by reference: the host never holds the weights. And, once it is there, after
        how many steps. Every rank has the weights, so one is asked."""
        weights, step = self._ranks[0].export_adapter.remote(session_id)
        return weights, _first(self._together([step]))

    def export_state(self, session_id: str) -> list[ray.ObjectRef]:
        """Every rank's part, by reference."""
        return [rank.export_state.remote(session_id) for rank in self._ranks]

    def gather(self, parts: Sequence[ray.ObjectRef]) -> Awaitable[list[RankState]]:
        """What `export_state` refers to."""
        return self._together(parts)

    def load_state(self, session_id: str, state: TrainingState, gradients: Sequence[np.ndarray | None] = ()) -> Awaitable[None]:
        """`gradients`: one for each rank, or none."""
        shared = ray.put(state)
        gradients = gradients or [None] * len(self._ranks)
        calls = [rank.load_state.remote(session_id, shared, own) for rank, own in zip(self._ranks, gradients, strict=True)]
        return _first(self._together(calls))

    def release_memory(self) -> Awaitable[None]:
        return _first(self._together([rank.release_memory.remote() for rank in self._ranks]))

    def stop(self) -> None:
        self._placed.end()

    def _together(self, refs: Sequence[ray.ObjectRef]) -> Awaitable[list[Any]]:
        """The ranks' answers. Raises the first error, when all have answered; when one is gone or hangs, ends all."""
        calls = [asyncio.ensure_future(answer(ref, if_dead=RANK_DIED)) for ref in refs]

        async def wait() -> list[Any]:
            done, pending = await asyncio.wait(calls, timeout=self._operation_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            has_failed = any(_error(call) for call in done)
            if pending and has_failed and not any(_is_death(_error(call)) for call in done):
                _, pending = await asyncio.wait(pending, timeout=STRAGGLER_S)
            if pending:
                self.stop()
                await asyncio.wait(pending)
                if not has_failed:
                    raise RankDiedError(
                        f"A training rank did not answer within {self._operation_timeout_s:g} s "
                        "(TrainingConfig.operation_timeout_s)."
                    )
            errors = [error for call in calls if (error := _error(call)) is not None]
            errors.sort(key=lambda error: isinstance(error, PeerFailedError))
            if errors:
                raise errors[0]
            return [call.result() for call in calls]

        return wait()


def _seats(addresses: list[Address]) -> list[Seat]:
    """Ranks of one node are neighbours only if Ray placed them so: the rank is the order of the actors."""
    per_host = Counter(address.host for address in addresses)
    seen: Counter[str] = Counter()
    seats = []
    for world_rank, address in enumerate(addresses):
        seats.append(
            Seat(
                world_rank=world_rank,
                world_size=len(addresses),
                local_rank=seen[address.host],
                local_size=per_host[address.host],
                master_addr=addresses[0].host,
                master_port=addresses[0].port,
            )
        )
        seen[address.host] += 1
    return seats


def _error(call: asyncio.Future[Any]) -> BaseException | None:
    return call.exception() if call.done() else None


def _is_death(error: BaseException | None) -> bool:
    return isinstance(error, RankDiedError)


async def _first(answers: Awaitable[list[Any]]) -> Any:
    return (await answers)[0]


async def _collect(answers: Awaitable[list[LossResult]], lengths: tuple[int, ...]) -> ForwardBackwardOutput:
    """Each rank's tokens in their places, then split by datum."""
    results = await answers
    shape = (sum(lengths), *results[0].logprobs.shape[1:])
    logprobs, loss = np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32)
    for result in results:
        logprobs[result.positions] = result.logprobs
        loss[result.positions] = result.elementwise_loss
    bounds = np.cumsum(lengths)[:-1]
    columns = zip(np.split(logprobs, bounds), np.split(loss, bounds), strict=True)
    outputs = [{"logprobs": TensorData(of_datum), "elementwise_loss": TensorData(terms)} for of_datum, terms in columns]
    return ForwardBackwardOutput(outputs, merge(metrics for result in results for metrics in result.metrics))


async def _respond(answers: Awaitable[list[dict[str, float]]]) -> OptimStepResponse:
    parts = [{name: Part(value) for name, value in metrics.items()} for metrics in await answers]
    return OptimStepResponse(merge(parts))
