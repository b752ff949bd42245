"""OpenAI's API: chat completions, completions, models. What answers is vLLM's own layer, in the samplers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from raysessions.actors.protocol import OpenAiHead
from raysessions.gateway.backend import Backend
from raysessions.gateway.bodies import json_body
from raysessions.gateway.errors import HttpError, as_http, openai_body
from raysessions.gateway.keys import ApiKey
from raysessions.gateway.state import Cluster, Key
from raysessions.operations import OpenAiRequest, OpenAiRoute
from raysessions.sampling_client import SamplingClient

Parts = AsyncGenerator[OpenAiHead | str, None]

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
    sessions = await cluster.sessions(key.tenant)
    base_models = cluster.base_models_of(sessions)
    return [*((session.name, session.age_s) for session in sessions), *((name, 0.0) for name in base_models)]


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
    """The answer's parts, from the first on."""

    async def ask(sampler: SamplingClient) -> Parts:
        parts = sampler.answer(request)
        return _preceded_by(await anext(parts), parts)

    return await cluster.with_sampler(key.tenant, request.model, ask)


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
