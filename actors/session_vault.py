"""A second place for what brings sessions back, in a process of its own: the ranks may die, and their host too."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import ray

from raysessions.actors.protocol import RankState
from raysessions.batch import Batch
from raysessions.errors import SessionError
from raysessions.operations import CustomLossOp, LossOp, Operation, SessionRequest

KEPT_FORWARDS = 64


@dataclass(slots=True)
class KeptSession:
    """A session as of some operation, and the operations since."""

    request: SessionRequest
    seq_id: int
    """Of the operation that `snapshot` follows."""
    op: Operation | None
    response: Any
    """Of that operation, or its error, for a caller who did not get it."""
    snapshot: list[RankState]
    """Every rank's part."""
    ops: dict[int, Operation] = field(default_factory=dict)
    """Later ones that were sent to the ranks, by sequence number."""
    responses: dict[int, Any] = field(default_factory=dict)
    """Of those of them that must not run again: saves that are done."""


class SessionVault:
    """An async actor. Everything in it is a copy of its own, on its heap: objects in Ray's store go with their owners."""

    def __init__(self) -> None:
        self._sessions: dict[str, KeptSession] = {}

    async def hold(self) -> None:
        """Never returns: whoever awaits it learns of the vault's end."""
        await asyncio.Event().wait()

    async def keep(
        self, request: SessionRequest, seq_id: int, parts: tuple[ray.ObjectRef, ...], op: Operation | None, response: Any
    ) -> None:
        """Takes the place of all that was kept of the session up to operation `seq_id`."""
        snapshot = copy.deepcopy([await part for part in parts])
        before = self._sessions.get(request.session_id)
        kept = KeptSession(request, seq_id, op, response, snapshot)
        if before is not None:
            if before.seq_id > seq_id:
                return
            kept.ops = {later: op for later, op in before.ops.items() if later > seq_id}
            kept.responses = {later: response for later, response in before.responses.items() if later > seq_id}
        self._sessions[request.session_id] = kept

    async def begin(self, session_id: str, seq_id: int, op: Operation) -> None:
        """The operation is sent to the ranks."""
        op = await _own(op)
        if (kept := self._sessions.get(session_id)) is not None and seq_id > kept.seq_id:
            kept.ops[seq_id] = op
            forwards = [number for number, op in kept.ops.items() if isinstance(op, LossOp) and not op.backward]
            for number in forwards[:-KEPT_FORWARDS]:  # they change nothing, and were answered long ago
                del kept.ops[number]

    async def settle(self, session_id: str, seq_id: int, response: Any) -> None:
        """A save is done."""
        if (kept := self._sessions.get(session_id)) is not None and seq_id > kept.seq_id:
            kept.responses[seq_id] = response

    async def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    async def snapshot(self, session_id: str) -> list[RankState]:
        if session_id not in self._sessions:
            raise SessionError(f"The copy of session {session_id} outside its ranks is lost too.")
        return self._sessions[session_id].snapshot

    async def everything(self) -> list[KeptSession]:
        return list(self._sessions.values())


async def _own(op: Operation) -> Operation:
    """The operation with its batch in it, and nothing of it in Ray's store."""
    if isinstance(op, CustomLossOp):
        return dataclasses.replace(op, op=await _with_own_batch(op.op))
    return await _with_own_batch(op) if isinstance(op, LossOp) else op


async def _with_own_batch(op: LossOp) -> LossOp:
    batch = op.batch if isinstance(op.batch, Batch) else await op.batch[0]
    return dataclasses.replace(op, batch=copy.deepcopy(batch))
