"""Copies of a pool's live versions in the registry, made behind the requests. A copy that fails stops nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from raysessions.actors.sampling_versions import Version
from raysessions.errors import CheckpointError, SamplerExpiredError
from raysessions.uris import VersionUri

log = logging.getLogger("raysessions")


class VersionCopies:
    """One change at a time, in the order in which they are asked for."""

    def __init__(self, root: str | None) -> None:
        from raysessions.registry import Registry  # brings pyarrow, which a driver that imports this room does not need

        self._registry = Registry(root)
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def write(self, version: Version) -> None:
        self._run(self._write(version))

    def delete(self, version: Version) -> None:
        self._run(self._delete(version))

    async def read(self, uri: VersionUri) -> tuple[ray.ObjectRef]:
        """The weights, in the object store again. Raises `SamplerExpiredError` when there is no copy either."""
        async with self._lock:
            try:
                return (ray.put(await asyncio.to_thread(self._registry.read, uri)),)
            except CheckpointError as error:
                raise SamplerExpiredError(f"{uri} is lost: its session's host is gone, and {error} Save again.") from error

    async def _write(self, version: Version) -> None:
        if version.is_retired:
            return
        try:
            await asyncio.to_thread(self._registry.write, version.uri, await version.weights[0])
        except (OSError, ObjectLostError) as error:
            log.warning("raysessions: %s has no copy in the registry: %s", version.uri, error)

    async def _delete(self, version: Version) -> None:
        try:
            await asyncio.to_thread(self._registry.delete, version.uri)
        except OSError as error:
            log.warning("raysessions: the copy of %s in the registry could not be deleted: %s", version.uri, error)

    def _run(self, change: Coroutine[Any, Any, None]) -> None:
        async def in_turn() -> None:
            async with self._lock:
                await change

        task = asyncio.create_task(in_turn())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
