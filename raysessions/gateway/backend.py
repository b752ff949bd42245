"""What the routes need of the cluster: who answers for a model's name."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from raysessions import ServiceClient
from raysessions.future import APIFuture
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.errors import HttpError
from raysessions.sampling_client import SamplingClient, open_sampling_client
from raysessions.session_summary import SessionSummary
from raysessions.storage_location import StoredUri
from raysessions.uris import SCHEME

TINKER_SCHEME = "tinker://"
"""An alias of ours."""
KEPT_CLIENTS = 64
"""Sampling clients of versions and base models that are kept open: each keeps its version live."""

T = TypeVar("T")


class Backend:
    """One in each replica of the gateway; a driver of the cluster like any other."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.service = ServiceClient("auto", output_uri=config.output_uri, training=config.training, sampling=config.sampling)
        self._clients: OrderedDict[tuple[str, str], SamplingClient] = OrderedDict()

    async def sampler(self, tenant: str, model: str) -> SamplingClient:
        """Of a session's newest version, a version, or a base model. Raises `HttpError` 404 if the tenant has none such."""
        session = await self._newest_of(tenant, model)
        if session is not None:
            return session
        model = model.replace(TINKER_SCHEME, SCHEME, 1) if model.startswith(TINKER_SCHEME) else model
        client = self._clients.get((tenant, model))
        if client is None:
            client = await self._open(tenant, model)
            self._clients[tenant, model] = client
            while len(self._clients) > KEPT_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end((tenant, model))
        return client

    def forget(self, tenant: str, model: str) -> None:
        """Its client was found to be of no use any more."""
        self._clients.pop((tenant, model), None)

    async def models(self, tenant: str) -> list[SessionSummary | str]:
        """The tenant's sessions, and the base models that it may use."""
        sessions = await self._sessions(tenant)
        return [*sessions, *self._base_models(sessions)]

    async def call(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """A call of the service, which blocks, in a thread."""
        return await asyncio.to_thread(function, *args, **keywords)

    async def _newest_of(self, tenant: str, name: str) -> SamplingClient | None:
        found: Any = await APIFuture(self.service._manager.sampler_of.remote(tenant, name))
        if found is None:
            return None
        pool, info = found
        uri: StoredUri | None = await APIFuture(pool.newest.remote(name))
        return await self.call(
            open_sampling_client,
            pool,
            uri,
            session_id=name,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            client_id=tenant,
        )

    async def _open(self, tenant: str, model: str) -> SamplingClient:
        if model.startswith(SCHEME):
            if (await self.call(self.service.get_checkpoint, model)).tenant != tenant:
                raise self._unknown(model)
            return await self.call(self.service.create_sampling_client, model, tenant=tenant)
        if model not in self._base_models(await self._sessions(tenant)):
            raise self._unknown(model)
        return await self.call(self.service.create_sampling_client, base_model=model, tenant=tenant)

    async def _sessions(self, tenant: str) -> list[SessionSummary]:
        sessions = await self.call(self.service.list_sessions)
        return [session for session in sessions if session.tenant == tenant and session.kind == "training"]

    def _base_models(self, sessions: list[SessionSummary]) -> list[str]:
        return list(dict.fromkeys([*self.config.base_models, *(session.base_model for session in sessions)]))

    @staticmethod
    def _unknown(model: str) -> HttpError:
        return HttpError(HTTPStatus.NOT_FOUND, f"There is no model {model!r} for this key: see GET /v1/models.")
