"""An OpQueue and what the tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from raysessions.actors.op_queue import OpQueue


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def queue_of(*sessions: str) -> OpQueue:
    queue = OpQueue()
    for session_id in sessions:
        queue.open(session_id)
    return queue


async def take(queue: OpQueue, count: int) -> list[Any]:
    """Begins `count` operations and ends each with its own name as the result."""
    entries = [await queue.next() for _ in range(count)]
    for entry in entries:
        entry.outcome.set_result(f"{entry.op} done")
    return [entry.op for entry in entries]


async def is_empty(queue: OpQueue) -> bool:
    """True if nothing can run now. Anything that could would come in the first turns of the event loop."""
    waiting = asyncio.create_task(queue.next())
    for _ in range(5):
        await asyncio.sleep(0)
    if waiting.done():
        return False
    waiting.cancel()
    return True
