"""All of Tinker's routes."""

from __future__ import annotations

from fastapi import APIRouter

from raysessions.gateway.tinker_api import archive_routes, sampling_routes, session_routes, training_routes, unsupported

router = APIRouter(prefix="/api/v1")
for part in (session_routes, training_routes, sampling_routes, archive_routes, unsupported):
    router.include_router(part.router)
