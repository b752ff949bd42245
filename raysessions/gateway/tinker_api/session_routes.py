"""Sessions of the SDK: creation, heartbeats, their end; and what the server tells of itself."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from tinker.types.create_session_request import CreateSessionRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

from raysessions.gateway.access import Key
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api.names import run_id
from raysessions.gateway.tinker_api.requests import Desk, read
from raysessions.models import context_length, local_folder

router = APIRouter()

WELCOME = (
    "raysessions: LoRA adapters the linear layers of attention and MLPs; train_unembed is taken for False. What else differs "
    "stands in docs/tinker-compatibility.md."
)


@router.post("/client/config")
async def client_config(key: Key) -> dict[str, Any]:
    """The SDK's own defaults."""
    return {}


@router.post("/client/dynamic_config")
async def client_dynamic_config(key: Key) -> dict[str, Any]:
    return {"sample_cancel_enabled": True}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/telemetry")
async def telemetry(key: Key) -> dict[str, str]:
    """Is not kept."""
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    asked = await read(request, desk, CreateSessionRequest)
    session = desk.sdk_sessions.create(key.tenant, asked.user_metadata, getattr(asked, "display_name", None))
    return {"type": "create_session", "session_id": session.session_id, "info_message": WELCOME}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, key: Key, desk: Desk) -> dict[str, str]:
    asked = await read(request, desk, SessionHeartbeatRequest)
    desk.sdk_sessions.get(key.tenant, asked.session_id)
    await asyncio.gather(*map(desk.backend.renew, await desk.model_names(key.tenant, asked.session_id)))
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, key: Key, desk: Desk) -> dict[str, str]:
    desk.sdk_sessions.end(key.tenant, session_id, "its client finished it.")
    await desk.stop_models(key.tenant, session_id)
    return {"status": "finished"}


@router.get("/sessions")
async def list_sessions(key: Key, desk: Desk, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    """Newest first."""
    sessions = [session.session_id for session in reversed(desk.sdk_sessions.of(key.tenant))]
    return {"sessions": sessions[offset : offset + limit]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, key: Key, desk: Desk) -> dict[str, Any]:
    session = next((one for one in desk.sdk_sessions.of(key.tenant) if one.session_id == session_id), None)
    if session is None:
        raise HttpError(HTTPStatus.NOT_FOUND, f"There is no session {session_id!r} for this key.")
    return {
        "training_run_ids": [run_id(name) for name in await desk.model_names(key.tenant, session_id)],
        "sampler_ids": session.sampler_ids,
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


@router.get("/get_server_capabilities")
async def get_server_capabilities(key: Key, desk: Desk) -> dict[str, Any]:
    names = await desk.backend.base_models(key.tenant)
    lengths = await asyncio.gather(*(asyncio.to_thread(_context_length, name) for name in names))
    models = [
        {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
        for name, length in zip(names, lengths, strict=True)
    ]
    return {"supported_models": models}


def _context_length(base_model: str) -> int:
    return context_length(local_folder(base_model))
