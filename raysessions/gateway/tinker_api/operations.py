"""From the SDK's requests to our operations."""

from __future__ import annotations

import secrets
from typing import Any

from tinker.types import AdamParams as TinkerAdamParams
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.lora_config import LoraConfig as TinkerLoraConfig
from tinker.types.optim_step_request import OptimStepRequest
from tinker.types.sample_request import SampleRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from raysessions.config import LoraConfig
from raysessions.errors import ConfigError
from raysessions.gateway.tinker_api.names import version_uri
from raysessions.manifest import checked_ttl
from raysessions.operations import LoadStateOp, OptimStepOp, SaveForSamplerOp, SaveStateOp
from raysessions.types import AdamParams, ModelInput, SamplingParams, as_typed

DEFAULT_RANK, ALPHA = 32, 32
MAX_SAMPLES = 1024
"""Of one prompt."""
UNSUPPORTED_SAMPLING = (
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)


def lora_config(request: CreateModelRequest) -> LoraConfig:
    """`train_unembed`, which the SDK sets by default, is taken for False: `create_session` says so."""
    _check_optimizer(request.optimizer_config)
    asked = request.lora_config or TinkerLoraConfig(rank=DEFAULT_RANK)
    return LoraConfig(
        rank=asked.rank,
        alpha=ALPHA,
        seed=secrets.randbits(31) if asked.seed is None else asked.seed,
        train_mlp=asked.train_mlp,
        train_attn=asked.train_attn,
    )


def optim_step_op(request: OptimStepRequest) -> OptimStepOp:
    if not isinstance(request.optim_params, TinkerAdamParams):
        raise ConfigError(f"Optimizer {request.optim_params.type!r} is not supported: only AdamW (AdamParams) is.")
    return OptimStepOp(as_typed(AdamParams, request.optim_params))


def save_state_op(request: SaveWeightsRequest) -> SaveStateOp:
    ttl_seconds = checked_ttl(request.ttl_seconds)
    return SaveStateOp(_name(request.path, request.seq_id), ttl_seconds, request.overwrite, request.user_metadata or {})


def save_for_sampler_op(request: SaveWeightsForSamplerRequest) -> SaveForSamplerOp:
    """Without a name it is a refresh, of which the registry keeps the newest."""
    if request.kind != "snapshot":
        raise ConfigError(f"A sampling client of kind {request.kind!r} is not supported: versions here never change.")
    is_refresh = request.path is None and request.sampling_session_seq_id is not None
    name = "refresh" if is_refresh else _name(request.path, request.seq_id)
    return SaveForSamplerOp(
        name, is_refresh, ttl_seconds=checked_ttl(request.ttl_seconds), user_metadata=request.user_metadata or {}
    )


def load_state_op(request: LoadWeightsRequest) -> LoadStateOp:
    check_load(request)
    return LoadStateOp(version_uri(request.path), request.optimizer)


def check_load(request: LoadWeightsRequest) -> None:
    _check_optimizer(request.optimizer_config)
    if request.weights_access_token is not None:
        raise ConfigError("weights_access_token is not supported: a key reaches the versions of its own tenant.")


def sampling_params(request: SampleRequest) -> SamplingParams:
    """Raises `ConfigError` for what would else be ignored."""
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise ConfigError(f"num_samples is {request.num_samples}: give 1…{MAX_SAMPLES}.")
    for name in UNSUPPORTED_SAMPLING:
        if getattr(request, name, None):
            raise ConfigError(f"{name} is not supported.")
    asked: Any = request.sampling_params
    return as_typed(SamplingParams, asked)


def prompt(request: SampleRequest) -> ModelInput:
    for chunk in request.prompt.chunks:
        if not hasattr(chunk, "tokens"):
            raise ConfigError(f"The prompt has a chunk of type {chunk.type!r}: only tokens are supported.")
    return ModelInput.from_ints(request.prompt.to_ints())


def _check_optimizer(config: Any) -> None:
    if config is not None and config.type != "adamw":
        raise ConfigError(f"Optimizer {config.type!r} is not supported: only AdamW is.")


def _name(path: str | None, seq_id: int | None) -> str:
    return path or f"operation-{seq_id}"
