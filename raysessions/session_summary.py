"""What `list_sessions` tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SessionState = Literal["created", "placing", "running", "recovering", "stopping", "stopped", "failed", "expired"]
"""created: asked for; placing: waiting for resources or loading; recovering: dead processes are being replaced; the last three
are ends: by whoever stopped it or its driver's end, by a start that failed, by one of its limits."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session of the cluster, running or recently ended."""

    name: str
    kind: Literal["training", "sampler"]
    state: SessionState
    tenant: str
    base_model: str
    age_s: float
    """Seconds since it was created."""
    idle_s: float
    """Seconds since its last operation or sample."""
    detached: bool
    reason: str = ""
    """Why it has ended."""

    def __str__(self) -> str:
        return f"{self.name} ({self.tenant}, {self.kind} on {self.base_model}, {self.state}, {_minutes(self.age_s)} old)"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
