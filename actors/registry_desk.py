"""The manager's counter for the registry: clients' machines need not see the storage."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from raysessions.responses import CheckpointInfo, CheckpointKind
from raysessions.storage_location import StorageLocation
from raysessions.uris import VersionUri
from raysessions.usage import AcceleratorTime, Usage, UsageReport


class RegistryDesk:
    """One line to the registry for each call, in a thread."""

    async def list_checkpoints(
        self, location: StorageLocation, group: str, kind: CheckpointKind | None, limit: int
    ) -> list[CheckpointInfo]:
        return await asyncio.to_thread(lambda: list(itertools.islice(location.open_registry().list(group, kind=kind), limit)))

    async def get_checkpoint(self, location: StorageLocation, uri: VersionUri) -> CheckpointInfo:
        return await asyncio.to_thread(lambda: location.open_registry().info(uri))

    async def delete_checkpoint(self, location: StorageLocation, uri: VersionUri) -> None:
        await asyncio.to_thread(lambda: location.open_registry().delete(uri))

    async def set_checkpoint_ttl(self, location: StorageLocation, uri: VersionUri, ttl_seconds: float | None) -> None:
        await asyncio.to_thread(lambda: location.open_registry().set_ttl(uri, ttl_seconds))

    async def list_files(self, location: StorageLocation, uri: VersionUri) -> Sequence[str]:
        return await asyncio.to_thread(lambda: location.open_registry().files(uri))

    async def read_file(self, location: StorageLocation, uri: VersionUri, name: str) -> bytes:
        return await asyncio.to_thread(lambda: bytes(location.open_registry().read(uri, only=[name])[1][name]))

    async def _read_ledger(
        self, location: StorageLocation, session: str | None, tenant: str, accelerators: list[AcceleratorTime]
    ) -> UsageReport:
        sessions = await asyncio.to_thread(lambda: location.open_ledger().read(session, tenant))
        return UsageReport(sessions, sum((entry.usage for entry in sessions), Usage()), accelerators)
