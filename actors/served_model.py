"""A saved version behind an HTTP server: an engine of its own, in the server's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import ray

from raysessions.actors.protocol import CoreShare, OpenAiHead, OpenAiPart, TokenCount
from raysessions.actors.sampling_actor import SamplingActor
from raysessions.config import SamplingConfig
from raysessions.operations import OpenAiRequest
from raysessions.saved_adapter import read_adapter
from raysessions.storage_location import StoredUri

ADAPTER_ID = 1


class ServedModel:
    """A merged version as one model, another as an adapter on its base."""

    _actor: SamplingActor
    _adapter_id: int | None

    def __init__(self, uri: StoredUri, config: SamplingConfig) -> None:
        self._uri = uri
        self._config = config

    async def start(self) -> None:
        """Loads it. Raises `CheckpointError`, `PlacementError`."""
        info, weights = await asyncio.to_thread(lambda: read_adapter(self._uri.location.open_registry(), self._uri.uri))
        stored, is_merged = (ray.put(weights),), info.kind == "merged"
        self._actor = SamplingActor(info.base_model, self._config.for_rank(info.rank), stored if is_merged else None)
        await self._actor.load(CoreShare(0, 1))
        self._adapter_id = None if is_merged else ADAPTER_ID
        if self._adapter_id is not None:
            await self._actor.add_adapter(self._adapter_id, str(self._uri.uri), stored)

    def answer(self, request: OpenAiRequest) -> AsyncIterator[OpenAiPart]:
        return self._actor.answer(request, self._adapter_id)

    async def answer_whole(self, request: OpenAiRequest) -> tuple[OpenAiHead, str, TokenCount]:
        return await self._actor.answer_whole(request, self._adapter_id)

    async def check_health(self, timeout_s: float) -> None:
        """Raises `ReplicaFailedError`."""
        await self._actor.check_health(timeout_s)

    async def stop(self) -> None:
        """Ends the engine's processes."""
        await self._actor.shutdown()
