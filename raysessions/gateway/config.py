"""What `raysessions serve` can be told."""

from __future__ import annotations

from pydantic import Field

from raysessions.config import SamplingConfig, TrainingConfig
from raysessions.types import TypedModel


class GatewayConfig(TypedModel):
    """Travels to the gateway's replicas."""

    output_uri: str | None = None
    """As in `Settings`: where versions are, and the keys."""
    base_models: tuple[str, ...] = ()
    """That keys may sample from, and train, besides those of their tenants' sessions."""
    training: TrainingConfig = TrainingConfig()
    sampling: SamplingConfig = SamplingConfig()
    lease_s: float = Field(default=180.0, gt=0)
    """Ends a training run of the tinker SDK after so long without a heartbeat of its client, which sends one every 10 s."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """Of a request, after decompression."""
    requests_per_minute: int = Field(default=30_000, ge=1)
    """Of one key; beyond that it gets 429 with `Retry-After`."""
