"""The frozen base model: loaded, handed to DeepSpeed, and asked for the logprobs of a row's targets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from raysessions.actors.engines import attention
from raysessions.actors.engines.host_memory import give_back_freed_memory
from raysessions.actors.engines.partitioned_load import load_partitioned
from raysessions.actors.maths.logprobs import target_logprobs
from raysessions.actors.maths.rows import Row, Segment
from raysessions.config import TrainingConfig
from raysessions.errors import ConfigError


class BaseModel(torch.nn.Module):
    """What DeepSpeed holds: the decoder of a causal language model, and its head as logprobs of chosen tokens.

    At stage 3 DeepSpeed's hooks gather each module's weights for its forward and backward; so the head is a module too.
    """

    def __init__(self, causal_lm: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.head = _Head(causal_lm.get_output_embeddings().weight)
        self.dtype: torch.dtype = causal_lm.dtype
        config = causal_lm.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        if causal_lm.get_output_embeddings().bias is not None:
            raise _unknown_head(causal_lm)

    def forward(self, row: Row, position_T: np.ndarray, target_T: np.ndarray, trained_T: torch.Tensor) -> torch.Tensor:
        """Logprobs of `target_T` (token ids) predicted at `position_T` (places in the row), float32, shape (T,).

        `trained_T` says for which of them a gradient is wanted.
        """
        # Datums that share a prompt ask for the same logprobs in it: each pair of position and target once.
        pairs, pair_T = np.unique(np.stack([position_T, target_T]), axis=1, return_inverse=True)
        used, position_P = np.unique(pairs[0], return_inverse=True)
        device = trained_T.device
        pair_T = torch.from_numpy(pair_T).to(device)
        trained_P = torch.zeros(pairs.shape[1], dtype=torch.bool, device=device)
        trained_P[pair_T[trained_T]] = True
        decoded = self._run(self.causal_lm.get_decoder(), row, device)
        hidden_UH = decoded.last_hidden_state[0, torch.from_numpy(used).to(device)]
        logprobs_P = self.head(
            hidden_UH, torch.from_numpy(position_P).to(device), torch.from_numpy(pairs[1]).to(device), trained_P
        )
        return logprobs_P[pair_T]

    def _run(self, module: torch.nn.Module, row: Row, device: torch.device) -> Any:
        with self._autocast(device):
            return module(
                input_ids=torch.from_numpy(row.tokens)[None].to(device),
                position_ids=torch.from_numpy(row.position_ids)[None].to(device),
                use_cache=False,
                plan=attention.plan_attention(row.segments, device),
            )

    @contextlib.contextmanager
    def exact_products(self) -> Iterator[None]:
        """On CPU, float32 products of values that are bfloat16 already are made by the bfloat16 unit: as exact, as its sums
        are float32 too, and twice as fast. Around forward and backward of a bfloat16 model."""
        if self.dtype != torch.bfloat16:
            yield
            return
        before = torch.backends.mkldnn.matmul.fp32_precision
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            yield
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = before

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.dtype == torch.float32 else torch.autocast(device.type, self.dtype)

    @torch.no_grad()
    def check_head(self, device: torch.device) -> None:
        """Refuses a model whose logits are not plainly hidden @ weightᵀ (soft caps, scales)."""
        tokens = np.arange(16, dtype=np.int64) % self.vocab_size
        row = Row([0], tokens, np.arange(16), [Segment(0, 16)], np.arange(16))
        targets = np.roll(tokens, -1)
        ours_T = self(row, np.arange(16), targets, torch.zeros(16, dtype=torch.bool, device=device))
        logits_TV = self._run(self.causal_lm, row, device).logits[0].float()
        theirs_T = logits_TV.log_softmax(-1).gather(-1, torch.from_numpy(targets).to(device)[:, None]).squeeze(-1)
        if not torch.allclose(ours_T, theirs_T, atol=1e-3 if self.dtype == torch.float32 else 0.25):
            raise _unknown_head(self.causal_lm)


class _Head(torch.nn.Module):
    """The output layer's weight, by reference: often the input embedding's too."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, hidden_TH: torch.Tensor, position_P: torch.Tensor, target_P: torch.Tensor, trained_P: torch.Tensor
    ) -> torch.Tensor:
        return target_logprobs(hidden_TH, self.weight, position_P, target_P, trained_P)


def load_base_model(folder: Path, config: TrainingConfig, device: torch.device) -> BaseModel:
    """Loads the checkpoint and hands it to DeepSpeed, frozen. The process group must stand."""
    import deepspeed

    if config.offload_param and device.type == "cpu":
        raise ConfigError(
            "offload_param=True moves weights from GPU to CPU memory; here they are on CPU already. Leave it out."
        )
    if config.zero_stage == 3 and device.type == "cpu":
        give_back_freed_memory()
    settings = _deepspeed_settings(config, config.dtype_for(folder), device)
    model = BaseModel(_load(folder, config.dtype_for(folder), settings)).requires_grad_(False).eval()
    if config.zero_stage < 3:
        model.to(device)
    if config.gradient_checkpointing:
        _checkpoint_layers(model.causal_lm)
    deepspeed.initialize(model=model, config=settings)
    model.check_head(device)
    return model


def _deepspeed_settings(config: TrainingConfig, dtype: str, device: torch.device) -> dict[str, Any]:
    """Stages 1 and 2 are about adapters, which DeepSpeed does not know: for the base they are stage 0."""
    zero: dict[str, Any] = {"stage": 3 if config.zero_stage == 3 else 0}
    if config.zero_stage == 3 and device.type == "cpu":
        # Gather what the layer at hand needs and free it at once. DeepSpeed would keep up to a billion parameters for their
        # next use, a model of that size whole, and gather ahead, which helps only where a GPU computes meanwhile.
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if config.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == "bfloat16"}, "zero_optimization": zero}


def _load(folder: Path, dtype: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    arguments = {"dtype": getattr(torch, dtype), "attn_implementation": attention.register()}
    if settings["zero_optimization"]["stage"] == 3:
        return load_partitioned(folder, settings, **arguments)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)


def _checkpoint_layers(causal_lm: transformers.PreTrainedModel) -> None:
    causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    for module in causal_lm.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # it checkpoints only while training; what is inside stays without dropout


def _unknown_head(causal_lm: transformers.PreTrainedModel) -> ConfigError:
    return ConfigError(
        f"{type(causal_lm).__name__} computes its logits in a way that training does not know (soft cap, scale or bias). "
        "Choose another base model."
    )
