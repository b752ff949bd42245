"""The part of ServiceClient that looks at the whole cluster: its sessions, quota and ledger."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from raysessions.errors import ConfigError
from raysessions.future import APIFuture
from raysessions.losses import LOSSES
from raysessions.models import CATALOGUE
from raysessions.quota import Quota
from raysessions.session_summary import SessionSummary
from raysessions.settings import Settings
from raysessions.usage import PriceTable, Usage, UsageReport


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """What `get_server_capabilities` returns."""

    base_models: list[str]
    """Names of the catalogue; folders and Hugging Face ids are base models too."""
    losses: list[str]
    version: str
    """Of raysessions."""


class ClusterOverview:
    """One line to the manager for each call."""

    _manager: Any
    _driver_id: str
    _settings: Settings

    def list_sessions(self, *, ended: bool = False) -> list[SessionSummary]:
        """The cluster's sessions, oldest first, whoever created them. With `ended`, those too that ended lately, and why."""
        return APIFuture(self._manager.list_sessions.remote(ended=ended)).result()

    def stop_session(self, name: str) -> None:
        """Ends a session, whoever created it. Safe to call again."""
        APIFuture(self._manager.stop_session.remote(name)).result()

    def set_quota(self, max_sessions: int | None = None, max_sessions_per_tenant: int | None = None) -> None:
        """How many training sessions may run at the same time, in the cluster and for each tenant; None: any number. Beyond
        that `create_*` raises `QuotaExceededError`. Sessions that run are left alone."""
        quota = Quota(max_sessions=max_sessions, max_sessions_per_tenant=max_sessions_per_tenant)
        APIFuture(self._manager.set_quota.remote(quota)).result()

    def scale_samplers(self, num_replicas: int, *, timeout_s: float = 900) -> None:
        """Changes how many replicas serve this client's sessions, while they run. Blocks until it is so: a new replica gets
        every live version before it takes requests, one that leaves finishes those it has.

        Raises `PlacementError` when the cluster has no room; the samplers of that base model are then as many as before.
        """
        if not isinstance(num_replicas, int) or num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas!r}: give at least 1. Sessions end with stop().")
        APIFuture(self._manager.scale_samplers.remote(self._driver_id, num_replicas)).result(timeout_s)

    def usage(self, session: str | None = None, tenant: str | None = None, *, prices: PriceTable | None = None) -> UsageReport:
        """What a tenant's sessions have used so far, running and ended ones, or one of them; from the ledger at `output_uri`.

        Args:
            session: its name.
            tenant: None for this client's.
            prices: fills in the costs.

        When a process dies, up to two seconds of what it had counted are lost, and operations that are done again for it are
        counted again, as they were computed again.
        """
        asked = self._manager.usage.remote(self._settings.location, session, tenant or self._settings.tenant)
        report: UsageReport = APIFuture(asked).result()
        if prices is None:
            return report
        sessions = [dataclasses.replace(entry, cost=prices.cost(entry.usage)) for entry in report.sessions]
        return dataclasses.replace(report, sessions=sessions, cost=prices.cost(report.total))

    def estimate(
        self,
        prices: PriceTable,
        *,
        steps: int,
        prompts_per_step: int = 0,
        prompt_tokens: int = 0,
        samples_per_prompt: int = 0,
        sample_tokens: int = 0,
        trained_tokens_per_step: int | None = None,
    ) -> float:
        """What a run would cost, in the price table's currency.

        `trained_tokens_per_step` None: every sample with its prompt, as a reinforcement loop trains on them.
        """
        samples = prompts_per_step * samples_per_prompt
        trained = samples * (prompt_tokens + sample_tokens) if trained_tokens_per_step is None else trained_tokens_per_step
        return prices.cost(
            Usage(
                prefilled_tokens=steps * prompts_per_step * prompt_tokens,
                sampled_tokens=steps * samples * sample_tokens,
                trained_tokens=steps * trained,
            )
        )

    def list_base_models(self) -> list[str]:
        """The catalogue's names. Folders and Hugging Face ids are base models too."""
        return sorted(CATALOGUE)

    def get_server_capabilities(self) -> ServerCapabilities:
        return ServerCapabilities(self.list_base_models(), sorted(LOSSES), importlib.metadata.version("raysessions"))
