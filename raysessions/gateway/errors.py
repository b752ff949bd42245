"""Errors as HTTP answers: a status, and a sentence. Never a traceback."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError

from raysessions.errors import (
    BackPressureError,
    CheckpointError,
    CheckpointNotFoundError,
    EmptyGradientError,
    ModelNotFoundError,
    PlacementError,
    QuotaExceededError,
    RaySessionsError,
    RequestTimeoutError,
    SamplerExpiredError,
    SamplingPoolError,
    SessionStoppedError,
    ValidationError,
)

log = logging.getLogger("raysessions.gateway")

STATUS = {
    ValidationError: HTTPStatus.BAD_REQUEST,
    CheckpointNotFoundError: HTTPStatus.NOT_FOUND,
    CheckpointError: HTTPStatus.UNPROCESSABLE_ENTITY,
    EmptyGradientError: HTTPStatus.BAD_REQUEST,
    ModelNotFoundError: HTTPStatus.NOT_FOUND,
    QuotaExceededError: HTTPStatus.TOO_MANY_REQUESTS,
    BackPressureError: HTTPStatus.TOO_MANY_REQUESTS,
    SamplerExpiredError: HTTPStatus.GONE,
    SessionStoppedError: HTTPStatus.GONE,
    SamplingPoolError: HTTPStatus.SERVICE_UNAVAILABLE,
    PlacementError: HTTPStatus.SERVICE_UNAVAILABLE,
    RequestTimeoutError: HTTPStatus.GATEWAY_TIMEOUT,
}
"""The first that fits. What fits none is a 500."""
TRY_AGAIN = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
RETRY_AFTER_S = 1


class HttpError(Exception):
    """The gateway's own refusals."""

    def __init__(self, status: HTTPStatus, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def as_http(error: Exception) -> HttpError:
    """What the caller is told."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return HttpError(HTTPStatus.BAD_REQUEST, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
    if isinstance(error, RaySessionsError):
        return HttpError(status, str(error), RETRY_AFTER_S if status in TRY_AGAIN else None)
    log.error("raysessions: a request failed", exc_info=error)
    return HttpError(status, "The gateway failed at this request; its log says why.")


def openai_body(error: HttpError) -> dict[str, Any]:
    """As OpenAI's clients read it."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.status.value}}
