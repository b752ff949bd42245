"""The host of one base model: which sessions train on it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from raysessions.actors.hosted_session import HostedSession
from raysessions.actors.journal import Journal
from raysessions.actors.op_runner import OpRunner
from raysessions.actors.protocol import AdapterFacts, ModelFacts, joined
from raysessions.actors.session_checkpoints import SessionCheckpoints, read_start
from raysessions.actors.session_vault import KeptSession
from raysessions.actors.usage_meter import ActivityReport
from raysessions.config import TrainingConfig
from raysessions.errors import SessionError, SessionStoppedError
from raysessions.models import fingerprint, local_folder, tokenizer_files
from raysessions.operations import Operation, SessionRequest
from raysessions.responses import SessionInfo


class ModelHost:
    """An async actor; the only caller of its ranks. Sessions share the base model and take turns.

    When its process dies, Ray starts it again and sends it the calls that it had not answered; it gets its sessions from the
    vault. So every method may be called again.
    """

    _facts: ModelFacts
    _fingerprint: str

    def __init__(self, base_model: str, config: TrainingConfig, pool: Any, vault: Any | None, *, takes_turns: bool) -> None:
        """`takes_turns`: training and sampling do not compute at the same time (`SamplingConfig.sleep`)."""
        self._base_model = base_model
        self._config = config
        self._takes_turns = takes_turns
        self._sessions: dict[str, HostedSession] = {}
        self._runner = OpRunner(base_model, config, pool, vault, self._sessions)
        self._clients: dict[str, str] = {}
        """Who attached last to a detached session."""
        self._opening: dict[str, asyncio.Task[HostedSession]] = {}
        self._starting: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None

    async def phase(self) -> str:
        """ "placing", "loading", "ready" or "recovering"."""
        return self._runner.keeper.phase

    async def report(self) -> ActivityReport:
        """What its sessions did."""
        placed_s = self._config.num_workers * self._runner.keeper.age_s
        return self._runner.meter.report(self._runner.keeper.phase, placed_s)

    async def open_session(self, request: SessionRequest) -> SessionInfo:
        """Adds a session, loading the base model first if it is the first one."""
        await self._restored()
        session_id = request.session_id
        if session_id not in self._sessions:
            if session_id not in self._opening:
                self._opening[session_id] = asyncio.create_task(self._open(request))
            try:
                await asyncio.shield(self._opening[session_id])
            except asyncio.CancelledError:
                raise SessionStoppedError(f"Session {session_id} was stopped while it was starting.") from None
            finally:
                self._opening.pop(session_id, None)
        return self._sessions[session_id].info

    async def info(self, session_id: str) -> SessionInfo:
        """The session's info as of now."""
        await self._restored()
        if session_id not in self._sessions:
            raise SessionStoppedError(f"Session {session_id} was stopped.")
        others = tuple(sorted(set(self._sessions) - {session_id}))
        return dataclasses.replace(self._sessions[session_id].info, sharing=others)

    async def close_session(self, session_id: str) -> None:
        await self._restored()
        if session_id in self._opening:
            self._opening[session_id].cancel()
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._runner.queue.close(session_id)
            self._runner.vault.forget(session_id)
            self._runner.meter.forget(session_id)
            self._clients.pop(session_id, None)
            await self._runner.keeper.remove(session_id)
            await session.checkpoints.finish()

    async def take_over(self, session_id: str, client_id: str) -> int:
        """A client that attaches is the only one from now on. Returns the sequence number of the last operation before it."""
        await self._restored()
        last_seq = self._runner.queue.take_over(session_id)
        self._clients[session_id] = client_id
        return last_seq

    async def submit(self, session_id: str, seq_id: int, op: Operation, client_id: str = "") -> Any:
        """Runs `op` when its turn comes and returns its response. Safe to call again with the same `seq_id`."""
        await self._restored()
        if self._clients.get(session_id, client_id) != client_id:
            raise SessionError(f"Another client has attached to session {session_id}: this one cannot go on.")
        self._runner.meter.touch(session_id)
        return await asyncio.shield(self._runner.queue.submit(session_id, seq_id, op))

    async def outcome(self, session_id: str, seq_id: int) -> Any:
        """The response of an operation that somebody submits, perhaps later."""
        await self._restored()
        return await asyncio.shield(self._runner.queue.outcome(session_id, seq_id))

    async def has(self, session_id: str, seq_id: int) -> bool:
        """Whether somebody has submitted operation `seq_id`, and its response is still there."""
        await self._restored()
        return self._runner.queue.has(session_id, seq_id)

    async def cancel(self, session_id: str, seq_id: int) -> bool:
        await self._restored()
        return self._runner.queue.cancel(session_id, seq_id)

    async def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(local_folder(self._base_model))

    async def stop(self) -> None:
        """Frees the ranks; what waits fails. Returns when what was saved is in the registry."""
        sessions = list(self._sessions.values())
        for session in sessions:
            self._runner.queue.close(session.session_id)
        for task in (*self._opening.values(), self._starting):
            if task is not None:
                task.cancel()
        self._runner.keeper.stop()
        await asyncio.gather(*(session.checkpoints.finish() for session in sessions))

    async def _started(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        folder = await asyncio.to_thread(local_folder, self._base_model)  # an unknown model fails before anything is placed
        self._facts = await self._runner.keeper.start()
        self._fingerprint = await asyncio.to_thread(fingerprint, folder)
        self._runner.start(takes_turns=self._takes_turns)

    async def _open(self, request: SessionRequest) -> HostedSession:
        await self._started()
        checkpoints = SessionCheckpoints(request, self._fingerprint)
        start = await read_start(request, self._fingerprint) if request.start else None
        try:
            facts = await self._runner.keeper.add(request, start)
        except asyncio.CancelledError:  # closed meanwhile
            await self._runner.keeper.remove(request.session_id)
            raise
        session = self._hosted(request, facts, checkpoints)
        self._runner.queue.open(request.session_id)
        self._runner.meter.touch(request.session_id)
        self._sessions[request.session_id] = session
        self._runner.run(checkpoints.tidy())
        return session

    def _hosted(self, request: SessionRequest, facts: AdapterFacts, checkpoints: SessionCheckpoints) -> HostedSession:
        info = SessionInfo(
            session_id=request.session_id,
            base_model=self._base_model,
            rank=request.lora.rank,
            alpha=request.lora.alpha,
            seed=request.lora.seed,
            target_modules=facts.target_modules,
            num_trainable_parameters=facts.num_parameters,
            vocab_size=self._facts.vocab_size,
            context_length=self._facts.context_length,
            dtype=self._facts.dtype,
            num_workers=self._config.num_workers,
            zero_stage=self._config.zero_stage,
        )
        checkpoints.session = info
        return HostedSession(request, info, facts, Journal(self._config.snapshot_every), checkpoints)

    async def _restored(self) -> None:
        """Waits until a host that was started again has its sessions back."""
        if self._restoring is None:
            self._restoring = asyncio.create_task(self._restore())
        await asyncio.shield(self._restoring)

    async def _restore(self) -> None:
        for kept in await self._runner.vault.everything():
            await self._started()
            await self._bring_back(kept)

    async def _bring_back(self, kept: KeptSession) -> None:
        """A session as of its snapshot; the operations since are in the queue again."""
        request = kept.request
        self._runner.vault.remember(request.session_id, kept.snapshot)
        state = joined(kept.snapshot, request.lora.seed)
        facts = await self._runner.keeper.add(request, state, [part.gradient for part in kept.snapshot], kept.seq_id)
        session = self._hosted(request, facts, SessionCheckpoints(request, self._fingerprint))
        session.journal.last_sent = kept.seq_id
        self._sessions[request.session_id] = session
        self._runner.queue.restore(request.session_id, kept.seq_id, kept.op, kept.response, kept.ops, kept.responses)
