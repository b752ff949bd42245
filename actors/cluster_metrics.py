"""What the cluster's sessions do, as Ray's metrics: Ray exports them for Prometheus on every node."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable

from ray.util.metrics import Counter, Gauge

from raysessions.actors.protocol import PoolStatus
from raysessions.usage import Usage

WHOSE = ("tenant", "base_model")
TOKENS = {
    "trained": "trained_tokens",
    "forward": "forward_tokens",
    "prefilled": "prefilled_tokens",
    "sampled": "sampled_tokens",
}
OPERATIONS = {"optim_step": "optim_steps", "sample": "sample_requests"}
"""Kinds, and their fields of Usage."""


class ClusterMetrics:
    """Of the manager, which hears of everything."""

    def __init__(self) -> None:
        self._tokens = Counter("raysessions_tokens", "Tokens of operations and samples.", ("kind", *WHOSE))
        self._operations = Counter("raysessions_operations", "Optimizer steps and samples.", ("kind", *WHOSE))
        self._sessions = Gauge("raysessions_sessions", "Training sessions and samplers, by state.", ("state",))
        self._queued = Gauge("raysessions_queued_requests", "Samples that wait for a replica.", ("base_model",))
        self._versions = Gauge("raysessions_live_versions", "Versions that samplers answer from.", ("base_model",))
        self._replicas = Gauge("raysessions_sampler_replicas", "Replicas that serve.", ("base_model",))
        self._states: set[str] = set()

    def used(self, tenant: str, base_model: str, before: Usage, after: Usage) -> None:
        """A session's count has grown."""
        for counter, kinds in ((self._tokens, TOKENS), (self._operations, OPERATIONS)):
            for kind, field in kinds.items():
                grown = getattr(after, field) - getattr(before, field)
                if grown > 0:
                    counter.inc(grown, {"kind": kind, "tenant": tenant, "base_model": base_model})

    def sessions(self, states: Iterable[str]) -> None:
        counts = Count(states)
        self._states |= set(counts)
        for state in self._states:
            self._sessions.set(counts[state], {"state": state})

    def pool(self, base_model: str, status: PoolStatus) -> None:
        tags = {"base_model": base_model}
        self._queued.set(status.num_queued, tags)
        self._versions.set(status.num_versions, tags)
        self._replicas.set(len(status.replicas), tags)
