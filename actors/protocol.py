"""What an engine offers to its actor, and the records that pass between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raysessions.actors.maths.metrics import Part
from raysessions.adapter_weights import AdapterWeights
from raysessions.batch import Batch
from raysessions.config import LoraConfig
from raysessions.errors import SamplingPoolError, TrainingGroupError
from raysessions.operations import Loss, OpenAiRequest, SampleRequest
from raysessions.training_state import TrainingState
from raysessions.types import AdamParams, SampleResponse


class PeerFailedError(TrainingGroupError):
    """This rank did its part, another did not; the other's error is the one to tell."""


class RankDiedError(TrainingGroupError):
    """The group is to be replaced."""


class ReplicaFailedError(SamplingPoolError):
    """This replica has ended or is stuck; another can answer instead."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank runs."""

    host: str
    port: int
    """Free when the rank looked."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in its training group, as torch.distributed wants to know it."""

    world_rank: int
    world_size: int
    local_rank: int
    """Among the ranks of its node."""
    local_size: int
    master_addr: str
    """Of rank 0's node."""
    master_port: int


@dataclass(frozen=True, slots=True)
class CoreShare:
    """A replica's part of its node's CPU cores."""

    index: int
    count: int
    """Replicas that share the node."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a sampler replica is doing."""

    node_id: str
    pid: int
    """Of its actor's process."""
    num_sequences: int
    """Asked of it and not answered."""
    outstanding_tokens: int
    """Of these, prompts included, at most."""
    adapter_ids: list[int]
    """Loaded."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What a sampling pool is doing."""

    num_queued: int
    """Requests that wait for a replica."""
    num_versions: int
    """Live."""
    replicas: list[ReplicaStatus]
    """Those that take requests."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What clients need to know of a loaded base model."""

    vocab_size: int
    context_length: int
    dtype: str


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a session's adapter came out as."""

    target_modules: tuple[str, ...]
    """Names of the adapted linear layers, without their path, sorted."""
    num_modules: int
    """Adapted layers in all: what a sampler must have bound."""
    num_parameters: int


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's part of a session's state."""

    weights: AdapterWeights | None
    """float32; rank 0's alone, for all have the same."""
    moments: dict[str, np.ndarray]
    """AdamW's, of what this rank steps: all of it at ZeRO stage 0, and then rank 0's alone; else its slice. Empty before the
    first step."""
    gradient: np.ndarray | None
    """What this rank has accumulated; means something to the same rank of an equal group only."""
    step: int


def joined(parts: Sequence[RankState], seed: int) -> TrainingState:
    """The whole state from every rank's part, in their order."""
    weights = parts[0].weights
    assert weights is not None, "rank 0 has the weights"
    moments = {}
    for name in parts[0].moments:
        slices = [part.moments[name] for part in parts if part.moments]
        moments[name] = (slices[0] if len(slices) == 1 else np.concatenate(slices))[: len(weights.flat)]
    return TrainingState(weights, moments, parts[0].step, seed)


@dataclass(frozen=True, slots=True)
class LossResult:
    """One rank's part of a forward or forward_backward over a batch."""

    positions: np.ndarray
    """int64, shape (num_own,): which of the batch's tokens this rank computed."""
    logprobs: np.ndarray
    """Of their targets. float32, shape (num_own,) or (num_own, K), nats."""
    elementwise_loss: np.ndarray
    """float32, of the same shape."""
    metrics: list[dict[str, Part]]
    """One record per micro-batch."""


@dataclass(frozen=True, slots=True)
class OpenAiHead:
    """How the answer to an OpenAiRequest begins; its body follows in pieces."""

    status: int
    content_type: str


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How it ends: what it took."""

    prompt: int
    sampled: int


OpenAiPart = OpenAiHead | str | TokenCount


class TrainingEngine(Protocol):
    """A base model with the adapters of any number of sessions."""

    facts: ModelFacts

    def add_session(self, session_id: str, lora: LoraConfig) -> AdapterFacts: ...

    def remove_session(self, session_id: str) -> None: ...

    def run_loss(self, session_id: str, batch: Batch, loss: Loss, *, backward: bool) -> LossResult: ...

    def optim_step(self, session_id: str, adam: AdamParams) -> dict[str, float]: ...

    def export_adapter(self, session_id: str) -> AdapterWeights: ...

    def num_steps(self, session_id: str) -> int:
        """Optimizer steps so far."""

    def export_state(self, session_id: str) -> RankState: ...

    def load_state(self, session_id: str, state: TrainingState, gradient: np.ndarray | None) -> None: ...

    def release_memory(self) -> None:
        """Gives back what is only kept for the next operation."""


class SamplingEngine(Protocol):
    """A base model that generates, with adapters added and removed while it does."""

    async def add_adapter(self, adapter_id: int, name: str, weights: AdapterWeights) -> int:
        """Makes the adapter usable; returns the number of modules it was bound to."""

    async def remove_adapter(self, adapter_id: int) -> None: ...

    async def sample(self, request: SampleRequest, adapter_id: int | None) -> SampleResponse:
        """Cancelling it ends the generation. Raises `ReplicaFailedError` once the engine is dead."""

    def answer(self, request: OpenAiRequest, adapter_id: int | None) -> AsyncIterator[OpenAiPart]:
        """As `sample`, in parts as they come."""

    async def check_health(self, timeout_s: float) -> None:
        """Raises `ReplicaFailedError` when the engine is dead, or neither answers nor computes for `timeout_s`."""

    async def sleep(self) -> None:
        """Gives the GPU's memory back until `wake_up`; nothing may be sampled or added meanwhile."""

    async def wake_up(self) -> None: ...

    def num_unfinished(self) -> int:
        """Requests that the engine has."""

    def shutdown(self) -> None: ...
