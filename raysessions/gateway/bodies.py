"""Reading what callers send, within limits."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import Request

from raysessions.gateway.errors import HttpError


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Raises `HttpError` 413 as soon as it is too long."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A request may have {max_bytes} bytes: send less at a time.")
        chunks.append(chunk)
    return b"".join(chunks)


async def json_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises `HttpError` 400 unless it is a JSON object."""
    try:
        body = json.loads(await body_of(request, max_bytes))
    except (ValueError, RecursionError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise HttpError(HTTPStatus.BAD_REQUEST, "The body is not a JSON object.")
    return body
