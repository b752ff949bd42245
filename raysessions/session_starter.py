"""Starting sessions and samplers: asks the manager, waits aloud, and gives up cleanly."""

from __future__ import annotations

from typing import Any

import ray

from raysessions.config import LoraConfig, SamplingConfig
from raysessions.operations import SamplerRequest, SessionRequest, StartingPoint
from raysessions.progress import wait_with_progress
from raysessions.sampling_client import SamplingClient, open_sampling_client
from raysessions.settings import Settings
from raysessions.storage_location import StoredUri
from raysessions.training_client import TrainingClient
from raysessions.uris import check_name, new_session_id, new_token


def session_request(
    base_model: str,
    lora: LoraConfig,
    start: StartingPoint | None,
    name: str | None,
    settings: Settings,
    *,
    detached: bool,
    share: bool = True,
) -> SessionRequest:
    """What is asked of the manager. `name` None makes one up."""
    return SessionRequest(
        session_id=new_session_id(settings.session_name_prefix) if name is None else check_name(name),
        token=new_token(),
        base_model=base_model,
        lora=lora,
        share=share,
        training=settings.network.place(settings.training),
        sampling=settings.network.place(settings.sampling).for_rank(lora.rank),
        saves=settings.saves,
        limits=settings.limits(detached=detached),
        start=start,
    )


class SessionStarter:
    """Of one driver."""

    def __init__(self, manager: Any, driver_id: str) -> None:
        self._manager = manager
        self._driver_id = driver_id

    def start_session(self, request: SessionRequest, timeout_s: float) -> TrainingClient:
        created = self._manager.create_session.remote(self._driver_id, request)
        host, pool, info = self._await(created, request.base_model, request, timeout_s)
        lease_s = request.limits.lease_s
        return TrainingClient(self._manager, host, pool, info, request.saves.location, timeout_s=timeout_s, lease_s=lease_s)

    def start_sampler(
        self,
        base_model: str,
        sampling: SamplingConfig,
        uri: StoredUri | None,
        settings: Settings,
        timeout_s: float,
        *,
        merged: bool,
    ) -> SamplingClient:
        """Of the base model, or of a version of it."""
        request = SamplerRequest(
            session_id=new_session_id("sampler"),
            token=new_token(),
            base_model=base_model,
            sampling=settings.network.place(sampling),
            saves=settings.saves,
            limits=settings.limits(),
            merged=uri if merged else None,
        )
        created = self._manager.create_sampler.remote(self._driver_id, request)
        pool, facts = self._await(created, f"sampler of {uri or base_model}", request, timeout_s)
        keywords = {
            "session_id": request.session_id, "vocab_size": facts.vocab_size, "context_length": facts.context_length
        }  # fmt: skip
        if merged:  # its pool has nothing else
            return SamplingClient(pool, uri, None, **keywords)
        return open_sampling_client(pool, uri, **keywords)

    def _await(self, created: ray.ObjectRef, what: str, request: SessionRequest | SamplerRequest, timeout_s: float) -> Any:
        try:
            return wait_with_progress(created, what, lambda: self._manager.phase.remote(request.session_id), timeout_s)
        except BaseException:  # a time-out or Ctrl-C; after an error of its own the manager has nothing left to stop
            ray.get(self._manager.give_up.remote(request.session_id, request.token))
            raise
