"""Names of sessions and of what they save: `raysessions://SESSION/vN`."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from raysessions.errors import ConfigError

SCHEME = "raysessions://"
_NAME = r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?"
_URI = re.compile(rf"{SCHEME}(?P<session>{_NAME})/v(?P<version>[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class VersionUri:
    """One immutable version of a session's weights."""

    session_id: str
    version: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.session_id}/v{self.version}"

    @classmethod
    def parse(cls, uri: str) -> VersionUri:
        match = _URI.fullmatch(uri)
        if match is None:
            raise ConfigError(f"{uri!r} is not a version: expected {SCHEME}SESSION/vN, as save_weights_for_sampler returns.")
        return cls(match["session"], int(match["version"]))


def new_session_id(prefix: str = "session") -> str:
    """A fresh id. It names files and PEFT adapters, so it has no dots or slashes."""
    return f"{prefix}-{secrets.token_hex(4)}"


def check_name(name: str) -> str:
    """`name` if it may name a session: small letters, digits, `-` and `_`, at most 64."""
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"Session name {name!r}: use 1 to 64 small letters, digits, '-' or '_', not '-' or '_' at the ends.")
    return name
