"""The cluster's models for OpenAI's API: sessions, versions, base models."""

from __future__ import annotations

from raysessions.actors.protocol import OpenAiHead
from raysessions.gateway.backend import Backend
from raysessions.gateway.openai_routes import Parts, preceded_by
from raysessions.operations import OpenAiRequest
from raysessions.sampling_client import SamplingClient


class LiveModels:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.max_body_bytes = backend.config.max_body_bytes

    async def answer(self, tenant: str, request: OpenAiRequest) -> tuple[OpenAiHead, str]:
        return await self.backend.with_sampler(tenant, request.model, lambda sampler: sampler.answer(request))

    async def stream(self, tenant: str, request: OpenAiRequest) -> Parts:
        async def ask(sampler: SamplingClient) -> Parts:
            parts = sampler.stream(request)
            return preceded_by(await anext(parts), parts)

        return await self.backend.with_sampler(tenant, request.model, ask)

    async def list_models(self, tenant: str) -> list[tuple[str, float]]:
        sessions = await self.backend.sessions(tenant)
        base_models = self.backend.base_models_of(sessions)
        return [*((session.name, session.age_s) for session in sessions), *((name, 0.0) for name in base_models)]
