"""The host of one base model: its sessions' operations, in order, onto its ranks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any

from raysessions.actors.op_queue import Entry, OpQueue, Slots
from raysessions.actors.phases import TrainingPhases
from raysessions.actors.protocol import AdapterFacts, ModelFacts
from raysessions.actors.training_group import TrainingGroup
from raysessions.config import LoraConfig, TrainingConfig
from raysessions.errors import SessionError, SessionStoppedError
from raysessions.models import local_folder, tokenizer_files
from raysessions.operations import AbandonedOp, CustomLossOp, LossOp, Operation, OptimStepOp, SaveForSamplerOp
from raysessions.types import ForwardBackwardOutput, SaveWeightsForSamplerResponse, SessionInfo
from raysessions.uris import VersionUri

DISPATCHED_AHEAD = 2
"""Operations that the ranks have at the same time: one running and the next, so that they never wait for Python."""


@dataclass(slots=True)
class _Session:
    """What the host keeps of a session."""

    info: SessionInfo
    facts: AdapterFacts
    last_version: int = 0


class ModelHost:
    """An async actor; the only caller of its TrainingGroup. Sessions share the base model and take turns."""

    _group: TrainingGroup
    _facts: ModelFacts
    _worker: asyncio.Task[None]

    def __init__(self, base_model: str, config: TrainingConfig, pool: Any, *, takes_turns: bool) -> None:
        """`takes_turns`: training and sampling do not compute at the same time (`SamplingConfig.sleep`)."""
        self._base_model = base_model
        self._config = config
        self._pool = pool
        self._takes_turns = takes_turns
        self._queue = OpQueue()
        self._sessions: dict[str, _Session] = {}
        self._opening: set[str] = set()
        self._starting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._phases: TrainingPhases | None = None
        self._slots = Slots(DISPATCHED_AHEAD)
        self._phase = "placing"

    async def phase(self) -> str:
        """ "placing", "loading" or "ready"."""
        return self._phase

    async def open_session(self, session_id: str, lora: LoraConfig) -> SessionInfo:
        """Adds a session, loading the base model first if it is the first one."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        self._opening.add(session_id)
        try:
            await asyncio.shield(self._starting)
            facts = await self._group.add_session(session_id, lora)
            if session_id not in self._opening:  # closed meanwhile
                await self._group.remove_session(session_id)
                raise SessionStoppedError(f"Session {session_id} was stopped while it was starting.")
        finally:
            self._opening.discard(session_id)
        info = SessionInfo(
            session_id=session_id,
            base_model=self._base_model,
            rank=lora.rank,
            alpha=lora.alpha,
            seed=lora.seed,
            target_modules=facts.target_modules,
            num_trainable_parameters=facts.num_parameters,
            vocab_size=self._facts.vocab_size,
            context_length=self._facts.context_length,
            dtype=self._facts.dtype,
            num_workers=self._config.num_workers,
            zero_stage=self._config.zero_stage,
        )
        self._queue.open(session_id)
        self._sessions[session_id] = _Session(info, facts)
        return info

    async def info(self, session_id: str) -> SessionInfo:
        """The session's info as of now."""
        if session_id not in self._sessions:
            raise SessionStoppedError(f"Session {session_id} was stopped.")
        others = tuple(sorted(set(self._sessions) - {session_id}))
        return dataclasses.replace(self._sessions[session_id].info, sharing=others)

    async def close_session(self, session_id: str) -> None:
        self._opening.discard(session_id)
        if session_id in self._queue:
            self._queue.close(session_id)
            self._sessions.pop(session_id)
            await self._group.remove_session(session_id)

    async def submit(self, session_id: str, seq_id: int, op: Operation) -> Any:
        """Runs `op` when its turn comes and returns its response. Safe to call again with the same `seq_id`."""
        return await asyncio.shield(self._queue.submit(session_id, seq_id, op))

    async def outcome(self, session_id: str, seq_id: int) -> Any:
        """The response of an operation that somebody submits, perhaps later."""
        return await asyncio.shield(self._queue.outcome(session_id, seq_id))

    async def cancel(self, session_id: str, seq_id: int) -> bool:
        return self._queue.cancel(session_id, seq_id)

    async def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(local_folder(self._base_model))

    async def stop(self) -> None:
        """Frees the ranks; what waits fails."""
        for session_id in list(self._sessions):
            self._queue.close(session_id)
        if self._starting is not None:
            self._starting.cancel()
        if hasattr(self, "_group"):
            self._group.stop()

    async def _start(self) -> None:
        await asyncio.to_thread(local_folder, self._base_model)  # an unknown model fails before anything is placed
        self._group = await TrainingGroup.place(self._base_model, self._config)
        self._phase = "loading"
        self._facts = await self._group.load()
        self._phase = "ready"
        if self._takes_turns:
            self._phases = TrainingPhases(self._pool, self._group.release_memory)
        self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Hands operations to the ranks for as long as the host lives."""
        while True:
            await self._slots.free()
            entry = await self._queue.next()
            if self._phases is not None:
                await self._phases.begin()
            self._slots.take()
            # Called here, not in the task: the ranks see operations in the order of this loop.
            try:
                response = self._dispatch(entry)
            except Exception as error:
                entry.outcome.set_exception(error)
                self._give_back()
                continue
            self._run(_settle(entry, response))

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _give_back(self) -> None:
        """The ranks are done with an operation."""
        self._slots.give_back()
        if self._phases is not None and self._has_trained():
            self._run(self._phases.end(self._has_trained))

    def _has_trained(self) -> bool:
        return not self._slots.taken and not self._queue.has_next()

    def _dispatch(self, entry: Entry) -> Awaitable[Any]:
        """Sends the operation to the ranks. The slot is given back when the ranks are done with it."""
        match entry.op:
            case LossOp() as op:
                return self._until_done(self._group.run_loss(entry.session_id, op))
            case CustomLossOp(op, loss, metrics):
                return _with_metrics(self._until_done(self._group.run_loss(entry.session_id, op)), loss, metrics)
            case AbandonedOp(error):
                raise error
            case OptimStepOp(adam):
                return self._until_done(self._group.optim_step(entry.session_id, adam))
            case SaveForSamplerOp(name):
                return self._publish(self._sessions[entry.session_id], name)
            case unknown:
                raise SessionError(f"Unknown operation {type(unknown).__name__}: client and cluster differ in version.")

    async def _until_done(self, response: Awaitable[Any]) -> Any:
        try:
            return await response
        finally:
            self._give_back()

    def _publish(self, session: _Session, name: str) -> Awaitable[Any]:
        session.last_version += 1
        uri = VersionUri(session.info.session_id, session.last_version)
        weights = self._group.export_adapter(session.info.session_id)
        published = self._pool.publish.remote(uri, (weights,), session.facts.num_modules)
        self._give_back()  # the export is in the ranks' queue; what follows does not need them

        async def respond() -> SaveWeightsForSamplerResponse:
            await published
            return SaveWeightsForSamplerResponse(path=str(uri), version=uri.version, name=name)

        return respond()


async def _with_metrics(
    response: Awaitable[ForwardBackwardOutput], loss: float, metrics: dict[str, float]
) -> ForwardBackwardOutput:
    """What the caller's own loss function said, in place of what its stand-in did."""
    output = await response
    outputs = [{"logprobs": of_datum["logprobs"]} for of_datum in output.loss_fn_outputs]
    engine = {name: value for name, value in output.metrics.items() if name.startswith("engine_")}
    return ForwardBackwardOutput(outputs, {"loss:sum": loss, **engine, **metrics})


async def _settle(entry: Entry, response: Awaitable[Any]) -> None:
    """Gives the operation its outcome. Its error is the caller's, never the host's."""
    try:
        result = await response
    except Exception as error:
        if not entry.outcome.done():
            entry.outcome.set_exception(getattr(error, "cause", None) or error)
    else:
        if not entry.outcome.done():
            entry.outcome.set_result(result)
