"""OpenAI's API: chat completions, completions, models. What answers is vLLM's own layer, in the samplers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from raysessions.actors.protocol import OpenAiHead
from raysessions.errors import SamplerExpiredError, SessionStoppedError
from raysessions.gateway.backend import Backend
from raysessions.gateway.bodies import json_body
from raysessions.gateway.errors import HttpError, as_http, openai_body
from raysessions.gateway.keys import ApiKey
from raysessions.gateway.state import authorized, backend_of
from raysessions.operations import OpenAiRequest, OpenAiRoute

Parts = AsyncGenerator[OpenAiHead | str, None]
Key = Annotated[ApiKey, Depends(authorized)]
Cluster = Annotated[Backend, Depends(backend_of)]

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def create_chat_completion(request: Request, key: Key, cluster: Cluster) -> Response:
    return await _respond(request, key, cluster, "chat/completions")


@router.post("/completions")
async def create_completion(request: Request, key: Key, cluster: Cluster) -> Response:
    return await _respond(request, key, cluster, "completions")


@router.get("/models")
async def list_models(key: Key, cluster: Cluster) -> dict[str, Any]:
    return {"object": "list", "data": [_card(name, age_s) for name, age_s in await _models(key, cluster)]}


@router.get("/models/{name:path}")
async def retrieve_model(name: str, key: Key, cluster: Cluster) -> dict[str, Any]:
    ages = dict(await _models(key, cluster))
    if name not in ages:
        raise HttpError(HTTPStatus.NOT_FOUND, f"There is no model {name!r} for this key.")
    return _card(name, ages[name])


async def _models(key: ApiKey, cluster: Backend) -> list[tuple[str, float]]:
    """Names, and for how many seconds there has been a model of that name."""
    found = await cluster.models(key.tenant)
    return [(model, 0.0) if isinstance(model, str) else (model.name, model.age_s) for model in found]


def _card(name: str, age_s: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time() - age_s), "owned_by": "raysessions"}


async def _respond(request: Request, key: ApiKey, cluster: Backend, route: OpenAiRoute) -> Response:
    body = await json_body(request, cluster.config.max_body_bytes)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise HttpError(HTTPStatus.BAD_REQUEST, "model is missing: a session's name, a version, or a base model.")
    parts = await _begun(key, cluster, OpenAiRequest(route, model, body))
    head = await anext(parts)
    assert isinstance(head, OpenAiHead)
    if head.content_type == "text/event-stream":
        return StreamingResponse(_events(parts), head.status, media_type=head.content_type)
    content = "".join([part async for part in parts if isinstance(part, str)])
    return Response(content, head.status, media_type=head.content_type)


async def _begun(key: ApiKey, cluster: Backend, request: OpenAiRequest) -> Parts:
    """The answer's parts, from the first on. A client that was kept may be of a version that is live no more."""
    for is_last in (False, True):
        sampler = await cluster.sampler(key.tenant, request.model)
        parts = sampler.answer(request)
        try:
            return _preceded_by(await anext(parts), parts)
        except (SamplerExpiredError, SessionStoppedError):
            cluster.forget(key.tenant, request.model)
            if is_last:
                raise
    raise AssertionError("unreachable")


async def _preceded_by(first: OpenAiHead | str, rest: Parts) -> Parts:
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
