"""One live training session. Each verb checks, sends and returns a future at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray

from raysessions.batch import Batch, pack
from raysessions.custom_loss import CustomLossFn, run_second_pass, targets_only
from raysessions.diagnostics import warn_of_divergence, warn_of_missing_logprobs
from raysessions.errors import ConfigError, SessionError, SessionStoppedError
from raysessions.future import APIFuture
from raysessions.lease_renewal import renew_while_alive
from raysessions.loss_op import loss_op, pickled_function
from raysessions.losses import LossSpec, get_loss, resolve_config
from raysessions.manifest import checked_ttl
from raysessions.operations import LoadStateOp, Loss, LossOp, Operation, OptimStepOp, SaveForSamplerOp, SaveStateOp
from raysessions.progress import wait_with_progress
from raysessions.responses import (
    LoadStateResponse,
    OptimStepResponse,
    SaveStateResponse,
    SaveWeightsForSamplerResponse,
    SessionInfo,
)
from raysessions.sampling_client import SamplingClient, open_sampling_client
from raysessions.storage_location import StorageLocation, StoredUri
from raysessions.tokenizer import load_tokenizer
from raysessions.types import AdamParams, Datum, ForwardBackwardOutput, as_typed
from raysessions.uris import VersionUri
from raysessions.usage import Usage


class TrainingClient:
    """A context manager: leaving the block stops the session and frees what it held.

    Operations run in the order of the calls, also when a call is made before the last one has finished. Threads may
    share a client.
    """

    def __init__(
        self,
        manager: Any,
        host: Any,
        pool: Any,
        info: SessionInfo,
        location: StorageLocation,
        *,
        timeout_s: float,
        lease_s: float | None = None,
        client_id: str = "",
        last_seq: int = 0,
    ) -> None:
        self._manager = manager
        self._host = host
        self._pool = pool
        self._info = info
        self._location = location
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client_id = client_id
        self._last_seq = last_seq
        self._saves: deque[APIFuture[SaveWeightsForSamplerResponse]] = deque(maxlen=16)
        self._stopped = False
        self._tokenizer: Any = None
        if lease_s is not None:
            renew_while_alive(self, manager, info.session_id, lease_s)

    def forward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The loss and logprobs of `data`, without a gradient. Raises `DatumError` or `LossError` at once."""
        return self._submit(self._loss_op(data, loss_fn, loss_fn_config, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the summed loss of `data` to the session's, until `optim_step`.

        Raises `DatumError` or `LossError` at once, and then nothing was sent. A call that fails later adds nothing.
        """
        return self._submit(self._loss_op(data, loss_fn, loss_fn_config, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> APIFuture[ForwardBackwardOutput]:
        """Like `forward_backward`, with a loss of your own that runs here and may couple datums.

        Args:
            data: datums with `target_tokens`; what else `loss_fn_inputs` holds is for `loss_fn`.
            loss_fn: `loss_fn(data, logprobs)` gets the data as given and per datum a torch tensor of its targets' logprobs,
                and returns the loss, a scalar tensor made from them, and a dict of metrics. It runs in a thread.

        Two passes over the model: a forward, and a cross_entropy with −d loss / d logprob as weights, which has the same
        gradient. Operations called later wait for both. An error in `loss_fn` is the future's, and nothing is applied.
        """
        self._check_running()
        batch = self._pack(targets_only(data), get_loss("cross_entropy"))
        forward = loss_op(batch, Loss("cross_entropy"), backward=False)
        with self._lock:
            first = self._send(self._last_seq + 1, forward)
            seq_id = self._last_seq + 1
            # The host waits for this number while the loss is computed here.
            outcome = self._host.outcome.remote(self._info.session_id, seq_id)
            self._last_seq = seq_id
        run_second_pass(
            data, batch, loss_fn, first, lambda op: self._host.submit.remote(self._info.session_id, seq_id, op, self._client_id)
        )
        return self._future(outcome, seq_id)

    def optim_step(self, adam_params: AdamParams | None = None) -> APIFuture[OptimStepResponse]:
        """One AdamW step with the accumulated gradient, which is then cleared.

        The future raises `EmptyGradientError` if nothing was accumulated.
        """
        return self._submit(OptimStepOp(as_typed(AdamParams, adam_params)))

    def save_weights_for_sampler(
        self, name: str, merge_weights: bool = False, ttl_seconds: float | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Makes the weights as of now a version that samplers answer from and the registry keeps. It never changes afterwards.

        Args:
            name: yours, to find it again by.
            merge_weights: save a whole model, the adapter merged into the base model's weights, which `transformers` loads by
                itself (`export_checkpoint`). The future then waits until it is written.
            ttl_seconds: delete it from the registry after so long.
        """
        return self._save_for_sampler(SaveForSamplerOp(_checked(name), False, merge_weights, checked_ttl(ttl_seconds)))

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """Saves and returns a client pinned to the new version. Blocks until every replica has it.

        For the refresh of each step: of these the registry keeps the newest `keep_refreshes`.
        """
        saved = self._save_for_sampler(SaveForSamplerOp(_checked(name or "refresh"), is_refresh=True))
        wait_with_progress(saved, f"sampler of {self._info.base_model}", self._pool.phase.remote, self._timeout_s)
        return self._sampling_client(VersionUri.parse(saved.result().path))

    def save_state(
        self,
        name: str,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveStateResponse]:
        """Saves all that continues this session as if it had not stopped: weights, optimizer, step. An accumulated gradient is
        not part of it.

        Args:
            name: yours. One that this session has used is refused (`CheckpointError`), unless `overwrite`, which then deletes
                the older version.
            ttl_seconds: delete it after so long.
            user_metadata: goes with it, besides the session's.
        """
        return self._submit(SaveStateOp(_checked(name), checked_ttl(ttl_seconds), overwrite, dict(user_metadata or {})))

    def load_state(self, path: str) -> APIFuture[LoadStateResponse]:
        """Takes the weights of a version, with a fresh optimizer and no gradient. The future raises `CheckpointMismatchError`
        if it is of another base model or LoRA shape, and then nothing has changed."""
        return self._submit(LoadStateOp(VersionUri.parse(path), with_optimizer=False))

    def load_state_with_optimizer(self, path: str) -> APIFuture[LoadStateResponse]:
        """Like `load_state`, with the optimizer and the step count of a version that `save_state` made."""
        return self._submit(LoadStateOp(VersionUri.parse(path), with_optimizer=True))

    def create_sampling_client(self, model_path: str | None = None) -> SamplingClient:
        """A client of the version `model_path`, of the session's newest version, or of the base model if there is none.

        Blocks until the samplers are ready. Raises `SamplerExpiredError` if the version is not live.
        """
        self._check_running()
        if model_path is not None:
            uri: VersionUri | None = VersionUri.parse(model_path)
        else:
            saved = next((save for save in reversed(self._saves) if save.exception(self._timeout_s) is None), None)
            uri = VersionUri.parse(saved.result().path) if saved is not None else None
        ready = self._pool.start.remote()
        wait_with_progress(ready, f"sampler of {self._info.base_model}", self._pool.phase.remote, self._timeout_s)
        return self._sampling_client(uri)

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer (transformers), from the cluster."""
        if self._tokenizer is None:
            self._check_running()
            self._tokenizer = load_tokenizer(ray.get(self._host.tokenizer_files.remote()))
        return self._tokenizer

    def get_info(self) -> SessionInfo:
        """The session as of now, also who shares its base model."""
        self._check_running()
        return APIFuture(self._host.info.remote(self._info.session_id)).result(self._timeout_s)

    def usage(self) -> Usage:
        """What this session has used so far; see `ServiceClient.usage`."""
        asked = self._manager.usage.remote(self._location, self._info.session_id, None)
        return APIFuture(asked).result(self._timeout_s).total

    def stop(self) -> None:
        """Ends the session and frees what it held. Safe to call again."""
        if not self._stopped:
            self._stopped = True
            APIFuture(self._manager.stop_session.remote(self._info.session_id)).result()

    def _save_for_sampler(self, op: SaveForSamplerOp) -> APIFuture[SaveWeightsForSamplerResponse]:
        future = self._submit(op)
        self._saves.append(future)
        return future

    def _loss_op(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None, *, backward: bool
    ) -> LossOp:
        self._check_running()
        spec = get_loss(loss_fn)
        loss = Loss(loss_fn, resolve_config(spec, loss_fn_config), spec.gates, pickled_function(loss_fn))
        batch = self._pack(data, spec)
        warn_of_missing_logprobs(batch)
        return loss_op(batch, loss, backward=backward)

    def _pack(self, data: Sequence[Datum], spec: LossSpec) -> Batch:
        return pack(data, spec, vocab_size=self._info.vocab_size, context_length=self._info.context_length)

    def _submit(self, op: Operation) -> APIFuture[Any]:
        self._check_running()
        with self._lock:
            return self._send(self._last_seq + 1, op)

    def _send(self, seq_id: int, op: Operation) -> APIFuture[Any]:
        """Sends `op` under the next number; the lock is held."""
        ref = self._host.submit.remote(self._info.session_id, seq_id, op, self._client_id)
        self._last_seq = seq_id  # not before it is sent: a number that never arrives would stop the session
        return self._future(ref, seq_id, look=warn_of_divergence if isinstance(op, LossOp) else None)

    def _future(self, ref: ray.ObjectRef, seq_id: int, look: Callable[[Any], None] | None = None) -> APIFuture[Any]:
        return APIFuture(ref, lambda: ray.get(self._host.cancel.remote(self._info.session_id, seq_id)), look, self._ending)

    def _ending(self) -> SessionError:
        """What became of the session, when its actors are gone."""
        return ray.get(self._manager.ending.remote(self._info.session_id))

    def _sampling_client(self, uri: VersionUri | None) -> SamplingClient:
        info = self._info
        stored = None if uri is None else StoredUri(uri, self._location)
        return open_sampling_client(
            self._pool, stored, session_id=info.session_id, vocab_size=info.vocab_size, context_length=info.context_length
        )

    def _check_running(self) -> None:
        if self._stopped:
            raise SessionStoppedError(f"Session {self._info.session_id} was stopped. Create a new one.")

    def __enter__(self) -> TrainingClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "A TrainingClient numbers its operations and cannot be copied to another process. Send a SamplingClient, or "
            "call this one from its own process."
        )

    def __repr__(self) -> str:
        info = self._info
        return f"TrainingClient({info.session_id}, {info.base_model}, rank {info.rank})"


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"What is saved needs a name, not {name!r}.")
    return name
