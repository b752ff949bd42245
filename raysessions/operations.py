"""The operations, as the clients send them to the actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raysessions.batch import Batch
from raysessions.config import LoraConfig, SamplingConfig, TrainingConfig
from raysessions.types import AdamParams, SamplingParams

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, slots=True)
class LossOp:
    """`forward` and `forward_backward`."""

    batch: Batch | tuple[ray.ObjectRef] = field(compare=False)
    """A small batch itself: one message less. A large one by reference, inside a tuple so that Ray hands the reference on
    and the host never copies the data."""
    digest: str
    """Of the batch's content: operations are the same if these are."""
    loss_fn: str
    config: dict[str, float]
    lengths: tuple[int, ...]
    """Tokens of each datum, to split the outputs again."""
    backward: bool


@dataclass(frozen=True, slots=True)
class OptimStepOp:
    """`optim_step`."""

    adam: AdamParams


@dataclass(frozen=True, slots=True)
class SaveForSamplerOp:
    """`save_weights_for_sampler`."""

    name: str


Operation = LossOp | OptimStepOp | SaveForSamplerOp


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One call of `sample`."""

    prompt: list[int]
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk_prompt_logprobs: int


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a driver asks the SessionManager for."""

    session_id: str
    token: str
    """Known to the asking driver only: a start that is given up must not stop another session of the same name."""
    base_model: str
    lora: LoraConfig
    training: TrainingConfig
    sampling: SamplingConfig
    """With max_lora_rank decided."""
