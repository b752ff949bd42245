"""The training engine: one frozen base model under DeepSpeed, with a plain LoRA adapter per session on top.

DeepSpeed gets the bare frozen base, and only then are adapters injected, so they stay ordinary parameters: the forward
goes through the modules and the backward is autograd's, not DeepSpeed's, whose accumulation rules fit one optimizer only.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from raysessions.actors.engines import target_modules
from raysessions.actors.engines.adapter import Adapter, activate
from raysessions.actors.engines.base_model import load_base_model
from raysessions.actors.engines.loss_function import compute_loss
from raysessions.actors.engines.process_group import ProcessGroup
from raysessions.actors.maths.batching import positions, select
from raysessions.actors.maths.losses import LossInputs, LossOutput
from raysessions.actors.maths.metrics import Part
from raysessions.actors.maths.rows import Row, empty_row, plan_share
from raysessions.actors.protocol import AdapterFacts, LossResult, ModelFacts, PeerFailedError, RankState, Seat
from raysessions.adapter_weights import AdapterWeights
from raysessions.batch import Batch
from raysessions.config import LoraConfig, TrainingConfig
from raysessions.operations import Loss
from raysessions.training_state import TrainingState
from raysessions.types import AdamParams

DEFAULT_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}


class DeepSpeedEngine:
    """One rank's model. Every rank must get the same calls in the same order. Not thread-safe."""

    def __init__(self, folder: Path, config: TrainingConfig, seat: Seat) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._config = config
        self._adapters: dict[str, Adapter] = {}
        self._active: str | None = None
        self._group = ProcessGroup(seat, self.device)
        self._model = load_base_model(folder, config, self.device)
        self._max_tokens = config.max_tokens_per_micro_batch or DEFAULT_MICRO_BATCH_TOKENS[self.device.type]
        self._scratch = torch.zeros(0, device=self.device)
        self.facts = ModelFacts(
            vocab_size=self._model.vocab_size,
            context_length=self._model.context_length,
            dtype=str(self._model.dtype).removeprefix("torch."),
        )

    def add_session(self, session_id: str, lora: LoraConfig) -> AdapterFacts:
        causal_lm = self._model.causal_lm
        targets = target_modules.choose(causal_lm, lora)
        adapter = Adapter(causal_lm, session_id, lora, targets, self._group, self._config.zero_stage)
        self._adapters[session_id] = adapter
        self._active = None  # injection leaves several adapters active
        self._fit_scratch()
        return adapter.facts()

    def remove_session(self, session_id: str) -> None:
        self._adapters.pop(session_id).remove()
        self._active = None
        self._fit_scratch()

    def run_loss(self, session_id: str, batch: Batch, loss: Loss, *, backward: bool) -> LossResult:
        """This rank's part of the loss of `batch`; with `backward`, its gradient is added to the session's, on every rank
        entirely or on none."""
        started = time.perf_counter()
        adapter = self._activate(session_id)
        with torch.set_grad_enabled(backward), self._model.exact_products():
            if not backward:
                result, error = self._run_rows(batch, loss)
            else:
                scratch = self._scratch[: len(adapter.weights)]
                adapter.collect_into(scratch)
                try:
                    result, error = self._run_rows(batch, loss)
                finally:
                    adapter.stop_collecting()
        failed = self._group.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise PeerFailedError("The operation failed on another rank; nothing was applied.")
        if backward:
            adapter.accumulate(scratch)
        result.metrics.append({"engine_seconds:max": Part(time.perf_counter() - started)})
        return result

    def optim_step(self, session_id: str, adam: AdamParams) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self._adapters[session_id].optim_step(adam)
        return {**metrics, "engine_seconds:max": time.perf_counter() - started}

    def release_memory(self) -> None:
        """torch's cache of freed GPU memory."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def export_adapter(self, session_id: str) -> AdapterWeights:
        return self._adapters[session_id].export(self._model.dtype)

    def num_steps(self, session_id: str) -> int:
        return self._adapters[session_id].step

    def export_state(self, session_id: str) -> RankState:
        return self._adapters[session_id].state()

    def load_state(self, session_id: str, state: TrainingState, gradient: np.ndarray | None = None) -> None:
        self._adapters[session_id].load(state, gradient)

    def _run_rows(self, batch: Batch, loss: Loss) -> tuple[LossResult, Exception | None]:
        """This rank's rows, and the first error in them. At stage 3 the ranks gather weights together, so all of them go
        through the model equally often, also with nothing to do or after an error in the loss."""
        share = plan_share(batch, self._max_tokens, self._group.world_rank, self._group.world_size)
        rows = share.rows
        own = np.concatenate([positions(batch, row.indices) for row in rows]) if rows else np.empty(0, dtype=np.int64)
        shape = (len(own), *batch.target_tokens.shape[1:])
        result = LossResult(own, np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32), [])
        error: Exception | None = None
        begin = 0
        for row in rows:
            part = select(batch, row.indices)
            end = begin + len(part.tokens)
            try:
                logprobs_T, output = self._run_row(row, part, loss)
            except Exception as caught:
                error = error or caught
                if self._config.zero_stage < 3:
                    break
            else:
                result.logprobs[begin:end] = logprobs_T.view(end - begin, *shape[1:]).cpu()
                result.elementwise_loss[begin:end] = output.per_token_T.detach().view(end - begin, *shape[1:]).cpu()
                result.metrics.append(output.metrics)
            begin = end
        if self._config.zero_stage == 3:
            for _ in range(share.num_passes - len(rows)):
                self._pass_through(empty_row())
        return result, error

    def _run_row(self, row: Row, batch: Batch, loss: Loss) -> tuple[torch.Tensor, LossOutput]:
        """Forward, loss and, where gradients are enabled, backward of one row with the datums `batch`."""
        num_targets = batch.target_tokens[0].size
        columns = {name: torch.from_numpy(column.reshape(-1)).to(self.device) for name, column in batch.inputs.items()}
        sequence = np.repeat(np.arange(batch.num_datums), batch.lengths * num_targets)
        inputs = LossInputs(columns, torch.from_numpy(sequence).to(self.device), batch.num_datums)
        trained_T = torch.ones(len(sequence), dtype=torch.bool, device=self.device)
        for gate in loss.gates:
            trained_T &= inputs[gate] != 0
        logprobs_T = self._model(row, np.repeat(row.source, num_targets), batch.target_tokens.reshape(-1), trained_T)
        try:
            output = compute_loss(loss, logprobs_T, inputs)
        except BaseException:
            if torch.is_grad_enabled() and self._config.zero_stage == 3:
                (0.0 * logprobs_T.sum()).backward()
            raise
        if torch.is_grad_enabled():
            output.per_token_T.sum().backward()
        return logprobs_T.detach(), output

    def _pass_through(self, row: Row) -> None:
        """The model's forward and backward with nothing to learn from."""
        untrained_T = torch.zeros(1, dtype=torch.bool, device=self.device)
        logprobs_T = self._model(row, row.source, row.tokens, untrained_T)
        if torch.is_grad_enabled():
            logprobs_T.sum().backward()

    def _activate(self, session_id: str) -> Adapter:
        if self._active != session_id:
            activate(self._model.causal_lm, session_id)
            self._active = session_id
        return self._adapters[session_id]

    def _fit_scratch(self) -> None:
        """One gradient buffer serves all sessions in turn: as long as the largest adapter."""
        size = max((len(adapter.weights) for adapter in self._adapters.values()), default=0)
        if size != len(self._scratch):
            self._scratch = torch.zeros(size, device=self.device)
