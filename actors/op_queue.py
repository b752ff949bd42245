"""The order of operations: each session's by sequence number, sessions in turn. Plain asyncio, no Ray."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from raysessions.errors import RequestCancelledError, SessionStoppedError, ValidationError

KEPT_RESULTS = 64
"""Finished operations per session whose result a repeated sequence number still gets."""


@dataclass(slots=True)
class Entry:
    """One operation in the queue."""

    session_id: str
    seq_id: int
    op: Any
    outcome: asyncio.Future[Any]
    begun: bool = False


@dataclass(slots=True)
class _Session:
    next_seq: int = 1
    """The sequence number whose turn it is; later ones wait for it."""
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    """Waiting, running and the last finished ones, by sequence number."""


class OpQueue:
    """Sessions take turns; within a session the sequence numbers decide, and a gap waits."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._changed = asyncio.Event()

    def open(self, session_id: str) -> None:
        self._sessions[session_id] = _Session()

    def close(self, session_id: str) -> None:
        """Forgets the session; what has not begun fails with SessionStoppedError."""
        for entry in self._sessions.pop(session_id).entries.values():
            if not entry.begun and not entry.outcome.done():
                entry.outcome.set_exception(SessionStoppedError(f"Session {session_id} was stopped."))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def submit(self, session_id: str, seq_id: int, op: Any) -> asyncio.Future[Any]:
        """Puts `op` in line. A number seen before gets the first one's outcome, and its op is not run again."""
        if session_id not in self._sessions:
            raise SessionStoppedError(f"Session {session_id} was stopped, or never was. Create a new one.")
        session = self._sessions[session_id]
        if seq_id in session.entries:
            if session.entries[seq_id].op != op:
                raise ValidationError(f"Operation {seq_id} of session {session_id} was another one: numbers are used once.")
            return session.entries[seq_id].outcome
        if seq_id < session.next_seq:
            raise ValidationError(f"Operation {seq_id} of session {session_id} ended too long ago: its result is gone.")
        entry = Entry(session_id, seq_id, op, asyncio.get_running_loop().create_future())
        # Nobody may be waiting for it any more: then an error is not worth a warning of asyncio.
        entry.outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())
        session.entries[seq_id] = entry
        self._changed.set()
        return entry.outcome

    def cancel(self, session_id: str, seq_id: int) -> bool:
        """True if the operation had not begun: it never will, and its number counts as done."""
        session = self._sessions.get(session_id)
        entry = session.entries.get(seq_id) if session else None
        if entry is None or entry.begun or entry.outcome.done():
            return False
        entry.outcome.set_exception(RequestCancelledError("Cancelled before it began; nothing was applied."))
        self._changed.set()
        return True

    async def next(self) -> Entry:
        """The next operation to run; waits until there is one."""
        while True:
            for session_id, session in self._sessions.items():
                entry = self._advance(session)
                if entry is not None:
                    self._sessions.move_to_end(session_id)  # its turn comes again after the others'
                    return entry
            self._changed.clear()
            await self._changed.wait()

    def _advance(self, session: _Session) -> Entry | None:
        """Takes the session's next operation, skipping cancelled ones; None if it has not arrived."""
        while (entry := session.entries.get(session.next_seq)) is not None:
            session.next_seq += 1
            session.entries.pop(session.next_seq - 1 - KEPT_RESULTS, None)
            if not entry.outcome.done():
                entry.begun = True
                return entry
        return None
