"""What the SDK calls a session: one ServiceClient, which sends heartbeats. Its training runs end with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api.names import is_sdk_session_id, new_sdk_session_id

REMEMBERED_S = 24 * 3600.0
"""How long it is known that a session has ended."""


@dataclass(slots=True)
class SdkSession:
    session_id: str
    tenant: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    sampler_ids: list[str] = field(default_factory=list)
    num_clones: int = 0
    """Copies of its sampling clients that asked for a number of their own."""
    heard_at: float = field(default_factory=time.monotonic)
    ended_because: str | None = None


class SdkSessions:
    """Of one replica of the gateway. One that is started again meets sessions that it does not know: their names cannot be
    guessed, so whoever names one that nobody has ended is taken for its owner. What a session may reach is another question,
    which the cluster answers."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._sessions: dict[str, SdkSession] = {}

    def create(self, tenant: str, user_metadata: dict[str, Any] | None, display_name: str | None) -> SdkSession:
        session = SdkSession(new_sdk_session_id(), tenant, user_metadata, display_name)
        self._sessions[session.session_id] = session
        return session

    def get(self, tenant: str, session_id: str) -> SdkSession:
        """A session that is open. Raises `HttpError` 410."""
        session = self._known(tenant, session_id)
        self._look_at(session)
        if session.ended_because is not None:
            raise HttpError(HTTPStatus.GONE, f"Session {session_id} has ended: {session.ended_because}")
        session.heard_at = time.monotonic()
        return session

    def end(self, tenant: str, session_id: str, reason: str) -> None:
        """Safe to call again: the first reason stays. Raises `HttpError` 410 for a session that never was."""
        session = self._known(tenant, session_id)
        session.ended_because = session.ended_because or reason

    def of(self, tenant: str) -> list[SdkSession]:
        """Those of a tenant that are open, oldest first."""
        return [session for session in self._sessions.values() if session.tenant == tenant and session.ended_because is None]

    def expire(self) -> list[SdkSession]:
        """Ends sessions that were not heard of, and returns them; forgets those that ended long ago."""
        expired = [session for session in self._sessions.values() if self._look_at(session)]
        for session in list(self._sessions.values()):
            if time.monotonic() - session.heard_at > REMEMBERED_S:
                del self._sessions[session.session_id]
        return expired

    def _known(self, tenant: str, session_id: str) -> SdkSession:
        session = self._sessions.get(session_id)
        if session is None and is_sdk_session_id(session_id):
            session = self._sessions[session_id] = SdkSession(session_id, tenant)
        if session is None or session.tenant != tenant:
            raise HttpError(HTTPStatus.GONE, f"There is no session {session_id!r} for this key: create a new ServiceClient.")
        return session

    def _look_at(self, session: SdkSession) -> bool:
        """Whether its time is over now."""
        silent_s = time.monotonic() - session.heard_at
        if session.ended_because is not None or silent_s <= self._lease_s:
            return False
        session.ended_because = f"no heartbeat came for {silent_s:.0f} s."
        return True
