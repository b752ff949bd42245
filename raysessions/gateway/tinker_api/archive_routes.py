"""What is kept: training runs and their versions."""

from __future__ import annotations

import asyncio
import datetime
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from tinker.types.checkpoint import Checkpoint
from tinker.types.training_run import TrainingRun

from raysessions.gateway.access import Key
from raysessions.gateway.bodies import json_body
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api.desk import TinkerDesk
from raysessions.gateway.tinker_api.names import TINKER_SCHEME, PathKind, run_id, session_name, tinker_path
from raysessions.gateway.tinker_api.requests import Desk
from raysessions.responses import CheckpointInfo
from raysessions.uris import VersionUri

router = APIRouter()

Count = Annotated[int, Query(ge=0)]


@router.get("/training_runs")
async def list_training_runs(key: Key, desk: Desk, limit: Count = 20, offset: Count = 0) -> dict[str, Any]:
    """Newest first: those that run, and those that have saved something."""
    runs = await _runs(key.tenant, desk)
    cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
    return {"training_runs": runs[offset : offset + limit], "cursor": cursor}


@router.get("/training_runs/{run}")
async def get_training_run(run: str, key: Key, desk: Desk) -> TrainingRun:
    found = await _runs(key.tenant, desk, session_name(run))
    if not found:
        raise HttpError(HTTPStatus.NOT_FOUND, f"There is no training run {run!r} for this key.")
    return found[0]


@router.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, key: Key, desk: Desk) -> dict[str, Any]:
    infos = await desk.backend.checkpoints(key.tenant, session_name(run))
    return {"checkpoints": [_checkpoint(info) for info in infos]}


@router.get("/checkpoints")
async def list_user_checkpoints(key: Key, desk: Desk, limit: Count = 100, offset: Count = 0) -> dict[str, Any]:
    infos = await desk.backend.checkpoints(key.tenant)
    cursor = {"offset": offset, "limit": limit, "total_count": len(infos)}
    return {"checkpoints": [_checkpoint(info) for info in infos[offset : offset + limit]], "cursor": cursor}


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
async def delete_checkpoint(run: str, kind: PathKind, name: str, key: Key, desk: Desk) -> dict[str, str]:
    info = await desk.backend.checkpoint(key.tenant, f"{TINKER_SCHEME}{run}/{kind}/{name}")
    await desk.backend.call(desk.backend.service.delete_checkpoint, info.path)
    return {"status": "deleted"}


@router.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
async def set_checkpoint_ttl(run: str, kind: PathKind, name: str, request: Request, key: Key, desk: Desk) -> dict[str, str]:
    body = await json_body(request, desk.backend.config.max_body_bytes)
    info = await desk.backend.checkpoint(key.tenant, f"{TINKER_SCHEME}{run}/{kind}/{name}")
    await desk.backend.call(desk.backend.service.set_checkpoint_ttl, info.path, body.get("ttl_seconds"))
    return {"status": "set"}


@router.post("/weights_info")
async def weights_info(request: Request, key: Key, desk: Desk) -> dict[str, Any]:
    body = await json_body(request, desk.backend.config.max_body_bytes)
    info = await desk.backend.checkpoint(key.tenant, str(body.get("tinker_path")))
    modules = set(info.target_modules)
    return {
        "base_model": info.base_model,
        "is_lora": True,
        "lora_rank": info.rank,
        "train_unembed": False,
        "train_mlp": bool(modules & {"gate_proj", "up_proj", "down_proj"}),
        "train_attn": bool(modules & {"q_proj", "k_proj", "v_proj", "o_proj"}),
    }


async def _runs(tenant: str, desk: TinkerDesk, name: str | None = None) -> list[TrainingRun]:
    """All, or the one of that name: a session, or the group of versions that it left."""
    sessions, infos = await asyncio.gather(desk.backend.sessions(tenant), desk.backend.checkpoints(tenant, name))
    saved: dict[str, list[CheckpointInfo]] = {}
    for info in infos:
        saved.setdefault(VersionUri.parse(info.path).group, []).append(info)
    running = {session.name: session for session in sessions if name in (None, session.name)}
    now = datetime.datetime.now(datetime.UTC)
    runs = []
    for name in {**running, **saved}:
        versions, session = saved.get(name, []), running.get(name)
        heard = now - datetime.timedelta(seconds=session.idle_s) if session else _time(versions[0].created_at)
        rank = versions[0].rank if versions else (await _rank(tenant, desk, name))
        base_model = session.base_model if session else versions[0].base_model
        runs.append(
            TrainingRun(
                training_run_id=run_id(name),
                base_model=base_model,
                model_owner=tenant,
                is_lora=True,
                lora_rank=rank,
                last_request_time=heard,
                last_checkpoint=_latest(versions, "state"),
                last_sampler_checkpoint=_latest(versions, "sampler"),
                user_metadata=versions[0].user_metadata if versions else None,
            )
        )
    return sorted(runs, key=lambda run: run.last_request_time, reverse=True)


async def _rank(tenant: str, desk: TinkerDesk, name: str) -> int | None:
    found = await desk.backend.find_session(tenant, name)
    return None if found is None else found[2].rank


def _latest(infos: list[CheckpointInfo], kind: str) -> Checkpoint | None:
    return next((_checkpoint(info) for info in infos if info.kind == kind), None)


def _checkpoint(info: CheckpointInfo) -> Checkpoint:
    path = tinker_path(VersionUri.parse(info.path), "weights" if info.kind == "state" else "sampler_weights")
    return Checkpoint(
        checkpoint_id=path.removeprefix(TINKER_SCHEME).partition("/")[2],
        checkpoint_type="training" if info.kind == "state" else "sampler",
        time=_time(info.created_at),
        tinker_path=path,
        size_bytes=info.num_bytes,
        user_metadata={"name": info.name, **info.user_metadata},
        expires_at=None if info.expires_at is None else _time(info.expires_at),
    )


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
