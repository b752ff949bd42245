"""How many training sessions may run at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from raysessions.errors import QuotaExceededError
from raysessions.session_summary import SessionSummary
from raysessions.types import TypedModel


class Quota(TypedModel):
    """None: no limit."""

    max_sessions: int | None = Field(default=None, ge=0)
    """In the cluster."""
    max_sessions_per_tenant: int | None = Field(default=None, ge=0)

    def check(self, tenant: str, running: Sequence[SessionSummary]) -> None:
        """Whether `tenant` may start a session beside those that run. Raises `QuotaExceededError`, which names them."""
        sessions = [session for session in running if session.kind == "training"]
        own = [session for session in sessions if session.tenant == tenant]
        _refuse_above(self.max_sessions_per_tenant, own, f"Tenant {tenant}")
        _refuse_above(self.max_sessions, sessions, "The cluster")


def _refuse_above(limit: int | None, running: Sequence[SessionSummary], who: str) -> None:
    if limit is not None and len(running) >= limit:
        holders = "; ".join(map(str, running)) or "none"
        raise QuotaExceededError(
            f"{who} may have {limit} training session{'s' if limit != 1 else ''} at a time. Running: {holders}. Stop one "
            "(service.stop_session), wait, or raise the quota (service.set_quota)."
        )
