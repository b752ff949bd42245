"""The ranks of a host: placed, and replaced when they die, with every session as it was."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from raysessions.actors.hosted_session import HostedSession
from raysessions.actors.journal import Record
from raysessions.actors.op_queue import Slots
from raysessions.actors.protocol import AdapterFacts, ModelFacts, RankDiedError, joined
from raysessions.actors.rank_operations import send
from raysessions.actors.training_group import TrainingGroup
from raysessions.actors.vault_keeper import VaultKeeper
from raysessions.config import TrainingConfig
from raysessions.errors import PlacementError, RaySessionsError, SessionError, TrainingGroupError
from raysessions.operations import SessionRequest
from raysessions.training_state import TrainingState

log = logging.getLogger("raysessions")


class RankKeeper:
    """Lives in the host, on its event loop."""

    group: TrainingGroup

    def __init__(
        self,
        base_model: str,
        config: TrainingConfig,
        sessions: Mapping[str, HostedSession],
        slots: Slots,
        vault: VaultKeeper,
        resend: Callable[[HostedSession, Record], None],
    ) -> None:
        """
        Args:
            sessions: those to bring back; the host's own table.
            slots: taken while the ranks have operations.
            vault: has the state that sessions come back to.
            resend: sends an operation to the ranks again whose answer died with them.
        """
        self._base_model = base_model
        self._config = config
        self._sessions = sessions
        self._slots = slots
        self._vault = vault
        self._resend = resend
        self._ready = asyncio.Event()
        self._ruin: TrainingGroupError | None = None
        """Why there are no ranks any more, and will be none."""
        self._recovering: asyncio.Task[None] | None = None
        self._placed_at: float | None = None
        self.phase = "placing"

    @property
    def age_s(self) -> float:
        """Seconds since the first ranks were placed."""
        return 0.0 if self._placed_at is None else time.monotonic() - self._placed_at

    async def start(self) -> ModelFacts:
        for attempt in range(self._config.max_recoveries + 1):
            self.group = await TrainingGroup.place(self._base_model, self._config)
            self._placed_at = time.monotonic()
            self.phase = "loading"
            try:
                facts = await self.group.load()
            except RankDiedError:
                self.group.stop()
                if attempt == self._config.max_recoveries:
                    raise
            else:
                self._is_ready()
                return facts
        raise AssertionError("unreachable")

    async def ready(self) -> None:
        """Waits while dead ranks are replaced. Raises `TrainingGroupError` when they will not be."""
        await self._ready.wait()
        if self._ruin is not None:
            raise self._ruin

    async def add(
        self,
        request: SessionRequest,
        start: TrainingState | None,
        gradients: Sequence[np.ndarray | None] = (),
        seq_id: int = 0,
    ) -> AdapterFacts:
        """A session's adapter on every rank, and a copy of its state, as of operation `seq_id`, in the vault."""
        while True:
            await self.ready()
            group = self.group
            try:
                facts = await group.add_session(request.session_id, request.lora)
                if start is not None:
                    await group.load_state(request.session_id, start, gradients)
                if self._vault.keeps:
                    parts = group.export_state(request.session_id)
                    await group.gather(parts)
                    await self._vault.keep(request, seq_id, parts)
                return facts
            except RankDiedError as error:
                self.died(group, error)

    async def remove(self, session_id: str) -> None:
        group = self.group
        try:
            await self.ready()
            group = self.group
            await group.remove_session(session_id)
        except RankDiedError as error:
            self.died(group, error)
        except TrainingGroupError:
            return  # there are no ranks any more

    def died(self, group: TrainingGroup, error: RankDiedError) -> None:
        """A call to `group` found it dead. Safe to call for each."""
        if group is self.group and self._ready.is_set() and self._ruin is None:
            self._ready.clear()
            self.phase = "recovering"
            self._recovering = asyncio.create_task(self._recover(error))

    async def release_memory(self) -> None:
        group = self.group
        try:
            await group.release_memory()
        except RankDiedError as error:
            self.died(group, error)

    def stop(self) -> None:
        if self._recovering is not None:
            self._recovering.cancel()
        if hasattr(self, "group"):
            self.group.stop()

    async def _recover(self, error: SessionError) -> None:
        """New ranks, or none if they die again and again or have no place."""
        log.warning("raysessions: the training ranks of %s are replaced: %s", self._base_model, error)
        for _ in range(self._config.max_recoveries):
            self.group.stop()
            await self._slots.all_free()  # what the ranks had has failed, or was answered just before
            self._give_up_killers(error)
            try:
                self.group = await TrainingGroup.place(self._base_model, self._config)
                await self.group.load()
                for session in list(self._sessions.values()):
                    await self._restore(session)
            except (RankDiedError, PlacementError) as again:
                error = again
                continue
            except Exception as unexpected:
                error = TrainingGroupError(f"The ranks could not be brought back: {unexpected}")
                break
            for session in self._sessions.values():
                for record in session.journal.pending:
                    self._resend(session, record)
            self._is_ready()
            return
        self.group.stop()
        await self._slots.all_free()
        self._ruin = TrainingGroupError(
            f"{error} It was not replaced: TrainingConfig.max_recoveries={self._config.max_recoveries}."
        )
        for session in self._sessions.values():
            for record in list(session.journal.pending):
                record.entry.fail(self.resumable(session, self._ruin))
        self._ready.set()

    async def _restore(self, session: HostedSession) -> None:
        """The snapshot, and what was done since. Operations whose answer is due are sent again by the host."""
        group, session_id, journal = self.group, session.session_id, session.journal
        await group.add_session(session_id, session.lora)
        snapshot = await self._vault.snapshot(session_id)
        await group.load_state(session_id, joined(snapshot, session.lora.seed), [part.gradient for part in snapshot])
        for record in journal.done:
            if record.changes_state:
                try:
                    await send(group, session, record.entry.op)
                except RankDiedError:
                    raise
                except RaySessionsError as error:  # as it failed before: a step whose gradient was not finite
                    log.info("raysessions: operation %d failed again: %s", record.entry.seq_id, error)

    def _give_up_killers(self, error: SessionError) -> None:
        """Operations under which ranks died too often: more likely the cause than the victims."""
        for session in self._sessions.values():
            for record in list(session.journal.pending):
                record.deaths += 1
                if record.deaths > self._config.max_recoveries:
                    record.entry.fail(
                        TrainingGroupError(
                            f"{error} It was the {_ordinal(record.deaths)} time under this operation, which was given up and "
                            "not applied: it may need more memory than there is. The session goes on."
                        )
                    )
                    session.journal.end(record, failed=True)

    def resumable(self, session: HostedSession, error: TrainingGroupError) -> TrainingGroupError:
        """The error with what the session can be resumed from."""
        last = session.checkpoints.last_state
        return TrainingGroupError(
            f"{error} "
            + (
                f"Resume from {last} with create_training_client_from_state_with_optimizer."
                if last
                else "The session has saved no state to resume from: create a new session."
            )
        )

    def _is_ready(self) -> None:
        self.phase = "ready"
        self._ready.set()


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
