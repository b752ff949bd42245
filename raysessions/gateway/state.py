"""What a replica of the gateway has, for its routes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from raysessions.gateway.access import Access
from raysessions.gateway.backend import Backend
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.keys import ApiKey, KeyStore
from raysessions.storage_location import StorageLocation

if TYPE_CHECKING:
    from raysessions.gateway.tinker_api.desk import TinkerDesk


@dataclass(frozen=True, slots=True)
class GatewayState:
    """Made once, when the application starts."""

    backend: Backend
    access: Access
    tinker: TinkerDesk | None
    """None where the tinker package is not installed."""

    @classmethod
    async def create(cls, config: GatewayConfig, *, with_tinker: bool) -> GatewayState:
        backend = await asyncio.to_thread(Backend, config)
        store = await asyncio.to_thread(KeyStore, StorageLocation(config.output_uri))
        tinker = None
        if with_tinker:
            from raysessions.gateway.tinker_api.desk import TinkerDesk

            tinker = TinkerDesk(backend)
        return cls(backend, Access(store, config.requests_per_minute), tinker)


def _backend(request: Request) -> Backend:
    state: GatewayState = request.app.state.gateway
    return state.backend


async def _authorized(request: Request) -> ApiKey:
    state: GatewayState = request.app.state.gateway
    return await state.access.check(request)


Key = Annotated[ApiKey, Depends(_authorized)]
"""Asked for by every route but the open ones."""
Cluster = Annotated[Backend, Depends(_backend)]
