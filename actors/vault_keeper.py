"""A host's dealings with its vault: what it keeps there, and what it does when the vault dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from raysessions.actors.answer import answer
from raysessions.actors.op_queue import Entry
from raysessions.actors.protocol import RankState
from raysessions.actors.session_vault import KeptSession
from raysessions.errors import RaySessionsError, SessionError
from raysessions.operations import Operation, SessionRequest

log = logging.getLogger("raysessions")

VAULT_DIED = SessionError("The vault that keeps copies of the sessions died at the same time.")


class VaultKeeper:
    """Without a vault (`max_recoveries=0`) nothing is kept, and nothing comes back."""

    def __init__(self, vault: Any | None, keep_again: Callable[[], None]) -> None:
        """`keep_again`: called when the vault has lost everything; copies all sessions anew."""
        self._vault = vault
        self._keep_again = keep_again
        self._own: dict[str, list[RankState]] = {}
        """Copies here too, in Ray's store: ranks and vault may die together, or one while the other is being replaced."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def keeps(self) -> bool:
        return self._vault is not None

    def start(self) -> None:
        """Once the ranks have their places."""
        if self._vault is not None:
            self._watch = asyncio.create_task(self._watch_vault(self._vault))

    async def keep(
        self,
        request: SessionRequest,
        seq_id: int,
        parts: list[ray.ObjectRef],
        op: Operation | None = None,
        response: Any = None,
    ) -> bool:
        """Copies a session's state as of operation `seq_id`, straight from the ranks' results. False if that did not work: then
        the copy before it is still there, or is made anew."""
        if self._vault is None:
            return False
        try:
            await answer(self._vault.keep.remote(request, seq_id, tuple(parts), op, response), if_dead=VAULT_DIED)
            self.remember(request.session_id, [await part for part in parts])
        except (RaySessionsError, RayError) as error:  # a rank died before it had answered, or the vault itself
            log.info("raysessions: no copy of session %s as of operation %d: %s", request.session_id, seq_id, error)
            return False
        return True

    def remember(self, session_id: str, snapshot: list[RankState]) -> None:
        """What the vault has of a session."""
        self._own[session_id] = snapshot

    def begin(self, entry: Entry) -> ray.ObjectRef | None:
        """Notes an operation. Its result must not be told before this is there."""
        return None if self._vault is None else self._vault.begin.remote(entry.session_id, entry.seq_id, entry.op)

    async def noted(self, note: ray.ObjectRef | None) -> None:
        if note is not None:
            try:
                await note
            except RayActorError:
                return  # all sessions are copied anew

    async def settle(self, entry: Entry, response: Any) -> None:
        """A save is done, and must not be done again."""
        if self._vault is not None:
            await self.noted(self._vault.settle.remote(entry.session_id, entry.seq_id, response))

    def forget(self, session_id: str) -> None:
        self._own.pop(session_id, None)
        if self._vault is not None:
            self._vault.forget.remote(session_id)

    async def snapshot(self, session_id: str) -> list[RankState]:
        """Raises `SessionError` when there is no copy."""
        if self._vault is None:
            raise VAULT_DIED
        try:
            return await answer(self._vault.snapshot.remote(session_id), if_dead=VAULT_DIED)
        except SessionError:
            if session_id not in self._own:
                raise
            return self._own[session_id]

    async def everything(self) -> list[KeptSession]:
        """What a host that died left."""
        return [] if self._vault is None else await answer(self._vault.everything.remote(), if_dead=VAULT_DIED)

    async def _watch_vault(self, vault: Any) -> None:
        while True:
            try:
                await vault.hold.options(max_task_retries=0).remote()
            except RayActorError:
                await asyncio.sleep(0.1)  # Ray starts it again
                self._keep_again()
