"""Making versions live on every replica of a pool, or on none; and freeing those that are live no more."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from raysessions.actors.leases import is_held, new_lease
from raysessions.actors.phases import SamplingPhases
from raysessions.actors.protocol import ReplicaFailedError
from raysessions.actors.sampling_replica import Replica
from raysessions.actors.sampling_replicas import ReplicaSet
from raysessions.actors.sampling_versions import Version, Versions
from raysessions.actors.saved_versions import SavedVersions
from raysessions.config import SamplingConfig
from raysessions.storage_location import StoredUri


class LiveVersions:
    """Lives in the pool, on its event loop."""

    def __init__(
        self, config: SamplingConfig, saved: SavedVersions, phases: SamplingPhases, start: Callable[[], Awaitable[Any]]
    ) -> None:
        """`start`: returns when the pool's replicas serve."""
        self._config = config
        self._saved = saved
        self._phases = phases
        self._start = start
        self._versions = Versions(config.max_live_versions, is_held)
        # A pool that was started again has none, and takes from the registry what is asked for.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray calls what it has deprecated itself
            self._is_second_life = ray.get_runtime_context().was_current_actor_reconstructed
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.replicas: ReplicaSet

    def __contains__(self, uri: StoredUri) -> bool:
        return uri in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    def session_of(self, uri: StoredUri) -> str | None:
        return self._versions.get(uri).session_id if uri in self._versions else None

    def newest(self, session_id: str) -> StoredUri | None:
        versions = self._versions.of_session(session_id)
        return versions[-1].uri if versions else None

    def weights(self, uri: StoredUri) -> tuple[ray.ObjectRef]:
        return self._versions.get(uri).weights

    async def get(self, uri: StoredUri) -> Version:
        """Raises `SamplerExpiredError` when it is not live."""
        if self._is_second_life and uri not in self._versions:
            async with self._loading:
                if uri not in self._versions:
                    info, weights = await self._saved.await_copy(uri)
                    version = self._versions.new(uri, info.session_id, (ray.put(weights),), weights.num_modules)
                    await self._make_live(version)
        return self._versions.get(uri)

    async def publish(self, uri: StoredUri, session_id: str, weights: tuple[ray.ObjectRef], num_modules: int) -> None:
        """Retires what is too old. Safe to call again."""
        if uri not in self._versions:
            await self._make_live(self._versions.new(uri, session_id, weights, num_modules))

    async def load(self, uri: StoredUri) -> tuple[ray.ObjectRef]:
        """From the registry unless it is live already. It is for as long as anybody holds the object returned."""
        async with self._loading:
            if uri not in self._versions:
                _, weights = await self._saved.read(uri)
                version = self._versions.new(uri, None, (ray.put(weights),), weights.num_modules)
                lease = _lease(version)
                await self._make_live(version)
                return lease
        return _lease(self._versions.get(uri))

    def drop_session(self, session_id: str) -> None:
        for version in self._versions.of_session(session_id):
            self._versions.retire(version)
        self.free_retired()

    async def bind_all(self, replica: Replica) -> None:
        """Gives a new replica the live versions, the newest last: as many as it keeps loaded. It loads others when asked."""
        bound: set[Version] = set()
        while True:
            # It joins in a sampling phase: one that came later than `rest` would compute while others train.
            while not self._phases.may_sample:
                await self._phases.wait()
            missing = set(self._versions.newest_first()[: self._config.max_resident_loras]) - bound
            if not missing:
                return
            for version in sorted(missing, key=lambda version: version.adapter_id):
                await replica.bind(version)
            bound |= missing

    def free_retired(self) -> None:
        for replica in self.replicas.serving:
            task = asyncio.create_task(call(replica, replica.unbind_retired))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _make_live(self, version: Version) -> None:
        bound: list[Replica] = []
        try:
            await self._start()
            await self.replicas.any_serving()
            await self._phases.wait()
            while missing := [replica for replica in self.replicas.serving if replica not in bound]:
                await asyncio.gather(*(call(replica, replica.bind, version) for replica in missing))
                bound += missing
        except BaseException:
            self._versions.retire(version)
            self.free_retired()
            raise
        if self._versions.add(version):
            self.free_retired()


async def call(replica: Replica, method: Callable[..., Awaitable[None]], *args: Any) -> None:
    """A replica that fails at it is replaced, and its successor made fit before it serves."""
    try:
        await method(*args)
    except ReplicaFailedError as error:
        replica.fail(error)


def _lease(version: Version) -> tuple[ray.ObjectRef]:
    lease = new_lease()
    version.leases.add(lease.binary())
    return (lease,)
