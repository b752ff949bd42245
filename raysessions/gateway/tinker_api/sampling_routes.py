"""Sampling, and fetching the results of all futures."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.sample_request import SampleRequest

from raysessions.future import APIFuture
from raysessions.gateway.access import Key
from raysessions.gateway.bodies import json_body
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api import operations
from raysessions.gateway.tinker_api.names import TINKER_SCHEME, tinker_path, version_uri
from raysessions.gateway.tinker_api.requests import Desk, read
from raysessions.gateway.tinker_api.samplers import Sampler
from raysessions.sampling_client import SamplingClient
from raysessions.uris import SCHEME

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    """Returns when samplers can answer for it."""
    asked = await read(request, desk, CreateSamplingSessionRequest)
    model = asked.model_path or asked.base_model
    if model is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "Give model_path or base_model.")
    session = desk.sdk_sessions.get(key.tenant, asked.session_id)
    await desk.backend.sampler(key.tenant, model)
    sampler = Sampler(asked.session_id, asked.sampling_session_seq_id, model)
    if sampler.sampler_id not in session.sampler_ids:
        session.sampler_ids.append(sampler.sampler_id)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, key: Key, desk: Desk) -> dict[str, Any]:
    sampler = Sampler.parse(sampler_id)
    if not sampler.model.startswith((SCHEME, TINKER_SCHEME)):
        await desk.backend.check_base_model(key.tenant, sampler.model)
        return {"sampler_id": sampler_id, "base_model": sampler.model, "model_path": None}
    info = await desk.backend.checkpoint(key.tenant, sampler.model)
    path = tinker_path(version_uri(sampler.model), "sampler_weights")
    return {"sampler_id": sampler_id, "base_model": info.base_model, "model_path": path}


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    asked = await read(request, desk, JoinSamplingSessionRequest)
    session = desk.sdk_sessions.get(key.tenant, Sampler.parse(asked.sampling_session_id).sdk_session_id)
    session.num_clones += 1
    return {"type": "join_sampling_session", "client_counter": session.num_clones}


@router.post("/asample")
async def asample(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    asked = await read(request, desk, SampleRequest)
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "sampling_session_id and seq_id are missing: create a sampling session.")
    sampler = Sampler.parse(asked.sampling_session_id)
    desk.sdk_sessions.get(key.tenant, sampler.sdk_session_id)
    prompt, params, num_samples = operations.prompt(asked), operations.sampling_params(asked), asked.num_samples

    def sample(client: SamplingClient) -> APIFuture[Any]:
        return client.sample(
            prompt,
            num_samples,
            params,
            include_prompt_logprobs=bool(asked.prompt_logprobs),
            topk_prompt_logprobs=asked.topk_prompt_logprobs,
        )

    what = (prompt.to_ints(), params, num_samples, asked.prompt_logprobs, asked.topk_prompt_logprobs)
    name = desk.sample(key.tenant, sampler, asked.seq_id, what, sample)
    return {"request_id": name, "sample_sequence_ids": [f"{name}:{index}" for index in range(num_samples)]}


@router.post("/retrieve_future")
async def retrieve_future(request: Request, key: Key, desk: Desk) -> Response:
    """Waits for a while; 408 says that it is not there yet."""
    asked = await read(request, desk, FutureRetrieveRequest)
    reply = await desk.retrieve(key.tenant, asked.request_id)
    if reply is None:
        return JSONResponse({"queue_state": "active", "queue_state_reason": None}, HTTPStatus.REQUEST_TIMEOUT)
    return Response(reply.content, reply.status, media_type=reply.media_type)


@router.post("/cancel_future")
async def cancel_future(request: Request, key: Key, desk: Desk) -> dict[str, str]:
    """Of a sample."""
    body = await json_body(request, desk.backend.config.max_body_bytes)
    desk.futures.cancel(str(body.get("request_id")), key.tenant)
    return {"status": "accepted"}
