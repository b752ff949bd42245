"""The words of the API. What people type is pydantic (frozen, unknown fields refused); bulk data is dataclasses on numpy.

Objects of the same shape from the `tinker` package (`Datum`, `ModelInput`, `SamplingParams`, `AdamParams`) are accepted
wherever ours are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from raysessions.errors import ConfigError

if TYPE_CHECKING:
    import torch

StopReason = Literal["stop", "length"]


class TypedModel(BaseModel):
    """What a person types: immutable, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            problems = [f"{'.'.join(map(str, p['loc']))}={p['input']!r}: {p['msg']}" for p in error.errors()]
            raise ConfigError(f"{type(self).__name__}: {'; '.join(problems)}.") from error


class SamplingParams(TypedModel):
    """How to sample. Defaults sample from the model's own distribution."""

    max_tokens: int | None = Field(default=None, ge=1)
    """New tokens at most. None: what the context leaves after the prompt."""
    temperature: float = Field(default=1.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample among the most likely tokens whose probabilities add up to this."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k most likely tokens. -1 or 0: all."""
    seed: int | None = None
    """The same seed and prompt give the same sequences; with `num_samples=n`, n different ones."""
    stop: str | list[str] | list[int] | None = None
    """Ends a sequence besides the end-of-sequence token: strings, or token ids. `[]` disables that token too."""

    @field_validator("stop")
    @classmethod
    def _no_empty_string(cls, stop: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("an empty string would stop at once; leave it out")
        return stop


class AdamParams(TypedModel):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019); each field is honoured per call."""

    learning_rate: float = Field(default=1e-4, ge=0.0)
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-12, ge=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    grad_clip_norm: float = Field(default=0.0, ge=0.0)
    """Scale the gradient down to this L2 norm when it is longer. 0: no clipping."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A small tensor on its way between processes: numpy inside."""

    data: np.ndarray
    """Any shape; float32 or int64."""

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls(_narrow(np.asarray(array)))

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        tensor = tensor.detach().cpu()
        return cls.from_numpy((tensor.float() if tensor.is_floating_point() else tensor).numpy())

    def to_numpy(self) -> np.ndarray:
        return self.data

    def to_torch(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.array(self.data))

    def tolist(self) -> list[Any]:
        return self.data.tolist()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> str:
        return str(self.data.dtype)

    def __len__(self) -> int:
        return len(self.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorData) and np.array_equal(self.data, other.data)


def _narrow(array: np.ndarray) -> np.ndarray:
    """float32 or int64, the two that the wire knows; other kinds are left for validation to refuse."""
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.dtype.kind in "iub":
        return array.astype(np.int64, copy=False)
    return array


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A run of tokens."""

    tokens: Sequence[int]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the model reads: chunks of tokens, one after the other."""

    chunks: Sequence[EncodedTextChunk] = ()

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> ModelInput:
        return cls(chunks=(EncodedTextChunk(tokens=[operator.index(token) for token in tokens]),))

    def to_ints(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.tokens]

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


TensorLike = Any
"""TensorData, numpy array, torch tensor or list."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence. Position i of `model_input` predicts token i + 1, so with `tokens` of length n + 1,
    `model_input` is `tokens[:-1]` and `target_tokens` is `tokens[1:]`; each loss input has the length n.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorLike] = field(default_factory=dict)
    """What the loss reads; see `raysessions.LOSSES` for the names each loss needs."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled continuation."""

    tokens: list[int]
    """New tokens, without the prompt; a sampled stop token is included."""
    logprobs: list[float]
    """Of each token under the model's own distribution (before temperature, top_p and top_k), nats. As long as tokens."""
    stop_reason: StopReason
    """"stop": a stop token or string was met. "length": max_tokens or the context ran out."""

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.tokens[:8])) + (", …" if len(self.tokens) > 8 else "")
        return f"SampledSequence({len(self.tokens)} tokens [{shown}], {self.stop_reason})"


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """What `sample` resolves to."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """Of each prompt token given those before it, nats; the first is None. Only when asked for."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Per prompt position the k most likely (token, logprob), best first; the first is None. Only when asked for."""

    def __repr__(self) -> str:
        asked = [name for name in ("prompt_logprobs", "topk_prompt_logprobs") if getattr(self, name) is not None]
        return f"SampleResponse({', '.join([repr(self.sequences), *asked])})"


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """What `forward` and `forward_backward` resolve to."""

    loss_fn_outputs: list[dict[str, TensorData]]
    """Per datum, in the order given: `logprobs` of the target tokens (nats) and `elementwise_loss`, float32, each of the
    shape of the datum's target_tokens. `forward_backward_custom` gives the logprobs alone."""
    metrics: dict[str, float]
    """Of this call alone. The suffix says how parts were merged: `loss:sum`, `weight:sum`, `engine_seconds:max`, …"""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return f"ForwardBackwardOutput({len(self.loss_fn_outputs)} datums, {shown})"

    @property
    def loss(self) -> float:
        """The sum over all tokens of all datums."""
        return self.metrics["loss:sum"]

    @property
    def mean_loss(self) -> float:
        """The loss per unit of weight: per trained token where weights are 0 and 1. Not a number without weight."""
        weight = self.metrics["weight:sum"]
        return self.metrics["loss:sum"] / weight if weight else math.nan


def as_model_input(value: Any) -> ModelInput:
    """Ours, tinker's (by shape), or a plain list of token ids."""
    if isinstance(value, ModelInput):
        return value
    if hasattr(value, "to_ints"):
        return ModelInput.from_ints(value.to_ints())
    return ModelInput.from_ints(value)


def as_typed(cls: type[TypedModel], value: Any) -> Any:
    """`value` as `cls`: ours, a dict, tinker's object with the same fields, or None for the defaults."""
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        return cls(**value)
    fields = {name: getattr(value, name) for name in cls.model_fields if hasattr(value, name)}
    if not fields:
        raise ConfigError(f"Expected {cls.__name__}, not {value!r}.")
    return cls(**fields)
