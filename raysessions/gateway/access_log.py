"""One line for each request, with an id that its caller sees too, and Ray's metrics of them. Plain ASGI: answers stream."""

from __future__ import annotations

import logging
import re
import secrets
import time

from ray.util.metrics import Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("raysessions.gateway.access")

HEADER = "X-Request-Id"
_SAFE = re.compile(r"[\w.:-]{1,64}")
TAGS = ("route", "status")
BUCKETS_S = [0.005, 0.02, 0.1, 0.5, 2, 10, 60]


class AccessLog:
    """Middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._requests = Counter("raysessions_gateway_requests", "HTTP requests, by route and status.", TAGS)
        self._seconds = Histogram("raysessions_gateway_seconds", "Until a request was answered.", BUCKETS_S, TAGS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SAFE.fullmatch(given) else secrets.token_hex(8)
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            route = scope.get("route")
            tags = {"route": getattr(route, "path", "none"), "status": str(status)}
            self._requests.inc(1, tags)
            self._seconds.observe(seconds, tags)
            log.info("%s %s %s -> %d in %.3f s", request_id, scope["method"], scope["path"], status, seconds)
