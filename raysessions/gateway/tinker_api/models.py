"""Training runs: sessions that outlive the gateway's own process, and their operations."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from raysessions.batch import pack
from raysessions.errors import SessionStoppedError
from raysessions.future import APIFuture
from raysessions.gateway.backend import Backend
from raysessions.gateway.errors import HttpError
from raysessions.gateway.tinker_api.names import sdk_session_of, session_name
from raysessions.gateway.tinker_api.wire import ForwardBackwardCall
from raysessions.loss_op import loss_op, pickled_function
from raysessions.losses import get_loss, resolve_config
from raysessions.operations import Loss, LossOp, Operation
from raysessions.responses import SessionInfo

GATEWAY = "gateway"
"""The client's name, to the sessions: all replicas are one client, whose callers number the operations."""


@dataclass(frozen=True, slots=True)
class Model:
    """A running session."""

    model_id: str
    host: Any
    info: SessionInfo

    def loss_op(self, call: ForwardBackwardCall) -> LossOp:
        """Raises `DatumError` or `LossError`. It takes a while for a large batch."""
        spec = get_loss(call.loss_fn)
        loss = Loss(call.loss_fn, resolve_config(spec, call.loss_fn_config), spec.gates, pickled_function(call.loss_fn))
        batch = pack(call.data, spec, vocab_size=self.info.vocab_size, context_length=self.info.context_length)
        return loss_op(batch, loss, backward=not call.forward_only)

    def submit(self, seq_id: int, op: Operation) -> APIFuture[Any]:
        """Runs it when its number has its turn. Safe to call again."""
        return APIFuture(self.host.submit.remote(self.info.session_id, seq_id, op, GATEWAY))

    def outcome(self, seq_id: int) -> APIFuture[Any]:
        return APIFuture(self.host.outcome.remote(self.info.session_id, seq_id))

    def has(self, seq_id: int) -> Awaitable[bool]:
        """Whether an operation of that number has come, and its result is still there."""
        return APIFuture(self.host.has.remote(self.info.session_id, seq_id))


class Models:
    """Of one replica of the gateway."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._models: dict[tuple[str, str], Model] = {}
        """By tenant and id."""

    async def find(self, tenant: str, model_id: str, *, is_sure: bool = False) -> Model:
        """Raises `HttpError` 410 if there is no such model for this tenant, or why it has ended. It may have ended meanwhile,
        unless `is_sure`."""
        model = self._models.get((tenant, model_id))
        if model is None or is_sure:
            self._models.pop((tenant, model_id), None)
            name = session_name(model_id)
            is_ours = sdk_session_of(name) is not None
            found = await self._backend.find_session(tenant, name) if is_ours else None
            if found is None:
                raise HttpError(HTTPStatus.GONE, f"There is no model {model_id!r} for this key.")
            host, _, info, _ = found
            model = self._models[tenant, model_id] = Model(model_id, host, info)
        return model

    async def answer(self, tenant: str, model: Model, future: Awaitable[Any]) -> Any:
        """What became of an operation. Says why when its session is not there any more."""
        try:
            return await future
        except SessionStoppedError:
            await self.find(tenant, model.model_id, is_sure=True)
            raise
