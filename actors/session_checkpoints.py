"""What a session writes to the registry and reads from it. Without Ray, so that a slow or broken storage is a matter of
threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable

from raysessions.adapter_weights import AdapterWeights, to_peft_files
from raysessions.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, StorageError
from raysessions.manifest import expiry
from raysessions.operations import SaveStateOp, SessionRequest
from raysessions.responses import CheckpointInfo, CheckpointKind, SessionInfo
from raysessions.storage_location import StorageLocation
from raysessions.training_state import TrainingState, from_state_files, to_state_files
from raysessions.uris import VersionUri

log = logging.getLogger("raysessions")


class SessionCheckpoints:
    """A session's versions."""

    session: SessionInfo
    """Set once it is known."""

    def __init__(self, request: SessionRequest, base_fingerprint: str) -> None:
        self._saves = request.saves
        self._registry = request.saves.location.open_registry()
        self._base_fingerprint = base_fingerprint
        self._refreshes: list[VersionUri] = []
        self._claiming = asyncio.Lock()
        self._in_turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()
        self._states: dict[str, VersionUri] = {}
        self.parent = str(request.start.uri) if request.start and request.start.uri else None
        """The version that the session's weights came from."""

    async def tidy(self) -> None:
        """Deletes what is over in the group."""
        try:
            await asyncio.to_thread(self._registry.sweep, self._saves.group)
        except StorageError as error:
            log.warning("raysessions: the registry could not be tidied: %s", error)

    async def claim(self) -> VersionUri:
        """A new version's name. Names go up in the order of the calls."""
        async with self._claiming:
            return await asyncio.to_thread(self._registry.claim, self._saves.group)

    def describe(
        self, kind: CheckpointKind, name: str, step: int, ttl_seconds: float | None, user_metadata: dict[str, str] | None = None
    ) -> CheckpointInfo:
        """What a version of now is."""
        session = self.session
        return CheckpointInfo(
            path="",
            kind=kind,
            name=name,
            session_id=session.session_id,
            tenant=self._saves.tenant,
            created_at=time.time(),
            expires_at=expiry(ttl_seconds),
            base_model=session.base_model,
            base_fingerprint=self._base_fingerprint,
            rank=session.rank,
            alpha=session.alpha,
            target_modules=session.target_modules,
            step=step,
            parent=self.parent,
            user_metadata={**self._saves.user_metadata, **(user_metadata or {})},
            num_bytes=0,
            encrypted=False,
        )

    async def write(self, uri: VersionUri, info: CheckpointInfo, files: Iterable[tuple[str, bytes]]) -> None:
        await asyncio.to_thread(self._registry.write, uri, info, files)

    async def write_adapter(self, uri: VersionUri, info: CheckpointInfo, weights: AdapterWeights) -> None:
        files = await asyncio.to_thread(to_peft_files, weights, info.base_model)
        await self.write(uri, info, files.items())

    def write_behind(self, uri: VersionUri, info: CheckpointInfo, weights: Awaitable[AdapterWeights]) -> None:
        """Writes a refresh, which samplers answer from already. That it fails is told, and stops nobody."""

        async def write() -> None:
            try:
                async with self._in_turn:
                    await self.write_adapter(uri, info, await weights)
                    await self._forget_old_refreshes(uri)
            except Exception as error:
                log.warning("raysessions: %s is live, but is not in the registry: %s", uri, error)

        task = asyncio.create_task(write())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def save_state(self, op: SaveStateOp, state: TrainingState) -> VersionUri:
        """Raises `CheckpointError` for a name that the session has used, unless it is to be overwritten."""
        before = await self._earlier(op.name)
        if before is not None and not op.overwrite:
            raise CheckpointError(
                f"This session has saved a state {op.name!r} already ({before}): choose another name, or overwrite=True."
            )
        info = self.describe("state", op.name, state.step, op.ttl_seconds, op.user_metadata)
        uri = await self.claim()
        files = await asyncio.to_thread(to_state_files, state, info.base_model)
        await self.write(uri, info, files.items())
        self._states[op.name] = uri
        if before is not None:
            await asyncio.to_thread(self._registry.delete, before)
        return uri

    async def read_state(self, uri: VersionUri, *, with_optimizer: bool) -> TrainingState:
        """Raises `CheckpointMismatchError` for a version of another base model or with another adapter."""
        info, files = await asyncio.to_thread(self._registry.read, uri)
        ours, theirs = (
            {"rank": it.rank, "alpha": it.alpha, "target_modules": tuple(sorted(it.target_modules))}
            for it in (self.session, info)
        )
        if ours != theirs:
            differing = ", ".join(
                f"{key} {theirs[key]} (the session has {ours[key]})" for key in ours if ours[key] != theirs[key]
            )
            raise CheckpointMismatchError(
                f"{uri} has another LoRA shape: {differing}. Start a session from it with create_training_client_from_state."
            )
        _check(info, self._base_fingerprint, self.session.base_model, with_optimizer=with_optimizer)
        state = await asyncio.to_thread(from_state_files, files)
        return state if with_optimizer else state.without_optimizer()

    @property
    def location(self) -> StorageLocation:
        return self._saves.location

    @property
    def last_state(self) -> VersionUri | None:
        """What a run that failed can be resumed from."""
        return max(self._states.values(), key=lambda uri: uri.version, default=None)

    async def finish(self) -> None:
        """Waits for what is being written."""
        if self._writing:
            await asyncio.wait(self._writing)

    async def _earlier(self, name: str) -> VersionUri | None:
        """The session's state of that name, if it is still there."""
        uri = self._states.get(name)
        try:
            if uri is not None:
                await asyncio.to_thread(self._registry.info, uri)
        except CheckpointNotFoundError:
            return None
        return uri

    async def _forget_old_refreshes(self, uri: VersionUri) -> None:
        self._refreshes.append(uri)
        keep = self._saves.keep_refreshes
        while keep is not None and len(self._refreshes) > keep:
            await asyncio.to_thread(self._registry.delete, self._refreshes.pop(0))


async def read_start(request: SessionRequest, base_fingerprint: str) -> TrainingState:
    """What a session is to start from. Raises `CheckpointMismatchError` for a version of another base model."""
    start = request.start
    assert start is not None
    if start.uri is None:
        assert start.state is not None
        state: TrainingState = await start.state[0]
    else:
        info, files = await asyncio.to_thread(request.saves.location.open_registry().read, start.uri)
        _check(info, base_fingerprint, request.base_model, with_optimizer=start.with_optimizer)
        state = await asyncio.to_thread(from_state_files, files)
    return state if start.with_optimizer else state.without_optimizer()


def _check(info: CheckpointInfo, base_fingerprint: str, base_model: str, *, with_optimizer: bool) -> None:
    if info.kind == "merged":
        raise CheckpointMismatchError(f"{info.path} is a merged model: use its folder as a base model, or a state.")
    if with_optimizer and info.kind != "state":
        raise CheckpointMismatchError(
            f"{info.path} has weights only: load it without the optimizer, or use a save_state version."
        )
    if info.base_fingerprint != base_fingerprint:
        raise CheckpointMismatchError(
            f"{info.path} was trained on another base model ({info.base_model}) than the session's ({base_model}), or on other "
            "weights of that name."
        )
