"""Who asks: keys, and how often each may ask."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from raysessions.gateway.errors import HttpError
from raysessions.gateway.keys import ApiKey, KeyStore, digest_of

KEPT_S = 10.0
"""How long a key's owner is remembered: a revoked key still works for so long."""
MAX_KEPT = 10_000


class Access:
    """Of one replica of the gateway."""

    def __init__(self, store: KeyStore, requests_per_minute: int) -> None:
        self._store = store
        self._known: dict[str, tuple[float, ApiKey | None]] = {}
        self._limit = RateLimitItemPerMinute(requests_per_minute)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    async def check(self, request: Request) -> ApiKey:
        """The request's key. Raises `HttpError` 401 or 429."""
        key = await self._find(_secret(request))
        if key is None:
            raise HttpError(HTTPStatus.UNAUTHORIZED, "The API key is missing or unknown. `raysessions keys create` makes one.")
        if not self._limiter.hit(self._limit, key.key_id):
            wait_s = max(1.0, self._limiter.get_window_stats(self._limit, key.key_id).reset_time - time.time())
            raise HttpError(
                HTTPStatus.TOO_MANY_REQUESTS, f"More than {self._limit.amount} requests a minute: wait {wait_s:.0f} s.", wait_s
            )
        return key

    async def _find(self, secret: str) -> ApiKey | None:
        if not secret:
            return None
        digest = digest_of(secret)
        until, key = self._known.get(digest, (0.0, None))
        if time.monotonic() >= until:
            key = await asyncio.to_thread(self._store.find, digest)
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[digest] = time.monotonic() + KEPT_S, key
        return key


async def _authorized(request: Request) -> ApiKey:
    access: Access = request.app.state.access
    return await access.check(request)


Key = Annotated[ApiKey, Depends(_authorized)]
"""Asked for by every route but the open ones."""


def _secret(request: Request) -> str:
    """As OpenAI's clients send it, or as tinker's do."""
    bearer = request.headers.get("authorization", "")
    return bearer.removeprefix("Bearer").strip() if bearer else request.headers.get("x-api-key", "")
