"""What the manager must know to go on after its process died: in Ray's own key-value store, which outlives it."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from raysessions.actors.placement import NAMESPACE
from raysessions.errors import SessionStoppedError
from raysessions.operations import Limits, SaveSettings
from raysessions.quota import Quota
from raysessions.responses import SessionInfo
from raysessions.session_summary import SessionState, SessionSummary

KEPT_ENDED = 100

_KEY = b"manager-records"
_NAMESPACE = b"raysessions"


@dataclass(slots=True)
class SharedActor:
    """An actor that several sessions use; it ends with the last of them."""

    name: str
    vault_name: str | None = None
    """Of a host: where it keeps copies of its sessions."""
    users: set[str] = field(default_factory=set)

    @property
    def actor(self) -> Any:
        return find_actor(self.name)

    def kill(self) -> None:
        for name in (self.name, self.vault_name):
            if name is not None and (actor := _found.pop(name, None) or _look_up(name)) is not None:
                ray.kill(actor)


@dataclass(slots=True)
class SessionRecord:
    """A training session, or a sampler of a base model or of saved versions (then it has no host)."""

    session_id: str
    token: str
    driver_id: str | None
    """Whose end is its end; None for a detached one."""
    base_model: str
    saves: SaveSettings
    limits: Limits
    pool_key: str
    host_key: str | None = None
    info: SessionInfo | None = None
    """Of a training session, once it runs."""
    state: SessionState = "created"
    reason: str = ""
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)
    """When the last operation or sample came. Seconds since the epoch, as `created_at`."""
    renewed_at: float = field(default_factory=time.time)
    """When a client last said that it is there."""

    def summary(self) -> SessionSummary:
        now = time.time()
        return SessionSummary(
            name=self.session_id,
            kind="training" if self.host_key else "sampler",
            state=self.state,
            tenant=self.saves.tenant,
            base_model=self.base_model,
            age_s=now - self.created_at,
            idle_s=now - self.used_at,
            detached=self.driver_id is None,
            reason=self.reason,
        )


@dataclass(slots=True)
class ManagerRecords:
    """All of it. Actors are known by name: a handle cannot be read again once its actor is gone."""

    drivers: set[str] = field(default_factory=set)
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    hosts: dict[str, SharedActor] = field(default_factory=dict)
    pools: dict[str, SharedActor] = field(default_factory=dict)
    ended: dict[str, SessionRecord] = field(default_factory=dict)
    """The last ones, so that whoever asks for them learns what became of them."""
    quota: Quota = field(default_factory=Quota)

    def end(self, record: SessionRecord, state: SessionState, reason: str) -> None:
        record.state, record.reason = state, reason
        self.ended.pop(record.session_id, None)
        self.ended[record.session_id] = record
        while len(self.ended) > KEPT_ENDED:
            del self.ended[next(iter(self.ended))]

    def shared(self, record: SessionRecord) -> SharedActor:
        """The session's host, or its pool if it has none."""
        return self.hosts[record.host_key] if record.host_key else self.pools[record.pool_key]

    @classmethod
    def load(cls) -> ManagerRecords:
        """Those of the manager before this one, or none."""
        kept = _internal_kv_get(_KEY, namespace=_NAMESPACE)
        return cls() if kept is None else pickle.loads(kept)

    def save(self) -> None:
        _internal_kv_put(_KEY, pickle.dumps(self), overwrite=True, namespace=_NAMESPACE)

    @staticmethod
    def delete() -> None:
        _internal_kv_del(_KEY, namespace=_NAMESPACE)


def find_actor(name: str) -> Any:
    """Raises `SessionStoppedError` when it is gone."""
    if name not in _found:
        actor = _look_up(name)
        if actor is None:
            raise SessionStoppedError("The session's actors are gone: they were killed, or their node was lost.")
        _found[name] = actor
    return _found[name]


def _look_up(name: str) -> Any | None:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


_found: dict[str, Any] = {}
