"""One sampling replica: a process with one engine. A line to the engine for each call."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import ray

from raysessions.actors.protocol import CoreShare, ModelFacts, OpenAiHead, OpenAiPart, TokenCount
from raysessions.config import SamplingConfig
from raysessions.models import local_folder
from raysessions.operations import OpenAiRequest, SampleRequest
from raysessions.types import SampleResponse

if TYPE_CHECKING:
    from raysessions.actors.protocol import SamplingEngine


class SamplingActor:
    """An async actor: any number of samples at the same time."""

    _engine: SamplingEngine

    def __init__(self, base_model: str, config: SamplingConfig, merged: tuple[ray.ObjectRef] | None) -> None:
        """`merged`: the weights of the one adapter that the engine serves, added to the base model's."""
        self._base_model = base_model
        self._config = config
        self._merged = merged

    async def ping(self) -> None:
        """Answers once the process has a place."""

    async def whereabouts(self) -> tuple[str, int]:
        """The node and the process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def load(self, share: CoreShare) -> ModelFacts:
        # Ray sets it to the actor's num_cpus; vLLM gives its worker the cores that the engine binds, and its other
        # processes one thread each, only where it is not set.
        os.environ.pop("OMP_NUM_THREADS", None)
        folder = local_folder(self._base_model)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from raysessions.actors.engines.vllm import VllmEngine

        merged = None if self._merged is None else await self._merged[0]
        self._engine = VllmEngine(folder, self._config, share, merged)
        return self._engine.facts

    async def add_adapter(self, adapter_id: int, name: str, weights: tuple[ray.ObjectRef]) -> int:
        return await self._engine.add_adapter(adapter_id, name, await weights[0])

    async def remove_adapter(self, adapter_id: int) -> None:
        await self._engine.remove_adapter(adapter_id)

    async def sample(self, request: SampleRequest, adapter_id: int | None) -> SampleResponse:
        return await self._engine.sample(request, adapter_id)

    async def answer(self, request: OpenAiRequest, adapter_id: int | None) -> AsyncIterator[OpenAiPart]:
        async for part in self._engine.answer(request, adapter_id):
            yield part

    async def answer_whole(self, request: OpenAiRequest, adapter_id: int | None) -> tuple[OpenAiHead, str, TokenCount]:
        """The head, the body in one piece, and what it took."""
        parts = [part async for part in self._engine.answer(request, adapter_id)]
        head, *body, count = parts
        assert isinstance(head, OpenAiHead)
        assert isinstance(count, TokenCount)
        return head, "".join(part for part in body if isinstance(part, str)), count

    async def check_health(self, timeout_s: float) -> None:
        await self._engine.check_health(timeout_s)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake_up(self) -> None:
        await self._engine.wake_up()

    async def num_unfinished(self) -> int:
        return self._engine.num_unfinished()

    async def shutdown(self) -> None:
        """Ends the engine's own processes."""
        if hasattr(self, "_engine"):
            self._engine.shutdown()
