"""What the manager must know to go on after its process died: in Ray's own key-value store, which outlives it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from raysessions.actors.placement import NAMESPACE
from raysessions.config import SamplingConfig
from raysessions.errors import SessionStoppedError

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
    """A training session, or a sampler of a base model (then it has no host)."""

    driver_id: str
    token: str
    base_model: str
    sampling: SamplingConfig
    pool_key: str
    host_key: str | None = None


@dataclass(slots=True)
class ManagerRecords:
    """All of it. Actors are known by name: a handle cannot be read again once its actor is gone."""

    drivers: set[str] = field(default_factory=set)
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    hosts: dict[str, SharedActor] = field(default_factory=dict)
    pools: dict[str, SharedActor] = field(default_factory=dict)

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
