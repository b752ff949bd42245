"""One replica as its pool sees it: what it has to do, which adapters it holds, and whether it is well."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from raysessions.actors.answer import answer
from raysessions.actors.placement import Placed, place_engine_actors
from raysessions.actors.protocol import (
    CoreShare,
    ModelFacts,
    OpenAiHead,
    OpenAiPart,
    ReplicaFailedError,
    ReplicaStatus,
    TokenCount,
)
from raysessions.actors.sampling_actor import SamplingActor
from raysessions.actors.sampling_queue import Ticket
from raysessions.actors.sampling_router import PrefixIndex
from raysessions.actors.sampling_versions import Version
from raysessions.config import SamplingConfig
from raysessions.errors import SamplingPoolError
from raysessions.storage_location import StoredUri
from raysessions.types import SampleResponse

ReadCopy = Callable[[StoredUri], Awaitable[tuple[ray.ObjectRef]]]
"""Fetches a version's weights from the registry."""

PROBE_EVERY_S = 1.0
STUCK_AFTER_S = 8.0
"""A replica whose engine neither answers nor computes for so long has failed."""
SHUTDOWN_S = 10.0
"""How long a replica may take to end its engine before it is killed."""
BATCHES_AHEAD = 2
"""Full batches of sequences that a replica has at most, so that its engine never waits for the pool. What is beyond waits in
the pool, where it can still go to another replica, or behind a client that had less."""


class Replica:
    """A SamplingActor with the requests it has. The pool reserves a place for a request, then lets it run."""

    def __init__(self, placed: Placed, node_id: str, pid: int, config: SamplingConfig, read_copy: ReadCopy) -> None:
        self._placed = placed
        (self.actor,) = placed.actors
        self.node_id = node_id
        self._pid = pid
        self._config = config
        self._read_copy = read_copy
        self._resident: OrderedDict[int, Version] = OrderedDict()
        """Adapters that the engine has loaded, the least recently used first."""
        self._loading = asyncio.Lock()
        self._is_asleep = False
        self._in_flight: Counter[int] = Counter()
        """Requests of each adapter."""
        self._closing: int | None = None
        """The adapter that takes no more requests, so that another gets its slot."""
        self._num_sequences = 0
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._placed_at = time.monotonic()
        self._busy_s = 0.0
        self._busy_since = 0.0
        self.outstanding_tokens = 0
        self.prefixes = PrefixIndex()

    @classmethod
    async def place(
        cls, base_model: str, config: SamplingConfig, merged: tuple[ray.ObjectRef] | None, read_copy: ReadCopy
    ) -> Replica:
        placed = await place_engine_actors(SamplingActor, base_model, config, merged, config=config, is_async=True)
        node_id, pid = await _answered(placed.actors[0].whereabouts.remote())
        return cls(placed, node_id, pid, config, read_copy)

    async def load(self, share: CoreShare) -> ModelFacts:
        return await _answered(self.actor.load.remote(share))

    # Its requests

    def has_room(self) -> bool:
        return not self._failed.done() and self._num_sequences < BATCHES_AHEAD * self._config.max_num_seqs

    def admits(self, adapter_id: int | None) -> bool:
        """Whether the engine can have this adapter in its batch, besides those of the requests it has."""
        if adapter_id is None:
            return True
        if adapter_id in self._in_flight:
            return adapter_id != self._closing
        return len(self._in_flight) < self._config.max_loras

    @property
    def is_making_a_slot(self) -> bool:
        return self._closing is not None

    def make_a_slot(self) -> None:
        """Lets one adapter's requests run out, so that another gets its turn."""
        self._closing = min(self._in_flight, key=self._in_flight.__getitem__)

    def reserve(self, ticket: Ticket[Replica]) -> None:
        if ticket.adapter_id is not None:
            self._in_flight[ticket.adapter_id] += 1
        if not self._num_sequences:
            self._busy_since = time.monotonic()
        self._num_sequences += ticket.request.num_samples
        self.outstanding_tokens += ticket.num_tokens
        self.prefixes.add(ticket.blocks)
        self._idle.clear()

    def release(self, ticket: Ticket[Replica]) -> None:
        adapter_id = ticket.adapter_id
        if adapter_id is not None:
            self._in_flight[adapter_id] -= 1
            if not self._in_flight[adapter_id]:
                del self._in_flight[adapter_id]
                self._closing = None if self._closing == adapter_id else self._closing
        self._num_sequences -= ticket.request.num_samples
        self.outstanding_tokens -= ticket.num_tokens
        if not self._num_sequences:
            self._busy_s += time.monotonic() - self._busy_since
            self._idle.set()

    async def sample(self, ticket: Ticket[Replica]) -> SampleResponse:
        """Raises `ReplicaFailedError` when another replica should answer instead."""
        try:
            if ticket.version is not None:
                # Shielded: a request that is cancelled must not leave an adapter half loaded.
                await asyncio.shield(asyncio.ensure_future(self.bind(ticket.version)))
            return await _answered(self.actor.sample.remote(ticket.request, ticket.adapter_id))
        except ReplicaFailedError as error:
            self.fail(error)
            raise

    async def answer_whole(self, ticket: Ticket[Replica]) -> tuple[OpenAiHead, str, TokenCount]:
        """As `sample`: the answer's head, its body, and what it took."""
        try:
            if ticket.version is not None:
                await asyncio.shield(asyncio.ensure_future(self.bind(ticket.version)))
            return await _answered(self.actor.answer_whole.remote(ticket.request, ticket.adapter_id))
        except ReplicaFailedError as error:
            self.fail(error)
            raise

    async def answer(self, ticket: Ticket[Replica]) -> AsyncIterator[OpenAiPart]:
        """As `sample`, in parts."""
        parts = None
        try:
            if ticket.version is not None:
                await asyncio.shield(asyncio.ensure_future(self.bind(ticket.version)))
            parts = self.actor.answer.options(num_returns="streaming").remote(ticket.request, ticket.adapter_id)
            async for part in parts:
                yield await _answered(part)
            parts = None
        except ReplicaFailedError as error:
            self.fail(error)
            raise
        finally:
            if parts is not None:  # nobody listens any more
                ray.cancel(parts)

    async def idle(self) -> None:
        """Waits until it has no requests."""
        await self._idle.wait()

    def times(self) -> tuple[float, float]:
        """Seconds that it had requests, and that it has been there."""
        now = time.monotonic()
        return self._busy_s + (now - self._busy_since if self._num_sequences else 0.0), now - self._placed_at

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self.node_id, self._pid, self._num_sequences, self.outstanding_tokens, sorted(self._resident))

    async def num_unfinished(self) -> int:
        """Requests that the engine itself has."""
        return await _answered(self.actor.num_unfinished.remote())

    async def sleep(self) -> None:
        """Gives its GPU memory back until `wake_up`. No adapter comes or goes meanwhile. Safe to call again."""
        if not self._is_asleep:
            await self._loading.acquire()
            self._is_asleep = True
            await _answered(self.actor.sleep.remote())

    async def wake_up(self) -> None:
        """Safe to call again."""
        if self._is_asleep:
            await _answered(self.actor.wake_up.remote())
            self._is_asleep = False
            self._loading.release()

    # Its adapters

    async def bind(self, version: Version) -> None:
        """Makes sure that the engine has the version's adapter, whole. Raises `SamplingPoolError` if it does not take it."""
        if version.adapter_id in self._resident:
            self._resident.move_to_end(version.adapter_id)
            return
        async with self._loading:
            if version.adapter_id in self._resident:
                return
            await self._evict(self._config.max_resident_loras - 1)
            bound = await self._add(version)
            if bound != version.num_modules:
                await _answered(self.actor.remove_adapter.remote(version.adapter_id))
                raise SamplingPoolError(
                    f"{version.uri}: vLLM bound {bound} of the adapter's {version.num_modules} modules, so samples would not "
                    "follow the trained weights. Choose target_modules that vLLM's model supports."
                )
            self._resident[version.adapter_id] = version

    async def _add(self, version: Version) -> int:
        try:
            return await _answered(self.actor.add_adapter.remote(version.adapter_id, version.name, version.weights))
        except ObjectLostError:  # with its owner, the session's host, or with a node
            version.weights = await self._read_copy(version.uri)
            return await _answered(self.actor.add_adapter.remote(version.adapter_id, version.name, version.weights))

    async def unbind_retired(self) -> None:
        """Frees what no request needs any more."""
        async with self._loading:
            for version in [version for version in self._resident.values() if version.is_retired]:
                if version.adapter_id not in self._in_flight:
                    await self._remove(version)

    async def _evict(self, keep: int) -> None:
        """The least recently used ones go, but for those with requests. There are never more of those than max_loras."""
        idle = [version for version in self._resident.values() if version.adapter_id not in self._in_flight]
        for version in idle[: max(0, len(self._resident) - keep)]:
            await self._remove(version)

    async def _remove(self, version: Version) -> None:
        del self._resident[version.adapter_id]  # first: nobody may take it for loaded meanwhile
        await _answered(self.actor.remove_adapter.remote(version.adapter_id))

    # Its health

    def fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    async def failure(self) -> Exception:
        """Watches it, and returns why it has failed."""
        probing = asyncio.create_task(self._probe())
        try:
            return await asyncio.shield(self._failed)
        finally:
            probing.cancel()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            try:
                async with asyncio.timeout(STUCK_AFTER_S + 1):  # the actor's own verdict comes first
                    await _answered(self.actor.check_health.remote(STUCK_AFTER_S))
            except TimeoutError:
                self.fail(ReplicaFailedError(f"A sampler replica did not answer for {STUCK_AFTER_S:g} s."))
            except ReplicaFailedError as error:
                self.fail(error)
            except Exception as error:
                self.fail(ReplicaFailedError(f"A sampler replica could not be checked: {error}"))

    async def end(self) -> None:
        """Ends the engine and its processes."""
        self.fail(ReplicaFailedError("The sampler replica was stopped."))
        # One that hangs or is gone is killed next, and its engine's processes end with it.
        with contextlib.suppress(TimeoutError, SamplingPoolError):
            await asyncio.wait_for(_answered(self.actor.shutdown.remote()), SHUTDOWN_S)
        self.kill()

    def kill(self) -> None:
        self._placed.end()
        self._resident.clear()  # errors told of this replica may outlive it, and their frames hold it


async def _answered(ref: ray.ObjectRef) -> Any:
    try:
        return await answer(ref, if_dead=ReplicaFailedError("A sampler replica died."))
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
