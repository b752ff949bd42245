"""Futures by the names under which the SDK asks for them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Count
from collections.abc import Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from ray.util.metrics import Counter

from raysessions.errors import RequestCancelledError
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api.replies import Reply, failure_of

HOLD_S = 30.0
"""How long a caller waits for a future at a time. The SDK gives up after 45 s, and asks again at once."""
KEPT_S = 600.0
"""How long a result is kept for its caller; once it was fetched, and may have got lost on the way, a fifth of it."""
MAX_OPEN = 20_000
"""Of one tenant, at the same time."""


@dataclass(slots=True)
class Future:
    tenant: str
    task: asyncio.Task[Reply]
    what: Any
    """That it was asked for; None: not known."""
    can_be_cancelled: bool
    forget_at: float = field(default=float("inf"))

    def is_over(self, now: float) -> bool:
        if self.task.done():
            self.forget_at = min(self.forget_at, now + KEPT_S)
        return now >= self.forget_at


class Futures:
    """Of one replica of the gateway."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._open: Count[str] = Count()
        """Of each tenant."""
        self._failures = Counter("raysessions_gateway_failed_futures", "Of the tinker SDK, by error.", ("error",))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def start(
        self, request_id: str, tenant: str, what: Any, work: Coroutine[Any, Any, Reply], *, can_be_cancelled: bool = False
    ) -> None:
        """`work` under this name; nothing happens if it has been asked for already. Raises `HttpError` 400 if something else
        has, under the same name."""
        known = self._futures.get(request_id)
        if known is not None:
            work.close()
            if known.what is not None and what is not None and known.what != what:
                raise HttpError(HTTPStatus.BAD_REQUEST, f"{request_id} was another request: numbers are used once.")
            return
        if self._open[tenant] >= MAX_OPEN:
            work.close()
            raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, f"{MAX_OPEN} futures of this key are open: fetch some first.", 1.0)
        self._open[tenant] += 1
        task = asyncio.create_task(_answered(work, self._failures))
        self._futures[request_id] = Future(tenant, task, what, can_be_cancelled)

    async def retrieve(self, request_id: str, tenant: str) -> Reply | None:
        """None: not yet. Raises `HttpError` 410 for a future that is not there."""
        future = self._futures.get(request_id)
        if future is None or future.tenant != tenant:
            raise HttpError(HTTPStatus.GONE, f"There is no future {request_id!r}, or its result is gone: ask again.")
        await asyncio.wait([future.task], timeout=HOLD_S)
        if not future.task.done():
            return None
        future.forget_at = min(future.forget_at, time.monotonic() + KEPT_S / 5)
        return future.task.result()

    def cancel(self, request_id: str, tenant: str) -> None:
        """Gives up what is not done and can be given up."""
        future = self._futures.get(request_id)
        if future is not None and future.tenant == tenant and future.can_be_cancelled:
            future.task.cancel()

    def tidy(self) -> None:
        """Forgets what nobody will ask for."""
        now = time.monotonic()
        for request_id in [name for name, future in self._futures.items() if future.is_over(now)]:
            self._open[self._futures.pop(request_id).tenant] -= 1


async def _answered(work: Coroutine[Any, Any, Reply], failures: Counter) -> Reply:
    try:
        return await work
    except asyncio.CancelledError:
        return failure_of(RequestCancelledError("Cancelled."))
    except Exception as error:
        failures.inc(1, {"error": type(error).__name__})
        return failure_of(error)
