"""Which sessions exist, and for which drivers. One per cluster, named; it holds no weights and takes no CPU."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from raysessions.actors.answer import answer
from raysessions.actors.model_host import ModelHost
from raysessions.actors.placement import light_actor
from raysessions.actors.protocol import ModelFacts
from raysessions.actors.sampling_pool import SamplingPool
from raysessions.config import SamplingConfig, TrainingConfig
from raysessions.errors import ConfigError, SamplerExpiredError, SessionError, SessionStoppedError
from raysessions.operations import SessionRequest
from raysessions.types import SessionInfo
from raysessions.uris import VersionUri

STOP_S = 20.0
"""How long an actor may take to free what it holds before it is killed."""

START_INTERRUPTED = SessionStoppedError("The session was stopped while it was starting.")


class DriverAnchor:
    """An actor that belongs to a driver's job: Ray ends it when the driver ends, however that happens."""

    async def hold(self) -> None:
        """Never returns: whoever awaits it learns of the driver's end."""
        await asyncio.Event().wait()


@dataclass(slots=True)
class _Shared:
    """An actor that several sessions use; it ends with the last of them."""

    actor: Any
    users: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Session:
    """A training session, or a sampler of a base model (then it has no host)."""

    driver_id: str
    token: str
    pool_key: str
    base_model: str
    sampling: SamplingConfig
    host_key: str | None = None


class SessionManager:
    """An async actor. A driver's sessions end with the driver; the manager ends when it has no drivers."""

    def __init__(self) -> None:
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._sessions: dict[str, _Session] = {}
        self._hosts: dict[str, _Shared] = {}
        self._pools: dict[str, _Shared] = {}
        self._is_leaving = False

    async def connect(self, driver_id: str, anchor: Any) -> None:
        """A driver says that it is there, with an anchor to watch."""
        if self._is_leaving:
            await asyncio.Event().wait()  # the process is about to end, and the driver then meets the next one
        self._drivers[driver_id] = asyncio.create_task(self._watch(driver_id, anchor))

    async def disconnect(self, driver_id: str) -> None:
        """A driver leaves: its sessions stop."""
        watch = self._drivers.pop(driver_id, None)
        if watch is not None:
            watch.cancel()
        await self._end_driver(driver_id)

    async def create_session(self, driver_id: str, request: SessionRequest) -> tuple[Any, Any, SessionInfo]:
        """Places and loads what is missing. Returns the host's and the pool's handle and the session's info."""
        self._check_new(driver_id, request.session_id)
        pool = self._pool(request.base_model, request.sampling, request.output_uri, request.session_id)
        host_key = f"{pool.key}\n{request.training.model_dump_json()}"
        if not request.share:
            host_key += f"\n{request.session_id}"
        self._sessions[request.session_id] = _Session(
            driver_id, request.token, pool.key, request.base_model, request.sampling, host_key
        )
        host = _get_or_create(
            self._hosts,
            host_key,
            ModelHost,
            request.base_model,
            request.training,
            pool.actor,
            takes_turns=request.sampling.sleep,
        )
        host.users.add(request.session_id)
        info = await self._or_stop(request.session_id, host.actor.open_session.remote(request.session_id, request.lora))
        return host.actor, pool.actor, info

    async def create_sampler(
        self,
        driver_id: str,
        session_id: str,
        token: str,
        base_model: str,
        config: SamplingConfig,
        output_uri: str | None,
    ) -> tuple[Any, ModelFacts]:
        """A pool for the base model itself. Returns its handle and the model's facts."""
        self._check_new(driver_id, session_id)
        pool = self._pool(base_model, config, output_uri, session_id)
        self._sessions[session_id] = _Session(driver_id, token, pool.key, base_model, config)
        return pool.actor, await self._or_stop(session_id, pool.actor.start.remote())

    async def create_merged_sampler(
        self, driver_id: str, session_id: str, token: str, uri: VersionUri, config: SamplingConfig | None
    ) -> tuple[Any, ModelFacts]:
        """A pool of its own for one version, merged into its base model."""
        self._check_new(driver_id, session_id)
        source = self._sessions.get(uri.session_id)
        if source is None:
            raise SamplerExpiredError(f"{uri} is not live: its session has ended.")
        (weights,) = await answer(self._pools[source.pool_key].actor.weights.remote(uri), if_dead=START_INTERRUPTED)
        pool_key = f"merged\n{session_id}"
        merged = (uri, await weights)
        pool = _get_or_create(self._pools, pool_key, SamplingPool, source.base_model, config or source.sampling, None, merged)
        pool.users.add(session_id)
        self._sessions[session_id] = _Session(driver_id, token, pool_key, source.base_model, config or source.sampling)
        return pool.actor, await self._or_stop(session_id, pool.actor.start.remote())

    async def get_pool(self, session_id: str) -> Any | None:
        """The pool that serves a training session's versions; None if there is no such session."""
        session = self._sessions.get(session_id)
        return None if session is None else self._pools[session.pool_key].actor

    async def phase(self, session_id: str) -> str:
        """What the session is doing while it starts: "placing", "loading" or "ready"."""
        session = self._sessions.get(session_id)
        if session is None:
            return "placing"
        shared = self._hosts[session.host_key] if session.host_key else self._pools[session.pool_key]
        return await answer(shared.actor.phase.remote(), if_dead=START_INTERRUPTED)

    async def scale_samplers(self, driver_id: str, num_replicas: int) -> None:
        """Changes the number of replicas of every pool that the driver's sessions use."""
        keys = {session.pool_key for session in self._sessions.values() if session.driver_id == driver_id}
        if not keys:
            raise SessionError("There are no samplers to scale: create a session or a sampling client first.")
        calls = [self._pools[key].actor.scale.remote(num_replicas) for key in keys]
        await asyncio.gather(*(answer(call, if_dead=START_INTERRUPTED) for call in calls))

    async def list_sessions(self) -> list[str]:
        return sorted(self._sessions)

    async def give_up(self, session_id: str, token: str) -> None:
        """Stops a session whose start its driver no longer waits for."""
        session = self._sessions.get(session_id)
        if session is not None and session.token == token:
            await self.stop_session(session_id)

    async def stop_session(self, session_id: str) -> None:
        """Frees what only this session used. Safe to call again."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        await asyncio.gather(
            _release(self._hosts, session.host_key, session_id, "close_session"),
            _release(self._pools, session.pool_key, session_id, "drop_session"),
        )

    async def leave(self) -> None:
        """Ends this process, if no driver has come meanwhile.

        By force: a polite exit waits until nobody holds a handle that came from here, and a driver may keep its stopped
        clients for as long as it likes. Until then nobody could connect.
        """
        if not self._drivers:
            self._is_leaving = True
            ray.kill(ray.get_runtime_context().current_actor)

    async def _watch(self, driver_id: str, anchor: Any) -> None:
        try:
            await anchor.hold.remote()
        except RayError:  # the anchor is gone, and so is its driver
            self._drivers.pop(driver_id, None)
            await self._end_driver(driver_id)

    async def _end_driver(self, driver_id: str) -> None:
        ended = [session_id for session_id, session in self._sessions.items() if session.driver_id == driver_id]
        await asyncio.gather(*map(self.stop_session, ended))
        if not self._drivers:
            ray.get_runtime_context().current_actor.leave.remote()

    def _check_new(self, driver_id: str, session_id: str) -> None:
        if driver_id not in self._drivers:
            raise SessionError("This driver is not connected: create a new ServiceClient.")
        if session_id in self._sessions:
            raise ConfigError(f"A session named {session_id!r} is running: choose another name, or stop it first.")

    def _pool(self, base_model: str, config: SamplingConfig, output_uri: str | None, session_id: str) -> _Pool:
        key = f"{_key(base_model, config)}\n{output_uri or ''}"
        shared = _get_or_create(self._pools, key, SamplingPool, base_model, config, output_uri)
        shared.users.add(session_id)
        return _Pool(key, shared.actor)

    async def _or_stop(self, session_id: str, ref: ray.ObjectRef) -> Any:
        """The start's result; when it fails, the session is undone."""
        try:
            return await answer(ref, if_dead=START_INTERRUPTED)
        except BaseException:
            await self.stop_session(session_id)
            raise


@dataclass(frozen=True, slots=True)
class _Pool:
    key: str
    actor: Any


def _key(base_model: str, *configs: TrainingConfig | SamplingConfig) -> str:
    return "\n".join([base_model, *(config.model_dump_json() for config in configs)])


def _get_or_create(table: dict[str, _Shared], key: str, cls: type, *args: Any, **kwargs: Any) -> _Shared:
    if key not in table:
        table[key] = _Shared(light_actor(cls).remote(*args, **kwargs))
    return table[key]


async def _release(table: dict[str, _Shared], key: str | None, session_id: str, leave: str) -> None:
    """Takes the session off a shared actor; the last one ends it."""
    if key is None or key not in table:
        return
    shared = table[key]
    shared.users.discard(session_id)
    if not shared.users:
        del table[key]
    call = getattr(shared.actor, leave).remote(session_id) if shared.users else shared.actor.stop.remote()
    # One that hangs or is gone already is killed below, or with its last session.
    with contextlib.suppress(TimeoutError, SessionError):
        await asyncio.wait_for(answer(call, if_dead=START_INTERRUPTED), STOP_S)
    if not shared.users:
        ray.kill(shared.actor)
