"""Which sessions exist, and for which drivers. One per cluster, named; it holds no weights and takes no CPU."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

import ray
from ray.exceptions import RayError

from raysessions.actors.answer import answer
from raysessions.actors.manager_records import ManagerRecords, SessionRecord, SharedActor, find_actor
from raysessions.actors.model_host import ModelHost
from raysessions.actors.placement import durable_actor
from raysessions.actors.protocol import ModelFacts
from raysessions.actors.registry_desk import RegistryDesk
from raysessions.actors.sampling_pool import SamplingPool
from raysessions.actors.session_vault import SessionVault
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.errors import ConfigError, SessionError, SessionStoppedError
from raysessions.operations import SessionRequest
from raysessions.responses import SessionInfo
from raysessions.saved_adapter import read_adapter
from raysessions.storage_location import StoredUri

STOP_S = 20.0
"""How long an actor may take to free what it holds before it is killed."""

START_INTERRUPTED = SessionStoppedError("The session was stopped while it was starting.")


class DriverAnchor:
    """An actor that belongs to a driver's job: Ray ends it when the driver ends, however that happens."""

    async def hold(self) -> None:
        """Never returns: whoever awaits it learns of the driver's end."""
        await asyncio.Event().wait()


class SessionManager(RegistryDesk):
    """An async actor. A driver's sessions end with the driver; the manager ends when it has no drivers.

    When its process dies, Ray starts it again, and it goes on from its records; hosts and pools live on by themselves.
    """

    def __init__(self) -> None:
        self._records = ManagerRecords.load()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._is_leaving = False
        ray.get_runtime_context().current_actor.resume.remote()

    async def resume(self) -> None:
        """Watches the drivers that there were before the process died."""
        for driver_id in list(self._records.drivers):
            self._watch(driver_id)

    async def connect(self, driver_id: str) -> None:
        """A driver says that it is there, and has left its anchor."""
        if self._is_leaving:
            await asyncio.Event().wait()  # the process is about to end, and the driver then meets the next one
        self._records.drivers.add(driver_id)
        self._records.save()
        self._watch(driver_id)

    async def disconnect(self, driver_id: str) -> None:
        """A driver leaves: its sessions stop."""
        watch = self._watches.pop(driver_id, None)
        if watch is not None:
            watch.cancel()
        await self._end_driver(driver_id)

    async def create_session(self, driver_id: str, request: SessionRequest) -> tuple[Any, Any, SessionInfo]:
        """Places and loads what is missing. Returns the host's and the pool's handle and the session's info."""
        session_id, config = request.session_id, request.sampling
        self._check_new(driver_id, session_id, request.token)
        pool_key = _pool_key(request.base_model, config)
        host_key = f"{pool_key}\n{request.training.model_dump_json()}"
        if not request.share:
            host_key += f"\n{session_id}"
        pool = self._get_pool(pool_key, session_id, request.base_model, config)
        host = self._get_host(host_key, request, pool)
        self._add(session_id, SessionRecord(driver_id, request.token, request.base_model, config, pool_key, host_key))
        info = await self._or_stop(session_id, host.open_session.remote(request))
        return host, pool, info

    async def create_sampler(
        self,
        driver_id: str,
        session_id: str,
        token: str,
        base_model: str,
        config: SamplingConfig,
    ) -> tuple[Any, ModelFacts]:
        """A pool for the base model itself, or for saved versions of it. Returns its handle and the model's facts."""
        self._check_new(driver_id, session_id, token)
        pool_key = _pool_key(base_model, config)
        pool = self._get_pool(pool_key, session_id, base_model, config)
        self._add(session_id, SessionRecord(driver_id, token, base_model, config, pool_key))
        return pool, await self._or_stop(session_id, pool.start.remote())

    async def create_merged_sampler(
        self,
        driver_id: str,
        session_id: str,
        token: str,
        uri: StoredUri,
        config: SamplingConfig,
    ) -> tuple[Any, ModelFacts]:
        """A pool of its own for one version, merged into its base model."""
        self._check_new(driver_id, session_id, token)
        base_model, weights = await self._weights(uri)
        pool_key = f"merged\n{session_id}"
        pool = self._get_pool(pool_key, session_id, base_model, config, (uri, weights))
        self._add(session_id, SessionRecord(driver_id, token, base_model, config, pool_key))
        return pool, await self._or_stop(session_id, pool.start.remote())

    async def find_live(self, uri: StoredUri) -> Any | None:
        """The pool in which the version is live; None if there is none."""
        for pool in list(self._records.pools.values()):
            if await answer(pool.actor.is_live.remote(uri), if_dead=START_INTERRUPTED):
                return pool.actor
        return None

    async def phase(self, session_id: str) -> str:
        """What the session is doing while it starts: "placing", "loading" or "ready"."""
        session = self._records.sessions.get(session_id)
        if session is None:
            return "placing"
        shared = self._records.hosts[session.host_key] if session.host_key else self._records.pools[session.pool_key]
        return await answer(shared.actor.phase.remote(), if_dead=START_INTERRUPTED)

    async def scale_samplers(self, driver_id: str, num_replicas: int) -> None:
        """Changes the number of replicas of every pool that the driver's sessions use."""
        keys = {session.pool_key for session in self._records.sessions.values() if session.driver_id == driver_id}
        if not keys:
            raise SessionError("There are no samplers to scale: create a session or a sampling client first.")
        calls = [self._records.pools[key].actor.scale.remote(num_replicas) for key in keys]
        await asyncio.gather(*(answer(call, if_dead=START_INTERRUPTED) for call in calls))

    async def list_sessions(self) -> list[str]:
        return sorted(self._records.sessions)

    async def give_up(self, session_id: str, token: str) -> None:
        """Stops a session whose start its driver no longer waits for."""
        session = self._records.sessions.get(session_id)
        if session is not None and session.token == token:
            await self.stop_session(session_id)

    async def stop_session(self, session_id: str) -> None:
        """Frees what only this session used. Safe to call again."""
        session = self._records.sessions.pop(session_id, None)
        if session is None:
            return
        await asyncio.gather(
            _release(self._records.hosts, session.host_key, session_id, "close_session"),
            _release(self._records.pools, session.pool_key, session_id, "drop_session"),
        )
        self._records.save()  # not before: a manager that died meanwhile does it again

    async def leave(self) -> None:
        """Ends this process, if no driver has come meanwhile.

        By force: a polite exit waits until nobody holds a handle that came from here, and a driver may keep its stopped
        clients for as long as it likes. Until then nobody could connect.
        """
        if not self._records.drivers:
            self._is_leaving = True
            self._records.delete()
            ray.kill(ray.get_runtime_context().current_actor)

    def _watch(self, driver_id: str) -> None:
        async def watch() -> None:
            # Until the anchor is gone, and its driver with it.
            with contextlib.suppress(RayError, SessionStoppedError):
                await find_actor(anchor_name(driver_id)).hold.remote()
            await self._end_driver(driver_id)

        if driver_id not in self._watches:
            self._watches[driver_id] = asyncio.create_task(watch())

    async def _end_driver(self, driver_id: str) -> None:
        self._watches.pop(driver_id, None)
        sessions = self._records.sessions
        await asyncio.gather(*(self.stop_session(name) for name in list(sessions) if sessions[name].driver_id == driver_id))
        self._records.drivers.discard(driver_id)
        self._records.save()
        if not self._records.drivers:
            ray.get_runtime_context().current_actor.leave.options(max_task_retries=0).remote()

    def _check_new(self, driver_id: str, session_id: str, token: str) -> None:
        if driver_id not in self._records.drivers:
            raise SessionError("This driver is not connected: create a new ServiceClient.")
        running = self._records.sessions.get(session_id)
        if running is not None and running.token != token:  # the same token: the call is made again after a death
            raise ConfigError(f"A session named {session_id!r} is running: choose another name, or stop it first.")

    def _add(self, session_id: str, record: SessionRecord) -> None:
        self._records.sessions[session_id] = record
        self._records.save()

    async def _weights(self, uri: StoredUri) -> tuple[str, AdapterWeights]:
        """The base model and the adapter of a live or a saved version."""
        from raysessions.registry import Registry  # brings pyarrow, which a driver that imports this room does not need

        pool = await self.find_live(uri)
        if pool is not None:
            base_model, (weights,) = await answer(pool.weights.remote(uri), if_dead=START_INTERRUPTED)
            return base_model, await weights
        info, adapter = await asyncio.to_thread(lambda: read_adapter(Registry(uri.location), uri.uri))
        return info.base_model, adapter

    def _get_pool(self, key: str, session_id: str, base_model: str, config: SamplingConfig, *args: Any) -> Any:
        if key not in self._records.pools:
            self._records.pools[key] = SharedActor(_new_name("pool"))
            durable_actor(SamplingPool, self._records.pools[key].name, base_model, config, *args)
        self._records.pools[key].users.add(session_id)
        return self._records.pools[key].actor

    def _get_host(self, key: str, request: SessionRequest, pool: Any) -> Any:
        if key not in self._records.hosts:
            keeps = request.training.max_recoveries > 0
            shared = self._records.hosts[key] = SharedActor(_new_name("host"), _new_name("vault") if keeps else None)
            vault = durable_actor(SessionVault, shared.vault_name) if shared.vault_name else None
            sleep = request.sampling.sleep
            durable_actor(ModelHost, shared.name, request.base_model, request.training, pool, vault, takes_turns=sleep)
        self._records.hosts[key].users.add(request.session_id)
        return self._records.hosts[key].actor

    async def _or_stop(self, session_id: str, ref: ray.ObjectRef) -> Any:
        """The start's result; when it fails, the session is undone."""
        try:
            return await answer(ref, if_dead=START_INTERRUPTED)
        except BaseException:
            await self.stop_session(session_id)
            raise


def _pool_key(base_model: str, config: SamplingConfig) -> str:
    return f"{base_model}\n{config.model_dump_json()}"


def anchor_name(driver_id: str) -> str:
    return f"raysessions-anchor-{driver_id}"


def _new_name(what: str) -> str:
    return f"raysessions-{what}-{secrets.token_hex(8)}"


async def _release(table: dict[str, SharedActor], key: str | None, session_id: str, leave: str) -> None:
    """Takes the session off a shared actor; the last one ends it."""
    if key is None or key not in table:
        return
    shared = table[key]
    shared.users.discard(session_id)
    if not shared.users:
        del table[key]
    # One that hangs or is gone already is killed below, or with its last session.
    with contextlib.suppress(TimeoutError, SessionError):
        actor = shared.actor
        call = actor.stop.options(max_task_retries=0).remote() if not shared.users else getattr(actor, leave).remote(session_id)
        await asyncio.wait_for(answer(call, if_dead=START_INTERRUPTED), STOP_S)
    if not shared.users:
        shared.kill()
