"""A proxy that loses, repeats and reorders HTTP requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import uvicorn
from clusters import free_port
from starlette.requests import Request
from starlette.responses import Response

FAULTY = ("create_model", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "asample")
"""Requests that would change something if they were done twice."""


class FaultyProxy:
    """An ASGI application. A request is lost before it arrives, or its answer is, or it arrives twice; each waits a while."""

    def __init__(self, target: str, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self.faults: Counter[str] = Counter()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        await (await self._respond(request, await request.body()))(scope, receive, send)

    async def _respond(self, request: Request, body: bytes) -> Response:
        fault = "none"
        if request.url.path.rpartition("/")[2] in FAULTY:
            fault = self._random.choice(["lost", "answer lost", "twice", "none"])
            self.faults[fault] += 1
            await asyncio.sleep(self._random.uniform(0, 0.2))
        lost = Response(status_code=502)
        if fault == "lost":
            return lost
        answers = await asyncio.gather(*(self._forward(request, body) for _ in range(2 if fault == "twice" else 1)))
        return lost if fault == "answer lost" else answers[0]

    async def _forward(self, request: Request, body: bytes) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.request(request.method, f"{self._target}{request.url.path}", content=body, headers=headers)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


@contextlib.contextmanager
def served(app: FaultyProxy) -> Iterator[str]:
    """Its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
