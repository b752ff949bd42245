"""Hosts and pools: made for the first session that needs them, ended with the last."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from raysessions.actors.answer import answer
from raysessions.actors.manager_records import ManagerRecords, SessionRecord, SharedActor
from raysessions.actors.model_host import ModelHost
from raysessions.actors.placement import durable_actor
from raysessions.actors.sampling_pool import SamplingPool
from raysessions.actors.session_vault import SessionVault
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.errors import SessionStoppedError
from raysessions.operations import SessionRequest
from raysessions.storage_location import StoredUri

log = logging.getLogger("raysessions")

STOP_S = {"host": 120.0, "pool": 20.0}
"""How long an actor may take to end before it is killed. A host has freed its ranks then, and waits for what is being saved."""


def pool_key_of(base_model: str, config: SamplingConfig) -> str:
    """Sessions with the same one share samplers."""
    return f"{base_model}\n{config.model_dump_json()}"


def host_key_of(request: SessionRequest) -> str:
    """Sessions with the same one share a loaded base model."""
    key = f"{pool_key_of(request.base_model, request.sampling)}\n{request.training.model_dump_json()}"
    return key if request.share else f"{key}\n{request.session_id}"


class SharedActors:
    """Of the manager."""

    def __init__(self, records: ManagerRecords) -> None:
        self._records = records
        self._leaving: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        """Of each actor, by its name: sessions that let go of it, while others use it."""

    def pool(
        self, record: SessionRecord, config: SamplingConfig, merged: tuple[StoredUri, AdapterWeights] | None = None
    ) -> Any:
        """`merged`: a version that the pool is to serve merged into the base model."""
        pools = self._records.pools
        if record.pool_key not in pools:
            pools[record.pool_key] = SharedActor(_new_name("pool"))
            durable_actor(SamplingPool, pools[record.pool_key].name, record.base_model, config, merged)
        return self._use(pools[record.pool_key], record)

    def host(self, record: SessionRecord, request: SessionRequest, pool: Any) -> Any:
        hosts, key = self._records.hosts, host_key_of(request)
        if key not in hosts:
            keeps = request.training.max_recoveries > 0
            shared = hosts[key] = SharedActor(_new_name("host"), _new_name("vault") if keeps else None)
            vault = durable_actor(SessionVault, shared.vault_name, elsewhere=True) if shared.vault_name else None
            sleep = request.sampling.sleep
            durable_actor(ModelHost, shared.name, request.base_model, request.training, pool, vault, takes_turns=sleep)
        return self._use(hosts[key], record)

    async def release(self, record: SessionRecord) -> None:
        """The session is over: its actors hear of it, and those that nobody else uses end."""
        hosts, pools = self._records.hosts, self._records.pools
        await asyncio.gather(
            self._release(hosts, record.host_key, record.session_id, "close_session", STOP_S["host"]),
            self._release(pools, record.pool_key, record.session_id, "drop_session", STOP_S["pool"]),
        )

    def _use(self, shared: SharedActor, record: SessionRecord) -> Any:
        shared.users.add(record.session_id)
        self._records.save()
        return shared.actor

    async def _release(
        self, table: dict[str, SharedActor], key: str | None, session_id: str, leave: str, stop_s: float
    ) -> None:
        if key is None or key not in table:
            return
        shared = table[key]
        shared.users.discard(session_id)
        leaving = self._leaving[shared.name]
        if shared.users:
            task = asyncio.create_task(_end(shared, session_id, lambda actor: getattr(actor, leave).remote(session_id), stop_s))
            leaving.add(task)
            await task
            leaving.discard(task)
            return
        del table[key]
        await asyncio.gather(*leaving)
        await _end(shared, session_id, lambda actor: actor.stop.options(max_task_retries=0).remote(), stop_s)
        shared.kill()
        del self._leaving[shared.name]


def _new_name(what: str) -> str:
    return f"raysessions-{what}-{secrets.token_hex(8)}"


async def _end(shared: SharedActor, session_id: str, call: Callable[[Any], Any], stop_s: float) -> None:
    """Lets an actor end what it does for a session, by `call`."""
    try:
        await asyncio.wait_for(answer(call(shared.actor), if_dead=SessionStoppedError("It is gone.")), stop_s)
    except Exception as error:  # it hangs, is gone already or fails: it is killed now, or with its last session
        log.warning("raysessions: %s did not let session %s go cleanly: %s", shared.name, session_id, error)
