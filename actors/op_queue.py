"""The order of operations: each session's by sequence number, sessions in turn. Plain asyncio, no Ray.

Turns are weighted by tokens (deficit round robin, Shreedhar & Varghese 1995): each turn allows as many tokens as the largest
operation that waits anywhere. So sessions get equal shares of the ranks' work whatever the size of their operations, and an
operation waits at most one largest operation's worth of each other session. An operation without tokens, such as
`optim_step`, ends the turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysessions.errors import RequestCancelledError, SessionError, SessionStoppedError, ValidationError

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

    def resolve(self, result: Any) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def settle(self, result: Any) -> None:
        """With a result, or with an error."""
        self.fail(result) if isinstance(result, BaseException) else self.resolve(result)

    @property
    def num_tokens(self) -> int:
        return getattr(self.op, "num_tokens", 0)


@dataclass(slots=True)
class _Session:
    next_seq: int = 1
    """The sequence number whose turn it is; later ones wait for it."""
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    """Waiting, running and the last finished ones, by sequence number."""
    awaited: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Outcomes asked for before their operation came."""
    restored_at: int = 0
    """The operation after which the session was brought back."""
    held_by: Entry | None = None
    """An operation that the later ones wait for."""
    in_turn: bool = False
    allowance: int = 0
    """Tokens that the session may still take in its turn; what is left over counts in the next one."""

    def pass_by(self) -> None:
        """The next operation has its turn or was cancelled: the one after it is next."""
        self.next_seq += 1
        self.entries.pop(self.next_seq - 1 - KEPT_RESULTS, None)


class OpQueue:
    """Sessions take turns; within a session the sequence numbers decide, and a gap waits."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._changed = asyncio.Event()

    def open(self, session_id: str) -> None:
        self._sessions[session_id] = _Session()

    def restore(
        self, session_id: str, last_seq: int, op: Any, result: Any, later: Mapping[int, Any], results: Mapping[int, Any]
    ) -> None:
        """A session whose operation `last_seq` had `result`, with the `later` ones in line again; `results` has those of them
        that must not run again."""
        session = self._sessions[session_id] = _Session(next_seq=last_seq + 1, restored_at=last_seq)
        if op is not None:
            session.entries[last_seq] = Entry(session_id, last_seq, op, _new_outcome(), begun=True)
            session.entries[last_seq].settle(result)
        for seq_id in range(last_seq + 1, max(later, default=last_seq) + 1):
            entry = session.entries[seq_id] = Entry(session_id, seq_id, later.get(seq_id), _new_outcome())
            if seq_id not in later:
                entry.fail(RequestCancelledError("Cancelled before it began; nothing was applied."))
            elif seq_id in results:
                entry.settle(results[seq_id])
        self._changed.set()

    def begun_after(self, session_id: str, seq_id: int) -> list[Entry]:
        """Operations after number `seq_id` that have begun, and may have ended."""
        entries = self._session(session_id).entries.values()
        return [entry for entry in entries if entry.begun and entry.seq_id > seq_id]

    def take_over(self, session_id: str) -> int:
        """The number of the last operation that is in line without a gap. What waits behind a gap fails: its caller is gone."""
        session = self._session(session_id)
        last_seq = session.next_seq - 1
        while last_seq + 1 in session.entries:
            last_seq += 1
        gone = SessionError(f"Another client has attached to session {session_id}.")
        for seq_id in [seq_id for seq_id in session.entries if seq_id > last_seq]:
            session.entries.pop(seq_id).fail(gone)
        for outcome in session.awaited.values():
            outcome.set_exception(gone)
        session.awaited.clear()
        return last_seq

    def close(self, session_id: str) -> None:
        """Forgets the session; what has not begun fails with SessionStoppedError. Safe to call again."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        waiting = [entry.outcome for entry in session.entries.values() if not entry.begun]
        for outcome in (*waiting, *session.awaited.values()):
            if not outcome.done():
                outcome.set_exception(SessionStoppedError(f"Session {session_id} was stopped."))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def submit(self, session_id: str, seq_id: int, op: Any) -> asyncio.Future[Any]:
        """Puts `op` in line. A number seen before gets the first one's outcome, and its op is not run again."""
        session = self._session(session_id)
        if seq_id in session.entries:
            if session.entries[seq_id].op != op:
                raise ValidationError(f"Operation {seq_id} of session {session_id} was another one: numbers are used once.")
            return session.entries[seq_id].outcome
        if seq_id <= session.restored_at:
            raise SessionError(
                f"Operation {seq_id} of session {session_id} was in flight when its host died, and cannot be done again: the "
                "weights have moved on. Call it again if you need it."
            )
        if seq_id < session.next_seq:
            raise ValidationError(f"Operation {seq_id} of session {session_id} ended too long ago: its result is gone.")
        outcome = session.awaited.pop(seq_id) if seq_id in session.awaited else _new_outcome()
        entry = Entry(session_id, seq_id, op, outcome)
        session.entries[seq_id] = entry
        self._changed.set()
        return entry.outcome

    def outcome(self, session_id: str, seq_id: int) -> asyncio.Future[Any]:
        """The outcome of operation `seq_id`, which may come later."""
        session = self._session(session_id)
        if seq_id in session.entries:
            return session.entries[seq_id].outcome
        return session.awaited.setdefault(seq_id, _new_outcome())

    def has(self, session_id: str, seq_id: int) -> bool:
        """Whether `outcome` is that of an operation which has come already."""
        return seq_id in self._session(session_id).entries

    def cancel(self, session_id: str, seq_id: int) -> bool:
        """True if the operation had not begun: it never will, and its number counts as done."""
        session = self._sessions.get(session_id)
        if session is None:
            return False
        entry = session.entries.get(seq_id)
        outcome = entry.outcome if entry is not None else session.awaited.get(seq_id)
        if outcome is None or outcome.done() or (entry is not None and entry.begun):
            return False
        outcome.set_exception(RequestCancelledError("Cancelled before it began; nothing was applied."))
        self._changed.set()
        return True

    def hold(self, entry: Entry) -> None:
        """The session's next operation waits until this one has its outcome."""
        self._session(entry.session_id).held_by = entry
        entry.outcome.add_done_callback(lambda _: self._changed.set())

    async def next(self) -> Entry:
        """The next operation to run; waits until there is one."""
        while True:
            entry = self._take()
            if entry is not None:
                return entry
            self._changed.clear()
            await self._changed.wait()

    def has_next(self) -> bool:
        """Whether an operation could run now."""
        return any(self._head(session) is not None for session in self._sessions.values())

    def _take(self) -> Entry | None:
        """The next operation of the session whose turn it is: the first in line."""
        heads = {session_id: head for session_id, session in self._sessions.items() if (head := self._head(session))}
        if not heads:
            return None
        largest = max(head.num_tokens for head in heads.values())
        while True:
            session_id, session = next(iter(self._sessions.items()))
            head = heads.get(session_id)
            if head is None:
                session.allowance = 0  # who has nothing to do saves nothing up
            else:
                if not session.in_turn:
                    session.in_turn = True
                    session.allowance += largest
                if head.num_tokens <= session.allowance:
                    self._begin(session_id, session, head)
                    return head
            self._end_turn(session_id, session)

    def _begin(self, session_id: str, session: _Session, entry: Entry) -> None:
        entry.begun = True
        session.pass_by()
        session.allowance -= entry.num_tokens
        if not entry.num_tokens:
            self._end_turn(session_id, session)

    def _end_turn(self, session_id: str, session: _Session) -> None:
        session.in_turn = False
        self._sessions.move_to_end(session_id)

    def _head(self, session: _Session) -> Entry | None:
        """The session's next operation, skipping cancelled ones; None if it has not arrived or must wait."""
        if session.held_by is not None and not session.held_by.outcome.done():
            return None
        while (entry := session.entries.get(session.next_seq)) is not None and entry.outcome.done():
            session.pass_by()
        return entry

    def _session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            raise SessionStoppedError(f"Session {session_id} was stopped, or never was. Create a new one.")
        return self._sessions[session_id]


class Slots:
    """How many operations the ranks may have at the same time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = asyncio.Event()
        self.taken = 0

    async def one_free(self) -> None:
        await self._fewer_than(self._count)

    async def all_free(self) -> None:
        await self._fewer_than(1)

    async def _fewer_than(self, count: int) -> None:
        while self.taken >= count:
            self._changed.clear()
            await self._changed.wait()

    def take(self) -> None:
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self._changed.set()


def _new_outcome() -> asyncio.Future[Any]:
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    # Nobody may be waiting for it any more: then an error is not worth a warning of asyncio.
    outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())
    return outcome
