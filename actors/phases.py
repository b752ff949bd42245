"""Turns of training and sampling on one GPU: while one computes, the other has given its memory back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from raysessions.actors.answer import answer
from raysessions.errors import SamplingPoolError


class TrainingPhases:
    """The host's side of `SamplingConfig.sleep`: the samplers rest from the first operation that waits to the last one."""

    def __init__(self, pool: Any, release_memory: Callable[[], Awaitable[None]]) -> None:
        self._pool = pool
        self._release_memory = release_memory
        self._id = secrets.token_hex(8)
        self._is_training = False
        self._changing = asyncio.Lock()

    async def begin(self) -> None:
        """Returns when the samplers have answered what they had begun and given their memory back."""
        async with self._changing:
            if not self._is_training:
                await answer(self._pool.rest.remote(self._id), if_dead=_POOL_DIED)
                self._is_training = True

    async def end(self, is_over: Callable[[], bool]) -> None:
        """Lets the samplers go on, if there is still nothing to train."""
        async with self._changing:
            if self._is_training and is_over():
                await self._release_memory()
                self._is_training = False
                await answer(self._pool.resume.remote(self._id), if_dead=_POOL_DIED)


_POOL_DIED = SamplingPoolError("The samplers ended.")


class SamplingPhases:
    """The pool's side."""

    def __init__(self) -> None:
        self._training: set[str] = set()
        """The hosts that train."""
        self.changing = asyncio.Lock()
        """Held while engines fall asleep or wake up."""
        self._may_sample = asyncio.Event()
        self._may_sample.set()

    @property
    def may_sample(self) -> bool:
        return self._may_sample.is_set()

    async def wait(self) -> None:
        """Until samplers may compute."""
        await self._may_sample.wait()

    def rest(self, host_id: str) -> None:
        self._training.add(host_id)
        self._may_sample.clear()

    def resume(self, host_id: str) -> None:
        self._training.discard(host_id)

    @property
    def is_training(self) -> bool:
        return bool(self._training)

    def awake(self) -> None:
        """The engines are."""
        if not self._training:
            self._may_sample.set()
