"""The replicas of a pool: as many as asked for, and another in the place of each that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import ray

from raysessions.actors.protocol import CoreShare, ModelFacts, ReplicaFailedError
from raysessions.actors.sampling_replica import Replica
from raysessions.config import SamplingConfig
from raysessions.errors import SamplingPoolError
from raysessions.storage_location import StoredUri

FIRST_START_RETRIES = 2
RESTART_DELAYS_S = (0.0, 2.0, 10.0, 30.0)
"""Before each attempt to bring a replica back; after the last one its seat is given up."""

log = logging.getLogger("raysessions")


@dataclass(slots=True, eq=False)
class _Seat:
    """A replica's place in the pool, which it leaves to its successor."""

    task: asyncio.Task[None] = field(init=False)
    """Keeps a replica in it."""
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has a node, or never will."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its first replica serves, or has failed to start."""
    error: Exception | None = None
    """Why the first one has not started."""
    node_id: str | None = None
    replica: Replica | None = None


class ReplicaSet:
    """Starts, ends and replaces replicas. `serving` are those that take requests."""

    facts: ModelFacts

    def __init__(
        self,
        base_model: str,
        config: SamplingConfig,
        merged: tuple[ray.ObjectRef] | None,
        read_copy: Callable[[StoredUri], Awaitable[tuple[ray.ObjectRef]]],
        *,
        prepare: Callable[[Replica], Awaitable[None]],
        changed: Callable[[], None],
        ruined: Callable[[SamplingPoolError], None],
    ) -> None:
        """
        Args:
            merged: the weights of the one adapter that the replicas serve, merged; None for any number side by side.
            read_copy: of a version whose weights are gone from the object store.
            prepare: makes a loaded replica fit to serve.
            changed: called when `serving` has changed.
            ruined: called when no replica is left and none can be brought back.
        """
        self._base_model = base_model
        self._config = config
        self._merged = merged
        self._read_copy = read_copy
        self._prepare = prepare
        self._changed = changed
        self._ruined = ruined
        self._seats: list[_Seat] = []
        self._scaling = asyncio.Lock()
        self._available = asyncio.Event()
        """Set while there is one that serves, and when there will be none."""
        self.serving: list[Replica] = []

    @property
    def is_placed(self) -> bool:
        return bool(self._seats) and all(seat.placed.is_set() for seat in self._seats)

    async def scale(self, count: int) -> None:
        """Returns when `count` replicas serve. New ones are undone when one cannot start; those that leave finish their
        requests."""
        async with self._scaling:
            if count > len(self._seats):
                await self._add(count - len(self._seats))
            leaving = sorted(self._seats, key=_outstanding_tokens)[: max(0, len(self._seats) - count)]
            await asyncio.gather(*(self._remove(seat, politely=True) for seat in leaving))

    async def any_serving(self) -> None:
        """Waits for the return of a replica when all have failed. Raises `SamplingPoolError` when none will."""
        await self._available.wait()
        if not self.serving:
            raise SamplingPoolError("No sampler replica could be brought back: call again to start new ones.")

    async def stop(self) -> None:
        await asyncio.gather(*(self._remove(seat, politely=False) for seat in list(self._seats)))

    async def _add(self, count: int) -> None:
        seats = [_Seat() for _ in range(count)]
        self._seats += seats
        for seat in seats:
            seat.task = asyncio.create_task(self._keep(seat))
        try:
            await asyncio.gather(*(_first_start(seat) for seat in seats))
        except BaseException:
            await asyncio.gather(*(self._remove(seat, politely=False) for seat in seats))
            raise

    async def _remove(self, seat: _Seat, *, politely: bool) -> None:
        if seat in self._seats:
            self._seats.remove(seat)
        replica = seat.replica
        if replica in self.serving:
            self._take_off(replica)
            if politely:
                await asyncio.wait([asyncio.ensure_future(replica.idle()), seat.task], return_when=asyncio.FIRST_COMPLETED)
        seat.task.cancel()
        await asyncio.wait([seat.task])
        if replica is not None:
            await replica.end()

    async def _keep(self, seat: _Seat) -> None:
        """A replica in the seat for as long as it is one of ours."""
        failures = 0
        while True:
            try:
                replica = seat.replica = await self._start(seat)
            except Exception as error:
                seat.placed.set()
                died = isinstance(error, ReplicaFailedError)  # in mid-start; an error of its own would come again
                if not seat.started.is_set() and not (died and failures < FIRST_START_RETRIES):
                    seat.error = error
                    seat.started.set()
                    return
                if failures == len(RESTART_DELAYS_S):
                    self._give_up(seat, error)
                    return
                log.warning("raysessions: a sampler replica did not come back, trying again: %s", error)
                await asyncio.sleep(RESTART_DELAYS_S[failures])
                failures += 1
                continue
            failures = 0
            self.serving.append(replica)
            self._available.set()
            seat.started.set()
            self._changed()
            reason = await replica.failure()
            if seat not in self._seats:  # it is leaving
                return
            log.warning("raysessions: a sampler replica failed and is replaced: %s", reason)
            self._take_off(replica)
            replica.kill()
            seat.replica = None

    async def _start(self, seat: _Seat) -> Replica:
        replica = await Replica.place(self._base_model, self._config, self._merged, self._read_copy)
        try:
            seat.node_id = replica.node_id
            seat.placed.set()
            await asyncio.gather(*(other.placed.wait() for other in self._seats))
            neighbours = [other for other in self._seats if other.node_id == seat.node_id]
            self.facts = await replica.load(CoreShare(neighbours.index(seat), len(neighbours)))
            await self._prepare(replica)
        except BaseException:
            replica.kill()
            raise
        return replica

    def _take_off(self, replica: Replica) -> None:
        self.serving.remove(replica)
        if not self.serving:
            self._available.clear()

    def _give_up(self, seat: _Seat, error: Exception) -> None:
        log.warning("raysessions: a sampler replica is given up, scale_samplers tries again: %s", error)
        self._seats.remove(seat)
        if not self._seats:
            self._available.set()
            self._ruined(SamplingPoolError(f"No sampler replica could be brought back: {error}"))


async def _first_start(seat: _Seat) -> None:
    await seat.started.wait()
    if seat.error is not None:
        raise seat.error


def _outstanding_tokens(seat: _Seat) -> int:
    return seat.replica.outstanding_tokens if seat.replica is not None else 0
