"""Training runs: their creation and operations. Each answers with the name of a future."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.get_info_request import GetInfoRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.optim_step_request import OptimStepRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from raysessions.config import LoraConfig
from raysessions.errors import ConfigError, RaySessionsError, ValidationError
from raysessions.gateway.access import Key
from raysessions.gateway.bodies import body_of, json_body
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api import operations
from raysessions.gateway.tinker_api.desk import TinkerDesk
from raysessions.gateway.tinker_api.names import version_uri
from raysessions.gateway.tinker_api.requests import Desk, R, parse, read
from raysessions.gateway.tinker_api.wire import parse_forward_backward, read_forward_backward
from raysessions.models import local_folder
from raysessions.operations import AbandonedOp, Operation, StartingPoint

router = APIRouter()


@router.post("/create_model")
async def create_model(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    asked = await read(request, desk, CreateModelRequest)
    lora = operations.lora_config(asked)
    return _create(key.tenant, desk, asked, asked.base_model, lora, None)


@router.post("/load_weights")
async def load_weights(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    body = await json_body(request, desk.backend.config.max_body_bytes)
    if body.get("session_id") is None:
        path, problem = body.get("path"), None
        try:
            await desk.backend.checkpoint(key.tenant, str(path))
        except (HttpError, RaySessionsError) as error:
            problem = ValidationError(str(error))
        return await _submit(key.tenant, desk, body, LoadWeightsRequest, operations.load_state_op, problem=problem)
    asked = parse(LoadWeightsRequest, body)
    operations.check_load(asked)
    info = await desk.backend.checkpoint(key.tenant, asked.path)
    lora = LoraConfig(rank=info.rank, alpha=info.alpha, seed=0, target_modules=tuple(info.target_modules))
    start = StartingPoint(version_uri(asked.path), None, asked.optimizer)
    return _create(key.tenant, desk, asked, asked.base_model or info.base_model, lora, start)


@router.post("/get_info")
async def get_info(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    asked = await read(request, desk, GetInfoRequest)
    model = await desk.models.find(key.tenant, asked.model_id, is_sure=True)
    name = model.info.base_model
    folder = await asyncio.to_thread(local_folder, name)
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "is_lora": True,
        "lora_rank": model.info.rank,
        "model_name": name,
        "model_data": {"arch": "unknown", "model_name": name, "tokenizer_id": name if "/" in name else str(folder)},
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    """In protobuf; `forward` too."""
    message = await body_of(request, desk.backend.config.max_body_bytes)
    asked = await asyncio.to_thread(parse_forward_backward, message)
    model = await desk.models.find(key.tenant, asked.model_id)
    op: Operation
    try:
        op = await asyncio.to_thread(lambda: model.loss_op(read_forward_backward(asked)))
    except RaySessionsError as error:
        op = AbandonedOp(error)
    return {"request_id": desk.submit(key.tenant, model, asked.seq_id, op), "model_id": model.model_id}


@router.post("/optim_step")
async def optim_step(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    body = await json_body(request, desk.backend.config.max_body_bytes)
    return await _submit(key.tenant, desk, body, OptimStepRequest, operations.optim_step_op)


@router.post("/save_weights")
async def save_weights(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    body = await json_body(request, desk.backend.config.max_body_bytes)
    return await _submit(key.tenant, desk, body, SaveWeightsRequest, operations.save_state_op)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    body = await json_body(request, desk.backend.config.max_body_bytes)
    sampler_seq_id = body.get("sampling_session_seq_id") if body.get("path") is None else None
    make = operations.save_for_sampler_op
    return await _submit(key.tenant, desk, body, SaveWeightsForSamplerRequest, make, sampler_seq_id)


@router.post("/save_weights_external")
async def save_weights_external(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    """Is not supported, but has a number."""
    body = await json_body(request, desk.backend.config.max_body_bytes)
    problem = ConfigError("Not supported by raysessions. Versions lie in the storage that the cluster was given (output_uri).")
    return await _submit(key.tenant, desk, body, SaveWeightsRequest, operations.save_state_op, problem=problem)


def _create(
    tenant: str, desk: TinkerDesk, asked: Any, base_model: str, lora: LoraConfig, start: StartingPoint | None
) -> dict[str, Any]:
    session = desk.sdk_sessions.get(tenant, asked.session_id)
    metadata = {name: str(value) for name, value in (asked.user_metadata or {}).items()}
    name = desk.create_model(tenant, session.session_id, asked.model_seq_id, base_model, lora, start, metadata)
    return {"request_id": name}


async def _submit(
    tenant: str,
    desk: TinkerDesk,
    body: dict[str, Any],
    kind: type[R],
    make: Callable[[R], Operation],
    sampler_seq_id: int | None = None,
    problem: RaySessionsError | None = None,
) -> dict[str, Any]:
    """An operation that is refused here has a number all the same, for which the later ones wait: it is used up. `problem`: why
    it is."""
    model_id, seq_id = body.get("model_id"), body.get("seq_id")
    if not isinstance(model_id, str) or not isinstance(seq_id, int) or seq_id < 1:
        raise HttpError(HTTPStatus.BAD_REQUEST, "model_id and seq_id are missing: they say which operation this is.")
    model = await desk.models.find(tenant, model_id)
    op: Operation
    try:
        op = make(parse(kind, body)) if problem is None else AbandonedOp(problem)
    except RaySessionsError as error:
        op = AbandonedOp(error)
    return {"request_id": desk.submit(tenant, model, seq_id, op, sampler_seq_id), "model_id": model_id}
