"""OpenAI's API: chat completions, completions, models. What answers is vLLM's own layer, beside the engines."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from raysessions.actors.protocol import OpenAiHead
from raysessions.gateway.access import Key
from raysessions.gateway.bodies import json_body
from raysessions.gateway.errors import HttpError, as_http, openai_body
from raysessions.gateway.keys import ApiKey
from raysessions.operations import OpenAiRequest, OpenAiRoute

Parts = AsyncGenerator[OpenAiHead | str, None]
"""The head of an answer, then its body in pieces."""


class Models(Protocol):
    """What answers: `app.state.models`."""

    max_body_bytes: int

    async def answer(self, tenant: str, request: OpenAiRequest) -> tuple[OpenAiHead, str]:
        """The head and the body. Raises `HttpError` 404 if the tenant has no such model."""

    async def stream(self, tenant: str, request: OpenAiRequest) -> Parts:
        """Likewise; returns when the answer has begun."""

    async def list_models(self, tenant: str) -> list[tuple[str, float]]:
        """Names, and for how many seconds there has been a model of that name."""


def _models(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Source = Annotated[Models, Depends(_models)]

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def create_chat_completion(request: Request, key: Key, models: Source) -> Response:
    return await _respond(request, key, models, "chat/completions")


@router.post("/completions")
async def create_completion(request: Request, key: Key, models: Source) -> Response:
    return await _respond(request, key, models, "completions")


@router.get("/models")
async def list_models(key: Key, models: Source) -> dict[str, Any]:
    return {"object": "list", "data": [_card(name, age_s) for name, age_s in await models.list_models(key.tenant)]}


@router.get("/models/{name:path}")
async def retrieve_model(name: str, key: Key, models: Source) -> dict[str, Any]:
    ages = dict(await models.list_models(key.tenant))
    if name not in ages:
        raise HttpError(HTTPStatus.NOT_FOUND, f"There is no model {name!r} for this key.")
    return _card(name, ages[name])


def _card(name: str, age_s: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time() - age_s), "owned_by": "raysessions"}


async def _respond(request: Request, key: ApiKey, models: Models, route: OpenAiRoute) -> Response:
    body = await json_body(request, models.max_body_bytes)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise HttpError(HTTPStatus.BAD_REQUEST, "model is missing: GET /v1/models names those there are.")
    asked = OpenAiRequest(route, model, body)
    if not body.get("stream"):
        head, content = await models.answer(key.tenant, asked)
        return Response(content, head.status, media_type=head.content_type)
    parts = await models.stream(key.tenant, asked)
    begun = await anext(parts)
    assert isinstance(begun, OpenAiHead)
    return StreamingResponse(_events(parts), begun.status, media_type=begun.content_type)


async def preceded_by(first: OpenAiHead | str, rest: Parts) -> Parts:
    try:
        yield first
        async for part in rest:
            yield part
    finally:
        await rest.aclose()


async def _events(parts: Parts) -> AsyncGenerator[str, None]:
    """Server-sent events. A failure in the middle is one too: the status has long been sent."""
    try:
        async for part in parts:
            assert isinstance(part, str)
            yield part
    except Exception as error:
        yield f"data: {json.dumps(openai_body(as_http(error)))}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        await parts.aclose()
