"""Sampling sessions. Their names say what is sampled from, so that any replica of the gateway can answer, also one that was
started again."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from http import HTTPStatus

from raysessions.gateway.errors import HttpError

_ID = re.compile(r"(?P<sdk_session>[^:]+):sample:(?P<seq>\d+):(?P<model>[\w-]*)")


@dataclass(frozen=True, slots=True)
class Sampler:
    sdk_session_id: str
    seq_id: int
    model: str
    """A path of Tinker's, or a base model."""

    @property
    def sampler_id(self) -> str:
        coded = base64.urlsafe_b64encode(self.model.encode()).decode().rstrip("=")
        return f"{self.sdk_session_id}:sample:{self.seq_id}:{coded}"

    @classmethod
    def parse(cls, sampler_id: str) -> Sampler:
        """Raises `HttpError` 404."""
        match = _ID.fullmatch(sampler_id)
        try:
            if match is not None:
                coded = match["model"]
                model = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
                return cls(match["sdk_session"], int(match["seq"]), model)
        except (binascii.Error, UnicodeDecodeError):
            pass
        raise HttpError(HTTPStatus.NOT_FOUND, f"There is no sampling session {sampler_id[:200]!r}.")
