"""The training engine: one frozen base model under DeepSpeed, with a plain LoRA adapter per session on top.

DeepSpeed gets the bare frozen base, and only then are adapters injected, so they stay ordinary parameters: the forward
goes through the modules and the backward is autograd's, not DeepSpeed's, whose accumulation rules fit one optimizer only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from raysessions.actors.engines import attention, process_group, target_modules
from raysessions.actors.engines.adapter import Adapter, activate
from raysessions.actors.maths.batching import positions, select
from raysessions.actors.maths.logprobs import target_logprobs
from raysessions.actors.maths.losses import LOSS_FNS, LossOutput
from raysessions.actors.maths.metrics import Part
from raysessions.actors.maths.rows import Row, Segment, plan_rows
from raysessions.actors.protocol import AdapterFacts, AdapterWeights, LossResult, ModelFacts
from raysessions.batch import Batch
from raysessions.config import LoraConfig, TrainingConfig
from raysessions.errors import ConfigError
from raysessions.losses import LOSSES
from raysessions.types import AdamParams

DEFAULT_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}


class DeepSpeedEngine:
    """One rank's model. Not thread-safe: the actor calls it from one thread."""

    def __init__(self, folder: Path, config: TrainingConfig, *, master_port: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._adapters: dict[str, Adapter] = {}
        self._active: str | None = None
        process_group.join(self.device, master_port)
        self._model = _initialise_deepspeed(_load(folder, config.dtype_for(folder)).to(self.device))
        self._head = self._model.get_output_embeddings().weight
        self._max_tokens = config.max_tokens_per_micro_batch or DEFAULT_MICRO_BATCH_TOKENS[self.device.type]
        text_config = self._model.config.get_text_config()
        self.facts = ModelFacts(
            vocab_size=self._head.shape[0],
            context_length=text_config.max_position_embeddings,
            dtype=str(self._model.dtype).removeprefix("torch."),
        )
        self._check_head()

    def add_session(self, session_id: str, lora: LoraConfig) -> AdapterFacts:
        targets = target_modules.choose(self._model, lora)
        adapter = self._adapters[session_id] = Adapter(self._model, session_id, lora, targets)
        self._active = None  # injection leaves several adapters active
        return adapter.facts()

    def remove_session(self, session_id: str) -> None:
        self._adapters.pop(session_id).remove()
        self._active = None

    def run_loss(
        self, session_id: str, batch: Batch, loss_fn: str, config: Mapping[str, float], *, backward: bool
    ) -> LossResult:
        """The loss of `batch`; with `backward`, its gradient is added to the session's, entirely or not at all."""
        started = time.perf_counter()
        adapter = self._activate(session_id)
        result = LossResult(
            logprobs=np.empty(len(batch.tokens), dtype=np.float32),
            elementwise_loss=np.empty(len(batch.tokens), dtype=np.float32),
            metrics=[],
        )
        with self._all_or_nothing(adapter) if backward else torch.no_grad():
            for row in plan_rows(batch, self._max_tokens):
                logprobs_T, output = self._run_row(row, select(batch, row.indices), loss_fn, config)
                if backward:
                    output.per_token_T.sum().backward()
                at = positions(batch, row.indices)
                result.logprobs[at] = logprobs_T.detach().cpu().numpy()
                result.elementwise_loss[at] = output.per_token_T.detach().cpu().numpy()
                result.metrics.append(output.metrics)
        result.metrics.append({"engine_seconds:max": Part(time.perf_counter() - started)})
        return result

    def optim_step(self, session_id: str, adam: AdamParams) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self._adapters[session_id].optim_step(adam)
        return {**metrics, "engine_seconds:max": time.perf_counter() - started}

    def export_adapter(self, session_id: str) -> AdapterWeights:
        return self._adapters[session_id].export(self._model.dtype)

    def _activate(self, session_id: str) -> Adapter:
        adapter = self._adapters[session_id]
        if self._active != session_id:
            activate(self._model, session_id)
            self._active = session_id
        return adapter

    @contextlib.contextmanager
    def _all_or_nothing(self, adapter: Adapter) -> Iterator[None]:
        """Puts the gradient back as it was when a micro-batch fails."""
        before = adapter.gradient.clone() if adapter.has_gradient else None
        try:
            yield
        except BaseException:
            adapter.gradient.zero_() if before is None else adapter.gradient.copy_(before)
            raise
        adapter.has_gradient = True

    def _run_row(self, row: Row, batch: Batch, loss_fn: str, config: Mapping[str, float]) -> tuple[torch.Tensor, LossOutput]:
        """Forward of one row with the datums `batch`. Returns the logprobs with their graph, and the loss."""
        inputs = {key: self._tensor(column) for key, column in batch.inputs.items()}
        trained_T = torch.ones(len(batch.tokens), dtype=torch.bool, device=self.device)
        for gate in LOSSES[loss_fn].gates:
            trained_T &= inputs[gate] != 0
        # Datums that share a prompt ask for the same logprobs in it: each pair of position and target once.
        pairs, pair_T = np.unique(np.stack([row.source, batch.target_tokens]), axis=1, return_inverse=True)
        pair_T = self._tensor(pair_T)
        trained_P = torch.zeros(pairs.shape[1], dtype=torch.bool, device=self.device)
        trained_P[pair_T[trained_T]] = True
        hidden_PH = self._hidden(row)[self._tensor(pairs[0])]
        logprobs_T = target_logprobs(hidden_PH, self._head, self._tensor(pairs[1]), trained_P)[pair_T]
        return logprobs_T, LOSS_FNS[loss_fn](logprobs_T, inputs, config)

    def _hidden(self, row: Row) -> torch.Tensor:
        """The last hidden states of the row, shape (num_unique, hidden size)."""
        return self._forward(self._model.get_decoder(), row).last_hidden_state[0]

    def _forward(self, module: torch.nn.Module, row: Row) -> Any:
        with self._autocast():
            return module(
                input_ids=self._tensor(row.tokens)[None],
                position_ids=self._tensor(row.position_ids)[None],
                use_cache=False,
                plan=attention.plan_attention(row.segments, self.device),
            )

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._model.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._model.dtype)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        # Arrays mapped from the object store are read-only; select() has copied these.
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuses a model whose logits are not plainly hidden @ weightᵀ (soft caps, scales, biases)."""
        tokens = np.arange(16, dtype=np.int64) % self.facts.vocab_size
        row = Row([0], tokens, np.arange(16), [Segment(0, 16)], np.arange(16))
        targets_T = self._tensor(np.roll(tokens, -1))
        ours_T = target_logprobs(self._hidden(row), self._head, targets_T, torch.zeros(16, dtype=torch.bool))
        logits_TV = self._forward(self._model, row).logits[0].float()
        theirs_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None]).squeeze(-1)
        if not torch.allclose(ours_T, theirs_T, atol=1e-3 if self._model.dtype == torch.float32 else 0.25):
            raise ConfigError(
                f"{type(self._model).__name__} computes its logits in a way that training does not know (soft cap, scale or "
                "bias). Choose another base model."
            )


def _load(folder: Path, dtype: str) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention.register()
    )
    return model.eval().requires_grad_(False)


def _initialise_deepspeed(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Hands the frozen base to DeepSpeed (stage 0: every rank holds it whole)."""
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine.module
