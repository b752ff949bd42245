"""The operations, as the clients send them to the actors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raysessions.batch import Batch
from raysessions.config import LoraConfig, SamplingConfig, TrainingConfig
from raysessions.storage_location import StorageLocation, StoredUri
from raysessions.types import AdamParams, SamplingParams
from raysessions.uris import VersionUri

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, slots=True)
class Loss:
    """Which loss, and how."""

    name: str
    config: dict[str, float] = field(default_factory=dict)
    """Complete: the defaults are in it."""
    gates: tuple[str, ...] = ()
    """As in its LossSpec."""
    function: bytes | None = field(default=None, repr=False)
    """Of a loss added by `register_loss`: the function, pickled. Only the training ranks unpickle it."""


@dataclass(frozen=True, slots=True)
class LossOp:
    """`forward` and `forward_backward`."""

    batch: Batch | tuple[ray.ObjectRef] = field(compare=False)
    """A small batch itself: one message less. A large one by reference, inside a tuple so that Ray hands the reference on
    and the host never copies the data."""
    digest: str
    """Of the batch's content: operations are the same if these are."""
    loss: Loss
    lengths: tuple[int, ...]
    """Tokens of each datum, to split the outputs again."""
    backward: bool

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class CustomLossOp:
    """The second pass of `forward_backward_custom`: a cross_entropy with the gradient of the caller's loss as weights."""

    op: LossOp
    loss: float
    """The caller's."""
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return self.op.num_tokens


@dataclass(frozen=True, slots=True)
class AbandonedOp:
    """Takes the place of an operation whose caller failed before it could be made: applies nothing."""

    error: Exception = field(compare=False)


@dataclass(frozen=True, slots=True)
class OptimStepOp:
    """`optim_step`."""

    adam: AdamParams


@dataclass(frozen=True, slots=True)
class SaveForSamplerOp:
    """`save_weights_for_sampler` and `save_weights_and_get_sampling_client`."""

    name: str
    is_refresh: bool = False
    """Only the last few of these are kept in the registry."""
    merge_weights: bool = False
    ttl_seconds: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveStateOp:
    """`save_state`."""

    name: str
    ttl_seconds: float | None
    overwrite: bool
    user_metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class LoadStateOp:
    """`load_state` and `load_state_with_optimizer`."""

    uri: VersionUri
    with_optimizer: bool


Operation = LossOp | CustomLossOp | AbandonedOp | OptimStepOp | SaveForSamplerOp | SaveStateOp | LoadStateOp


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One call of `sample`."""

    prompt: list[int]
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk_prompt_logprobs: int


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """What a sampler is asked for by the name of a session: its newest version, whichever that is when the request comes; the
    base model before the first one."""

    token: str
    """Of the session, as its samplers met it: a later one may have the same name."""


BYTES_PER_TOKEN = 4
"""Of text, about."""
TYPICAL_ANSWER = 256
"""Tokens, of a request that sets no bound."""

OpenAiRoute = Literal["chat/completions", "completions"]


@dataclass(frozen=True, slots=True)
class OpenAiRequest:
    """One call of OpenAI's API."""

    route: OpenAiRoute
    model: str
    """As the caller names it."""
    body: dict[str, Any]
    """As it came, not checked yet."""

    @property
    def num_samples(self) -> int:
        count = self.body.get("n")
        return count if isinstance(count, int) and count > 0 else 1

    @property
    def num_tokens(self) -> int:
        """Prompt and new ones, about: the text is not tokenized yet."""
        given = [self.body.get(name) for name in ("max_completion_tokens", "max_tokens")]
        new_tokens = next((count for count in given if isinstance(count, int) and count > 0), TYPICAL_ANSWER)
        return len(self.text) // BYTES_PER_TOKEN + self.num_samples * new_tokens

    @property
    def text(self) -> bytes:
        """What the prompt is made from: equal beginnings are equal prefixes."""
        return json.dumps(self.body.get("messages", self.body.get("prompt"))).encode()


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Where a session's versions go, and under which names."""

    location: StorageLocation
    group: str
    tenant: str
    user_metadata: dict[str, str]
    keep_refreshes: int | None
    """How many of the session's newest refreshes are kept; None: all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a session ends by itself. Seconds."""

    idle_timeout_s: float | None = None
    """After so long without an operation or a sample; None: never."""
    max_lifetime_s: float | None = None
    """After its creation; None: never."""
    lease_s: float | None = None
    """Of a detached session: after so long without a client. None: the session ends with its driver."""


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """What a session starts from instead of fresh weights."""

    uri: VersionUri | None
    """In the registry."""
    state: tuple[ray.ObjectRef] | None
    """Of a TrainingState, brought by the driver."""
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a driver asks the SessionManager for."""

    session_id: str
    token: str
    """Known to the asking driver only: a start that is given up must not stop another session of the same name."""
    base_model: str
    lora: LoraConfig
    share: bool
    """Whether other sessions may use the same loaded base model."""
    training: TrainingConfig
    sampling: SamplingConfig
    """With max_lora_rank decided."""
    saves: SaveSettings
    limits: Limits = Limits()
    start: StartingPoint | None = None


@dataclass(frozen=True, slots=True)
class SamplerRequest:
    """What a driver asks the SessionManager for when it wants samplers without a training session."""

    session_id: str
    token: str
    base_model: str
    """Empty for a merged version: its own."""
    sampling: SamplingConfig
    saves: SaveSettings
    limits: Limits = Limits()
    merged: StoredUri | None = None
    """A version to merge into its base model, for a pool of its own."""
