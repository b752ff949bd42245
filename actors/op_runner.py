"""Sends sessions' operations to the ranks, in turn, and gives each its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any

import ray

from raysessions.actors.hosted_session import HostedSession
from raysessions.actors.journal import Record
from raysessions.actors.op_queue import Entry, OpQueue, Slots
from raysessions.actors.phases import TrainingPhases
from raysessions.actors.protocol import RankDiedError, joined
from raysessions.actors.publication import publish
from raysessions.actors.rank_keeper import RankKeeper
from raysessions.actors.rank_operations import send
from raysessions.actors.training_group import TrainingGroup
from raysessions.actors.usage_meter import UsageMeter
from raysessions.actors.vault_keeper import VaultKeeper
from raysessions.config import TrainingConfig
from raysessions.errors import SessionStoppedError, TrainingGroupError
from raysessions.operations import CustomLossOp, LoadStateOp, LossOp, OptimStepOp, SaveForSamplerOp, SaveStateOp
from raysessions.responses import SaveStateResponse, SaveWeightsForSamplerResponse
from raysessions.usage import Usage

DISPATCHED_AHEAD = 2
"""Operations that the ranks have at the same time: one running and the next, so that they never wait for Python."""


class OpRunner:
    """Lives in the host, on its event loop."""

    def __init__(
        self, base_model: str, config: TrainingConfig, pool: Any, vault: Any | None, sessions: Mapping[str, HostedSession]
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self.queue = OpQueue()
        self._slots = Slots(DISPATCHED_AHEAD)
        self.vault = VaultKeeper(vault, self._keep_all)
        self.keeper = RankKeeper(base_model, config, sessions, self._slots, self.vault, self._send)
        self._num_workers = config.num_workers
        self.meter = UsageMeter()
        self._phases: TrainingPhases | None = None
        self._running: set[asyncio.Task[None]] = set()

    def start(self, *, takes_turns: bool) -> None:
        """`takes_turns`: training and sampling do not compute at the same time (`SamplingConfig.sleep`)."""
        if takes_turns:
            self._phases = TrainingPhases(self._pool, self.keeper.release_memory)
        self.vault.start()
        self.run(self._work())

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Behind everything else."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _work(self) -> None:
        """Hands operations to the ranks for as long as the host lives."""
        while True:
            await self._slots.one_free()
            entry = await self.queue.next()
            if self._phases is not None:
                await self._phases.begin()
            try:
                await self.keeper.ready()
            except TrainingGroupError as error:
                session = self._sessions.get(entry.session_id)
                entry.fail(self.keeper.resumable(session, error) if session else error)
                continue
            session = self._sessions.get(entry.session_id)
            if session is None:  # stopped meanwhile
                entry.fail(SessionStoppedError(f"Session {entry.session_id} was stopped."))
                continue
            if isinstance(entry.op, LoadStateOp):
                self.queue.hold(entry)
            self._send(session, session.journal.begin(entry))

    def _send(self, session: HostedSession, record: Record) -> None:
        """To the ranks, which see operations in the order of these calls. The slot is given back when they are done with it."""
        self._slots.take()
        group, entry = self.keeper.group, record.entry
        response: Awaitable[Any]
        try:
            match entry.op:
                case SaveForSamplerOp() as op:
                    response = self._publish(session, record, op, *group.export_adapter(session.session_id))
                case SaveStateOp() as op:
                    response = self._save_state(session, record, op, group, group.export_state(session.session_id))
                case LoadStateOp() as op:
                    response = self._load_state(session, entry, group, send(group, session, op))
                case op:
                    response = self._until_done(send(group, session, op))
                    if self.vault.keeps and session.journal.wants_snapshot(op):
                        self.run(self._keep(session, entry, group.export_state(session.session_id)))
        except Exception as error:
            self._give_back()
            session.journal.end(record, failed=True)
            entry.fail(error)
            return
        self.run(self._settle(session, record, group, self.vault.begin(entry), response))

    async def _settle(
        self,
        session: HostedSession,
        record: Record,
        group: TrainingGroup,
        note: ray.ObjectRef | None,
        response: Awaitable[Any],
    ) -> None:
        """Gives the operation its outcome. Its error is the caller's, never the host's; after a death it runs again."""
        try:
            result = await response
        except RankDiedError as error:
            self.keeper.died(group, error)
        except Exception as error:
            session.journal.end(record, failed=True)
            await self.vault.noted(note)
            record.entry.fail(getattr(error, "cause", None) or error)
        else:
            session.journal.end(record, failed=False)
            self._count(record.entry, result)
            await self.vault.noted(note)
            record.entry.resolve(result)

    def _count(self, entry: Entry, result: Any) -> None:
        """What the operation has used."""
        seconds = self._num_workers * getattr(result, "metrics", {}).get("engine_seconds:max", 0.0)
        self.meter.busy_s += seconds
        match entry.op:
            case LossOp(backward=True) | CustomLossOp():
                usage = Usage(trained_tokens=entry.num_tokens, training_s=seconds)
            case LossOp():
                usage = Usage(forward_tokens=entry.num_tokens, training_s=seconds)
            case OptimStepOp():
                usage = Usage(optim_steps=1, training_s=seconds)
            case _:
                usage = Usage()
        self.meter.add(entry.session_id, usage)

    async def _publish(
        self, session: HostedSession, record: Record, op: SaveForSamplerOp, weights: ray.ObjectRef, exported: Awaitable[int]
    ) -> SaveWeightsForSamplerResponse:
        claim = asyncio.create_task(session.checkpoints.claim())
        try:
            step = await self._until_done(exported)
        except BaseException:
            claim.cancel()
            raise
        session.journal.end(record, failed=False)
        response = await publish(self._pool, session, op, await claim, weights, step)
        await self.vault.settle(record.entry, response)
        return response

    async def _save_state(
        self, session: HostedSession, record: Record, op: SaveStateOp, group: TrainingGroup, parts: list[ray.ObjectRef]
    ) -> SaveStateResponse:
        state = joined(await self._until_done(group.gather(parts)), session.lora.seed)
        session.journal.end(record, failed=False)
        uri = await session.checkpoints.save_state(op, state)
        response = SaveStateResponse(path=str(uri), version=uri.version)
        await self.vault.settle(record.entry, response)
        return response

    async def _load_state(self, session: HostedSession, entry: Entry, group: TrainingGroup, loading: Awaitable[Any]) -> Any:
        response = await self._until_done(loading)
        if self.vault.keeps:
            parts = group.export_state(session.session_id)
            await group.gather(parts)
            if await self.vault.keep(session.request, entry.seq_id, parts, entry.op, response):
                session.journal.advance(entry.seq_id)
        return response

    async def _keep(self, session: HostedSession, entry: Entry, parts: list[ray.ObjectRef]) -> None:
        """Copies the state as of the operation to the vault, where it outlives the ranks and this process."""
        try:
            response = await asyncio.shield(entry.outcome)
        except Exception as error:
            response = error
        if await self.vault.keep(session.request, entry.seq_id, parts, entry.op, response):
            session.journal.advance(entry.seq_id)

    def _keep_all(self) -> None:
        """The vault has lost everything: it gets each session's state as of now, and what came and comes after it."""
        for session in self._sessions.values():
            # Saves since the last change are of this state: one that is under way can be done again from it.
            last_change = session.journal.last_change
            under_way = any(not entry.outcome.done() for entry in self.queue.begun_after(session.session_id, last_change))
            seq_id = last_change if under_way else session.journal.last_sent
            self.run(self._keep_anew(session, seq_id, self.keeper.group.export_state(session.session_id)))

    async def _keep_anew(self, session: HostedSession, seq_id: int, parts: list[ray.ObjectRef]) -> None:
        if not await self.vault.keep(session.request, seq_id, parts) or session.session_id not in self.queue:
            return
        session.journal.advance(seq_id)
        for entry in self.queue.begun_after(session.session_id, seq_id):
            await self.vault.noted(self.vault.begin(entry))
            if isinstance(entry.op, SaveForSamplerOp | SaveStateOp) and entry.outcome.done() and not entry.outcome.exception():
                await self.vault.settle(entry, entry.outcome.result())

    async def _until_done(self, response: Awaitable[Any]) -> Any:
        try:
            return await response
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """The ranks are done with an operation."""
        self._slots.give_back()
        if self._phases is not None and self._has_trained():
            self.run(self._phases.end(self._has_trained))

    def _has_trained(self) -> bool:
        return not self._slots.taken and not self.queue.has_next()
