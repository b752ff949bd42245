"""A session as its host sees it."""

from __future__ import annotations

from dataclasses import dataclass

from raysessions.actors.journal import Journal
from raysessions.actors.protocol import AdapterFacts
from raysessions.actors.session_checkpoints import SessionCheckpoints
from raysessions.config import LoraConfig
from raysessions.operations import SessionRequest
from raysessions.responses import SessionInfo


@dataclass(slots=True, eq=False)
class HostedSession:
    """What it is, how it comes back, and where its versions go."""

    request: SessionRequest
    info: SessionInfo
    facts: AdapterFacts
    journal: Journal
    checkpoints: SessionCheckpoints

    @property
    def session_id(self) -> str:
        return self.request.session_id

    @property
    def lora(self) -> LoraConfig:
        return self.request.lora
