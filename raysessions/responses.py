"""What the calls of a session and of a service return, but for outputs of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """What `optim_step` resolves to."""

    metrics: dict[str, float]
    """`grad_norm:max` is the gradient's L2 norm before clipping; `step:max` counts this session's optimizer steps."""


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    """What `save_weights_for_sampler` resolves to."""

    path: str
    """`raysessions://GROUP/vN`: give it to `create_sampling_client(model_path=…)`."""
    version: int
    """N: goes up with each save into the group, by any session, and is never used twice."""
    name: str
    """As given."""


@dataclass(frozen=True, slots=True)
class SaveStateResponse:
    """What `save_state` resolves to."""

    path: str
    """`raysessions://GROUP/vN`: give it to `load_state…` or `create_training_client_from_state…`."""
    version: int


@dataclass(frozen=True, slots=True)
class LoadStateResponse:
    """What `load_state` and `load_state_with_optimizer` resolve to."""

    path: str
    """As given."""
    step: int
    """The session's optimizer steps as of now: the saved run's with its optimizer, 0 with a fresh one."""


CheckpointKind = Literal["sampler", "state", "merged"]
"""Weights in the base model's dtype; all that a session continues from; a whole model in the Hugging Face layout."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the registry knows of a saved version."""

    path: str
    """`raysessions://GROUP/vN`."""
    kind: CheckpointKind
    name: str
    """As given to the saving call."""
    session_id: str
    tenant: str
    created_at: float
    """Seconds since the epoch."""
    expires_at: float | None
    """Seconds since the epoch, when it may be deleted; None: never."""
    base_model: str
    base_fingerprint: str
    """Of the base model's configuration and weights."""
    rank: int
    """LoRA rank."""
    alpha: float
    target_modules: tuple[str, ...]
    step: int
    """The session's optimizer steps when it was saved."""
    parent: str | None
    """The version whose weights the session started from or loaded last."""
    user_metadata: dict[str, str]
    num_bytes: int
    """Of its files in the storage."""
    encrypted: bool


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What `get_info` returns."""

    session_id: str
    base_model: str
    rank: int
    """LoRA rank."""
    alpha: float
    seed: int
    """Of the adapter's initial weights."""
    target_modules: tuple[str, ...]
    """Names of the adapted linear layers, without their path, sorted."""
    num_trainable_parameters: int
    vocab_size: int
    context_length: int
    """Tokens in one sequence at most."""
    dtype: str
    """Of the base model's weights; adapters are float32."""
    num_workers: int
    """Training ranks that hold the base model."""
    zero_stage: int
    sharing: tuple[str, ...] = ()
    """The other sessions that train on the same loaded base model, sorted, when `get_info` was called."""
