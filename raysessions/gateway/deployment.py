"""A saved version as a Ray Serve application of its own, with OpenAI's API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import FastAPI

from raysessions.actors.protocol import OpenAiHead, TokenCount
from raysessions.actors.served_model import ServedModel
from raysessions.config import SamplingConfig
from raysessions.gateway.app import open_access, openai_app
from raysessions.gateway.errors import HttpError
from raysessions.gateway.openai_routes import Parts, preceded_by
from raysessions.operations import OpenAiRequest
from raysessions.storage_location import StoredUri

HEALTH_S = 30.0
"""An engine that neither answers nor computes for so long is replaced."""


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """Travels to the deployment's replicas."""

    name: str
    uri: StoredUri
    tenant: str
    """Whose keys may ask."""
    sampling: SamplingConfig
    max_body_bytes: int
    requests_per_minute: int


class ModelServer:
    """One replica, for Ray Serve."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self._spec = spec
        self._model = ServedModel(spec.uri, spec.sampling)
        self._is_ready = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            app.state.access = await open_access(self._spec.uri.location, self._spec.requests_per_minute)
            await self._model.start()
            self._is_ready = True
            app.state.models = _OneModel(self._spec, self._model)
            yield
            await self._model.stop()

        return openai_app(lifespan)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if self._is_ready:
            await self._model.check_health(HEALTH_S)


class _OneModel:
    """For OpenAI's routes."""

    def __init__(self, spec: DeploymentSpec, model: ServedModel) -> None:
        self._spec = spec
        self._model = model
        self.max_body_bytes = spec.max_body_bytes

    async def answer(self, tenant: str, request: OpenAiRequest) -> tuple[OpenAiHead, str]:
        self._check(tenant, request)
        head, body, _ = await self._model.answer_whole(request)
        return head, body

    async def stream(self, tenant: str, request: OpenAiRequest) -> Parts:
        self._check(tenant, request)
        parts = self._parts(request)
        return preceded_by(await anext(parts), parts)

    async def list_models(self, tenant: str) -> list[tuple[str, float]]:
        return [(name, 0.0) for name in self._names] if tenant == self._spec.tenant else []

    @property
    def _names(self) -> tuple[str, str]:
        return self._spec.name, str(self._spec.uri.uri)

    def _check(self, tenant: str, request: OpenAiRequest) -> None:
        if tenant != self._spec.tenant or request.model not in self._names:
            raise HttpError(HTTPStatus.NOT_FOUND, f"There is no model {request.model!r} for this key.")

    async def _parts(self, request: OpenAiRequest) -> Parts:
        async for part in self._model.answer(request):
            if isinstance(part, OpenAiHead | str):
                yield part
            else:
                assert isinstance(part, TokenCount)  # not in the ledger, which is of sessions
