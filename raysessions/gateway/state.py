"""What a replica of the gateway has, for its routes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request

from raysessions.gateway.access import Access
from raysessions.gateway.backend import Backend
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.keys import ApiKey, KeyStore
from raysessions.storage_location import StorageLocation


@dataclass(frozen=True, slots=True)
class GatewayState:
    """Made once, when the application starts."""

    backend: Backend
    access: Access

    @classmethod
    async def create(cls, config: GatewayConfig) -> GatewayState:
        backend = await asyncio.to_thread(Backend, config)
        store = await asyncio.to_thread(KeyStore, StorageLocation(config.output_uri))
        return cls(backend, Access(store, config.requests_per_minute))


def backend_of(request: Request) -> Backend:
    state: GatewayState = request.app.state.gateway
    return state.backend


async def authorized(request: Request) -> ApiKey:
    """A dependency of every route but the open ones."""
    state: GatewayState = request.app.state.gateway
    return await state.access.check(request)
