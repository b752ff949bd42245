"""What the routes need of the cluster: sessions, and who answers for a model's name."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from raysessions import ServiceClient
from raysessions.actors.protocol import ModelFacts
from raysessions.config import LoraConfig
from raysessions.errors import CheckpointNotFoundError, SamplerExpiredError, SessionStoppedError
from raysessions.future import APIFuture
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api.names import TINKER_SCHEME, kind_of, session_name, version_uri
from raysessions.operations import NewestVersion, SaveSettings, StartingPoint
from raysessions.responses import CheckpointInfo, SessionInfo
from raysessions.sampling_client import SamplingClient, open_sampling_client
from raysessions.session_starter import session_request
from raysessions.session_summary import SessionSummary
from raysessions.settings import Settings
from raysessions.storage_location import StoredUri
from raysessions.uris import SCHEME, check_name

KEPT_CLIENTS = 64
"""Sampling clients of versions and base models that are kept open: each keeps its version live."""

T = TypeVar("T")


class Backend:
    """One in each replica of the gateway; a driver of the cluster like any other."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._settings = Settings(
            output_uri=config.output_uri, training=config.training, sampling=config.sampling, lease_s=config.lease_s
        )
        self.service = ServiceClient(output_uri=config.output_uri, training=config.training, sampling=config.sampling)
        self._manager = self.service._manager
        self._clients: OrderedDict[tuple[str, str], SamplingClient] = OrderedDict()
        self._opening: dict[tuple[str, str], asyncio.Task[SamplingClient]] = {}

    async def sampler(self, tenant: str, model: str) -> SamplingClient:
        """Of a session's newest version, a version, or a base model. Raises `HttpError` 404 if the tenant has none such."""
        is_version = model.startswith((SCHEME, TINKER_SCHEME))
        key = (tenant, str(version_uri(model)) if is_version else session_name(model))
        if key not in self._clients:
            if key not in self._opening:
                open_client = self._open_version if is_version else self._open_name
                self._opening[key] = asyncio.create_task(open_client(*key))
            try:
                client = await asyncio.shield(self._opening[key])
            finally:
                self._opening.pop(key, None)
            self._clients[key] = client
            while len(self._clients) > KEPT_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end(key)
        return self._clients[key]

    async def with_sampler(self, tenant: str, model: str, ask: Callable[[SamplingClient], Awaitable[T]]) -> T:
        """What `ask` gets from the model's sampler. A client that was kept may be of a version that is live no more: then it is
        asked once more, of a fresh one."""
        client = await self.sampler(tenant, model)
        try:
            return await ask(client)
        except (SamplerExpiredError, SessionStoppedError):
            self._clients = OrderedDict((key, kept) for key, kept in self._clients.items() if kept is not client)
            return await ask(await self.sampler(tenant, model))

    async def create_session(
        self,
        tenant: str,
        name: str,
        base_model: str,
        lora: LoraConfig,
        start: StartingPoint | None,
        user_metadata: Mapping[str, str],
    ) -> SessionInfo:
        """A session that saves in a group of its own, and lives as long as its lease is renewed."""
        await self.check_base_model(tenant, base_model)
        settings = self._settings.but({"tenant": tenant, "model_package_group": name, "user_metadata": user_metadata})
        request = session_request(base_model, lora, start, name, settings, detached=True)
        created: Any = await APIFuture(self._manager.create_session.remote(self.service._driver_id, request))
        info: SessionInfo = created[2]
        return info

    async def find_session(self, tenant: str, name: str) -> tuple[Any, Any, SessionInfo, SaveSettings] | None:
        """The host, the pool, the info of a running session, and where it saves. Raises why it has ended, if it has."""
        return await APIFuture(self._manager.find_session.remote(tenant, name))

    async def renew(self, name: str) -> None:
        await APIFuture(self._manager.renew.remote(name))

    async def stop_session(self, name: str) -> None:
        await APIFuture(self._manager.stop_session.remote(name))

    async def checkpoint(self, tenant: str, path: str) -> CheckpointInfo:
        """Of a version, by Tinker's path or ours. Raises `HttpError` 404 if the tenant has no such version."""
        with contextlib.suppress(CheckpointNotFoundError):
            info = await self.call(self.service.get_checkpoint, str(version_uri(path)))
            kind = "weights" if info.kind == "state" else "sampler_weights"
            if info.tenant == tenant and kind_of(path) in (None, kind):
                return info
        raise HttpError(HTTPStatus.NOT_FOUND, f"There is no version {path!r} for this key.")

    async def checkpoints(self, tenant: str, group: str | None = None) -> list[CheckpointInfo]:
        """A tenant's versions in one group or in all, newest first."""

        def read() -> list[CheckpointInfo]:
            registry = self._settings.location.open_registry()
            groups = registry.groups() if group is None else [check_name(group, "Group")]
            infos = (info for one in groups for info in registry.list(one) if info.tenant == tenant)
            return sorted(infos, key=lambda info: info.created_at, reverse=True)

        return await self.call(read)

    async def sessions(self, tenant: str) -> list[SessionSummary]:
        """Training sessions that run."""
        sessions: list[SessionSummary] = await APIFuture(self._manager.list_sessions.remote(ended=False))
        return [session for session in sessions if session.tenant == tenant and session.kind == "training"]

    async def base_models(self, tenant: str) -> list[str]:
        """Those that the tenant may use: the gateway's, and those of its sessions."""
        return self.base_models_of(await self.sessions(tenant))

    def base_models_of(self, sessions: list[SessionSummary]) -> list[str]:
        return list(dict.fromkeys([*self.config.base_models, *(session.base_model for session in sessions)]))

    async def check_base_model(self, tenant: str, base_model: str) -> None:
        """Raises `HttpError` 404: a name may be any folder of the cluster."""
        allowed = await self.base_models(tenant)
        if base_model not in allowed:
            raise HttpError(
                HTTPStatus.NOT_FOUND,
                f"There is no model {base_model!r} for this key. Base models here: {', '.join(allowed) or 'none'}. "
                "`raysessions serve --base-model` adds one.",
            )

    async def call(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """A call of the service, which blocks, in a thread."""
        return await asyncio.to_thread(function, *args, **keywords)

    async def _open_name(self, tenant: str, model: str) -> SamplingClient:
        """Of a session, whose newest version each request gets, or of a base model."""
        found = await self.find_session(tenant, model)
        if found is None:
            await self.check_base_model(tenant, model)
            return await self._start_sampler(tenant, model)
        _, pool, info, saves = found
        newest: StoredUri | None = await APIFuture(pool.newest.remote(model))
        newest = newest or await self.call(_newest_saved, model, saves)
        asked: NewestVersion = await APIFuture(pool.meet.remote(model, newest))
        return SamplingClient(
            pool,
            asked,
            None,
            session_id=model,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            client_id=tenant,
        )

    async def _start_sampler(self, tenant: str, base_model: str) -> SamplingClient:
        return await self.call(self.service.create_sampling_client, base_model=base_model, tenant=tenant)

    async def _open_version(self, tenant: str, path: str) -> SamplingClient:
        """From the samplers of its session, if they have it, or else from those of its base model."""
        info = await self.checkpoint(tenant, path)
        uri = StoredUri(version_uri(path), self._settings.location)
        live: tuple[Any, str] | None = await APIFuture(self._manager.find_live.remote(uri))
        if live is not None:
            pool, name = live
            return await self._client(tenant, pool, uri, name, await APIFuture(pool.start.remote()))
        sampling = self.config.sampling
        if sampling.for_rank(info.rank) != sampling.for_rank(1):  # it needs samplers of its own
            return await self.call(self.service.create_sampling_client, path, tenant=tenant)
        base = self._clients.get((tenant, info.base_model)) or await self._start_sampler(tenant, info.base_model)
        self._clients[tenant, info.base_model] = base
        return await self._client(tenant, base._pool, uri, base._session_id, await APIFuture(base._pool.start.remote()))

    async def _client(self, tenant: str, pool: Any, uri: StoredUri | None, name: str, facts: ModelFacts) -> SamplingClient:
        keywords: dict[str, Any] = {"session_id": name, "vocab_size": facts.vocab_size, "context_length": facts.context_length}
        keywords["client_id"] = tenant  # all that a tenant asks is one client's, when the samplers let clients take turns
        return await self.call(open_sampling_client, pool, uri, **keywords)


def _newest_saved(session_id: str, saves: SaveSettings) -> StoredUri | None:
    """In the registry: a pool whose process died has forgotten."""
    versions = saves.location.open_registry().list(saves.group, session_id=session_id)
    path = next((info.path for info in versions if info.kind != "state"), None)
    return None if path is None else StoredUri(version_uri(path), saves.location)
