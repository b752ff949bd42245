"""A pool's way to versions that are in the registry."""

from __future__ import annotations

import asyncio

import ray

from raysessions.adapter_weights import AdapterWeights
from raysessions.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, SamplerExpiredError
from raysessions.models import fingerprint, local_folder
from raysessions.responses import CheckpointInfo
from raysessions.saved_adapter import read_adapter
from raysessions.storage_location import StoredUri

COPY_ATTEMPTS = 10


class SavedVersions:
    """Reads adapters of one base model, in threads."""

    def __init__(self, base_model: str) -> None:
        self._base_model = base_model

    async def read(self, uri: StoredUri) -> tuple[CheckpointInfo, AdapterWeights]:
        """Raises `SamplerExpiredError` when it is not there, `CheckpointMismatchError` when it is of another base model."""
        return await asyncio.to_thread(self._read, uri)

    async def await_copy(self, uri: StoredUri) -> tuple[CheckpointInfo, AdapterWeights]:
        """Like `read`, of a version that may still be on its way into the registry."""
        for _ in range(COPY_ATTEMPTS - 1):
            try:
                return await self.read(uri)
            except SamplerExpiredError:
                await asyncio.sleep(1.0)
        return await self.read(uri)

    async def read_copy(self, uri: StoredUri) -> tuple[ray.ObjectRef]:
        """A live version's weights, in the object store again."""
        try:
            _, weights = await self.read(uri)
            return (ray.put(weights),)
        except CheckpointError as error:
            raise SamplerExpiredError(f"{uri} is lost: its session's host is gone, and {error} Save again.") from error

    def _read(self, uri: StoredUri) -> tuple[CheckpointInfo, AdapterWeights]:
        try:
            info, weights = read_adapter(uri.location.open_registry(), uri.uri)
        except CheckpointNotFoundError as error:
            raise SamplerExpiredError(
                f"{uri} is not live (SamplingConfig.max_live_versions) and not in the registry (keep_refreshes, "
                "delete_checkpoint, "
                "time to live): use a newer one, or save again."
            ) from error
        if info.base_fingerprint != fingerprint(local_folder(self._base_model)):
            raise CheckpointMismatchError(
                f"{uri} is an adapter of another base model: {info.base_model}, not {self._base_model}."
            )
        return info, weights
