"""Tinker's API behind its routes: sessions, training runs and futures of one replica of the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from raysessions.config import LoraConfig
from raysessions.future import APIFuture
from raysessions.gateway.backend import Backend
from raysessions.gateway.tinker_api.futures import Futures
from raysessions.gateway.tinker_api.models import Model, Models
from raysessions.gateway.tinker_api.names import model_id_of, operation_name, parse_operation_name, sdk_session_of, session_name
from raysessions.gateway.tinker_api.replies import Reply, reply_of, sampler_reply
from raysessions.gateway.tinker_api.samplers import Sampler
from raysessions.gateway.tinker_api.sdk_sessions import SdkSessions
from raysessions.operations import Operation, StartingPoint
from raysessions.sampling_client import SamplingClient

log = logging.getLogger("raysessions.gateway")

TIDY_EVERY_S = 5.0


class TinkerDesk:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.sdk_sessions = SdkSessions(backend.config.lease_s)
        self.models = Models(backend)
        self.futures = Futures()

    async def tidy(self) -> None:
        """Until it is cancelled: forgets old futures, and ends what nobody sends heartbeats for."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            self.futures.tidy()
            for session in self.sdk_sessions.expire():
                try:
                    await self.stop_models(session.tenant, session.session_id)
                except Exception as error:  # their leases end too
                    log.warning("raysessions: the training runs of %s were not stopped: %s", session.session_id, error)

    async def stop_models(self, tenant: str, sdk_session_id: str) -> None:
        names = await self.model_names(tenant, sdk_session_id)
        await asyncio.gather(*map(self.backend.stop_session, names))

    async def model_names(self, tenant: str, sdk_session_id: str) -> list[str]:
        """Our names of its training runs."""
        sessions = await self.backend.sessions(tenant)
        return [session.name for session in sessions if sdk_session_of(session.name) == sdk_session_id]

    def create_model(
        self,
        tenant: str,
        sdk_session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraConfig,
        start: StartingPoint | None,
        user_metadata: dict[str, str],
    ) -> str:
        """Returns the name of a future."""
        model_id = model_id_of(sdk_session_id, model_seq_id)

        async def create() -> Reply:
            session = session_name(model_id)
            return reply_of(await self.backend.create_session(tenant, session, base_model, lora, start, user_metadata))

        name = operation_name(model_id, 0)
        self.futures.start(name, tenant, (base_model, lora.model_copy(update={"seed": 0}), start), create())
        return name

    def submit(self, tenant: str, model: Model, seq_id: int, op: Operation, sampler_seq_id: int | None = None) -> str:
        """Passes an operation on. Returns the name of a future, the same one for the same operation."""
        name = operation_name(model.model_id, seq_id, sampler_seq_id)
        sent = model.submit(seq_id, op)  # now, not when the task begins; the host knows what was sent before
        self.futures.start(name, tenant, op, self._outcome(tenant, model, sent, sampler_seq_id))
        return name

    def sample(
        self, tenant: str, sampler: Sampler, seq_id: int, what: Any, sample: Callable[[SamplingClient], APIFuture[Any]]
    ) -> str:
        """Samples by `sample`; `what`: its arguments. Returns the name of a future, the same one for the same number."""

        async def ask(client: SamplingClient) -> Any:
            sampled = sample(client)
            try:
                return await sampled
            except asyncio.CancelledError:
                await asyncio.to_thread(sampled.cancel)
                raise

        async def answer() -> Reply:
            return reply_of(await self.backend.with_sampler(tenant, sampler.model, ask))

        name = f"{sampler.sampler_id}:{seq_id}"
        self.futures.start(name, tenant, what, answer(), can_be_cancelled=True)
        return name

    async def retrieve(self, tenant: str, name: str) -> Reply | None:
        """None: not yet. Raises `HttpError` 410 for a future that is not there."""
        if name not in self.futures:
            await self._find(tenant, name)
        return await self.futures.retrieve(name, tenant)

    async def _find(self, tenant: str, name: str) -> None:
        """An operation that this gateway's predecessor passed on."""
        parsed = parse_operation_name(name)
        if parsed is None:
            return
        model_id, seq_id, sampler_seq_id = parsed
        model = await self.models.find(tenant, model_id)
        if seq_id == 0:
            self.futures.start(name, tenant, None, _at_once(reply_of(model.info)))
        elif await model.has(seq_id):
            self.futures.start(name, tenant, None, self._outcome(tenant, model, model.outcome(seq_id), sampler_seq_id))

    async def _outcome(self, tenant: str, model: Model, future: Awaitable[Any], sampler_seq_id: int | None) -> Reply:
        response = await self.models.answer(tenant, model, future)
        if sampler_seq_id is None:
            return reply_of(response)
        sdk_session_id = sdk_session_of(model.info.session_id) or ""
        return sampler_reply(Sampler(sdk_session_id, sampler_seq_id, response.path).sampler_id)


async def _at_once(reply: Reply) -> Reply:
    return reply
