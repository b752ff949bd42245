"""Reading what callers send, within limits."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import zstandard
from fastapi import Request

from raysessions.gateway.errors import HttpError

SLICE = 256
"""Bytes that are decompressed at a time: each four of them may stand for a block of 128 KiB."""


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Decompressed. Raises `HttpError` 413 as soon as it is too long, before it is all there."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "zstd"):
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding!r} is not known: use zstd or none.")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_long(max_bytes)
        chunks.append(chunk)
    body = b"".join(chunks)
    return _decompressed(body, max_bytes) if encoding == "zstd" else body


async def json_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises `HttpError` 400 unless it is a JSON object."""
    try:
        body = json.loads(await body_of(request, max_bytes))
    except (ValueError, RecursionError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise HttpError(HTTPStatus.BAD_REQUEST, "The body is not a JSON object.")
    return body


def _decompressed(body: bytes, max_bytes: int) -> bytes:
    """A few bytes may stand for many: it stops soon after the bound, whatever the frame says of its size."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj(read_across_frames=False)
    content, size = [], 0
    try:
        for start in range(0, len(body), SLICE):
            content.append(decompressor.decompress(body[start : start + SLICE]))
            size += len(content[-1])
            if size > max_bytes:
                raise _too_long(max_bytes)
    except (zstandard.ZstdError, MemoryError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, "The body is not zstd, though its Content-Encoding says so.") from error
    if not decompressor.eof:
        raise HttpError(HTTPStatus.BAD_REQUEST, "The body's end is missing: its zstd frame is not complete.")
    return b"".join(content)


def _too_long(max_bytes: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"A request may have {max_bytes} bytes, decompressed: send less at a time, or raise GatewayConfig.max_body_bytes.",
    )
