"""The HTTP application: routes, and what holds for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from raysessions.errors import RaySessionsError
from raysessions.gateway import openai_routes
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.errors import HttpError, as_http, openai_body
from raysessions.gateway.state import GatewayState

access_log = logging.getLogger("raysessions.gateway.access")


def build_app(config: GatewayConfig) -> FastAPI:
    """Called in each replica."""
    has_tinker = importlib.util.find_spec("tinker") is not None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = app.state.gateway = await GatewayState.create(config, with_tinker=has_tinker)
        tidying = asyncio.create_task(state.tinker.tidy()) if state.tinker is not None else None
        yield
        if tidying is not None:
            tidying.cancel()

    app = FastAPI(title="raysessions", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(openai_routes.router)
    if has_tinker:
        from raysessions.gateway.tinker_api.routes import router

        app.include_router(router)
    for kind in (HttpError, RaySessionsError, RequestValidationError):
        app.add_exception_handler(kind, _refuse)
    app.middleware("http")(_log)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def _refuse(request: Request, error: Exception) -> Response:
    told = as_http(error)
    headers = {} if told.retry_after_s is None else {"Retry-After": f"{told.retry_after_s:.0f}"}
    if told.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # or the server would read on, however long it is
    return JSONResponse(openai_body(told), told.status, headers)


async def _log(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """One line for each request, with an id that its caller sees too."""
    request_id = request.headers.get("x-request-id", "")[:64] or secrets.token_hex(8)
    started = time.monotonic()
    try:
        response = await call_next(request)
    except Exception as error:
        response = await _refuse(request, error)
    response.headers["X-Request-Id"] = request_id
    access_log.info(
        "%s %s %s -> %d in %.3f s",
        request_id,
        request.method,
        request.url.path,
        response.status_code,
        time.monotonic() - started,
    )
    return response
