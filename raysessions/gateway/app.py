"""HTTP applications: routes, and what holds for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from raysessions.errors import RaySessionsError
from raysessions.gateway import openai_routes
from raysessions.gateway.access import Access, Key
from raysessions.gateway.access_log import AccessLog
from raysessions.gateway.backend import Backend
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.errors import HttpError, as_http, openai_body
from raysessions.gateway.keys import KeyStore
from raysessions.gateway.live_models import LiveModels
from raysessions.storage_location import StorageLocation


def build_app(config: GatewayConfig) -> FastAPI:
    """The gateway. Called in each of its replicas."""
    has_tinker = importlib.util.find_spec("tinker") is not None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.access = await open_access(StorageLocation(config.output_uri), config.requests_per_minute)
        backend = await asyncio.to_thread(Backend, config)
        app.state.models = LiveModels(backend)
        async with contextlib.AsyncExitStack() as stack:
            if has_tinker:
                from raysessions.gateway.tinker_api.desk import TinkerDesk

                app.state.tinker = TinkerDesk(backend)
                tidying = asyncio.create_task(app.state.tinker.tidy())
                stack.callback(tidying.cancel)
            yield

    app = openai_app(lifespan)

    @app.get("/usage")
    async def usage(key: Key, request: Request, session: str | None = None) -> dict[str, Any]:
        """What the key's tenant has used, or one of its sessions."""
        backend: Backend = request.app.state.models.backend
        return asdict(await backend.call(backend.service.usage, session, key.tenant))

    if has_tinker:
        from raysessions.gateway.tinker_api.routes import router

        app.include_router(router)
    return app


def openai_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """OpenAI's routes; `lifespan` gives the application's state an `access` and `models`."""
    app = FastAPI(title="raysessions", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(openai_routes.router)
    for kind in (HttpError, RaySessionsError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(AccessLog)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def open_access(location: StorageLocation, requests_per_minute: int) -> Access:
    return Access(await asyncio.to_thread(KeyStore, location), requests_per_minute)


async def _refuse(request: Request, error: Exception) -> Response:
    told = as_http(error)
    headers = {} if told.retry_after_s is None else {"Retry-After": f"{told.retry_after_s:.0f}"}
    if told.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # or the server would read on, however long it is
    return JSONResponse(openai_body(told), told.status, headers)
