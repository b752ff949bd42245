"""Which sessions exist, and for which drivers. One per cluster, named; it holds no weights and takes no CPU."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raysessions.actors.answer import answer
from raysessions.actors.housekeeper import Housekeeper
from raysessions.actors.manager_records import ManagerRecords, SessionRecord, find_actor
from raysessions.actors.protocol import ModelFacts
from raysessions.actors.registry_desk import RegistryDesk
from raysessions.actors.shared_actors import SharedActors, host_key_of, pool_key_of
from raysessions.adapter_weights import AdapterWeights
from raysessions.errors import ConfigError, PlacementError, SessionError, SessionExpiredError, SessionStoppedError
from raysessions.operations import SamplerRequest, SaveSettings, SessionRequest
from raysessions.quota import Quota
from raysessions.responses import SessionInfo
from raysessions.saved_adapter import read_adapter
from raysessions.session_summary import SessionState, SessionSummary
from raysessions.storage_location import StorageLocation, StoredUri
from raysessions.usage import UsageReport

ANCHOR_RETRY_S = 0.5

START_INTERRUPTED = SessionStoppedError("The session was stopped while it was starting.")


class DriverAnchor:
    """An actor that belongs to a driver's job: Ray ends it when the driver ends, however that happens."""

    async def hold(self) -> None:
        """Never returns: whoever awaits it learns of the driver's end."""
        await asyncio.Event().wait()


class SessionManager(RegistryDesk):
    """An async actor. A driver's sessions end with the driver; the manager ends when it has no drivers and no sessions.

    When its process dies, Ray starts it again, and it goes on from its records; hosts and pools live on by themselves.
    """

    def __init__(self) -> None:
        self._records = ManagerRecords.load()
        self._shared = SharedActors(self._records)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._housekeeper = Housekeeper(self._records, self._expire)
        self._housekeeping: asyncio.Task[None] | None = None
        self._is_leaving = False
        ray.get_runtime_context().current_actor.resume.options(max_task_retries=0).remote()

    async def resume(self) -> None:
        """Watches the drivers that there were before the process died, and the clock."""
        for driver_id in list(self._records.drivers):
            self._watch(driver_id)
        if self._housekeeping is None:
            self._housekeeping = asyncio.create_task(self._housekeeper.run())

    async def connect(self, driver_id: str) -> None:
        """A driver says that it is there, and has left its anchor."""
        if self._is_leaving:
            await asyncio.Event().wait()  # the process is about to end, and the driver then meets the next one
        self._records.drivers.add(driver_id)
        self._records.save()
        self._watch(driver_id)

    async def disconnect(self, driver_id: str) -> None:
        """A driver leaves: its sessions stop. The answer has to reach it, so that it asks this process to `leave`; if it dies
        before, its watch does."""
        await self._end_driver(driver_id)

    async def create_session(self, driver_id: str, request: SessionRequest) -> tuple[Any, Any, SessionInfo]:
        """Places and loads what is missing. Returns the host's and the pool's handle and the session's info."""
        pool_key = pool_key_of(request.base_model, request.sampling)
        record = self._new_record(driver_id, request, pool_key)
        record.host_key = host_key_of(request)
        pool = self._shared.pool(record, request.sampling)
        host = self._shared.host(record, request, pool)
        record.info = await self._or_stop(record, host.open_session.remote(request))
        return host, pool, record.info

    async def create_sampler(self, driver_id: str, request: SamplerRequest) -> tuple[Any, ModelFacts]:
        """A pool for the base model itself, for saved versions of it, or for one merged into it. Returns its handle and the
        model's facts."""
        base_model, config = request.base_model, request.sampling
        pool_key, merged = pool_key_of(base_model, config), None
        if request.merged is not None:
            base_model, weights = await self._weights(request.merged)
            pool_key, merged = f"{base_model}\nmerged\n{request.session_id}", (request.merged, weights)
        record = self._new_record(driver_id, dataclasses.replace(request, base_model=base_model), pool_key)
        pool = self._shared.pool(record, config, merged)
        return pool, await self._or_stop(record, pool.start.remote())

    async def find_live(self, uri: StoredUri) -> tuple[Any, str] | None:
        """The pool in which a running session's version is live, and the session; None if there is none."""
        for pool in list(self._records.pools.values()):
            session_id = await answer(pool.actor.session_of.remote(uri), if_dead=START_INTERRUPTED)
            if session_id is not None:
                return pool.actor, session_id
        return None

    async def find_session(self, tenant: str, session_id: str) -> tuple[Any, Any, SessionInfo, SaveSettings] | None:
        """The host, the pool, the info of a tenant's running training session, and where it saves; None if the tenant has none
        of that name. Raises what became of it if it has ended."""
        ended = self._records.ended.get(session_id)
        record = self._records.sessions.get(session_id)
        if record is None and ended is not None and ended.saves.tenant == tenant:
            raise self._ending(session_id)
        if record is None or record.saves.tenant != tenant or record.info is None or record.host_key is None:
            return None
        return self._records.shared(record).actor, self._records.pools[record.pool_key].actor, record.info, record.saves

    async def attach(self, session_id: str) -> tuple[Any, Any, SessionInfo, StorageLocation, float | None]:
        """A detached session's host, pool, info, location and lease. Raises what became of it if it has ended."""
        record = self._records.sessions.get(session_id)
        if record is None:
            raise self._ending(session_id)
        if record.driver_id is not None or record.info is None:
            raise SessionError(
                f"Session {session_id} belongs to a running driver or is just starting. Only a session created with "
                "detached=True "
                "can be attached to."
            )
        record.renewed_at = time.time()
        host, pool = self._records.shared(record).actor, self._records.pools[record.pool_key].actor
        return host, pool, record.info, record.saves.location, record.limits.lease_s

    async def renew(self, session_id: str) -> None:
        """A client of a detached session is there."""
        if (record := self._records.sessions.get(session_id)) is not None:
            record.renewed_at = time.time()

    async def ending(self, session_id: str) -> SessionError:
        """What became of a session that is not there."""
        return self._ending(session_id)

    async def phase(self, session_id: str) -> str:
        """What the session is doing while it starts: "placing", "loading" or "ready"."""
        record = self._records.sessions.get(session_id)
        if record is None:
            return "placing"
        return await answer(self._records.shared(record).actor.phase.remote(), if_dead=START_INTERRUPTED)

    async def scale_samplers(self, driver_id: str, num_replicas: int) -> None:
        """Changes the number of replicas of every pool that the driver's sessions use."""
        keys = {record.pool_key for record in self._records.sessions.values() if record.driver_id == driver_id}
        if not keys:
            raise SessionError("There are no samplers to scale: create a session or a sampling client first.")
        calls = [self._records.pools[key].actor.scale.remote(num_replicas) for key in keys]
        await asyncio.gather(*(answer(call, if_dead=START_INTERRUPTED) for call in calls))

    async def list_sessions(self, *, ended: bool) -> list[SessionSummary]:
        await self._housekeeper.look_around()
        records = [*self._records.sessions.values(), *(self._records.ended.values() if ended else ())]
        return sorted((record.summary() for record in records), key=lambda summary: -summary.age_s)

    async def set_quota(self, quota: Quota) -> None:
        self._records.quota = quota
        self._records.save()

    async def usage(self, location: StorageLocation, session: str | None, tenant: str | None) -> UsageReport:
        """The ledger's lines, up to date. `tenant` None: the session's."""
        await self._housekeeper.look_around()
        await self._housekeeper.write_ledger()
        if tenant is None:
            record = self._records.sessions.get(session or "") or self._records.ended.get(session or "")
            tenant = record.saves.tenant if record is not None else ""
        return await self._read_ledger(location, session, tenant, self._housekeeper.accelerators())

    async def give_up(self, session_id: str, token: str) -> None:
        """Stops a session whose start its driver no longer waits for."""
        record = self._records.sessions.get(session_id)
        if record is not None and record.token == token:
            await self.stop_session(session_id)

    async def stop_session(self, session_id: str, state: SessionState = "stopped", reason: str = "It was stopped.") -> None:
        """Frees what only this session used. Safe to call again."""
        record = self._records.sessions.get(session_id)
        if record is None or record.state == "stopping":
            return
        record.state = "stopping"
        await self._housekeeper.look_at(record)  # what it has used
        del self._records.sessions[session_id]
        self._records.end(record, state, reason)
        await self._shared.release(record)
        self._records.save()  # not before: a manager that died meanwhile does it again
        self._leave_if_empty()

    async def leave(self) -> None:
        """Ends this process, if no driver has come meanwhile.

        By force: a polite exit waits until nobody holds a handle that came from here, and a driver may keep its stopped
        clients for as long as it likes. Until then nobody could connect.
        """
        if not self._records.drivers and not self._records.sessions:
            self._is_leaving = True
            self._records.delete()
            ray.kill(ray.get_runtime_context().current_actor)

    async def _expire(self, record: SessionRecord, reason: str) -> None:
        await self.stop_session(record.session_id, "expired", reason)

    def _watch(self, driver_id: str) -> None:
        async def watch() -> None:
            with contextlib.suppress(ActorDiedError, SessionStoppedError):  # the anchor is gone, and its driver with it
                while True:
                    with contextlib.suppress(ActorUnavailableError):  # its process died alone, and comes back
                        await find_actor(anchor_name(driver_id)).hold.options(max_task_retries=0).remote()
                    await asyncio.sleep(ANCHOR_RETRY_S)
            await self._end_driver(driver_id)
            del self._watches[driver_id]
            self._leave_if_empty()

        if driver_id not in self._watches:
            self._watches[driver_id] = asyncio.create_task(watch())

    async def _end_driver(self, driver_id: str) -> None:
        records = list(self._records.sessions.values())
        own = [record.session_id for record in records if record.driver_id == driver_id]
        await asyncio.gather(*(self.stop_session(name, reason="Its driver ended.") for name in own))
        self._records.drivers.discard(driver_id)
        self._records.save()

    def _leave_if_empty(self) -> None:
        if not self._records.drivers and not self._records.sessions:
            ray.get_runtime_context().current_actor.leave.options(max_task_retries=0).remote()

    def _new_record(self, driver_id: str, request: SessionRequest | SamplerRequest, pool_key: str) -> SessionRecord:
        """Raises `ConfigError` for a name in use, `QuotaExceededError`."""
        session_id = request.session_id
        if driver_id not in self._records.drivers:
            raise SessionError("This driver is not connected: create a new ServiceClient.")
        running = self._records.sessions.get(session_id)
        if running is not None:
            if running.token == request.token:  # the call is made again after a death
                return running
            raise ConfigError(f"A session named {session_id!r} is running: choose another name, or stop it first.")
        if isinstance(request, SessionRequest):
            self._records.quota.check(request.saves.tenant, [record.summary() for record in self._records.sessions.values()])
        owner = None if request.limits.lease_s is not None else driver_id
        record = SessionRecord(
            session_id, request.token, owner, request.base_model, request.saves, request.limits, pool_key, state="placing"
        )
        self._records.sessions[session_id] = record
        self._records.save()
        return record

    def _ending(self, session_id: str) -> SessionError:
        record = self._records.ended.get(session_id)
        if session_id in self._records.sessions:
            return SessionStoppedError(
                f"The actors of session {session_id} are gone: stop it, and create a new one from a state."
            )
        if record is None:
            return SessionStoppedError(f"There is no session {session_id}: service.list_sessions() names those there are.")
        kind = SessionExpiredError if record.state == "expired" else SessionStoppedError
        return kind(f"Session {session_id} has ended. {record.reason} Create a new one, from a saved state if there is one.")

    async def _weights(self, uri: StoredUri) -> tuple[str, AdapterWeights]:
        """The base model and the adapter of a live or a saved version."""
        live = await self.find_live(uri)
        if live is not None:
            pool, _ = live
            base_model, (weights,) = await answer(pool.weights.remote(uri), if_dead=START_INTERRUPTED)
            return base_model, await weights
        info, adapter = await asyncio.to_thread(lambda: read_adapter(uri.location.open_registry(), uri.uri))
        return info.base_model, adapter

    async def _or_stop(self, record: SessionRecord, ref: ray.ObjectRef) -> Any:
        """The start's result; when it fails, the session is undone."""
        try:
            result = await answer(ref, if_dead=START_INTERRUPTED)
        except PlacementError as error:
            others = [str(other.summary()) for other in self._records.sessions.values() if other is not record]
            await self.stop_session(record.session_id, "failed", str(error))
            raise PlacementError(f"{error} Held by: {'; '.join(others) or 'no session of raysessions'}.") from error
        except BaseException as error:
            await self.stop_session(record.session_id, "failed", str(error))
            raise
        record.state = "running"
        self._records.save()
        return result


def anchor_name(driver_id: str) -> str:
    return f"raysessions-anchor-{driver_id}"
