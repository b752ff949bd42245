"""Who answers a request, and when: the pool's queue and its replicas' room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from raysessions.actors.live_versions import LiveVersions
from raysessions.actors.phases import SamplingPhases
from raysessions.actors.protocol import OpenAiPart, ReplicaFailedError
from raysessions.actors.sampling_queue import RequestQueue, Ticket
from raysessions.actors.sampling_replica import Replica
from raysessions.actors.sampling_replicas import ReplicaSet
from raysessions.actors.sampling_router import choose
from raysessions.errors import SamplingPoolError

TURN_S = 0.5
"""How long a version may wait for a slot in the engines' batches before another has to let its requests run out."""
MAX_ATTEMPTS = 3
"""Replicas that may fail under one request before it is held to be the cause."""

T = TypeVar("T")


class Dispatcher:
    """Lives in the pool, on its event loop."""

    replicas: ReplicaSet

    def __init__(self, max_queued_requests: int, live: LiveVersions, phases: SamplingPhases) -> None:
        self._live = live
        self._phases = phases
        self._queue: RequestQueue[Replica] = RequestQueue(max_queued_requests)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    async def run(self, ticket: Ticket[Replica], ask: Callable[[Replica], Awaitable[T]]) -> T:
        """What a replica answers. When one fails, another is asked."""
        self._queue.put(ticket)
        while True:
            replica = await self._placed(ticket)
            try:
                return await ask(replica)
            except ReplicaFailedError as error:
                self._put_back(ticket, error)
            finally:
                self._release(replica, ticket)

    async def stream(self, ticket: Ticket[Replica]) -> AsyncGenerator[OpenAiPart, None]:
        """A replica's answer in parts. When one fails, another is asked, until the first part is out."""
        self._queue.put(ticket)
        while True:
            replica, has_begun = await self._placed(ticket), False
            try:
                async for part in replica.answer(ticket):
                    has_begun = True
                    yield part
                return
            except ReplicaFailedError as error:
                if has_begun:
                    raise SamplingPoolError(
                        f"The sampler replica failed in the middle of its answer: ask again. {error}"
                    ) from error
                self._put_back(ticket, error)
            finally:
                self._release(replica, ticket)

    def dispatch(self) -> None:
        """Gives a replica to every request that can have one."""
        while self._queue.place(self._choose):
            pass

    def fail(self, error: SamplingPoolError) -> None:
        """What waits gets the error."""
        self._queue.fail(error)

    async def _placed(self, ticket: Ticket[Replica]) -> Replica:
        """Waits for a replica with room."""
        self.dispatch()
        try:
            return await asyncio.shield(ticket.placed)
        except asyncio.CancelledError:
            self._queue.remove(ticket)
            if ticket.placed.done() and not ticket.placed.exception():
                self._release(ticket.placed.result(), ticket)
            raise

    def _put_back(self, ticket: Ticket[Replica], error: ReplicaFailedError) -> None:
        """Its replica failed under the request: another will have it. Raises `SamplingPoolError` when too many have."""
        ticket.failures += 1
        if ticket.failures == MAX_ATTEMPTS:
            raise SamplingPoolError(
                f"{MAX_ATTEMPTS} sampler replicas failed under this request, so it was given up. The last one: {error}"
            ) from error
        self._queue.put_back(ticket)

    def _release(self, replica: Replica, ticket: Ticket[Replica]) -> None:
        replica.release(ticket)
        if ticket.version is not None and ticket.version.is_retired:
            self._live.free_retired()
        self.dispatch()

    def _choose(self, ticket: Ticket[Replica]) -> Replica | None:
        if not self._phases.may_sample:
            return None
        with_room = [replica for replica in self.replicas.serving if replica.has_room()]
        if admitting := [replica for replica in with_room if replica.admits(ticket.adapter_id)]:
            replica = choose(admitting, ticket.blocks)
            replica.reserve(ticket)
            return replica
        if with_room and ticket.waited_s > TURN_S and not any(replica.is_making_a_slot for replica in with_room):
            min(with_room, key=lambda replica: replica.outstanding_tokens).make_a_slot()
        return None
