"""What the sessions of one actor have used since its process began. Totals, so that nothing is counted twice or lost on the
way."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from raysessions.usage import Usage


@dataclass(frozen=True, slots=True)
class ActivityReport:
    """What an actor tells the manager when it is asked."""

    usage: dict[str, tuple[str, Usage]]
    """By session: its totals, and a name for the count, of which another one begins at 0."""
    idle_s: dict[str, float]
    """Seconds since each session's last operation or sample."""
    phase: str
    busy_s: float
    """Seconds that its accelerators computed, and had since they were placed, times their number."""
    placed_s: float


class UsageMeter:
    """Counts."""

    def __init__(self) -> None:
        self._usage: dict[str, tuple[str, Usage]] = {}
        self._used_at: dict[str, float] = {}
        self.busy_s = 0.0

    def touch(self, session_id: str) -> None:
        """Somebody uses the session."""
        self._used_at[session_id] = time.monotonic()

    def add(self, session_id: str, usage: Usage) -> None:
        count, total = self._usage.get(session_id) or (secrets.token_hex(8), Usage())
        self._usage[session_id] = count, total + usage
        self.touch(session_id)

    def forget(self, session_id: str) -> None:
        self._usage.pop(session_id, None)
        self._used_at.pop(session_id, None)

    def report(self, phase: str, placed_s: float, busy_s: float | None = None) -> ActivityReport:
        now = time.monotonic()
        idle_s = {session_id: now - used_at for session_id, used_at in self._used_at.items()}
        return ActivityReport(dict(self._usage), idle_s, phase, self.busy_s if busy_s is None else busy_s, placed_s)
