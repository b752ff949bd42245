"""What sessions have used, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pydantic import Field

from raysessions.types import TypedModel


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts add up over operations, and over processes that died and were replaced."""

    forward_tokens: int = 0
    """Of `forward`, and of the first pass of `forward_backward_custom`."""
    trained_tokens: int = 0
    """Of `forward_backward`."""
    optim_steps: int = 0
    training_s: float = 0.0
    """Seconds that the ranks computed for it, times their number."""
    sample_requests: int = 0
    prefilled_tokens: int = 0
    """Of prompts, once a request."""
    sampled_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)))


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """One line of the ledger."""

    session: str
    tenant: str
    base_model: str
    usage: Usage
    cost: float | None = None
    """In the price table's currency; None without one."""


@dataclass(frozen=True, slots=True)
class AcceleratorTime:
    """Of what runs now: seconds since it was placed, times the accelerators (or, without any, the processes)."""

    what: str
    """ "training" or "sampling", and the base model."""
    busy_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What `usage` returns."""

    sessions: list[SessionUsage]
    total: Usage
    accelerators: list[AcceleratorTime]
    cost: float | None = None


class PriceTable(TypedModel):
    """Prices of a million tokens, in one currency."""

    prefill: float = Field(default=0.0, ge=0)
    sample: float = Field(default=0.0, ge=0)
    train: float = Field(default=0.0, ge=0)
    """Of `forward_backward`."""
    forward: float = Field(default=0.0, ge=0)

    def cost(self, usage: Usage) -> float:
        return (
            self.prefill * usage.prefilled_tokens
            + self.sample * usage.sampled_tokens
            + self.train * usage.trained_tokens
            + self.forward * usage.forward_tokens
        ) / 1e6
