"""A deadline for answers that come in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def within(timeout_s: float, parts: AsyncGenerator[T, None]) -> AsyncIterator[T]:
    """The parts, and their source is closed in the end. Raises `TimeoutError` when they are not all there in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            yield part
    finally:
        await parts.aclose()
